//! The scaling of rotary frequencies for long contexts, and its JSON.

use serde::{Deserialize, Serialize};

use super::{LlamaConfig, LlamaConfigError, positive, size};

/// The scaling of the rotary frequencies for long contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Llama 3.1 and later (`rope_type: llama3`).
    Llama3(Llama3RopeScaling),
    /// Phi-3 and later (`longrope`, once called `su`).
    LongRope(LongRopeScaling),
}

/// The rotary scaling of Llama 3.1 and later (`rope_type: llama3`): low frequencies are divided by `factor`, high ones kept, and those between
/// interpolated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3RopeScaling {
    /// The divisor of low frequencies.
    pub factor: f64,
    /// Wavelengths above `original_max_position_embeddings / low_freq_factor` positions are low frequencies.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_max_position_embeddings / high_freq_factor` positions are high frequencies.
    pub high_freq_factor: f64,
    /// Positions of the context before it was stretched.
    pub original_max_position_embeddings: usize,
}

/// LongRoPE (arXiv 2402.13753): every frequency is divided by a factor of its own, and cosines and sines are scaled.
///
/// There are two sets of factors. Which of them counts is decided once, by the positions that a model is opened for: keys in the cache were
/// rotated by one set, and would not fit queries rotated by the other.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRopeScaling {
    /// The factor of each frequency for up to `original_max_position_embeddings` positions.
    pub short_factor: Vec<f64>,
    /// The factor of each frequency for more positions.
    pub long_factor: Vec<f64>,
    /// Positions of the context before it was stretched.
    pub original_max_position_embeddings: usize,
    /// The factor of cosines and sines; `None`: `sqrt(1 + ln(s) / ln(original))`, where the context was stretched by `s > 1`.
    pub attention_factor: Option<f64>,
}

impl LongRopeScaling {
    /// Returns the factor of cosines and sines in a model made for `max_position_embeddings` positions.
    pub fn attention_factor(&self, max_position_embeddings: usize) -> f64 {
        self.attention_factor.unwrap_or_else(|| {
            let original = self.original_max_position_embeddings as f64;
            let stretched = max_position_embeddings as f64 / original;
            if stretched <= 1.0 { 1.0 } else { (1.0 + stretched.ln() / original.ln()).sqrt() }
        })
    }
}

impl RopeScaling {
    /// Checks that the constants make sense for a config.
    pub(super) fn validate(&self, config: &LlamaConfig) -> Result<(), LlamaConfigError> {
        const ORIGINAL: &str = "rope_scaling.original_max_position_embeddings";
        match self {
            Self::Llama3(scaling) => {
                positive("rope_scaling.factor", scaling.factor)?;
                positive("rope_scaling.low_freq_factor", scaling.low_freq_factor)?;
                positive("rope_scaling.high_freq_factor", scaling.high_freq_factor)?;
                size(ORIGINAL, scaling.original_max_position_embeddings)?;
                if scaling.low_freq_factor >= scaling.high_freq_factor {
                    return Err(LlamaConfigError::FrequencyFactors { low: scaling.low_freq_factor, high: scaling.high_freq_factor });
                }
            }
            Self::LongRope(scaling) => {
                let expected = config.rotary_dim() / 2;
                for (field, factors) in
                    [("rope_scaling.short_factor", &scaling.short_factor), ("rope_scaling.long_factor", &scaling.long_factor)]
                {
                    if factors.len() != expected {
                        return Err(LlamaConfigError::RopeFactors { field, expected, found: factors.len() });
                    }
                    factors.iter().try_for_each(|&factor| positive(field, factor))?;
                }
                size(ORIGINAL, scaling.original_max_position_embeddings)?;
                // The logarithm of a context of one position is 0.
                positive("rope_scaling.attention_factor", scaling.attention_factor(config.max_position_embeddings))?;
            }
        }
        Ok(())
    }
}

/// `rope_scaling`, or the newer `rope_parameters`, which holds the base and the rotated part of a head as well.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct RawRope {
    #[serde(skip_serializing_if = "Option::is_none")]
    rope_type: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    old_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rope_theta: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) partial_rotary_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    low_freq_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    high_freq_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    short_factor: Option<Vec<f64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    long_factor: Option<Vec<f64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_max_position_embeddings: Option<usize>,
}

impl RawRope {
    /// `original` is the `original_max_position_embeddings` beside `rope_scaling`, where Phi-3 has it.
    pub(super) fn scaling(self, original: Option<usize>) -> Result<Option<RopeScaling>, LlamaConfigError> {
        const ORIGINAL: &str = "original_max_position_embeddings";
        match self.rope_type.or(self.old_type).as_deref() {
            None | Some("default") => Ok(None),
            Some("llama3") => {
                let missing = |field| LlamaConfigError::MissingRopeField { field, rope_type: "llama3" };
                Ok(Some(RopeScaling::Llama3(Llama3RopeScaling {
                    factor: self.factor.ok_or(missing("factor"))?,
                    low_freq_factor: self.low_freq_factor.ok_or(missing("low_freq_factor"))?,
                    high_freq_factor: self.high_freq_factor.ok_or(missing("high_freq_factor"))?,
                    original_max_position_embeddings: self.original_max_position_embeddings.ok_or(missing(ORIGINAL))?,
                })))
            }
            Some("longrope" | "su") => {
                let missing = |field| LlamaConfigError::MissingRopeField { field, rope_type: "longrope" };
                Ok(Some(RopeScaling::LongRope(LongRopeScaling {
                    short_factor: self.short_factor.ok_or(missing("short_factor"))?,
                    long_factor: self.long_factor.ok_or(missing("long_factor"))?,
                    original_max_position_embeddings: original.or(self.original_max_position_embeddings).ok_or(missing(ORIGINAL))?,
                    attention_factor: self.attention_factor,
                })))
            }
            Some(found) => {
                Err(LlamaConfigError::Unsupported { field: "rope_type", found: found.into(), expected: "default, llama3 or longrope" })
            }
        }
    }
}

impl From<RopeScaling> for RawRope {
    fn from(scaling: RopeScaling) -> Self {
        match scaling {
            RopeScaling::Llama3(scaling) => Self {
                rope_type: Some("llama3".into()),
                factor: Some(scaling.factor),
                low_freq_factor: Some(scaling.low_freq_factor),
                high_freq_factor: Some(scaling.high_freq_factor),
                original_max_position_embeddings: Some(scaling.original_max_position_embeddings),
                ..Self::default()
            },
            // Hugging Face's `Phi3Config` takes these three fields and no other; the original context stands beside them.
            RopeScaling::LongRope(scaling) => Self {
                old_type: Some("longrope".into()),
                short_factor: Some(scaling.short_factor),
                long_factor: Some(scaling.long_factor),
                attention_factor: scaling.attention_factor,
                ..Self::default()
            },
        }
    }
}
