//! Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split convention of Hugging
//! Face's Llama, with the scaling of Llama 3, of YaRN and of LongRoPE.

use std::f64::consts::TAU;

use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use marlin_nn as decode;

use crate::config::{Llama3RopeScaling, ModelConfig, RopeScaling};

/// Cosines and sines of every position up to a length, [length, rotary_dim / 2] each, in f32.
#[derive(Module, Debug)]
pub struct Rope {
    cos: Tensor<2>,
    sin: Tensor<2>,
}

/// The part of the tables that one forward pass needs, in its dtype: [1, 1, seq, rotary_dim / 2].
pub(crate) struct RopePositions {
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl Rope {
    /// Computes the tables for positions `0..length`.
    ///
    /// Angles are computed in f64: in f32 the last positions of a long context would be off by a
    /// thousandth of a rotation.
    pub fn new(config: &ModelConfig, length: usize, device: &Device) -> Self {
        let (frequencies, scale) = frequencies(config, length);
        let angles: Vec<f64> = (0..length)
            .flat_map(|position| frequencies.iter().map(move |f| position as f64 * f))
            .collect();
        let table = |function: fn(f64) -> f64| {
            let values: Vec<f32> = angles
                .iter()
                .map(|&angle| (scale * function(angle)) as f32)
                .collect();
            Tensor::from_data(
                TensorData::new(values, [length, frequencies.len()]),
                (device, DType::F32),
            )
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
        }
    }

    /// Returns the number of positions in the tables.
    pub fn length(&self) -> usize {
        self.cos.dims()[0]
    }

    /// Returns the tables of cosines and sines.
    pub(crate) fn tables(&self) -> [Tensor<2>; 2] {
        [self.cos.clone(), self.sin.clone()]
    }

    /// Returns the tables of positions `start..start + seq` in `dtype`.
    pub(crate) fn positions(&self, start: usize, seq: usize, dtype: FloatDType) -> RopePositions {
        let part = |table: &Tensor<2>| {
            table
                .clone()
                .slice_dim(0, start..start + seq)
                .cast(dtype)
                .unsqueeze::<4>()
        };
        RopePositions {
            cos: part(&self.cos),
            sin: part(&self.sin),
        }
    }
}

impl RopePositions {
    /// Rotates each head of [batch, heads, seq, head_dim] by the angles of its position. Features
    /// from `rotary_dim` on are unchanged.
    pub(crate) fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        decode::rotate(x, &self.cos, &self.sin)
    }
}

/// Returns the frequencies in radians per position, [rotary_dim / 2], and the factor of cosines and
/// sines, for a model that is opened for `length` positions.
fn frequencies(config: &ModelConfig, length: usize) -> (Vec<f64>, f64) {
    let rotary_dim = config.rotary_dim();
    let plain =
        (0..rotary_dim / 2).map(|i| config.rope_theta.powf(-2.0 * i as f64 / rotary_dim as f64));
    match &config.rope_scaling {
        None => (plain.collect(), 1.0),
        Some(RopeScaling::Llama3(scaling)) => (
            plain.map(|frequency| scaled(frequency, scaling)).collect(),
            1.0,
        ),
        Some(RopeScaling::Yarn(scaling)) => {
            let [first, last] = scaling.interpolated(rotary_dim, config.rope_theta);
            // Avoids a division by 0, as transformers does.
            let last = if first == last { first + 0.001 } else { last };
            let interpolated = |(i, frequency): (usize, f64)| {
                let part = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
                frequency * (1.0 - part + part / scaling.factor)
            };
            (
                plain.enumerate().map(interpolated).collect(),
                scaling.attention_factor(),
            )
        }
        Some(RopeScaling::LongRope(scaling)) => {
            let long = length > scaling.original_max_position_embeddings;
            let factors = if long {
                &scaling.long_factor
            } else {
                &scaling.short_factor
            };
            let stretched = plain
                .zip(factors)
                .map(|(frequency, factor)| frequency / factor)
                .collect();
            (
                stretched,
                scaling.attention_factor(config.max_position_embeddings),
            )
        }
    }
}

fn scaled(frequency: f64, scaling: &Llama3RopeScaling) -> f64 {
    let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
    // The number of full rotations within the original context.
    let rotations = scaling.original_max_position_embeddings as f64 * frequency / TAU;
    let kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
    frequency * (kept + (1.0 - kept) / scaling.factor)
}
