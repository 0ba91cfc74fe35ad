//! Compiles kernels together, without those that have passed before.

use crate::Card;
use crate::cache::Cache;
use crate::listing::{Code, Usage};
use crate::toolchain::{Times, Toolchain};
use marlin_kernels::inspect::Source;
use std::error::Error;
use std::path::PathBuf;

/// A kernel whose text has not passed before, compiled for a card.
pub struct Kernel<T> {
    /// What it is a kernel of.
    pub of: T,
    /// Its text.
    pub source: Source,
    /// Its resources.
    pub usage: Usage,
    /// Its machine code.
    pub code: Code,
    /// Its file in the cache.
    entry: PathBuf,
}

impl<T> Kernel<T> {
    /// Returns the shared memory of a block in bytes.
    pub fn shared_bytes(&self) -> usize {
        self.source.shared_bytes + self.usage.static_shared
    }

    /// Records that the kernel obeys every rule.
    pub fn passed(&self) {
        Cache::add(&self.entry);
    }
}

/// Kernels that were compiled together.
pub struct Batch<T> {
    /// The kernels, in order.
    pub kernels: Vec<Kernel<T>>,
    /// The time that it took.
    pub times: Times,
}

/// Compiles those of `sources` whose text has not passed before.
pub fn compile<T>(sources: Vec<(T, Source)>, card: Card, toolchain: &Toolchain) -> Result<Batch<T>, Box<dyn Error>> {
    let cache = Cache::new(toolchain);
    let entries = sources.into_iter().map(|(of, source)| (cache.entry(&source.text, card.arch), of, source));
    let new: Vec<_> = entries.filter(|(entry, _, _)| !Cache::has(entry)).collect();
    if new.is_empty() {
        return Ok(Batch { kernels: Vec::new(), times: Times::default() });
    }
    let texts: Vec<&Source> = new.iter().map(|(_, _, source)| source).collect();
    let (compiled, times) = toolchain.compile(&texts, card.arch)?;
    let kernels = new.into_iter().zip(compiled).map(|((entry, of, source), compiled)| {
        let usage = Usage::parse(&compiled.assembler_log)?;
        Ok(Kernel { of, source, usage, code: Code::parse(&compiled.listing)?, entry })
    });
    Ok(Batch { kernels: kernels.collect::<Result<_, Box<dyn Error>>>()?, times })
}
