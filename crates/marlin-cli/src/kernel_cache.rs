//! The cache of compiled kernels on disk: CubeCL's cache, in the user's cache folder.
//!
//! CubeCL keys a kernel by its type, its compile-time configuration, the program's build ID and the
//! card's architecture, and keeps the results of autotuning by the number of the device. Everything
//! else that a kernel depends on is in the name of the environment, a file in the folder: the
//! versions of this program, the driver and NVRTC, and the cards. Several processes may use the
//! cache at once.

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};
use etcetera::BaseStrategy;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};
use std::time::{Duration, SystemTime};

/// The environment variable that names another cache folder, or is `off`.
pub const VARIABLE: &str = "BURN_MARLIN_CACHE";
/// The bytes that must be free for a new environment: a model's kernels take about 10 MB.
const ROOM: usize = 32 << 20;
/// The time without a new kernel after which an environment, of an earlier driver or version, is
/// removed. Environments are removed when a new one is created.
const OLD: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// True if the cache is on and has no kernel yet.
static IS_EMPTY: AtomicBool = AtomicBool::new(false);
/// The value of [`compiled_marks`] if the cache is on.
static COMPILED_MARKS: OnceLock<PathBuf> = OnceLock::new();

/// Returns true if the cache was switched on and no process has used it before: every kernel must
/// be compiled.
pub fn is_empty() -> bool {
    IS_EMPTY.load(Ordering::Relaxed)
}

/// Returns the first part of the names of files that record whose kernels are all in the cache;
/// `None` if the cache is off. The files are removed together with the kernels of their
/// environment.
pub fn compiled_marks() -> Option<PathBuf> {
    COMPILED_MARKS.get().cloned()
}

/// Switches the cache on for the rest of the process. Call it before anything asks CubeCL for a
/// device.
///
/// If the cache cannot be used, kernels are compiled anew, and a warning says why. A `cubecl.toml`
/// that switches the cache on takes precedence. Only the first call has an effect: a command that
/// opens several models calls this function several times.
pub fn enable() {
    static ENABLED: Once = Once::new();
    ENABLED.call_once(configure);
}

fn configure() {
    let Some(folder) = folder() else { return };
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    if config.compilation.cache {
        return;
    }
    let Some(build) = buildid::build_id() else {
        tracing::warn!(
            "compiled kernels are not kept: the program was linked without a build ID, by which those of another build are told apart"
        );
        return;
    };
    let name = environment(&versions());
    let is_new = match prepare(&folder, &name) {
        Ok(is_new) => is_new,
        Err(error) => {
            tracing::warn!(folder = %folder.display(), %error, "compiled kernels are not kept; {VARIABLE} names another folder, or is off");
            return;
        }
    };
    let marks = folder.join(format!("{name}.db-compiled-{}", hex(build)));
    config.compilation.cache = true;
    config.environment.path = CacheConfig::Directory(folder);
    config.environment.name = name;
    if !CubeClRuntimeConfig::try_set(config) {
        tracing::warn!("compiled kernels are not kept: CubeCL is configured already");
        return;
    }
    IS_EMPTY.store(is_new, Ordering::Relaxed);
    COMPILED_MARKS.get_or_init(|| marks);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The state of the cache.
pub enum State {
    /// The environment variable switches it off.
    Off,
    /// The user has no cache folder.
    NoFolder,
    /// The program was linked without a build ID.
    NoBuildId,
    /// The folder cannot be written, or its disk has no space.
    Unwritable { folder: PathBuf, error: io::Error },
    /// Kernels are kept.
    Writable { folder: PathBuf },
}

/// Returns the state of the cache, without switching it on. Creates its folder, as [`enable`]
/// does.
pub fn state() -> State {
    let Some(folder) = folder() else {
        return if is_off() {
            State::Off
        } else {
            State::NoFolder
        };
    };
    if buildid::build_id().is_none() {
        return State::NoBuildId;
    }
    match fs::create_dir_all(&folder).and_then(|()| probe(&folder, ROOM)) {
        Ok(()) => State::Writable { folder },
        Err(error) => State::Unwritable { folder, error },
    }
}

/// Returns true if the environment variable switches the cache off.
fn is_off() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|value| value == "off")
}

/// Returns the folder of the cache, or `None` if the cache is off or the user has no cache folder.
fn folder() -> Option<PathBuf> {
    match std::env::var_os(VARIABLE) {
        Some(_) if is_off() => None,
        Some(value) => Some(value.into()),
        None => Some(
            etcetera::choose_base_strategy()
                .ok()?
                .cache_dir()
                .join("burn-marlin"),
        ),
    }
}

/// Returns the name of the environment for the versions that its kernels depend on.
fn environment(versions: &[String]) -> String {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || ".+-".contains(character);
    let name = format!("{}-{}", env!("CARGO_PKG_VERSION"), versions.join("-"));
    name.trim_end_matches('-')
        .chars()
        .map(|character| if is_plain(character) { character } else { '_' })
        .collect()
}

/// Creates the folder and tests that the disk has space for an environment. If this environment is
/// new, removes old environments and returns true. CubeCL would panic if it could read the file of
/// an environment but not write it.
fn prepare(folder: &Path, name: &str) -> io::Result<bool> {
    fs::create_dir_all(folder)?;
    let is_new = !folder.join(format!("{name}.db")).exists();
    probe(folder, if is_new { ROOM } else { ROOM / 32 })?;
    if is_new {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let is_old = entry
                .metadata()
                .and_then(|metadata| metadata.modified())
                .is_ok_and(|modified| {
                    SystemTime::now()
                        .duration_since(modified)
                        .is_ok_and(|age| age > OLD)
                });
            // Another process may have removed the file first.
            if is_old && entry.file_name().to_string_lossy().contains(".db") {
                fs::remove_file(entry.path()).or_else(|error| {
                    if error.kind() == io::ErrorKind::NotFound {
                        Ok(())
                    } else {
                        Err(error)
                    }
                })?;
            }
        }
    }
    Ok(is_new)
}

/// Writes a file of this many bytes to a folder, and removes it.
fn probe(folder: &Path, bytes: usize) -> io::Result<()> {
    let probe = folder.join(format!("probe-{}", std::process::id()));
    let written = File::create(&probe).and_then(|mut file| file.write_all(&vec![0; bytes]));
    let removed = fs::remove_file(&probe);
    written.and(removed)
}

/// Returns the versions of the driver and NVRTC, and the cards (`8xNVIDIA H200`); empty without
/// CUDA.
#[cfg(feature = "cuda")]
fn versions() -> Vec<String> {
    use cudarc::driver::{result, sys};
    use cudarc::nvrtc;

    // SAFETY: both functions only try to open a library.
    if !unsafe { sys::is_culib_present() && nvrtc::sys::is_culib_present() } {
        return Vec::new();
    }
    let (mut driver, mut major, mut minor) = (0, 0, 0);
    // SAFETY: the libraries are present, and the functions write to variables that outlive the
    // calls.
    let is_known = unsafe {
        sys::cuDriverGetVersion(&mut driver).result().is_ok()
            && nvrtc::sys::nvrtcVersion(&mut major, &mut minor)
                .result()
                .is_ok()
    };
    let names = || -> Result<Vec<String>, cudarc::driver::DriverError> {
        result::init()?;
        (0..result::device::get_count()?)
            .map(|card| result::device::get_name(result::device::get(card)?))
            .collect()
    };
    match names() {
        Ok(names) if is_known => {
            let cards: Vec<_> = names
                .chunk_by(|a, b| a == b)
                .map(|same| format!("{}x{}", same.len(), same[0]))
                .collect();
            vec![
                format!("cuda{driver}"),
                format!("nvrtc{major}.{minor}"),
                cards.join("+"),
            ]
        }
        _ => Vec::new(),
    }
}

#[cfg(not(feature = "cuda"))]
fn versions() -> Vec<String> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_file_name_that_has_all_versions() {
        let versions = ["cuda13000", "nvrtc13.0", "8xNVIDIA H200+1xTesla/T4"].map(String::from);
        let name = environment(&versions);
        assert_eq!(
            name,
            format!(
                "{}-cuda13000-nvrtc13.0-8xNVIDIA_H200+1xTesla_T4",
                env!("CARGO_PKG_VERSION")
            )
        );
        assert_eq!(environment(&[]), env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn a_folder_is_made_and_probed() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("a/b");
        assert!(prepare(&folder, "x").unwrap());
        assert_eq!(
            fs::read_dir(&folder).unwrap().count(),
            0,
            "the probe is removed"
        );
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        prepare(&file, "x").unwrap_err();
    }

    #[test]
    fn old_environments_go_when_a_new_one_comes() {
        let folder = tempfile::tempdir().unwrap();
        let with_age = |name: &str, age: Duration| {
            let file = File::create(folder.path().join(name)).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
        };
        let names = || {
            let mut names: Vec<_> = fs::read_dir(folder.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        for name in ["old.db", "old.db-wal", "notes.txt"] {
            with_age(name, 2 * OLD);
        }
        with_age("young.db", OLD / 2);
        assert!(!prepare(folder.path(), "young").unwrap());
        assert_eq!(names(), ["notes.txt", "old.db", "old.db-wal", "young.db"]);
        prepare(folder.path(), "new").unwrap();
        assert_eq!(names(), ["notes.txt", "young.db"]);
    }
}
