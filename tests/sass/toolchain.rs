//! NVIDIA's compiler as a pipeline: from CUDA text to PTX, to machine code, and to a listing.

use crate::nvrtc::{Nvrtc, NvrtcError};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// An error of the pipeline.
#[derive(Debug, thiserror::Error)]
pub enum ToolchainError {
    /// A file of NVIDIA's wheels is missing in the folder.
    #[error("no {what} in {folder}", folder = folder.display())]
    Missing {
        /// The program or library.
        what: &'static str,
        /// The folder that was searched.
        folder: PathBuf,
    },
    /// NVRTC failed.
    #[error(transparent)]
    Nvrtc(#[from] NvrtcError),
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A program failed.
    #[error("`{command}` failed ({status}):\n{output}")]
    Failed {
        /// The command line.
        command: String,
        /// The exit status.
        status: std::process::ExitStatus,
        /// Its output.
        output: String,
    },
}

/// NVRTC, ptxas and nvdisasm.
pub struct Toolchain {
    folder: PathBuf,
    nvrtc: Nvrtc,
    /// The version that ptxas prints; all wheels are of the same release.
    version: String,
}

/// A kernel compiled for one card, and the time of each step.
pub struct Compiled {
    /// The output of `ptxas -v`.
    pub assembler_log: String,
    /// The listing of the machine code by nvdisasm.
    pub listing: String,
    /// The time in NVRTC.
    pub nvrtc: Duration,
    /// The time in ptxas.
    pub ptxas: Duration,
    /// The time in nvdisasm.
    pub nvdisasm: Duration,
}

impl Toolchain {
    /// Loads the compiler in `folder`, which has `bin`, `lib` and `include`.
    pub fn load(folder: PathBuf) -> Result<Self, ToolchainError> {
        for (what, path) in
            [("ptxas", "bin/ptxas"), ("nvdisasm", "bin/nvdisasm"), ("CUDA headers", "include/cuda_fp16.h"), ("CCCL", "include/cccl")]
        {
            if !folder.join(path).exists() {
                return Err(ToolchainError::Missing { what, folder });
            }
        }
        let lib = folder.join("lib");
        let library = fs::read_dir(&lib)
            .map_err(|source| ToolchainError::File { path: lib.clone(), source })?
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so.")));
        let Some(library) = library else { return Err(ToolchainError::Missing { what: "libnvrtc.so", folder: lib }) };
        let nvrtc = Nvrtc::load(&library)?;
        let mut toolchain = Self { folder, nvrtc, version: String::new() };
        toolchain.version = toolchain.run("ptxas", &["--version".as_ref()])?.0;
        Ok(toolchain)
    }

    /// Returns the version of the toolchain.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Compiles CUDA text for the architecture `arch`.
    pub fn compile(&self, text: &str, arch: &str) -> Result<Compiled, ToolchainError> {
        let include = self.folder.join("include");
        // The same as in `compile_to_ptx` of cubecl-cuda 0.11.3.
        let options = [
            format!("--gpu-architecture={arch}"),
            format!("--include-path={}", include.display()),
            "-lineinfo".to_owned(),
            format!("--include-path={}", include.join("cccl").display()),
        ];
        let clock = Instant::now();
        let ptx = self.nvrtc.ptx(text, &options)?;
        let nvrtc = clock.elapsed();

        let scratch = tempfile::tempdir().map_err(|source| ToolchainError::File { path: std::env::temp_dir(), source })?;
        let (ptx_file, cubin) = (scratch.path().join("kernel.ptx"), scratch.path().join("kernel.cubin"));
        fs::write(&ptx_file, ptx).map_err(|source| ToolchainError::File { path: ptx_file.clone(), source })?;
        let clock = Instant::now();
        let (_, assembler_log) = self.run("ptxas", &["-v".as_ref(), format!("-arch={arch}").as_ref(), &ptx_file, "-o".as_ref(), &cubin])?;
        let ptxas = clock.elapsed();
        let clock = Instant::now();
        // Only code (`-c`), without the analysis of data flow (`-ndf`), which takes a third of the time and does not change the listing.
        let (listing, _) = self.run("nvdisasm", &["-c".as_ref(), "-ndf".as_ref(), &cubin])?;
        Ok(Compiled { assembler_log, listing, nvrtc, ptxas, nvdisasm: clock.elapsed() })
    }

    /// Runs a program of the toolchain, and returns its standard output and standard error.
    fn run(&self, program: &str, arguments: &[&Path]) -> Result<(String, String), ToolchainError> {
        let path = self.folder.join("bin").join(program);
        let mut command = Command::new(&path);
        let output = command.args(arguments).output().map_err(|source| ToolchainError::File { path, source })?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned());
        if !output.status.success() {
            let output_text = format!("{out}{err}");
            return Err(ToolchainError::Failed { command: format!("{command:?}"), status: output.status, output: output_text });
        }
        Ok((out, err))
    }
}
