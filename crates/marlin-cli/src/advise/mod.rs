//! The formats that a model can have on a card: sizes, floors, expected times and accuracy.
//!
//! Nothing is run. Times that `benches/records` has for the same shape of model, card, format and
//! numbers of sequences and tokens are measured; all others are modelled by [`cost`].

pub mod accuracy;
pub mod cards;
pub mod cost;
pub mod records;
pub mod report;
#[cfg(test)]
mod tests;

use marlin_format::{GroupSize, QuantSpec, ScaleDtype, Sparsity, WeightDescriptor, WeightFormat};
use marlin_kernels::{ActivationDtype, QuantProblem, Reason, Target, device_layout, plan};
use marlin_lm::{ModelConfig, ModelSizes};
use serde::Serialize;

/// A format of the weights of all projections. The other tensors and the activations are in f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Format {
    #[serde(rename = "f16")]
    F16,
    #[serde(rename = "int8 g128")]
    Int8,
    #[serde(rename = "fp8")]
    Fp8,
    #[serde(rename = "int4 g32")]
    Int4G32,
    #[serde(rename = "nvfp4")]
    Nvfp4,
    #[serde(rename = "int4 g128")]
    Int4,
    #[serde(rename = "mxfp4")]
    Mxfp4,
    #[serde(rename = "int4 g128 2:4")]
    Int4TwoFour,
}

impl Format {
    /// All formats, the most accurate first.
    pub const ALL: [Self; 8] = [
        Self::F16,
        Self::Int8,
        Self::Fp8,
        Self::Int4G32,
        Self::Nvfp4,
        Self::Int4,
        Self::Mxfp4,
        Self::Int4TwoFour,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Int8 => "int8 g128",
            Self::Fp8 => "fp8",
            Self::Int4G32 => "int4 g32",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp4 => "mxfp4",
            Self::Int4 => "int4 g128",
            Self::Int4TwoFour => "int4 g128 2:4",
        }
    }

    /// Returns the format of quantised weights; `None` for float weights.
    fn weight(self) -> Option<WeightFormat> {
        let int4 = |group| WeightFormat::dense(QuantSpec::int4(group));
        // Tensor cores take scales in the dtype of the activations.
        let floats = |spec: QuantSpec| WeightFormat::dense(spec.with_scale_dtype(ScaleDtype::F16));
        match self {
            Self::F16 => None,
            Self::Int8 => Some(WeightFormat::dense(QuantSpec::int8(GroupSize::G128))),
            Self::Fp8 => Some(floats(QuantSpec::fp8())),
            Self::Int4G32 => Some(int4(GroupSize::G32)),
            Self::Nvfp4 => Some(floats(QuantSpec::nvfp4())),
            Self::Mxfp4 => Some(floats(QuantSpec::mxfp4())),
            Self::Int4 => Some(int4(GroupSize::G128)),
            Self::Int4TwoFour => Some(int4(GroupSize::G128).with_sparsity(Sparsity::TwoFour)),
        }
    }

    /// Returns the sizes of a model in this format.
    pub fn sizes(self, config: &ModelConfig) -> ModelSizes {
        config.sizes(self.weight(), records::DTYPE)
    }

    /// Returns true if tensor-core kernels run all projections of a model on a device, or if the
    /// weights are floats.
    pub fn runs(self, config: &ModelConfig, target: &Target) -> bool {
        let Some(format) = self.weight() else {
            return true;
        };
        config.matmuls().into_iter().all(|[k, n]| {
            let weight = WeightDescriptor::plain(format, k, n);
            let problem = QuantProblem::new(1, weight, ActivationDtype::F16);
            weight.check().is_ok() && {
                let problem = QuantProblem {
                    weight: device_layout(&problem, target),
                    ..problem
                };
                matches!(plan(problem, target).reason, Reason::TensorCores { .. })
            }
        })
    }
}
