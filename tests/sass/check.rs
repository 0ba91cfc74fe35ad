//! Compiles kernels and checks their machine code.

use crate::kernel::{self, Kernel, Subject};
use crate::ledger::LedgerRow;
use crate::toolchain::{Compiled, Toolchain, ToolchainError};
use crate::{Card, Coverage};
use marlin_kernels::inspect::KernelSource;

/// The result of checking a kernel.
pub struct Outcome<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// The ledger row with the figures found; an error if the kernel was not compiled.
    pub row: Result<LedgerRow, String>,
    /// Messages for the rules that the machine code breaks.
    pub broken: Vec<String>,
}

/// Compiles the kernels of a card, each from its text, and checks each by its rules. A kernel that
/// fails does not affect the others.
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
    // No kernel is tuned for a card with `Coverage::One`, so the rules are not applied to its
    // kernels. The ledger shows how much the registers spill.
    let mut broken = if kernel.card.coverage == Coverage::One {
        Vec::new()
    } else {
        kernel::broken(kernel, &compiled)
    };
    if let Subject::Tile(config) = &kernel.subject
        && let Coverage::SamePtx(twin) = kernel.card.coverage_of(&config.tile)
    {
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

/// Returns true if NVRTC's PTX for a card differs from the PTX for `twin` only in the `.target`
/// line.
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
