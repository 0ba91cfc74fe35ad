//! The kernels of `examples/ladder`: each step for every card, with few rows of activations and with many.

use crate::batch::{self, Kernel};
use crate::rules;
use crate::toolchain::Toolchain;
use crate::{CARDS, Card};
use ::ladder::source::source;
use libtest_mimic::{Completion, Failed, Trial};
use marlin_kernels::inspect::shared_limit;
use std::error::Error;
use std::sync::Arc;

/// Rows of activations.
const ROWS: [usize; 4] = [1, 8, 16, 64];

/// Returns one test for each step and card.
pub fn trials(toolchain: Option<&Arc<Toolchain>>) -> Vec<Trial> {
    let trials = |&card: &Card| (1..=5).map(move |step| trial(card, step, toolchain.cloned()));
    CARDS.iter().flat_map(trials).collect()
}

fn trial(card: Card, step: usize, toolchain: Option<Arc<Toolchain>>) -> Trial {
    Trial::ignorable_test(format!("{}::ladder::step_{step}", card.arch), move || {
        let Some(toolchain) = toolchain else {
            return Ok(Completion::ignored_with("needs NVIDIA's compiler: `cargo xtask proof` or `cargo xtask test` sets it up"));
        };
        let broken = prove(card, step, &toolchain)?;
        if broken.is_empty() { Ok(Completion::Completed) } else { Err(Failed::from(broken.join("\n"))) }
    })
}

/// Compiles a step for every number of rows; returns the rules that are broken.
fn prove(card: Card, step: usize, toolchain: &Toolchain) -> Result<Vec<String>, Box<dyn Error>> {
    let sources = ROWS.iter().map(|&m| Ok((m, source(step, m, card.capability)?))).collect::<Result<_, Box<dyn Error>>>()?;
    let mut all_broken = Vec::new();
    for kernel in batch::compile(sources, card, toolchain)?.kernels {
        let broken = broken(card, step, &kernel);
        if broken.is_empty() {
            kernel.passed();
        }
        all_broken.extend(broken.into_iter().map(|rule| format!("M = {}: {rule}", kernel.of)));
    }
    Ok(all_broken)
}

/// Returns the rules that a step breaks, in words.
fn broken(card: Card, step: usize, kernel: &Kernel<usize>) -> Vec<String> {
    let Kernel { of: m, usage, code, .. } = kernel;
    let (shared, limit) = (kernel.shared_bytes(), shared_limit(card.capability));
    println!("{} step {step}, M = {m}: {} registers, {shared} B shared, {} instructions", card.arch, usage.registers, code.len());
    let mut broken = rules::local_memory(usage, code);
    let mut rule = |holds: bool, message: String| {
        if !holds {
            broken.push(message);
        }
    };
    rule(shared <= limit, format!("{shared} bytes of shared memory where a block may have {limit}"));
    // The instructions that characterise each step.
    let [products, copies, matrices] = [("HMMA", 4), ("LDGSTS", 5), ("LDSM", 5)].map(|(mnemonic, from)| {
        let found = code.count(mnemonic, &[]);
        rule((found > 0) == (step >= from), format!("{found} {mnemonic}"));
        found
    });
    let conversions = code.count("I2FP", &[]) + code.count("I2F", &[]);
    rule((conversions >= 32) == (step <= 2 && step > 1), format!("{conversions} conversions from integers"));
    println!("  {products} HMMA, {copies} LDGSTS, {matrices} LDSM, {conversions} I2F");
    broken
}
