//! The kernels of a decode step other than the Marlin kernels.

use crate::rules;
use crate::toolchain::Compiled;
use marlin_kernels::experts::{self, Router};
use marlin_kernels::inspect::{KernelSource, shared_limit};
use marlin_kernels::matmul::gemv::experts::{ExpertGemvConfig, ExpertRows};
use marlin_kernels::matmul::{few_columns, float_gemv, gemv, lm_head};
use marlin_kernels::{ActivationDtype, Epilogue, fp8};
use marlin_nn::kernels::attention::{
    self, AttentionPass, AttentionPlan, AttentionShape, AttentionTarget,
};
use marlin_nn::kernels::{e4m3_cache_sources, flash, gated_source, rms_norm_source};
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
    /// The rounding of rows of activations to e4m3.
    Fp8Rows {
        features: usize,
        has_norm: bool,
        dtype: ActivationDtype,
    },
    /// The product of gates and ups, as in SwiGLU.
    Gates {
        epilogue: Epilogue,
        dtype: ActivationDtype,
    },
    /// The logits of a float head.
    Head {
        rows: usize,
        features: usize,
        dtype: ActivationDtype,
    },
    /// The product of one row and a float weight.
    FloatGemv {
        features: usize,
        has_norm: bool,
        dtype: ActivationDtype,
    },
    /// The matmul of one row, for cards with clusters.
    Gemv(gemv::GemvConfig),
    /// Attention of a step, and of prompts without tensor cores.
    Attention {
        group: usize,
        head_dim: usize,
        has_norm: bool,
        has_sinks: bool,
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
    /// The routing of tokens to experts.
    Route {
        router: Router,
        tokens: usize,
        /// The number of the kernel, of those that the number of tokens takes.
        kernel: usize,
        block_rows: usize,
        has_correction: bool,
        dtype: ActivationDtype,
    },
    /// The weighted sums of experts' outputs.
    Combine {
        top_k: usize,
        has_beside: bool,
        dtype: ActivationDtype,
    },
    /// The rows of activations in the order of experts.
    Gather {
        of_tokens: bool,
        /// True for weights with act-order.
        permutes: bool,
        dtype: ActivationDtype,
    },
    /// The matmul of few rows of experts, for cards with clusters.
    ExpertGemv {
        config: ExpertGemvConfig,
        has_correction: bool,
    },
    /// The product of a router.
    FewColumns {
        features: usize,
        dtype: ActivationDtype,
    },
    /// Attention of prompts on tensor cores.
    Flash {
        head_dim: usize,
        /// The number of positions of a page, if the cache has pages.
        page_size: Option<usize>,
        has_sinks: bool,
        dtype: ActivationDtype,
    },
}

impl Subject {
    /// Returns the routine whose sources make the CUDA text.
    pub fn routine(&self) -> Routine {
        match self {
            Self::Norm { .. } | Self::Fp8Rows { .. } | Self::Gates { .. } | Self::Codes { .. } => {
                Routine::Rows
            }
            Self::Head { .. } | Self::FloatGemv { .. } => Routine::Head,
            Self::Gemv(_) => Routine::Gemv,
            Self::Attention { .. } => Routine::Attention,
            Self::Route { .. }
            | Self::Combine { .. }
            | Self::Gather { .. }
            | Self::ExpertGemv { .. }
            | Self::FewColumns { .. } => Routine::Experts,
            Self::Flash { .. } => Routine::Flash,
        }
    }
}

/// Returns the CUDA text of a kernel.
pub fn source(subject: &Subject, capability: u32) -> Result<KernelSource, Box<dyn Error>> {
    Ok(match *subject {
        Subject::Norm { features, dtype } => rms_norm_source(features, dtype, capability)?,
        Subject::Fp8Rows {
            features,
            has_norm,
            dtype,
        } => fp8::source(features, has_norm, dtype, capability)?,
        Subject::Gates { epilogue, dtype } => gated_source(epilogue, dtype, capability)?,
        Subject::Head {
            rows,
            features,
            dtype,
        } => lm_head::source(rows, features, dtype, capability)?,
        Subject::FloatGemv {
            features,
            has_norm,
            dtype,
        } => float_gemv::source(features, has_norm, dtype, capability)?,
        Subject::Gemv(config) => gemv::source(&config, capability)?,
        Subject::Attention {
            group,
            head_dim,
            has_norm,
            has_sinks,
            dtype,
            pass,
            page_size,
            format,
        } => {
            let mut shape = shape([group, head_dim], page_size, has_norm, dtype, pass);
            shape.cache.format = format;
            shape.has_sinks = has_sinks;
            let config = AttentionPlan::new(&shape, &TARGET)?.config;
            attention::source(&config, has_norm, has_sinks, dtype, capability)?
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
        Subject::Route {
            router,
            tokens,
            kernel,
            block_rows,
            has_correction,
            dtype,
        } => experts::route_sources(
            router,
            tokens,
            block_rows,
            has_correction,
            dtype,
            capability,
        )?
        .swap_remove(kernel),
        Subject::Combine {
            top_k,
            has_beside,
            dtype,
        } => experts::combine_source(top_k, 8, has_beside, dtype, capability)?,
        Subject::Gather {
            of_tokens,
            permutes,
            dtype,
        } => experts::gather_source(of_tokens, permutes, dtype, capability)?,
        Subject::ExpertGemv {
            config,
            has_correction,
        } => gemv::experts::expert_source(&config, has_correction, capability)?,
        Subject::FewColumns { features, dtype } => {
            few_columns::source(features, dtype, capability)?
        }
        Subject::Flash {
            head_dim,
            page_size,
            has_sinks,
            dtype,
        } => flash::source(head_dim, page_size, has_sinks, dtype, capability)?,
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
        Subject::Gemv(_) | Subject::FloatGemv { .. } => load.contains("NA"),
        // Logits, which are complete before summed rows are multiplied, and the corrections.
        Subject::ExpertGemv {
            config,
            has_correction,
        } if config.rows == ExpertRows::Summed => {
            load.contains("NA")
                || load.ends_with(".STRONG.GPU")
                || *has_correction && load == "LDG.E.CONSTANT"
        }
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
        has_sinks: false,
        norm_epsilon: has_norm.then_some(1e-6),
        dtype,
        pass,
    }
}
