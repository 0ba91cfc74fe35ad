//! The kernels of a decode step other than its quantised matmuls: a few configurations of each for every card, which must not use local memory.

use crate::batch::{self, Kernel};
use crate::rules;
use crate::toolchain::Toolchain;
use crate::{CARDS, Card};
use libtest_mimic::{Completion, Failed, Trial};
use marlin_decode::kernels::attention::{self, AttentionPass, AttentionPlan, AttentionShape, AttentionTarget};
use marlin_decode::kernels::{flash, rms_norm_source, silu_mul_source};
use marlin_format::{Bits, GroupSize, Sparsity};
use marlin_kernels::ActivationDtype::{self, BF16, F16, F32};
use marlin_kernels::inspect::{Source, shared_limit};
use marlin_kernels::matmul::{gemv, head};
use marlin_kernels::{Epilogue, Prologue};
use std::error::Error;
use std::sync::Arc;

/// Returns one test for each kernel and card.
pub fn trials(toolchain: Option<&Arc<Toolchain>>) -> Vec<Trial> {
    let kernels: [(&'static str, Sources); 4] =
        [("attention", attention_sources), ("flash", flash_sources), ("rows", row_sources), ("gemv", gemv_sources)];
    let trials = |&card: &Card| kernels.map(|(kernel, sources)| trial(card, kernel, sources, toolchain.cloned()));
    CARDS.iter().flat_map(trials).collect()
}

/// A source, and the name of its configuration.
type Named = (String, Source);
/// A function that returns the sources of a kernel for a card.
type Sources = fn(Card) -> Result<Vec<Named>, Box<dyn Error>>;

fn trial(card: Card, kernel: &'static str, sources: Sources, toolchain: Option<Arc<Toolchain>>) -> Trial {
    Trial::ignorable_test(format!("{}::decode::{kernel}", card.arch), move || {
        let Some(toolchain) = toolchain else {
            return Ok(Completion::ignored_with("needs NVIDIA's compiler: `cargo xtask proof` or `cargo xtask test` sets it up"));
        };
        let mut broken = Vec::new();
        for compiled in batch::compile(sources(card)?, card, &toolchain)?.kernels {
            let Kernel { of: name, usage, code, .. } = &compiled;
            let (shared, before) = (compiled.shared_bytes(), broken.len());
            println!("{} {name}: {} registers, {shared} B shared, {} instructions", card.arch, usage.registers, code.len());
            let mut state_words = 0;
            let is_there = |load: &str| match kernel {
                // The first of the weight, past the first-level cache.
                "gemv" => load.contains("NA"),
                // In a step the first cached keys and values, the only wide loads from buffers that the kernel also writes; and the row's position and slot.
                "attention" if name.starts_with("Step") => {
                    let is_constant = load.contains("CONSTANT");
                    state_words += usize::from(is_constant);
                    load == "LDG.E.128" || is_constant && state_words <= 2
                }
                _ => false,
            };
            let rules = rules::local_memory(usage, code).into_iter().chain(rules::early_loads(card.capability, code, is_there));
            broken.extend(rules.map(|rule| format!("{name}: {rule}")));
            if shared > shared_limit(card.capability) {
                broken.push(format!("{name}: {shared} bytes of shared memory where a block may have {}", shared_limit(card.capability)));
            }
            if broken.len() == before {
                compiled.passed();
            }
        }
        if broken.is_empty() { Ok(Completion::Completed) } else { Err(Failed::from(broken.join("\n"))) }
    })
}

/// Returns the sources of the norm, the gates and the head of small and large models.
fn row_sources(card: Card) -> Result<Vec<Named>, Box<dyn Error>> {
    let mut sources = Vec::new();
    for dtype in [F16, BF16, F32] {
        for features in [896, 4096, 8192, 16384] {
            sources.push((format!("norm of {features} {dtype}"), rms_norm_source(features, dtype, card.capability)?));
        }
        sources.push((format!("gates in {dtype}"), silu_mul_source(dtype, card.capability)?));
    }
    for (rows, features, dtype) in
        [(1, 4096, F16), (2, 896, F16), (9, 4096, BF16), (17, 8192, F16), (32, 4096, F16), (33, 896, BF16), (64, 4096, F16)]
    {
        sources.push((format!("head of {rows} rows of {features} {dtype}"), head::source(rows, features, dtype, card.capability)?));
    }
    Ok(sources)
}

/// Returns the sources of the matmul that also computes the norm, for cards with clusters.
fn gemv_sources(card: Card) -> Result<Vec<Named>, Box<dyn Error>> {
    let mut sources = Vec::new();
    if card.capability < 90 {
        return Ok(sources);
    }
    for group in [GroupSize::G32, GroupSize::G64, GroupSize::G128] {
        for (blocks, zero_points, bf16) in [(1, false, false), (2, true, false), (4, false, true), (8, true, true)] {
            for (bits, sparsity) in Bits::ALL.into_iter().flat_map(|bits| Sparsity::ALL.map(|sparsity| (bits, sparsity))) {
                let operations =
                    [(Prologue::None, Epilogue::None), (Prologue::AddRmsNorm, Epilogue::None), (Prologue::AddRmsNorm, Epilogue::SwiGlu)];
                for (prologue, epilogue) in operations.into_iter().filter(|(_, epilogue)| blocks * epilogue.columns() <= 8) {
                    // Without a norm K is split among two blocks at least.
                    let blocks = if prologue == Prologue::None { blocks.max(2) } else { blocks };
                    let config = gemv::Config { blocks, group, bits, zero_points, bf16, sparsity, prologue, epilogue };
                    if gemv::takes_format(&config) {
                        sources.push((format!("{config:?}"), gemv::source(&config, card.capability)?));
                    }
                }
            }
        }
    }
    Ok(sources)
}

/// Returns the sources of attention for groups of one to eight heads, every kind of head_dim, with and without norms, in every dtype; and for rows of prompts.
fn attention_sources(card: Card) -> Result<Vec<Named>, Box<dyn Error>> {
    let steps = [
        (128, 1, false, F16),
        (128, 4, false, F16),
        (128, 7, false, BF16),
        (128, 8, false, F16),
        (128, 4, true, BF16),
        (64, 8, false, BF16),
        (80, 1, false, F16),
        (96, 1, false, F16),
        (256, 4, true, F16),
        (128, 4, false, F32),
    ];
    let prompts = [(128, 1, false, F32), (40, 4, false, BF16)];
    let target = AttentionTarget { multiprocessors: 128, plane: 32, units: 1024 };
    let source = |pass| move |(head_dim, group, has_norm, dtype)| attention_source(card, &target, [head_dim, group], has_norm, dtype, pass);
    steps.into_iter().map(source(AttentionPass::Step)).chain(prompts.into_iter().map(source(AttentionPass::Prompt))).collect()
}

/// Returns the sources of attention of prompts on tensor cores.
fn flash_sources(card: Card) -> Result<Vec<Named>, Box<dyn Error>> {
    let named =
        |(head_dim, dtype)| Ok((format!("flash attention of {head_dim} in {dtype}"), flash::source(head_dim, dtype, card.capability)?));
    [(64, F16), (80, BF16), (96, F16), (128, F16), (128, BF16), (256, F16)].into_iter().map(named).collect()
}

fn attention_source(
    card: Card,
    target: &AttentionTarget,
    [head_dim, group]: [usize; 2],
    has_norm: bool,
    dtype: ActivationDtype,
    pass: AttentionPass,
) -> Result<Named, Box<dyn Error>> {
    let shape = AttentionShape {
        rows: 1,
        heads: group,
        kv_heads: 1,
        head_dim,
        rotary_dim: head_dim,
        slots: 1,
        max_len: 4096,
        max_positions: 4096,
        window: None,
        norm_epsilon: has_norm.then_some(1e-6),
        dtype,
        pass,
    };
    let config = AttentionPlan::new(&shape, target)?.config;
    let name = format!("{pass:?} attention of {group} x {head_dim} in {dtype}{}", if has_norm { " with norms" } else { "" });
    Ok((name, attention::source(&config, has_norm, dtype, card.capability)?))
}
