//! The layers of mixtures whose sizes are known.

use super::DTYPE;
use crate::kernels::rates;
use clap::ValueEnum;
use marlin_format::{
    GroupSize, QuantSpec, ScaleDtype, WeightDescriptor, WeightLayout, WeightValue,
};
use marlin_kernels::experts::{Router, RouterScores, expected_row_blocks};
use marlin_kernels::{Epilogue, QuantProblem};

/// A model with a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MoeModel {
    #[value(name = "qwen3-30b-a3b")]
    Qwen3,
    #[value(name = "mixtral-8x7b")]
    Mixtral,
    #[value(name = "gpt-oss-20b")]
    GptOss20b,
    #[value(name = "gpt-oss-120b")]
    GptOss120b,
    #[value(name = "qwen3.6-35b-a3b")]
    Qwen36,
}

/// The sizes of a layer, from the configs of the models.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    pub name: &'static str,
    pub experts: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub top_k: usize,
    pub spec: QuantSpec,
    /// What is computed from gates and ups.
    pub epilogue: Epilogue,
}

impl MoeModel {
    /// Returns the layer of the model.
    pub fn layer(self) -> Layer {
        let int4 = QuantSpec::new(WeightValue::Int4, GroupSize::G128);
        let mxfp4 = QuantSpec::new(WeightValue::E2m1, GroupSize::G32);
        let (name, experts, hidden, intermediate, top_k, spec) = match self {
            Self::Qwen3 => ("qwen3-30b-a3b", 128, 2048, 768, 8, int4),
            Self::Mixtral => ("mixtral-8x7b", 8, 4096, 14336, 2, int4),
            Self::GptOss20b => ("gpt-oss-20b", 32, 2880, 2880, 4, mxfp4),
            Self::GptOss120b => ("gpt-oss-120b", 128, 2880, 2880, 4, mxfp4),
            Self::Qwen36 => ("qwen3.6-35b-a3b", 256, 2048, 512, 8, mxfp4),
        };
        Layer {
            name,
            experts,
            hidden,
            intermediate,
            top_k,
            spec: spec.with_scale_dtype(ScaleDtype::BF16),
            epilogue: match self {
                Self::GptOss20b | Self::GptOss120b => Epilogue::ClampedSwiGlu,
                _ => Epilogue::SwiGlu,
            },
        }
    }
}

impl Layer {
    /// Returns a router of the layer's sizes.
    pub fn router(&self) -> Router {
        Router {
            experts: self.experts,
            top_k: self.top_k,
            scores: RouterScores::Softmax,
            normalises: true,
        }
    }

    /// Returns the weights of gates and ups, and of down.
    pub fn weights(&self) -> (WeightDescriptor, WeightDescriptor) {
        let of = |k, n| {
            WeightDescriptor::plain(self.spec, k, n)
                .with_experts(self.experts)
                .in_layout(WeightLayout::Tile)
        };
        (
            of(self.hidden, 2 * self.intermediate),
            of(self.intermediate, self.hidden),
        )
    }

    /// Returns the matmuls of gates and ups, and of down.
    pub fn problems(&self, tokens: usize) -> (QuantProblem, QuantProblem) {
        let (gate_up, down) = self.weights();
        let rows = tokens * self.top_k;
        (
            QuantProblem::new(rows, gate_up, DTYPE).with_epilogue(self.epilogue),
            QuantProblem::new(rows, down, DTYPE),
        )
    }

    /// Returns the lower bound of the time of both matmuls in microseconds: the time to read the
    /// weights of the distinct experts, or to compute the products, whichever is longer.
    pub fn floor(&self, tokens: usize, card: &str) -> Option<f64> {
        let distinct = expected_row_blocks(tokens, self.top_k, self.experts, tokens);
        let weights = (3 * self.hidden * self.intermediate) as f64;
        let scale_bytes = match self.spec.value {
            WeightValue::E2m1 => 1.0 / 32.0,
            _ => 2.0 / 128.0,
        };
        let bytes = distinct * weights * (0.5 + scale_bytes);
        let flops = 2.0 * weights * (tokens * self.top_k) as f64;
        rates(card).map(|rates| (bytes / rates.read).max(flops / rates.flops) * 1e6)
    }
}
