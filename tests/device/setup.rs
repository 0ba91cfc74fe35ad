use burn::tensor::{Device, DeviceKind};
use libtest_mimic::{Failed, Trial};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{SystemTime, UNIX_EPOCH};

/// A device and the name it goes by on the command line.
#[derive(Clone)]
pub struct Named {
    pub name: &'static str,
    pub device: Device,
}

pub struct Options {
    pub devices: Vec<Named>,
    pub seed: u64,
}

impl Options {
    /// Takes `--device NAME` and `--seed N` out of the arguments; the rest belongs to the test harness.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<(Self, Vec<String>), String> {
        let (mut devices, mut rest) = (Vec::new(), Vec::new());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut seed = now.as_secs() ^ u64::from(now.subsec_nanos());
        let mut args = args;
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--device" => devices.push(named(&args.next().ok_or("--device needs a name")?)?),
                "--seed" => {
                    let value = args.next().ok_or("--seed needs a number")?;
                    seed = value.parse().map_err(|_| format!("--seed: `{value}` is no number"))?;
                }
                _ => rest.push(arg),
            }
        }
        if devices.is_empty() {
            devices = vec![named("flex")?, named("cpu")?];
        }
        Ok((Self { devices, seed }, rest))
    }

    pub fn names(&self) -> String {
        self.devices.iter().map(|device| device.name).collect::<Vec<_>>().join(", ")
    }
}

fn named(name: &str) -> Result<Named, String> {
    match name {
        "flex" => Ok(Named { name: "flex", device: Device::flex() }),
        "cpu" => Ok(Named { name: "cpu", device: Device::cpu() }),
        "cuda" => Ok(Named { name: "cuda", device: Device::cuda(0) }),
        "vulkan" => Ok(Named { name: "vulkan", device: Device::vulkan(DeviceKind::DefaultDevice) }),
        other => Err(format!("--device: `{other}` is none of flex, cpu, cuda, vulkan")),
    }
}

/// A test named after its device; a panic is a failure with its message.
pub fn trial(device: &Named, name: &str, body: impl FnOnce(&Device) + Send + 'static) -> Trial {
    let named = device.clone();
    Trial::test(format!("{}::{name}", device.name), move || {
        catch_unwind(AssertUnwindSafe(|| body(&named.device))).map_err(|panic| {
            let message = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Failed::from(message.unwrap_or_else(|| "panicked".into()))
        })
    })
}
