use burn::backend::DispatchDevice;
use burn::tensor::{Device, DeviceKind};
pub use burn_marlin::backend::float_dtype;
use cubecl::ir::features::Plane;
use libtest_mimic::{Failed, Trial};
use marlin_kernels::ActivationDtype;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A device with its name on the command line.
#[derive(Clone)]
pub struct Named {
    pub name: &'static str,
    pub device: Device,
    /// The seed of the run.
    pub seed: u64,
}

pub struct Options {
    pub devices: Vec<Named>,
    pub seed: u64,
    /// The part of the tests that runs.
    pub partition: Partition,
}

/// A part of the tests: every `of`-th test, starting at `index`. It distributes the tests to
/// several processes, each with its own device.
#[derive(Clone, Copy)]
pub struct Partition {
    index: usize,
    of: usize,
}

impl Partition {
    const ALL: Self = Self { index: 0, of: 1 };

    /// Parses a part such as `1/2`, the first of two parts.
    fn parse(text: &str) -> Option<Self> {
        let (part, of) = text.split_once('/')?;
        let (part, of) = (part.parse::<usize>().ok()?, of.parse().ok()?);
        (1..=of).contains(&part).then(|| Self {
            index: part - 1,
            of,
        })
    }

    /// Keeps the tests of this part.
    pub fn of(self, tests: Vec<Trial>) -> Vec<Trial> {
        tests
            .into_iter()
            .skip(self.index)
            .step_by(self.of)
            .collect()
    }
}

impl Options {
    /// Parses `--device NAME` and `--partition PART/PARTS`, and returns the other arguments, which
    /// belong to the test harness.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<(Self, Vec<String>), String> {
        let (mut devices, mut rest) = (Vec::<String>::new(), Vec::new());
        let (mut args, mut partition) = (args, Partition::ALL);
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--device" => devices.push(args.next().ok_or("--device needs a name")?),
                "--partition" => {
                    let text = args.next().unwrap_or_default();
                    partition = Partition::parse(&text).ok_or_else(|| {
                        format!("--partition: expected PART/PARTS such as 1/2, found `{text}`")
                    })?;
                }
                _ => rest.push(arg),
            }
        }
        if devices.is_empty() {
            devices.push("flex".into());
            if cfg!(feature = "cpu") {
                devices.push("cpu".into());
            }
        }
        let seed = marlin_testing::seed();
        let devices = devices
            .iter()
            .map(|name| named(name, seed))
            .collect::<Result<_, _>>()?;
        Ok((
            Self {
                devices,
                seed,
                partition,
            },
            rest,
        ))
    }

    pub fn names(&self) -> String {
        self.devices
            .iter()
            .map(|device| device.name)
            .collect::<Vec<_>>()
            .join(", ")
    }
}

fn named(name: &str, seed: u64) -> Result<Named, String> {
    let (name, device) = match name {
        "flex" => ("flex", Device::flex()),
        #[cfg(feature = "cpu")]
        "cpu" => ("cpu", Device::cpu()),
        "cuda" => ("cuda", Device::cuda(0)),
        "vulkan" => ("vulkan", Device::vulkan(DeviceKind::DefaultDevice)),
        other => {
            return Err(format!(
                "--device: `{other}` is none of flex, cuda, vulkan, and cpu in builds with that feature"
            ));
        }
    };
    Ok(Named { name, device, seed })
}

/// Returns a test named after its device. The device's random numbers start from the run's seed in
/// every test. A panic fails the test with the panic's message.
pub fn trial(device: &Named, name: &str, body: impl FnOnce(&Device) + Send + 'static) -> Trial {
    let named = device.clone();
    Trial::test(format!("{}::{name}", device.name), move || {
        named.device.seed(named.seed);
        catch_unwind(AssertUnwindSafe(|| body(&named.device))).map_err(|panic| {
            let message = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Failed::from(message.unwrap_or_else(|| "panicked".into()))
        })
    })
}

/// Returns a [`trial`] that CubeCL's CPU runtime runs only with `--ignored` or `--include-ignored`:
/// in `cargo xtask slow`.
pub fn slow_on_cpu_runtime(
    device: &Named,
    name: &str,
    body: impl FnOnce(&Device) + Send + 'static,
) -> Trial {
    trial(device, name, body).with_ignored_flag(device.name == "cpu")
}

/// Returns true if a device is a GPU, which supports operations across a warp. Work that takes a
/// GPU a moment takes a processor minutes, also through a software implementation of Vulkan.
pub fn is_card(device: &Device) -> bool {
    match device.as_dispatch() {
        DispatchDevice::Cube(device) => device
            .client()
            .properties()
            .features
            .plane
            .contains(Plane::Ops),
        _ => false,
    }
}

/// Returns true for CubeCL's CPU runtime, in builds that have it.
pub fn is_cpu_runtime(device: &Device) -> bool {
    matches!(device.as_dispatch(), DispatchDevice::Cube(device) if device.client().name() == "cpu")
}

/// Returns true if kernels in a dtype run on a device.
///
/// CubeCL's CPU runtime reports bf16 as supported on every machine. If the processor has no
/// instruction that rounds to bf16, LLVM calls `__truncsfbf2`, which libgcc has since version 13;
/// Debian 12 has version 12.
pub fn computes(device: &Device, dtype: ActivationDtype) -> bool {
    let lacks_bf16 = dtype == ActivationDtype::BF16 && is_cpu_runtime(device) && !rounds_to_bf16();
    device.supports_dtype(float_dtype(dtype)) && !lacks_bf16
}

#[cfg(target_arch = "x86_64")]
fn rounds_to_bf16() -> bool {
    std::arch::is_x86_feature_detected!("avx512bf16")
}

#[cfg(not(target_arch = "x86_64"))]
fn rounds_to_bf16() -> bool {
    true
}
