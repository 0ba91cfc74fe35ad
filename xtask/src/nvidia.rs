//! Installs NVIDIA's compiler without the CUDA toolkit: the wheels that NVIDIA publishes for
//! Python, in a virtual environment in the build folder.
//!
//! `tests/sass` compiles the kernels with this compiler for every card, which needs no GPU and no
//! driver.

use crate::process::{Error, cargo, run, step, target};
use crate::{llvm, python};
use std::fs;
use std::path::{Path, PathBuf};

/// The environment variable with the compiler's folder, which `tests/sass` reads.
pub const VARIABLE: &str = "BURN_MARLIN_NVIDIA";
/// The wheels of NVRTC, ptxas (in `nvcc`), nvdisasm, and the headers that CubeCL's CUDA source
/// includes. The wheels and their dependencies are pinned, because the number of registers depends
/// on the version.
const WHEELS: [&str; 7] = [
    "nvidia-cuda-nvrtc==13.5.37",
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-cuda-nvdisasm==13.5.37",
    "nvidia-cuda-runtime==13.5.37",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-cuda-cccl==13.3.5.0.6",
    "nvidia-nvvm==13.5.37",
];
/// The folder of the wheels with the files of CUDA 13.
const CUDA: &str = "cu13";

/// The environment variable with the mode of the proof, which `tests/sass` reads.
const MODE: &str = "BURN_MARLIN_PROOF";

/// The mode of the proof: the kernels that it compiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// Every kernel of the ledger.
    Everything,
    /// Every kernel of the ledger, and every configuration that it leaves out.
    All,
    /// Kernels that are not in the ledger, which is then rewritten.
    Bless,
}

impl Proof {
    const fn name(self) -> &'static str {
        match self {
            Self::Everything => "everything",
            Self::All => "all",
            Self::Bless => "bless",
        }
    }
}

/// Compiles kernels for every card and checks their machine code against the rules and the ledger.
pub fn prove(proof: Proof) -> Result<(), Error> {
    let compiler = step("set-up", || {
        llvm::set_up()?;
        set_up()
    })?;
    let folder = compiler.ok_or_else(|| {
        Error::Needs("NVIDIA's compiler is installed on Linux only; run this there".into())
    })?;
    step("proof", || {
        run(cargo(["test", "--workspace", "--test", "sass"])
            .env(VARIABLE, folder)
            .env(MODE, proof.name()))
    })
}

/// Returns the folder of the compiler, after installing it if needed; `None` on systems without
/// such wheels.
pub fn set_up() -> Result<Option<PathBuf>, Error> {
    if !cfg!(target_os = "linux") {
        return Ok(None);
    }
    let environment = target().join("nvidia");
    python::install(&environment, &WHEELS, "NVIDIA's compiler")?;
    compiler(&environment).map(Some)
}

/// Returns the folder of the compiler in the environment:
/// `lib/python3.*/site-packages/nvidia/cu13`.
fn compiler(environment: &Path) -> Result<PathBuf, Error> {
    let lib = environment.join("lib");
    let entries = fs::read_dir(&lib).map_err(Error::file(&lib))?;
    let mut folders = entries.filter_map(|entry| {
        entry
            .ok()
            .map(|entry| entry.path().join("site-packages/nvidia").join(CUDA))
    });
    folders.find(|folder| folder.join("bin/ptxas").exists()).ok_or_else(|| {
        let shown = environment.display();
        Error::Needs(format!(
            "the wheels are installed in {shown}, without `nvidia/{CUDA}/bin/ptxas`; remove that folder and repeat the command"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_is_pinned() {
        assert!(WHEELS.iter().all(|wheel| {
            wheel
                .split_once("==")
                .is_some_and(|(_, version)| !version.is_empty())
        }));
    }

    #[test]
    fn the_compiler_is_found_whatever_the_python() -> Result<(), Error> {
        let environment = target().join("tmp/nvidia-test");
        let bin = environment
            .join("lib/python3.99/site-packages/nvidia")
            .join(CUDA)
            .join("bin");
        fs::create_dir_all(&bin).map_err(Error::file(&bin))?;
        assert!(matches!(compiler(&environment), Err(Error::Needs(_))));
        fs::write(bin.join("ptxas"), "").map_err(Error::file(&bin))?;
        assert_eq!(
            compiler(&environment)?,
            bin.parent().map(Path::to_path_buf).unwrap_or_default()
        );
        fs::remove_dir_all(&environment).map_err(Error::file(&environment))
    }
}
