//! Compiles kernels and checks their machine code.

use crate::kernel::{self, Kernel, Subject};
use crate::ledger::LedgerRow;
use crate::toolchain::{Compiled, Toolchain, ToolchainError};
use crate::{Card, Coverage};
use marlin_kernels::inspect::KernelSource;

/// What was found of a kernel.
pub struct Outcome<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// The row of the ledger that says so; an error if the kernel was not compiled.
    pub row: Result<LedgerRow, String>,
    /// The rules that the machine code breaks, in words.
    pub broken: Vec<String>,
}

/// Compiles kernels, each with its text, for the card whose kernels they are, and checks each by
/// its rules. What fails of one leaves the others as they are.
pub fn check<'a>(
    kernels: Vec<(&'a Kernel, KernelSource)>,
    card: Card,
    toolchain: &Toolchain,
) -> Vec<Outcome<'a>> {
    let texts: Vec<&KernelSource> = kernels.iter().map(|(_, source)| source).collect();
    let compiled = toolchain.compile(&texts, card.arch);
    kernels
        .iter()
        .zip(compiled)
        .map(|((kernel, source), compiled)| outcome(kernel, source, compiled, toolchain))
        .collect()
}

fn outcome<'a>(
    kernel: &'a Kernel,
    source: &KernelSource,
    compiled: Result<Compiled, ToolchainError>,
    toolchain: &Toolchain,
) -> Outcome<'a> {
    let compiled = match compiled {
        Ok(compiled) => compiled,
        Err(error) => {
            return Outcome {
                kernel,
                row: Err(error.to_string()),
                broken: Vec::new(),
            };
        }
    };
    // Nothing is tuned for a card of which one configuration is compiled: the ledger shows what its
    // registers do not hold.
    let mut broken = if kernel.card.coverage == Coverage::One {
        Vec::new()
    } else {
        kernel::broken(kernel, &compiled)
    };
    if let (Coverage::SamePtx(twin), Subject::Tile(_)) = (kernel.card.coverage, &kernel.subject) {
        match has_ptx_of(source, kernel.card, twin, toolchain) {
            Ok(true) => (),
            Ok(false) => {
                broken.push(format!("the PTX is not that for {}, for which alone more than one configuration is checked", twin.arch))
            }
            Err(error) => broken.push(error.to_string()),
        }
    }
    Outcome {
        kernel,
        row: Ok(LedgerRow::new(kernel, source, &compiled)),
        broken,
    }
}

/// Returns true if NVRTC's PTX is that for another card, but for the target.
fn has_ptx_of(
    source: &KernelSource,
    card: Card,
    twin: &Card,
    toolchain: &Toolchain,
) -> Result<bool, ToolchainError> {
    let [own, other] = [card.arch, twin.arch].map(|arch| toolchain.ptx(&source.text, arch));
    Ok(own?.replacen(
        &format!(".target {}", card.arch),
        &format!(".target {}", twin.arch),
        1,
    ) == other?)
}
