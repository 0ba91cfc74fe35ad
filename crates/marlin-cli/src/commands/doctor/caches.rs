//! Checks of the caches.

use super::report::{Check, Section};
#[cfg(feature = "cubecl-runtime")]
use crate::kernel_cache::{self, State};
use crate::output::size;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the cache of compiled kernels, and Hugging Face's cache if there is one.
pub fn check() -> Section {
    let mut checks = vec![kernels()];
    checks.extend(
        hugging_face()
            .filter(|folder| folder.is_dir())
            .map(|folder| {
                let models = fs::read_dir(&folder).map_or(0, |entries| {
                    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
                    names
                        .filter(|name| name.to_string_lossy().starts_with("models--"))
                        .count()
                });
                let bytes = size(bytes_in(&folder));
                let message = format!("{}: {models} models, {bytes}", folder.display());
                Check::ok("Hugging Face", message)
            }),
    );
    Section {
        name: "caches",
        checks,
    }
}

#[cfg(feature = "cubecl-runtime")]
fn kernels() -> Check {
    let name = "kernels";
    match kernel_cache::state() {
        State::Off => Check::ok(
            name,
            format!("off: {} is set to it", kernel_cache::VARIABLE),
        ),
        State::NoFolder => Check::warning(
            name,
            "not kept: the user has no cache folder",
            format!("export {}=FOLDER", kernel_cache::VARIABLE),
        ),
        State::NoBuildId => Check::warning(
            name,
            "not kept: the program was linked without a build ID",
            "RUSTFLAGS='-C link-arg=-Wl,--build-id' cargo build --release -p marlin-cli",
        ),
        State::Unwritable { folder, error } => Check::warning(
            name,
            format!("not kept: {} cannot be written: {error}", folder.display()),
            format!("export {}=FOLDER, or off", kernel_cache::VARIABLE),
        ),
        State::Writable { folder } => {
            let bytes = size(bytes_in(&folder));
            Check::ok(name, format!("{}: {bytes}, writable", folder.display()))
        }
    }
}

#[cfg(not(feature = "cubecl-runtime"))]
fn kernels() -> Check {
    Check::ok(
        "kernels",
        "none: no device that compiles kernels is compiled in",
    )
}

/// Returns the folder of Hugging Face's cache, whether it exists or not.
fn hugging_face() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    variable("HF_HUB_CACHE")
        .or_else(|| Some(variable("HF_HOME")?.join("hub")))
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(variable("HOME")?.join(".cache/huggingface/hub")))
}

/// Returns the size of all files in a folder and its subfolders, without the targets of links.
/// What cannot be read counts as empty.
fn bytes_in(folder: &Path) -> usize {
    let mut bytes = 0;
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => folders.push(entry.path()),
                Ok(metadata) if metadata.is_file() => bytes += metadata.len() as usize,
                _ => {}
            }
        }
    }
    bytes
}
