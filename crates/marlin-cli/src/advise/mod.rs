//! The formats that a model can have on a card: sizes, floors, expected times and accuracy.
//!
//! Nothing is run. Times that `benches/records` has for the same shape of model, card, format and
//! numbers of sequences and tokens are measured; all others are modelled by [`cost`].

pub mod accuracy;
pub mod cards;
pub mod cost;
pub mod models;
pub mod records;
pub mod report;
#[cfg(test)]
mod tests;

use marlin_format::{GroupSize, QuantSpec, ScaleDtype, Sparsity, WeightDescriptor, WeightFormat};
use marlin_kernels::{
    ActivationDtype, Kernel, Plan, QuantProblem, Reason, Target, device_layout, plan,
};
use marlin_lm::{ModelConfig, ModelSizes};
use serde::Serialize;

/// The most tokens of a prompt that the engine multiplies at a time on NVIDIA cards.
const PASS_TOKENS: usize = 1024;

/// A format of the weights of all projections. The other tensors and the activations are in f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Format {
    #[serde(rename = "f16")]
    F16,
    #[serde(rename = "int8 g128")]
    Int8,
    #[serde(rename = "fp8")]
    Fp8,
    /// FP8 weights with activations that are rounded to FP8 where that is faster.
    #[serde(rename = "fp8 w8a8")]
    Fp8W8A8,
    #[serde(rename = "int4 g32")]
    Int4G32,
    #[serde(rename = "nvfp4")]
    Nvfp4,
    #[serde(rename = "int4 g128")]
    Int4,
    #[serde(rename = "mxfp4")]
    Mxfp4,
    #[serde(rename = "int8 g128 2:4")]
    Int8TwoFour,
    #[serde(rename = "int4 g128 2:4")]
    Int4TwoFour,
}

impl Format {
    /// All formats, the most accurate first; 2:4 formats last, since their accuracy depends on the
    /// training.
    pub const ALL: [Self; 10] = [
        Self::F16,
        Self::Int8,
        Self::Fp8,
        Self::Fp8W8A8,
        Self::Int4G32,
        Self::Nvfp4,
        Self::Int4,
        Self::Mxfp4,
        Self::Int8TwoFour,
        Self::Int4TwoFour,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Int8 => "int8 g128",
            Self::Fp8 => "fp8",
            Self::Fp8W8A8 => "fp8 w8a8",
            Self::Int4G32 => "int4 g32",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp4 => "mxfp4",
            Self::Int4 => "int4 g128",
            Self::Int8TwoFour => "int8 g128 2:4",
            Self::Int4TwoFour => "int4 g128 2:4",
        }
    }

    /// Returns true if two of every four weights are zeros that are not stored.
    pub fn is_two_four(self) -> bool {
        matches!(self, Self::Int8TwoFour | Self::Int4TwoFour)
    }

    /// Returns the format of quantised weights; `None` for float weights.
    fn weight(self) -> Option<WeightFormat> {
        let int4 = |group| WeightFormat::dense(QuantSpec::int4(group));
        let int8 = WeightFormat::dense(QuantSpec::int8(GroupSize::G128));
        // Tensor cores take scales in the dtype of the activations.
        let floats = |spec: QuantSpec| WeightFormat::dense(spec.with_scale_dtype(ScaleDtype::F16));
        match self {
            Self::F16 => None,
            Self::Int8 => Some(int8),
            Self::Fp8 => Some(floats(QuantSpec::fp8())),
            Self::Fp8W8A8 => Some(floats(QuantSpec::fp8().with_fp8_activations(true))),
            Self::Int4G32 => Some(int4(GroupSize::G32)),
            Self::Nvfp4 => Some(floats(QuantSpec::nvfp4())),
            Self::Mxfp4 => Some(floats(QuantSpec::mxfp4())),
            Self::Int4 => Some(int4(GroupSize::G128)),
            Self::Int8TwoFour => Some(int8.with_sparsity(Sparsity::TwoFour)),
            Self::Int4TwoFour => Some(int4(GroupSize::G128).with_sparsity(Sparsity::TwoFour)),
        }
    }

    /// Returns the sizes of a model in this format.
    pub fn sizes(self, config: &ModelConfig) -> ModelSizes {
        config.sizes(self.weight(), records::DTYPE)
    }

    /// Returns true if tensor-core kernels run all projections of a model on a device, or if the
    /// weights are f16. With activations in FP8, some projections of prompts must multiply them.
    pub fn runs(self, config: &ModelConfig, target: &Target) -> bool {
        let Some(format) = self.weight() else {
            return true;
        };
        let has_tensor_cores = config.matmuls().into_iter().all(|shape| {
            planned(format, shape, 1, target)
                .is_some_and(|plan| matches!(plan.reason, Reason::TensorCores { .. }))
        });
        has_tensor_cores
            && (self != Self::Fp8W8A8 || self.fp8_products(config, target, PASS_TOKENS) > 0.0)
    }

    /// Returns the share of the products of the projections in which activations are multiplied in
    /// FP8, for a prompt of `tokens` tokens on a device.
    pub fn fp8_products(self, config: &ModelConfig, target: &Target, tokens: usize) -> f64 {
        // Experts multiply activations in 16 bits.
        let Some(format) = self.weight().filter(|_| config.experts.is_none()) else {
            return 0.0;
        };
        let (mut rounded, mut all) = (0, 0);
        for [k, n] in config.matmuls() {
            let plan = planned(format, [k, n], tokens.min(PASS_TOKENS), target);
            if let Some(Kernel::Marlin(launch)) = plan.map(|plan| plan.kernel)
                && launch.tile.is_fp8()
            {
                rounded += k * n;
            }
            all += k * n;
        }
        rounded as f64 / all.max(1) as f64
    }
}

/// Returns the plan of a matmul [K, N] of `rows` rows on a device; `None` if the format does not
/// take the shape.
fn planned(format: WeightFormat, [k, n]: [usize; 2], rows: usize, target: &Target) -> Option<Plan> {
    let weight = WeightDescriptor::plain(format, k, n);
    weight.check().ok()?;
    let problem = QuantProblem::new(rows, weight, ActivationDtype::F16);
    let weight = device_layout(&problem, target);
    Some(plan(QuantProblem { weight, ..problem }, target))
}
