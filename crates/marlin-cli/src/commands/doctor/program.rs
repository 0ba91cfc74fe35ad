//! Checks of the program itself.

use super::report::{Check, Section};
use crate::device::DeviceName;

/// The runtimes, and whether they are compiled in.
const RUNTIMES: [(&str, bool); 4] = [
    ("cuda", cfg!(feature = "cuda")),
    ("vulkan", cfg!(feature = "vulkan")),
    ("cpu", cfg!(feature = "cpu")),
    ("flex", cfg!(feature = "flex")),
];

/// Returns the versions, the build and the runtimes that are compiled in. `device` is the device
/// that commands run on by default.
pub fn check(device: Option<DeviceName>) -> Section {
    let unknown = "not known: built without a Cargo.lock";
    let checks = vec![
        Check::ok("burn-marlin", env!("CARGO_PKG_VERSION")),
        Check::ok("Burn", option_env!("BURN_VERSION").unwrap_or(unknown)),
        Check::ok("CubeCL", option_env!("CUBECL_VERSION").unwrap_or(unknown)),
        Check::ok(
            "commit",
            option_env!("BUILD_COMMIT").unwrap_or("not recorded: not a release build of a clone"),
        ),
        Check::ok("profile", env!("BUILD_PROFILE")),
        Check::ok(
            "system",
            format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        ),
        runtimes(),
        match device {
            Some(device) => Check::ok("default device", device.as_str()),
            None => Check::error("default device", "none is present", feature("flex")),
        },
    ];
    Section {
        name: "program",
        checks,
    }
}

/// Returns the command that builds the program with a feature.
pub fn feature(name: &str) -> String {
    format!("cargo build --release -p marlin-cli --features {name}")
}

fn runtimes() -> Check {
    let names = |is_in: bool| {
        let names = RUNTIMES.iter().filter(|(_, built)| *built == is_in);
        let names: Vec<_> = names.map(|(name, _)| *name).collect();
        (!names.is_empty()).then(|| names.join(","))
    };
    let built = names(true).unwrap_or_else(|| "none".into());
    match names(false) {
        None => Check::ok("runtimes", built),
        Some(missing) => Check::warning(
            "runtimes",
            format!("{built}; not compiled in: {missing}"),
            feature(&missing),
        ),
    }
}
