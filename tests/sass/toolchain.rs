//! NVIDIA's compiler as a pipeline: from CUDA text to PTX, to machine code, and to a listing.

use crate::listing::{self, Code, ListingError, Usage};
use crate::nvrtc::{Nvrtc, NvrtcError};
use marlin_kernels::inspect::KernelSource;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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
        /// The cause of the failure.
        source: std::io::Error,
    },
    /// The listing or the log could not be parsed.
    #[error(transparent)]
    Listing(#[from] ListingError),
    /// A program failed.
    #[error("`{command}` failed ({status}):\n{output}")]
    Failed {
        /// The command line.
        command: String,
        /// The exit status.
        status: std::process::ExitStatus,
        /// The output of the program.
        output: String,
    },
}

/// NVRTC, ptxas and nvdisasm.
pub struct Toolchain {
    folder: PathBuf,
    nvrtc: Nvrtc,
    /// The version that ptxas prints. All wheels have the same release.
    version: String,
}

/// A kernel compiled for one card.
#[derive(Debug)]
pub struct Compiled {
    /// The resources that the kernel uses.
    pub usage: Usage,
    /// The machine code of the kernel.
    pub code: Code,
    /// The shared memory of a block in bytes.
    pub shared_bytes: usize,
}

impl Toolchain {
    /// Loads the toolchain in `folder`, which has the folders `bin`, `lib` and `include`.
    pub fn load(folder: PathBuf) -> Result<Self, ToolchainError> {
        for (what, path) in [
            ("ptxas", "bin/ptxas"),
            ("nvdisasm", "bin/nvdisasm"),
            ("CUDA headers", "include/cuda_fp16.h"),
            ("CCCL", "include/cccl"),
        ] {
            if !folder.join(path).exists() {
                return Err(ToolchainError::Missing { what, folder });
            }
        }
        let lib = folder.join("lib");
        let library = fs::read_dir(&lib)
            .map_err(|source| ToolchainError::File {
                path: lib.clone(),
                source,
            })?
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .find(|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so."))
            });
        let Some(library) = library else {
            return Err(ToolchainError::Missing {
                what: "libnvrtc.so",
                folder: lib,
            });
        };
        let nvrtc = Nvrtc::load(&library)?;
        let mut toolchain = Self {
            folder,
            nvrtc,
            version: String::new(),
        };
        let version = toolchain.run("ptxas", &["--version".as_ref()])?.0;
        toolchain.version = version.lines().last().unwrap_or_default().trim().to_owned();
        Ok(toolchain)
    }

    /// Returns the version of the toolchain.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Compiles a text to PTX for the architecture `arch`.
    pub fn ptx(&self, text: &str, arch: &str) -> Result<String, ToolchainError> {
        let include = self.folder.join("include");
        // The options are those of `compile_to_ptx` in cubecl-cuda 0.11.3, without `-lineinfo`. The
        // machine code is the same without `-lineinfo`, and ptxas accepts line information of only
        // one text.
        let options = [
            format!("--gpu-architecture={arch}"),
            format!("--include-path={}", include.display()),
            format!("--include-path={}", include.join("cccl").display()),
        ];
        Ok(self.nvrtc.ptx(text, &options)?)
    }

    /// Compiles kernels for the architecture `arch`, in order. NVRTC compiles each kernel
    /// separately; ptxas and nvdisasm, which takes 0.3 s to start, process all kernels at once. If
    /// they fail, each kernel is compiled separately, so that each error belongs to the kernel that
    /// caused it.
    pub fn compile(
        &self,
        sources: &[&KernelSource],
        arch: &str,
    ) -> Vec<Result<Compiled, ToolchainError>> {
        match self.compile_together(sources, arch) {
            Ok(compiled) => compiled.into_iter().map(Ok).collect(),
            Err(error) if sources.len() == 1 => vec![Err(error)],
            Err(_) => sources
                .iter()
                .flat_map(|source| self.compile(&[source], arch))
                .collect(),
        }
    }

    fn compile_together(
        &self,
        sources: &[&KernelSource],
        arch: &str,
    ) -> Result<Vec<Compiled>, ToolchainError> {
        if sources.is_empty() {
            return Ok(Vec::new());
        }
        let scratch = tempfile::tempdir().map_err(|source| ToolchainError::File {
            path: std::env::temp_dir(),
            source,
        })?;
        let (mut entries, mut files) = (Vec::new(), Vec::new());
        for (i, source) in sources.iter().enumerate() {
            // Kernels for different sizes may have the same name.
            let entry = format!("{}_{i}", source.entry);
            let text = source.text.replace(&source.entry, &entry);
            entries.push(entry);
            let file = scratch.path().join(format!("{i}.ptx"));
            fs::write(&file, self.ptx(&text, arch)?).map_err(|source| ToolchainError::File {
                path: file.clone(),
                source,
            })?;
            files.push(file);
        }

        let cubin = scratch.path().join("kernels.cubin");
        let arch = format!("-arch={arch}");
        let arguments = ["-v".as_ref(), arch.as_ref(), "-o".as_ref(), cubin.as_path()];
        let arguments: Vec<&Path> = arguments
            .into_iter()
            .chain(files.iter().map(PathBuf::as_path))
            .collect();
        let (_, log) = self.run("ptxas", &arguments)?;
        // `-c` lists only code. `-ndf` omits the data-flow analysis, which takes a third of the
        // time and does not change the listing.
        let (listing, _) = self.run("nvdisasm", &["-c".as_ref(), "-ndf".as_ref(), &cubin])?;

        let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
        let listings = listing::listings_of(&listing, &entries)?;
        let compiled = sources
            .iter()
            .zip(listing::logs_of(&log, &entries))
            .zip(listings)
            .map(|((source, log), listing)| {
                let usage = Usage::parse(&log)?;
                let shared_bytes = source.shared_bytes + usage.static_shared;
                Ok(Compiled {
                    usage,
                    code: Code::parse(&listing)?,
                    shared_bytes,
                })
            });
        compiled.collect()
    }

    /// Runs a program of the toolchain, and returns its standard output and standard error.
    fn run(&self, program: &str, arguments: &[&Path]) -> Result<(String, String), ToolchainError> {
        let path = self.folder.join("bin").join(program);
        let mut command = Command::new(&path);
        let output = command
            .args(arguments)
            .output()
            .map_err(|source| ToolchainError::File { path, source })?;
        let (out, err) = (
            String::from_utf8_lossy(&output.stdout).into_owned(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        );
        if !output.status.success() {
            let output_text = format!("{out}{err}");
            return Err(ToolchainError::Failed {
                command: format!("{command:?}"),
                status: output.status,
                output: output_text,
            });
        }
        Ok((out, err))
    }
}
