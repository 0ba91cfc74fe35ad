//! The formats of a model's generated weights.

use clap::ValueEnum;
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, Sparsity, WeightFormat};

/// The format of the layers' weights; the lm_head is in f16.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Weights {
    /// 4 bits, groups of 128, symmetric.
    W4a16,
    /// The same, 2:4.
    #[value(name = "w4a16-24")]
    W4a16TwoFour,
    /// 8 bits, groups of 128, symmetric.
    W8a16,
    /// 8 bits, groups of 128, symmetric, 2:4.
    #[value(name = "w8a16-24")]
    W8a16TwoFour,
    /// FP8: e4m3, a scale for each output feature.
    Fp8,
    /// The same, with activations in e4m3 for many rows.
    #[value(name = "fp8-w8a8")]
    Fp8W8a8,
    /// MXFP4: e2m1, groups of 32.
    Mxfp4,
    /// NVFP4: e2m1, groups of 16.
    Nvfp4,
    /// Burn's own layers in f16.
    F16,
}

impl Weights {
    /// Returns the format of quantised layers; `None` for float layers.
    pub fn format(self) -> Option<WeightFormat> {
        let dense = |spec: fn(GroupSize) -> QuantSpec| WeightFormat::dense(spec(GroupSize::G128));
        // Tensor cores take scales in the dtype of the activations.
        let floats = |spec: QuantSpec| WeightFormat::dense(spec.with_scale_dtype(ScaleDtype::F16));
        match self {
            Self::W4a16 => Some(dense(QuantSpec::int4)),
            Self::W4a16TwoFour => Some(dense(QuantSpec::int4).with_sparsity(Sparsity::TwoFour)),
            Self::W8a16 => Some(dense(QuantSpec::int8)),
            Self::W8a16TwoFour => Some(dense(QuantSpec::int8).with_sparsity(Sparsity::TwoFour)),
            Self::Fp8 => Some(floats(QuantSpec::fp8())),
            Self::Fp8W8a8 => Some(floats(QuantSpec::fp8().with_fp8_activations(true))),
            Self::Mxfp4 => Some(floats(QuantSpec::mxfp4())),
            Self::Nvfp4 => Some(floats(QuantSpec::nvfp4())),
            Self::F16 => None,
        }
    }
}
