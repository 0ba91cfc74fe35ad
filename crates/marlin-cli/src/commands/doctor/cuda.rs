//! Checks of NVIDIA's driver, cards, NVRTC and headers.

use super::packages::{Package, install};
use super::report::{Check, Section};
use crate::output::size;
use cudarc::driver::sys::CUdevice_attribute::{
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
};
use cudarc::driver::{DriverError, result, sys};
use cudarc::nvrtc;
use marlin_kernels::device::{CLUSTER_CAPABILITY, MIN_CAPABILITY, WGMMA_CAPABILITY};
use std::fs;
use std::path::{Path, PathBuf};

/// A card that the driver lists.
struct Card {
    name: String,
    /// The compute capability, 80 for 8.0.
    capability: u32,
    memory: usize,
}

/// Returns the driver, the cards with their kernels, NVRTC and the headers.
///
/// Without a card nothing is an error, since the program runs on other devices.
pub fn check() -> Section {
    let (mut checks, cards, driver) = driver();
    for (index, card) in cards.iter().enumerate() {
        let (name, capability, memory) = (&card.name, card.capability, size(card.memory));
        checks.push(Check::ok(
            format!("device {index}"),
            format!(
                "{name}, compute capability {}.{}, {memory}",
                capability / 10,
                capability % 10
            ),
        ));
        checks.push(Check::ok(
            format!("kernels of {index}"),
            kernels(capability).join(", "),
        ));
    }
    checks.push(compiler(&cards, driver));
    checks.push(headers(!cards.is_empty()));
    Section {
        name: "cuda",
        checks,
    }
}

/// Returns a check of something without which no kernel is compiled: an error if there is a card.
fn missing(has_card: bool, name: &str, message: impl Into<String>) -> Check {
    let fix = install(Package::CudaToolkit);
    if has_card {
        Check::error(name, message, fix)
    } else {
        Check::warning(name, message, fix)
    }
}

/// Returns the checks of the driver, its cards, and the CUDA version that it supports, 13000 for
/// 13.0.
fn driver() -> (Vec<Check>, Vec<Card>, Option<i32>) {
    // SAFETY: the function only tries to open the library.
    if !unsafe { sys::is_culib_present() } {
        let missing = Check::warning(
            "driver",
            "libcuda was not found: no device of cuda",
            install(Package::CudaDriver),
        );
        return (vec![missing], Vec::new(), None);
    }
    let mut version = 0;
    // SAFETY: the library is present, and the function writes to a variable that outlives the
    // call.
    let known = unsafe { sys::cuDriverGetVersion(&mut version).result() };
    let module = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let number = driver_version(&module).unwrap_or("of unknown version");
    let mut checks = Vec::new();
    match known {
        Ok(()) => checks.push(Check::ok(
            "driver",
            format!("libcuda {number}, for CUDA {}", cuda_version(version)),
        )),
        Err(error) => checks.push(Check::error(
            "driver",
            format!("libcuda {number} does not say its version: {error}"),
            install(Package::CudaDriver),
        )),
    }
    let cards = match cards() {
        Ok(cards) => {
            if cards.is_empty() {
                checks.push(no_card());
            }
            cards
        }
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
            checks.push(no_card());
            Vec::new()
        }
        Err(error) => {
            checks.push(Check::error(
                "devices",
                format!("the driver does not start: {error}"),
                "nvidia-smi; after an update of the driver: sudo reboot",
            ));
            Vec::new()
        }
    };
    (checks, cards, known.ok().map(|()| version))
}

fn no_card() -> Check {
    Check::warning(
        "devices",
        "the driver lists no card",
        "nvidia-smi; in a container: docker run --gpus all",
    )
}

/// Returns the cards that the driver lists.
fn cards() -> Result<Vec<Card>, DriverError> {
    result::init()?;
    let card = |index| {
        let card = result::device::get(index)?;
        // SAFETY: the driver has just returned the device.
        let attribute = |name| unsafe { result::device::get_attribute(card, name) };
        let major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Card {
            name: result::device::get_name(card)?,
            capability: (major * 10 + minor) as u32,
            // SAFETY: as above.
            memory: unsafe { result::device::total_mem(card) }?,
        })
    };
    (0..result::device::get_count()?).map(card).collect()
}

/// Returns the kinds of kernels that run on cards of a compute capability.
fn kernels(capability: u32) -> Vec<&'static str> {
    [
        ("marlin (wgmma)", capability == WGMMA_CAPABILITY),
        ("marlin (mma.sync)", capability >= MIN_CAPABILITY),
        ("gemv (clusters)", capability >= CLUSTER_CAPABILITY),
        ("portable", true),
    ]
    .into_iter()
    .filter_map(|(name, runs)| runs.then_some(name))
    .collect()
}

/// Returns the check of NVRTC for the cards and the version of the driver.
fn compiler(cards: &[Card], driver: Option<i32>) -> Check {
    // SAFETY: the function only tries to open the library.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        let message = "libnvrtc was not found: it compiles the kernels of cuda";
        return missing(!cards.is_empty(), "nvrtc", message);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is present, and the function writes to variables that outlive the call.
    let known = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor).result() };
    if let Err(error) = known {
        let message = format!("libnvrtc does not say its version: {error:?}");
        return missing(!cards.is_empty(), "nvrtc", message);
    }
    let architectures = architectures();
    let unknown = cards
        .iter()
        .find(|card| !architectures.is_empty() && !architectures.contains(&card.capability));
    if let Some(Card {
        name, capability, ..
    }) = unknown
    {
        let message = format!(
            "{major}.{minor} does not compile for {name}, compute capability {}.{}",
            capability / 10,
            capability % 10
        );
        return missing(true, "nvrtc", message);
    }
    match driver {
        Some(driver) if 1000 * major + 10 * minor > driver => Check::warning(
            "nvrtc",
            format!(
                "{major}.{minor} is newer than the driver, for CUDA {}, which may refuse its PTX",
                cuda_version(driver)
            ),
            install(Package::CudaDriver),
        ),
        _ => Check::ok("nvrtc", format!("{major}.{minor}")),
    }
}

/// Returns the compute capabilities that NVRTC compiles for; none if it does not say.
fn architectures() -> Vec<u32> {
    let mut count = 0;
    // SAFETY: the library is present, and the function writes to a variable that outlives the
    // call.
    let counted = unsafe { nvrtc::sys::nvrtcGetNumSupportedArchs(&mut count).result() };
    let mut found = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: the list has as many places as NVRTC said.
    let listed = unsafe { nvrtc::sys::nvrtcGetSupportedArchs(found.as_mut_ptr()).result() };
    match (counted, listed) {
        (Ok(()), Ok(())) => found.into_iter().map(|found| found as u32).collect(),
        _ => Vec::new(),
    }
}

/// Returns the check of the CUDA headers, which NVRTC includes.
fn headers(has_card: bool) -> Check {
    let Some(root) = cuda_path() else {
        let message = "CUDA_PATH is not set, and there is no /usr/local/cuda and no /opt/cuda";
        return missing(has_card, "headers", message);
    };
    let include = root.join("include");
    let (folder, header) = (include.display(), include.join("mma.h"));
    if !header.is_file() {
        return missing(has_card, "headers", format!("{folder} has no mma.h"));
    }
    let text = fs::read_to_string(include.join("cuda.h")).unwrap_or_default();
    Check::ok(
        "headers",
        match defined_version(&text) {
            Some(version) => format!("CUDA {} in {folder}", cuda_version(version)),
            None => format!("in {folder}"),
        },
    )
}

/// Returns the folder of the CUDA toolkit, where CubeCL looks for it.
fn cuda_path() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("CUDA_PATH") {
        return Some(path.into());
    }
    if cfg!(windows) {
        return Some("C:/Program Files/NVIDIA GPU Computing Toolkit/CUDA/".into());
    }
    let places = [
        ("/usr/local/cuda", "/usr/local/cuda"),
        ("/opt/cuda", "/opt/cuda"),
        ("/usr/bin/nvcc", "/usr"),
    ];
    let place = places
        .into_iter()
        .find(|(sign, _)| Path::new(sign).exists());
    place.map(|(_, root)| root.into())
}

/// Returns the driver's version in the text of the kernel module's `version`.
fn driver_version(module: &str) -> Option<&str> {
    let line = module.lines().next()?;
    line.split_whitespace()
        .find(|word| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

/// Returns the version that `cuda.h` defines, 13000 for 13.0.
fn defined_version(header: &str) -> Option<i32> {
    let value = |line: &str| {
        line.strip_prefix("#define CUDA_VERSION")?
            .trim()
            .parse()
            .ok()
    };
    header.lines().find_map(value)
}

/// Formats a version of CUDA, 13000 for 13.0.
fn cuda_version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_follow_from_the_compute_capability() {
        assert_eq!(kernels(75), ["portable"]);
        assert_eq!(kernels(89), ["marlin (mma.sync)", "portable"]);
        let hopper = ["marlin (wgmma)", "marlin (mma.sync)", "gemv (clusters)"];
        assert_eq!(kernels(90), [&hopper[..], &["portable"]].concat());
        assert_eq!(kernels(120), [&hopper[1..], &["portable"]].concat());
    }

    #[test]
    fn versions_are_read_from_the_texts_of_the_driver_and_the_toolkit() {
        let module =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1\nGCC 12.2.0";
        assert_eq!(driver_version(module), Some("570.86.15"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release";
        assert_eq!(driver_version(open), Some("580.65.06"));
        assert_eq!(driver_version(""), None);
        let header = "#ifndef X\n#define CUDA_VERSION 12080\n";
        assert_eq!(
            defined_version(header).map(cuda_version).as_deref(),
            Some("12.8")
        );
        assert_eq!(defined_version("#define CUDA_VERSION_X\n"), None);
    }

    #[test]
    fn what_is_missing_is_an_error_only_beside_a_card() {
        use super::super::report::Status;
        assert_eq!(missing(true, "nvrtc", "").status, Status::Error);
        assert_eq!(missing(false, "nvrtc", "").status, Status::Warning);
    }
}
