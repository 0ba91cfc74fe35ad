//! The scaling of rotary frequencies for long contexts.

use std::f64::consts::TAU;

use super::{ModelConfig, ModelConfigError, positive, size};

/// The scaling of the rotary frequencies for long contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Llama 3.1 and later (`rope_type: llama3`).
    Llama3(Llama3RopeScaling),
    /// YaRN (`rope_type: yarn`).
    Yarn(YarnRopeScaling),
    /// Phi-3 and later (`longrope`, once called `su`).
    LongRope(LongRopeScaling),
}

/// The rotary scaling of Llama 3.1 and later (`rope_type: llama3`): low frequencies are divided by
/// `factor`, high frequencies are kept, and frequencies in between are interpolated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3RopeScaling {
    /// The divisor of low frequencies.
    pub factor: f64,
    /// The limit of low frequencies: wavelengths above
    /// `original_max_position_embeddings / low_freq_factor` positions.
    pub low_freq_factor: f64,
    /// The limit of high frequencies: wavelengths below
    /// `original_max_position_embeddings / high_freq_factor` positions.
    pub high_freq_factor: f64,
    /// The number of positions of the context before it was stretched.
    pub original_max_position_embeddings: usize,
}

/// YaRN (arXiv 2309.00071): frequencies with few rotations within the original context are divided
/// by `factor`, frequencies with many rotations are kept, and frequencies in between are
/// interpolated. Cosines and sines are scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnRopeScaling {
    /// The divisor of low frequencies.
    pub factor: f64,
    /// The number of positions of the context before it was stretched.
    pub original_max_position_embeddings: usize,
    /// The number of rotations within the original context above which frequencies are kept.
    pub beta_fast: f64,
    /// The number of rotations within the original context below which frequencies are divided by
    /// `factor`.
    pub beta_slow: f64,
    /// The factor of cosines and sines. The default is `m(mscale) / m(mscale_all_dim)` if both are
    /// present and not 0, otherwise `m(1)`. The function is `m(scale) = 0.1 scale ln(factor) + 1`,
    /// or 1 if `factor` is at most 1.
    pub attention_factor: Option<f64>,
    /// The scale in the numerator of the default of `attention_factor`.
    pub mscale: Option<f64>,
    /// The scale in the denominator of the default of `attention_factor`.
    pub mscale_all_dim: Option<f64>,
    /// True to round the range of interpolated frequencies outwards to whole indices.
    pub truncate: bool,
}

impl YarnRopeScaling {
    /// The default of [`beta_fast`](Self::beta_fast).
    pub const DEFAULT_BETA_FAST: f64 = 32.0;
    /// The default of [`beta_slow`](Self::beta_slow).
    pub const DEFAULT_BETA_SLOW: f64 = 1.0;

    /// Returns the factor of cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        let magnitude = |scale: f64| {
            if self.factor <= 1.0 {
                1.0
            } else {
                0.1 * scale * self.factor.ln() + 1.0
            }
        };
        let given = |scale: Option<f64>| scale.filter(|&scale| scale != 0.0);
        self.attention_factor.unwrap_or_else(|| {
            match (given(self.mscale), given(self.mscale_all_dim)) {
                (Some(mscale), Some(all_dim)) => magnitude(mscale) / magnitude(all_dim),
                _ => magnitude(1.0),
            }
        })
    }

    /// Returns the indices of the first and the last interpolated frequency, for `rotary_dim`
    /// features and the base `rope_theta`. The indices may be fractional.
    pub(crate) fn interpolated(&self, rotary_dim: usize, rope_theta: f64) -> [f64; 2] {
        let dim = rotary_dim as f64;
        // Returns the index of the frequency that makes `rotations` rotations within the original
        // context.
        let index = |rotations: f64| {
            dim * (self.original_max_position_embeddings as f64 / (rotations * TAU)).ln()
                / (2.0 * rope_theta.ln())
        };
        let (mut first, mut last) = (index(self.beta_fast), index(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        [first.max(0.0), last.min(dim - 1.0)]
    }
}

/// LongRoPE (arXiv 2402.13753): every frequency is divided by its own factor, and cosines and sines
/// are scaled.
///
/// There are two sets of factors. The number of positions that a model is opened for selects one
/// set, once: keys in the cache were rotated by one set, and would not fit queries rotated by the
/// other set.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRopeScaling {
    /// The factor of each frequency for up to `original_max_position_embeddings` positions.
    pub short_factor: Vec<f64>,
    /// The factor of each frequency for more positions.
    pub long_factor: Vec<f64>,
    /// The number of positions of the context before it was stretched.
    pub original_max_position_embeddings: usize,
    /// The ratio by which the context was stretched. The default is
    /// `max_position_embeddings / original_max_position_embeddings`.
    pub factor: Option<f64>,
    /// The factor of cosines and sines. The default is `sqrt(1 + ln(factor) / ln(original))`, or 1
    /// if `factor` is at most 1.
    pub attention_factor: Option<f64>,
}

impl LongRopeScaling {
    /// Returns the factor of cosines and sines in a model made for `max_position_embeddings`
    /// positions.
    pub fn attention_factor(&self, max_position_embeddings: usize) -> f64 {
        self.attention_factor.unwrap_or_else(|| {
            let original = self.original_max_position_embeddings as f64;
            let stretched = self
                .factor
                .unwrap_or(max_position_embeddings as f64 / original);
            if stretched <= 1.0 {
                1.0
            } else {
                (1.0 + stretched.ln() / original.ln()).sqrt()
            }
        })
    }
}

impl RopeScaling {
    /// Returns the value of `rope_type` in a config.
    pub(super) fn rope_type(&self) -> &'static str {
        match self {
            Self::Llama3(_) => "llama3",
            Self::Yarn(_) => "yarn",
            Self::LongRope(_) => "longrope",
        }
    }

    /// Checks that the constants make sense for a config.
    pub(super) fn validate(&self, config: &ModelConfig) -> Result<(), ModelConfigError> {
        const ORIGINAL: &str = "rope_scaling.original_max_position_embeddings";
        match self {
            Self::Llama3(scaling) => {
                positive("rope_scaling.factor", scaling.factor)?;
                positive("rope_scaling.low_freq_factor", scaling.low_freq_factor)?;
                positive("rope_scaling.high_freq_factor", scaling.high_freq_factor)?;
                size(ORIGINAL, scaling.original_max_position_embeddings)?;
                if scaling.low_freq_factor >= scaling.high_freq_factor {
                    return Err(ModelConfigError::FrequencyFactors {
                        low: scaling.low_freq_factor,
                        high: scaling.high_freq_factor,
                    });
                }
            }
            Self::Yarn(scaling) => {
                positive("rope_scaling.factor", scaling.factor)?;
                positive("rope_scaling.beta_fast", scaling.beta_fast)?;
                positive("rope_scaling.beta_slow", scaling.beta_slow)?;
                size(ORIGINAL, scaling.original_max_position_embeddings)?;
                positive("rope_scaling.attention_factor", scaling.attention_factor())?;
                // The computation of indices divides by the logarithm of the base.
                if config.rope_theta == 1.0 {
                    return Err(ModelConfigError::Unsupported {
                        field: "rope_theta",
                        found: "1".into(),
                        expected: "a base other than 1 with yarn",
                    });
                }
            }
            Self::LongRope(scaling) => {
                let expected = config.rotary_dim() / 2;
                for (field, factors) in [
                    ("rope_scaling.short_factor", &scaling.short_factor),
                    ("rope_scaling.long_factor", &scaling.long_factor),
                ] {
                    if factors.len() != expected {
                        return Err(ModelConfigError::RopeFactors {
                            field,
                            expected,
                            found: factors.len(),
                        });
                    }
                    factors
                        .iter()
                        .try_for_each(|&factor| positive(field, factor))?;
                }
                size(ORIGINAL, scaling.original_max_position_embeddings)?;
                positive("rope_scaling.factor", scaling.factor.unwrap_or(1.0))?;
                // The logarithm of a context of one position is 0.
                positive(
                    "rope_scaling.attention_factor",
                    scaling.attention_factor(config.max_position_embeddings),
                )?;
            }
        }
        Ok(())
    }
}
