//! The kernels of a decode step other than the Marlin kernels, each in a few configurations for
//! every card.

use crate::Card;
use crate::rules;
use crate::toolchain::Compiled;
use marlin_format::{GroupSize, WeightValue};
use marlin_kernels::ActivationDtype::{self, BF16, F16, F32};
use marlin_kernels::inspect::{KernelSource, shared_limit};
use marlin_kernels::matmul::{gemv, lm_head};
use marlin_kernels::{Epilogue, Prologue};
use marlin_nn::kernels::attention::{
    self, AttentionPass, AttentionPlan, AttentionShape, AttentionTarget,
};
use marlin_nn::kernels::{e4m3_cache_sources, flash, rms_norm_source, silu_mul_source};
use marlin_nn::{CacheFormat, CacheShape, Pages};
use source_digest::Routine;
use std::error::Error;

/// A kernel of a decode step, with its configuration.
#[derive(Debug, Clone)]
pub enum Subject {
    /// The RMSNorm of rows.
    Norm {
        features: usize,
        dtype: ActivationDtype,
    },
    /// The product of gates and ups, as in SwiGLU.
    Gates { dtype: ActivationDtype },
    /// The logits of a float head.
    Head {
        rows: usize,
        features: usize,
        dtype: ActivationDtype,
    },
    /// The matmul of one row, for cards with clusters.
    Gemv(gemv::GemvConfig),
    /// Attention of a step, and of prompts without tensor cores.
    Attention {
        group: usize,
        head_dim: usize,
        has_norm: bool,
        dtype: ActivationDtype,
        pass: AttentionPass,
        /// The number of positions of a page, if the cache has pages.
        page_size: Option<usize>,
        format: CacheFormat,
    },
    /// The kernels between a cache in e4m3 and the workspace of prompts.
    Codes {
        head_dim: usize,
        page_size: Option<usize>,
        dtype: ActivationDtype,
        /// True for the kernel that writes the cache, false for the kernel that reads it.
        stores: bool,
    },
    /// Attention of prompts on tensor cores.
    Flash {
        head_dim: usize,
        /// The number of positions of a page, if the cache has pages.
        page_size: Option<usize>,
        dtype: ActivationDtype,
    },
}

impl Subject {
    /// Returns the routine whose sources make the CUDA text.
    pub fn routine(&self) -> Routine {
        match self {
            Self::Norm { .. } | Self::Gates { .. } | Self::Codes { .. } => Routine::Rows,
            Self::Head { .. } => Routine::Head,
            Self::Gemv(_) => Routine::Gemv,
            Self::Attention { .. } => Routine::Attention,
            Self::Flash { .. } => Routine::Flash,
        }
    }
}

/// Returns the CUDA text of a kernel.
pub fn source(subject: &Subject, capability: u32) -> Result<KernelSource, Box<dyn Error>> {
    Ok(match *subject {
        Subject::Norm { features, dtype } => rms_norm_source(features, dtype, capability)?,
        Subject::Gates { dtype } => silu_mul_source(dtype, capability)?,
        Subject::Head {
            rows,
            features,
            dtype,
        } => lm_head::source(rows, features, dtype, capability)?,
        Subject::Gemv(config) => gemv::source(&config, capability)?,
        Subject::Attention {
            group,
            head_dim,
            has_norm,
            dtype,
            pass,
            page_size,
            format,
        } => {
            let mut shape = shape([group, head_dim], page_size, has_norm, dtype, pass);
            shape.cache.format = format;
            let config = AttentionPlan::new(&shape, &TARGET)?.config;
            attention::source(&config, has_norm, dtype, capability)?
        }
        Subject::Codes {
            head_dim,
            page_size,
            dtype,
            stores,
        } => {
            let [store, widen] = e4m3_cache_sources(head_dim, page_size, dtype, capability)?;
            if stores { store } else { widen }
        }
        Subject::Flash {
            head_dim,
            page_size,
            dtype,
        } => flash::source(head_dim, page_size, dtype, capability)?,
    })
}

/// Returns messages for the rules that the machine code breaks.
pub fn broken(subject: &Subject, capability: u32, compiled: &Compiled) -> Vec<String> {
    let Compiled {
        usage,
        code,
        shared_bytes,
    } = compiled;
    let mut words = 0;
    let is_there = |load: &str| match subject {
        // The first loads of the weight, which bypass the first-level cache.
        Subject::Gemv(_) => load.contains("NA"),
        // A decode step may load the first cached keys and values, which are the only wide loads
        // from buffers that the kernel also writes. It may also load the row's position and slot,
        // and the pages of a lane's first positions, of which there are at most four.
        Subject::Attention {
            pass: AttentionPass::Step,
            page_size,
            format,
            ..
        } => {
            let is_constant = load.contains("CONSTANT");
            words += usize::from(is_constant);
            let most = 2 + page_size.map_or(0, |_| 4);
            let is_cached = match format {
                CacheFormat::Activations => load == "LDG.E.128",
                // Codes, and the scale of a position.
                CacheFormat::E4m3 => matches!(load, "LDG.E.64" | "LDG.E"),
            };
            is_cached || is_constant && words <= most
        }
        _ => false,
    };
    let mut broken = rules::local_memory(usage, code);
    broken.extend(rules::early_loads(capability, code, is_there));
    let limit = shared_limit(capability);
    if *shared_bytes > limit {
        broken.push(format!(
            "{shared_bytes} bytes of shared memory where a block may have {limit}"
        ));
    }
    broken
}

/// The card for which attention is planned.
const TARGET: AttentionTarget = AttentionTarget {
    multiprocessors: 128,
    plane: 32,
    units: 1024,
};

/// Returns the shape of one row with one group of query heads.
fn shape(
    [heads, head_dim]: [usize; 2],
    page_size: Option<usize>,
    has_norm: bool,
    dtype: ActivationDtype,
    pass: AttentionPass,
) -> AttentionShape {
    AttentionShape {
        rows: 1,
        heads,
        cache: CacheShape {
            pages: page_size.map(|size| Pages { count: 64, size }),
            ..CacheShape::from([1, 1, 4096, head_dim])
        },
        rotary_dim: head_dim,
        max_positions: 4096,
        window: None,
        norm_epsilon: has_norm.then_some(1e-6),
        dtype,
        pass,
    }
}

/// Returns the kernels for a card, each with its name.
pub fn subjects(card: Card) -> Vec<(String, Subject)> {
    [rows(), heads(), gemv(card), attention(), codes(), flash()].concat()
}

/// Returns the norm and SwiGLU kernels of small and large models.
fn rows() -> Vec<(String, Subject)> {
    let mut subjects = Vec::new();
    for dtype in [F16, BF16, F32] {
        for features in [896, 4096, 8192, 16384] {
            subjects.push((
                format!("norm of {features} {dtype}"),
                Subject::Norm { features, dtype },
            ));
        }
        subjects.push((format!("gates in {dtype}"), Subject::Gates { dtype }));
    }
    subjects
}

/// Returns the lm_head kernels from one row to the maximum number of rows.
fn heads() -> Vec<(String, Subject)> {
    let named = |(rows, features, dtype)| {
        (
            format!("head of {rows} rows of {features} {dtype}"),
            Subject::Head {
                rows,
                features,
                dtype,
            },
        )
    };
    let heads = [
        (1, 4096, F16),
        (2, 896, F16),
        (9, 4096, BF16),
        (17, 8192, F16),
        (32, 4096, F16),
        (33, 896, BF16),
        (64, 4096, F16),
    ];
    heads.map(named).into()
}

/// Returns the matmuls of one row, with and without the norm, for cards with clusters.
fn gemv(card: Card) -> Vec<(String, Subject)> {
    let mut subjects = Vec::new();
    if card.capability < 90 {
        return subjects;
    }
    for group in GroupSize::ALL {
        for (blocks, zero_points, bf16) in [
            (1, false, false),
            (2, true, false),
            (4, false, true),
            (8, true, true),
        ] {
            for (bits, sparsity) in WeightValue::ALL
                .into_iter()
                .filter(|bits| bits.groups().contains(&group))
                .filter(|bits| bits.zero_points().contains(&zero_points.into()))
                .flat_map(|bits| bits.sparsities().iter().map(move |&of| (bits, of)))
            {
                let operations = [
                    (Prologue::None, Epilogue::None),
                    (Prologue::AddRmsNorm, Epilogue::None),
                    (Prologue::AddRmsNorm, Epilogue::SwiGlu),
                ];
                for (prologue, epilogue) in operations
                    .into_iter()
                    .filter(|(_, epilogue)| blocks * epilogue.columns() <= 8)
                {
                    // Without a norm, K is split among at least two blocks.
                    let blocks = if prologue == Prologue::None {
                        blocks.max(2)
                    } else {
                        blocks
                    };
                    let config = gemv::GemvConfig {
                        blocks,
                        group,
                        value: bits,
                        zero_points,
                        bf16,
                        sparsity,
                        prologue,
                        epilogue,
                    };
                    if gemv::takes_format(&config) {
                        subjects.push((gemv_name(&config), Subject::Gemv(config)));
                    }
                }
            }
        }
    }
    subjects
}

fn gemv_name(config: &gemv::GemvConfig) -> String {
    let gemv::GemvConfig {
        blocks,
        group,
        value,
        zero_points,
        bf16,
        sparsity,
        prologue,
        epilogue,
    } = config;
    let dtype = if *bf16 { "bf16" } else { "f16" };
    let zeros = if *zero_points { " zeros" } else { "" };
    let norm = if *prologue == Prologue::AddRmsNorm {
        " norm"
    } else {
        ""
    };
    let gated = if *epilogue == Epilogue::SwiGlu {
        " swiglu"
    } else {
        ""
    };
    format!("gemv of {blocks} blocks {sparsity} {value} {group} {dtype}{zeros}{norm}{gated}")
}

/// Returns the attention kernels for groups of one to eight heads, every kind of head_dim, with and
/// without norms and pages, in every dtype. Those of prompt rows follow.
fn attention() -> Vec<(String, Subject)> {
    let steps = [
        (128, 1, false, F16, None),
        (128, 4, false, F16, None),
        (128, 7, false, BF16, None),
        (128, 8, false, F16, None),
        (128, 4, true, BF16, None),
        (64, 8, false, BF16, None),
        (80, 1, false, F16, None),
        (96, 1, false, F16, None),
        (256, 4, true, F16, None),
        (128, 4, false, F32, None),
        (128, 1, false, F16, Some(64)),
        (128, 4, false, F16, Some(64)),
        (128, 8, false, F16, Some(64)),
        (64, 8, false, BF16, Some(16)),
        (256, 4, true, F16, Some(128)),
        (128, 4, false, F32, Some(64)),
    ];
    let prompts = [
        (128, 1, false, F32, None),
        (40, 4, false, BF16, None),
        (40, 4, false, BF16, Some(64)),
    ];
    let codes = [
        (128, 1, false, F16, Some(64)),
        (128, 4, false, BF16, Some(64)),
        (128, 8, false, F16, Some(64)),
        (64, 8, false, BF16, Some(16)),
        (256, 4, true, F16, Some(128)),
        (96, 1, false, BF16, None),
    ];
    let named = |pass, format| {
        move |(head_dim, group, has_norm, dtype, page_size)| {
            let codes = match format {
                CacheFormat::Activations => "",
                CacheFormat::E4m3 => " over e4m3",
            };
            let norms = if has_norm { " with norms" } else { "" };
            let pages = of_pages(page_size);
            let name = format!(
                "{pass:?} attention of {group} x {head_dim} in {dtype}{norms}{codes}{pages}"
            )
            .to_lowercase();
            (
                name,
                Subject::Attention {
                    group,
                    head_dim,
                    has_norm,
                    dtype,
                    pass,
                    page_size,
                    format,
                },
            )
        }
    };
    steps
        .into_iter()
        .map(named(AttentionPass::Step, CacheFormat::Activations))
        .chain(
            prompts
                .into_iter()
                .map(named(AttentionPass::Prompt, CacheFormat::Activations)),
        )
        .chain(
            codes
                .into_iter()
                .map(named(AttentionPass::Step, CacheFormat::E4m3)),
        )
        .collect()
}

/// Returns the kernels between a cache in e4m3 and the workspace of prompts.
fn codes() -> Vec<(String, Subject)> {
    let of = |(head_dim, dtype, page_size)| {
        [true, false].map(|stores| {
            let what = if stores { "written" } else { "read" };
            let name = format!(
                "cache of {head_dim} in e4m3 {what} in {dtype}{}",
                of_pages(page_size)
            );
            let subject = Subject::Codes {
                head_dim,
                page_size,
                dtype,
                stores,
            };
            (name, subject)
        })
    };
    let shapes = [
        (128, F16, Some(64)),
        (128, BF16, Some(64)),
        (80, F16, None),
        (256, BF16, Some(16)),
    ];
    shapes.into_iter().flat_map(of).collect()
}

/// Returns the attention kernels of prompts on tensor cores.
fn flash() -> Vec<(String, Subject)> {
    let named = |(head_dim, dtype, page_size)| {
        (
            format!(
                "flash attention of {head_dim} in {dtype}{}",
                of_pages(page_size)
            ),
            Subject::Flash {
                head_dim,
                page_size,
                dtype,
            },
        )
    };
    [
        (64, F16, None),
        (80, BF16, None),
        (96, F16, None),
        (128, F16, None),
        (128, BF16, None),
        (256, F16, None),
        (64, F16, Some(16)),
        (128, F16, Some(64)),
        (128, BF16, Some(128)),
        (256, F16, Some(64)),
    ]
    .map(named)
    .into()
}

fn of_pages(page_size: Option<usize>) -> String {
    page_size.map_or(String::new(), |size| format!(" over pages of {size}"))
}
