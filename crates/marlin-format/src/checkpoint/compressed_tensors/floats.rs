//! Writes weights of floats: `float-quantized`, `mxfp4-pack-quantized` and `nvfp4-pack-quantized`.
//! [`fp8`](crate::checkpoint::fp8) and [`fp4`](crate::checkpoint::fp4), which read them, list the
//! tensors.

use serde_json::{Value, json};

use super::{PACKED, SCALE, name, pack_words};
use crate::checkpoint::packed::transposed;
use crate::checkpoint::{Dtype, TensorSpec};
use crate::{GroupSize, PlainWeight, QuantSpec, WeightValue};

const WEIGHT: &str = "weight";
const GLOBAL_SCALE: &str = "weight_global_scale";
/// The codes of e4m3 that are positive numbers.
const POSITIVE: std::ops::RangeInclusive<u8> = 1..=0x7e;

/// The format of a weight of floats in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FloatFormat {
    /// e4m3 with an f32 scale for each output feature.
    FloatQuantized,
    /// e2m1 in groups of 32, whose scales are powers of two.
    MxFp4,
    /// e2m1 in groups of 16, whose scales are e4m3 times a scale of the weight.
    NvFp4,
}

impl FloatFormat {
    /// Returns the format that holds weights of a spec, or `None` if none does.
    pub fn of(spec: &QuantSpec) -> Option<Self> {
        match (spec.value, spec.scales.group) {
            (WeightValue::E4m3, GroupSize::Channel) => Some(Self::FloatQuantized),
            (WeightValue::E2m1, GroupSize::G32) => Some(Self::MxFp4),
            (WeightValue::E2m1, GroupSize::G16) => Some(Self::NvFp4),
            _ => None,
        }
    }

    /// Returns the name of the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::FloatQuantized => "float-quantized",
            Self::MxFp4 => "mxfp4-pack-quantized",
            Self::NvFp4 => "nvfp4-pack-quantized",
        }
    }

    /// Returns the `weights` of a group of the config.
    pub fn weights(self) -> Value {
        let (bits, strategy, group_size, scales) = match self {
            Self::FloatQuantized => (8, "channel", Value::Null, Value::Null),
            Self::MxFp4 => (4, "group", 32.into(), "torch.uint8".into()),
            Self::NvFp4 => (4, "tensor_group", 16.into(), "torch.float8_e4m3fn".into()),
        };
        json!({
            "num_bits": bits,
            "type": "float",
            "symmetric": true,
            "strategy": strategy,
            "group_size": group_size,
            "scale_dtype": scales,
            "dynamic": false,
        })
    }

    /// Returns the specs of the tensors of `layer`, in the order of [`tensors`](Self::tensors).
    pub fn tensor_specs(
        self,
        layer: &str,
        k: usize,
        n: usize,
        spec: &QuantSpec,
    ) -> Vec<TensorSpec> {
        let groups = spec.scales.group.count(k);
        let packed = TensorSpec::new(name(layer, PACKED), Dtype::U8, [n, k.div_ceil(2)]);
        let scales = |dtype| TensorSpec::new(name(layer, SCALE), dtype, [n, groups]);
        match self {
            Self::FloatQuantized => vec![
                TensorSpec::new(name(layer, WEIGHT), Dtype::F8_E4M3, [n, k]),
                scales(Dtype::F32),
            ],
            Self::MxFp4 => vec![packed, scales(Dtype::U8)],
            Self::NvFp4 => vec![
                packed,
                scales(Dtype::F8_E4M3),
                TensorSpec::new(name(layer, GLOBAL_SCALE), Dtype::F32, [1]),
            ],
        }
    }

    /// Returns the bytes of the tensors of a weight.
    pub fn tensors(self, weight: &PlainWeight) -> Vec<Vec<u8>> {
        let (k, n, spec) = (weight.k(), weight.n(), weight.spec());
        let words = pack_words(weight);
        // A word holds four bytes of a row, the last one perhaps padding.
        let (row_words, row_bytes) = (words.len() / n, k.div_ceil(8 / spec.value.bits()));
        let mut values = Vec::with_capacity(n * row_bytes);
        for row in words.chunks_exact(row_words) {
            values.extend_from_slice(&bytemuck::cast_slice(row)[..row_bytes]);
        }
        let scales = transposed(&weight.scales().to_f32(), spec.scales.group.count(k), n);
        match self {
            Self::FloatQuantized => vec![values, bytemuck::cast_slice(&scales).to_vec()],
            Self::MxFp4 => vec![values, scales.iter().map(|&scale| e8m0(scale)).collect()],
            Self::NvFp4 => {
                let tensor = tensor_scale(&scales);
                let codes = scales
                    .iter()
                    .map(|scale| WeightValue::E4m3.encode(scale / tensor));
                let divisor = (1.0 / tensor).to_le_bytes().to_vec();
                vec![values, codes.collect(), divisor]
            }
        }
    }
}

/// Returns the code of e8m0 of a power of two, or of the next one below.
fn e8m0(scale: f32) -> u8 {
    (scale.to_bits() >> 23) as u8
}

/// Returns a scale of the weight with which all scales of groups are numbers of e4m3: the quotient
/// of the largest scale and one of these numbers, the largest of them first. If there is none, as
/// in a weight that was joined of several, the largest scale becomes the largest number, and the
/// others are rounded.
fn tensor_scale(scales: &[f32]) -> f32 {
    let most = scales.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
    let is_held = |tensor: f32| {
        scales.iter().all(|scale| {
            let exact = scale / tensor;
            let held = WeightValue::E4m3.decode(WeightValue::E4m3.encode(exact));
            // A product of two numbers that was rounded to f32.
            (exact - held).abs() <= held * 1e-6
        })
    };
    let tensor_of = |code| most / WeightValue::E4m3.decode(code);
    POSITIVE
        .rev()
        .map(tensor_of)
        .find(|&tensor| is_held(tensor))
        .unwrap_or_else(|| tensor_of(*POSITIVE.end()))
        .max(f32::MIN_POSITIVE)
}
