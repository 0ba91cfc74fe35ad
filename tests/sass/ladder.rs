//! The kernels of `examples/ladder`: each step, with few rows of activations and with many.

use crate::rules;
use crate::toolchain::Compiled;
use marlin_kernels::inspect::shared_limit;

/// The steps with kernels of their own.
pub const STEPS: [usize; 5] = [1, 2, 3, 4, 5];
/// The numbers of rows of activations.
pub const ROWS: [usize; 4] = [1, 8, 16, 64];

/// Returns messages for the rules that the machine code of a step breaks.
pub fn broken(capability: u32, step: usize, compiled: &Compiled) -> Vec<String> {
    let Compiled {
        usage,
        code,
        shared_bytes,
    } = compiled;
    let limit = shared_limit(capability);
    let mut broken = rules::local_memory(usage, code);
    let mut rule = |holds: bool, message: String| {
        if !holds {
            broken.push(message);
        }
    };
    rule(
        *shared_bytes <= limit,
        format!("{shared_bytes} bytes of shared memory where a block may have {limit}"),
    );
    // The instructions that characterise each step.
    for (mnemonic, from) in [("HMMA", 4), ("LDGSTS", 5), ("LDSM", 5)] {
        let found = code.count(mnemonic, &[]);
        rule((found > 0) == (step >= from), format!("{found} {mnemonic}"));
    }
    let conversions = code.count("I2FP", &[]) + code.count("I2F", &[]);
    rule(
        (conversions >= 32) == (step <= 2 && step > 1),
        format!("{conversions} conversions from integers"),
    );
    broken
}
