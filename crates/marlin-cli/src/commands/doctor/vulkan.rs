//! Checks of the Vulkan loader and its devices.

use super::packages::{Package, install};
use super::report::{Check, Section};
use burn::tensor::{Device, DeviceType};
use burn_marlin::device::device_name;
use libloading::Library;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The names of the loader on Linux, macOS and Windows.
const LOADERS: [&str; 5] = [
    "libvulkan.so.1",
    "libvulkan.so",
    "libvulkan.dylib",
    "libMoltenVK.dylib",
    "vulkan-1.dll",
];

/// Returns the loader with its version, and the devices.
pub fn check() -> Section {
    let mut checks = Vec::new();
    match loader() {
        Some((name, version)) => {
            checks.push(Check::ok("loader", format!("{name}, {version}")));
            checks.extend(devices());
        }
        None => checks.push(Check::warning(
            "loader",
            "libvulkan was not found: no device of vulkan",
            install(Package::Vulkan),
        )),
    }
    Section {
        name: "vulkan",
        checks,
    }
}

/// Returns the name and the version of the Vulkan loader.
fn loader() -> Option<(&'static str, String)> {
    LOADERS.into_iter().find_map(|name| {
        // SAFETY: the loader's initialisers have no preconditions.
        let library = unsafe { Library::new(name) }.ok()?;
        Some((name, instance_version(&library)))
    })
}

/// Returns the version of Vulkan that a loader supports.
fn instance_version(library: &Library) -> String {
    type EnumerateInstanceVersion = unsafe extern "system" fn(*mut u32) -> i32;
    let mut version = 0;
    // SAFETY: the function has this type since Vulkan 1.1, before which it did not exist. It
    // writes to a variable that outlives the call.
    let result = unsafe {
        library
            .get::<EnumerateInstanceVersion>(b"vkEnumerateInstanceVersion\0")
            .map(|function| function(&mut version))
    };
    match result {
        Ok(0) => format!(
            "Vulkan {}.{}.{}",
            version >> 22,
            (version >> 12) & 0x3ff,
            version & 0xfff
        ),
        Ok(code) => format!("its version is not known (VkResult {code})"),
        Err(_) => "Vulkan 1.0".into(),
    }
}

fn devices() -> Vec<Check> {
    let devices = Device::enumerate(DeviceType::Vulkan);
    let checks: Vec<_> = devices
        .into_iter()
        .enumerate()
        .map(|(index, device)| {
            let label = format!("device {index}");
            // wgpu panics where a driver lists a device that it cannot open.
            match catch_unwind(AssertUnwindSafe(|| device_name(&device))) {
                Ok(name) => Check::ok(label, name),
                Err(_) => Check::warning(
                    label,
                    "the driver lists the device but does not open it",
                    "vulkaninfo --summary",
                ),
            }
        })
        .collect();
    if checks.is_empty() {
        return vec![Check::warning(
            "devices",
            "the loader has no driver with a device",
            install(Package::Vulkan),
        )];
    }
    checks
}
