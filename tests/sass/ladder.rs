//! The kernels of `examples/ladder`: each step for every card, with few rows of activations and with many.

use crate::cache::Cache;
use crate::listing::{Code, Usage};
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
        let (cache, mut broken) = (Cache::new(&toolchain), Vec::new());
        for m in ROWS {
            broken.extend(prove(card, step, m, &toolchain, &cache)?.into_iter().map(|rule| format!("M = {m}: {rule}")));
        }
        if broken.is_empty() { Ok(Completion::Completed) } else { Err(Failed::from(broken.join("\n"))) }
    })
}

/// Compiles a step, and returns the rules that it breaks, in words.
fn prove(card: Card, step: usize, m: usize, toolchain: &Toolchain, cache: &Cache) -> Result<Vec<String>, Box<dyn Error>> {
    let source = source(step, m, card.capability)?;
    let entry = cache.entry(&source.text, card.arch);
    if Cache::has(&entry) {
        return Ok(Vec::new());
    }
    let compiled = toolchain.compile(&source.text, card.arch)?;
    let usage = Usage::parse(&compiled.assembler_log)?;
    let code = Code::parse(&compiled.listing)?;
    let (shared, limit) = (source.shared_bytes + usage.static_shared, shared_limit(card.capability));
    println!("{} step {step}, M = {m}: {} registers, {shared} B shared, {} instructions", card.arch, usage.registers, code.len());
    let mut broken = rules::local_memory(&usage, &code);
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
    if broken.is_empty() {
        Cache::add(&entry);
    }
    Ok(broken)
}
