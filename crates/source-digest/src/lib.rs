//! Digests of the Rust sources that define a function: the function's own source, and the sources
//! of all items that it names, directly or through other items.
//!
//! If the digest has changed, the text of a kernel and a measurement of the kernel are stale.
//! Sources are found by following `mod`s, `use`s and paths from the function, item by item, so that
//! no list of files has to be kept. Comments, documentation and tests are excluded. Names are
//! resolved in the scope of their file, without types. Where that is not enough, more items are
//! included than are used; for example, all `impl` blocks of a type are included.
//!
//! ```no_run
//! use source_digest::Sources;
//! use std::path::Path;
//!
//! let sources = Sources::read(&[("marlin_kernels", Path::new("crates/marlin-kernels/src/lib.rs"))])?;
//! let gemv = sources.reached_from(&["marlin_kernels::matmul::gemv::source"])?;
//! println!("{} of {} files", gemv.digest(), gemv.files().len());
//! # Ok::<(), source_digest::Error>(())
//! ```

mod module;
mod resolve;
mod routine;
mod tokens;

pub use routine::{Routine, step_digest, step_sources, workspace};

use module::{Item, Module};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The reason why a digest of sources cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file that cannot be read.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file that the parser does not accept as Rust.
    #[error("{path}: {source}", path = path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: syn::Error,
    },
    /// A declared module without a file.
    #[error("{path}: no file of `mod {module};`", path = path.display())]
    NoModule {
        /// The file with the declaration.
        path: PathBuf,
        /// The name of the module.
        module: String,
    },
    /// A root that names no module or item.
    #[error(
        "nothing is named `{0}`: it starts with the name of a crate that was read, and ends with that of a module or an item"
    )]
    NoRoot(String),
}

/// The parsed sources of one or more crates.
#[derive(Debug, Default)]
pub struct Sources {
    modules: Vec<Module>,
    items: Vec<Item>,
    /// The root module of each crate, by the crate's name in paths.
    crates: BTreeMap<String, usize>,
    /// The macros, by name. Every macro is treated as visible everywhere.
    macros: BTreeMap<String, Vec<usize>>,
    /// The `impl` blocks of each type, or of each trait for types of other crates.
    impls: BTreeMap<usize, Vec<usize>>,
}

impl Sources {
    /// Reads the sources of crates. Each crate is given by its name in paths and the file of its
    /// root module.
    ///
    /// # Errors
    /// An [`Error`] if a file cannot be read or parsed.
    pub fn read(crates: &[(&str, &Path)]) -> Result<Self, Error> {
        let mut sources = Self::default();
        for (name, file) in crates {
            let root = sources.read_crate(name, file)?;
            sources.crates.insert((*name).to_owned(), root);
        }
        sources.find_impls();
        Ok(sources)
    }

    /// Returns all items that are reached from `roots`. A root is the path of an item, or of a
    /// module, all of whose items are then roots.
    ///
    /// # Errors
    /// [`Error::NoRoot`] if a root does not exist.
    pub fn reached_from(&self, roots: &[&str]) -> Result<Reached<'_>, Error> {
        let mut waiting = Vec::new();
        for root in roots {
            let found = self.items_of_root(root);
            if found.is_empty() {
                return Err(Error::NoRoot((*root).to_owned()));
            }
            waiting.extend(found);
        }
        let mut reached = BTreeSet::new();
        while let Some(item) = waiting.pop() {
            if reached.insert(item) {
                waiting.extend(self.named_by(item));
                waiting.extend(self.impls.get(&item).into_iter().flatten());
            }
        }
        Ok(Reached {
            sources: self,
            items: reached,
        })
    }
}

/// The items that are reached from some roots.
#[derive(Debug)]
pub struct Reached<'a> {
    sources: &'a Sources,
    items: BTreeSet<usize>,
}

impl Reached<'_> {
    /// Returns the digest of the items, in 32 hexadecimal digits. The digest depends neither on the
    /// order of items in a file nor on comments.
    pub fn digest(&self) -> String {
        let mut texts: Vec<(&str, &str)> = self
            .items
            .iter()
            .map(|&item| self.place_and_text(item))
            .collect();
        texts.sort_unstable();
        let mut digest = Sha256::new();
        for (place, text) in texts {
            for part in [place, text] {
                digest.update(part);
                digest.update([0]);
            }
        }
        digest
            .finalize()
            .iter()
            .take(16)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// Returns the files that contain the items.
    pub fn files(&self) -> BTreeSet<&Path> {
        self.items
            .iter()
            .map(|&item| {
                self.sources.modules[self.sources.items[item].module]
                    .file
                    .as_path()
            })
            .collect()
    }

    /// Returns the names of the items, including the paths of their modules. `impl` blocks have no
    /// names.
    pub fn names(&self) -> BTreeSet<String> {
        let names = |&item: &usize| {
            let item = &self.sources.items[item];
            item.names
                .iter()
                .map(|name| format!("{}::{name}", self.sources.modules[item.module].path))
        };
        self.items.iter().flat_map(names).collect()
    }

    /// Returns the path of an item's module, and the item's text.
    fn place_and_text(&self, item: usize) -> (&str, &str) {
        let item = &self.sources.items[item];
        (&self.sources.modules[item.module].path, &item.text)
    }
}

#[cfg(test)]
mod tests;
