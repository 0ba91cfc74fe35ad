//! NVIDIA's compiler as a pipeline: CUDA text to PTX to machine code to a listing.

use crate::nvrtc::{Nvrtc, NvrtcError};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Why a text did not become a listing.
#[derive(Debug, thiserror::Error)]
pub enum ToolchainError {
    /// The folder does not hold what NVIDIA's wheels do.
    #[error("no {what} in {folder}", folder = folder.display())]
    Missing {
        /// The program or library.
        what: &'static str,
        /// Where it was looked for.
        folder: PathBuf,
    },
    /// NVRTC refused.
    #[error(transparent)]
    Nvrtc(#[from] NvrtcError),
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A program failed.
    #[error("`{command}` failed ({status}):\n{output}")]
    Failed {
        /// The command line.
        command: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// What it said.
        output: String,
    },
}

/// NVRTC and the programs beside it.
pub struct Toolchain {
    folder: PathBuf,
    nvrtc: Nvrtc,
    /// The line of ptxas's release, which all wheels share.
    version: String,
}

/// A kernel compiled for one card, and how long each step took.
pub struct Compiled {
    /// What `ptxas -v` said.
    pub assembler_log: String,
    /// The machine code as nvdisasm writes it.
    pub listing: String,
    /// In NVRTC.
    pub nvrtc: Duration,
    /// In ptxas.
    pub ptxas: Duration,
    /// In nvdisasm.
    pub nvdisasm: Duration,
}

impl Toolchain {
    /// Takes the compiler in `folder`, which has `bin`, `lib` and `include`.
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

    /// The release of the toolchain.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Compiles CUDA text for the card `arch`.
    pub fn compile(&self, text: &str, arch: &str) -> Result<Compiled, ToolchainError> {
        let include = self.folder.join("include");
        // As `compile_to_ptx` of cubecl-cuda 0.11.3 has them.
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
        // Code alone, without the analysis of data flow: that takes a third of its time, and changes nothing in the listing.
        let (listing, _) = self.run("nvdisasm", &["-c".as_ref(), "-ndf".as_ref(), &cubin])?;
        Ok(Compiled { assembler_log, listing, nvrtc, ptxas, nvdisasm: clock.elapsed() })
    }

    /// Standard output and standard error of a program of the toolchain.
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
