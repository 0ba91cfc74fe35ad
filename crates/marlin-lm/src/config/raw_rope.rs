//! The JSON fields of the rotary scaling, and their conversion to a `RopeScaling`.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ModelConfigError;
use super::rope::{Llama3RopeScaling, LongRopeScaling, RopeScaling, YarnRopeScaling};
use crate::architectures::RopeFields;

/// The object `rope_scaling`, or the newer `rope_parameters`, which also has the base and the
/// rotated fraction of a head.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct RawRope(Map<String, Value>);

/// The fields of a config beside the scaling, and the default sizes of the scaling.
pub(super) struct TopLevelFields {
    pub(super) fields: RopeFields,
    pub(super) rope_theta: Option<f64>,
    pub(super) default_rope_theta: f64,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) original_max_position_embeddings: Option<usize>,
    pub(super) max_position_embeddings: usize,
}

/// The rotary position embedding of a config.
pub(super) struct Rope {
    pub(super) theta: f64,
    pub(super) partial_rotary_factor: f64,
    pub(super) scaling: Option<RopeScaling>,
}

const ORIGINAL: &str = "original_max_position_embeddings";

/// Returns true if other implementations compute other logits with a field of this value. Such
/// fields are: of YaRN in its first implementation and vLLM, of LongRoPE in vLLM and Phi-3.5-MoE,
/// of Mistral's later models, and objects with one scaling for each type of layers.
fn changes_logits(field: &str, value: &Value) -> bool {
    match field {
        "attn_factor" | "extrapolation_factor" => value.as_f64() != Some(1.0),
        "apply_yarn_scaling" => value != true,
        "short_mscale" | "long_mscale" => true,
        "llama_4_scaling_beta" => value.as_f64() != Some(0.0),
        _ => value.is_object(),
    }
}

impl RawRope {
    /// Returns the fields of a config without a scaling, for a class that has one by default.
    pub(super) fn unscaled() -> Self {
        Self(Map::from_iter([("rope_type".into(), "default".into())]))
    }

    /// Chooses between `rope_scaling` and `rope_parameters`. If a config has both, only
    /// `rope_scaling` counts, as in transformers.
    pub(super) fn choose(
        scaling: Option<Self>,
        parameters: Option<Self>,
        beside: &TopLevelFields,
    ) -> Option<Self> {
        let filled = |rope: Option<Self>| rope.filter(|rope| !rope.0.is_empty());
        match (filled(scaling), filled(parameters)) {
            (Some(scaling), Some(parameters)) => {
                let same = |(field, value): &(&String, &Value)| match scaling.0.get(*field) {
                    None if *field == "rope_theta" => value.as_f64() == beside.rope_theta,
                    found => found == Some(*value),
                };
                let differ: Vec<&str> = parameters
                    .0
                    .iter()
                    .filter(|entry| !same(entry))
                    .map(|(field, _)| field.as_str())
                    .collect();
                if !differ.is_empty() {
                    tracing::warn!(
                        "the config has `rope_scaling` and `rope_parameters`: the first counts, as in transformers, and of the second `{}` is not read",
                        differ.join("`, `").escape_debug()
                    );
                }
                Some(scaling)
            }
            (scaling, parameters) => scaling.or(parameters),
        }
    }

    /// Reads the fields as transformers does. A field that is not supported is an error if it
    /// changes logits, otherwise a warning.
    pub(super) fn read(mut self, beside: &TopLevelFields) -> Result<Rope, ModelConfigError> {
        let theta = self
            .take("rope_theta")?
            .or(beside.rope_theta)
            .unwrap_or(beside.default_rope_theta);
        let partial_rotary_factor = self
            .take("partial_rotary_factor")?
            .or(beside.partial_rotary_factor)
            .unwrap_or(1.0);
        let (new, old) = (
            self.take::<String>("rope_type")?,
            self.take::<String>("type")?,
        );
        let rope_type = new.or(old).unwrap_or_else(|| "default".into());
        let scaling = match rope_type.as_str() {
            "default" => None,
            long if beside.fields.is_long_rope(long) => {
                Some(RopeScaling::LongRope(self.long_rope(beside)?))
            }
            "llama3" => Some(RopeScaling::Llama3(self.llama3(beside)?)),
            "yarn" => Some(RopeScaling::Yarn(self.yarn(beside)?)),
            _ => {
                return Err(ModelConfigError::Unsupported {
                    field: "rope_type",
                    found: rope_type,
                    expected: "default, llama3, yarn or longrope",
                });
            }
        };
        self.refuse_unread(&rope_type)?;
        Ok(Rope {
            theta,
            partial_rotary_factor,
            scaling,
        })
    }

    fn llama3(&mut self, beside: &TopLevelFields) -> Result<Llama3RopeScaling, ModelConfigError> {
        Ok(Llama3RopeScaling {
            factor: self.need("factor", "llama3")?,
            low_freq_factor: self.need("low_freq_factor", "llama3")?,
            high_freq_factor: self.need("high_freq_factor", "llama3")?,
            original_max_position_embeddings: self.original(beside)?,
        })
    }

    fn yarn(&mut self, beside: &TopLevelFields) -> Result<YarnRopeScaling, ModelConfigError> {
        let original = self.original(beside)?;
        // transformers reads `null` as the ratio of the contexts, and refuses a config without the
        // field.
        let factor = match self.0.get("factor") {
            Some(Value::Null) => beside.max_position_embeddings as f64 / original as f64,
            _ => self.need("factor", "yarn")?,
        };
        let truncate = if self.0.contains_key("truncate") {
            self.take("truncate")?.unwrap_or(false)
        } else {
            true
        };
        let beta =
            |found: Option<f64>, default| found.filter(|&beta| beta != 0.0).unwrap_or(default);
        Ok(YarnRopeScaling {
            factor,
            original_max_position_embeddings: original,
            beta_fast: beta(self.take("beta_fast")?, YarnRopeScaling::DEFAULT_BETA_FAST),
            beta_slow: beta(self.take("beta_slow")?, YarnRopeScaling::DEFAULT_BETA_SLOW),
            attention_factor: self.take("attention_factor")?,
            mscale: self.take("mscale")?,
            mscale_all_dim: self.take("mscale_all_dim")?,
            truncate,
        })
    }

    fn long_rope(&mut self, beside: &TopLevelFields) -> Result<LongRopeScaling, ModelConfigError> {
        Ok(LongRopeScaling {
            short_factor: self.need("short_factor", "longrope")?,
            long_factor: self.need("long_factor", "longrope")?,
            original_max_position_embeddings: self.original(beside)?,
            factor: self.take("factor")?,
            attention_factor: self.take("attention_factor")?,
        })
    }

    /// Returns the number of positions of the context before it was stretched. The field beside the
    /// scaling takes precedence over the field in the scaling.
    fn original(&mut self, beside: &TopLevelFields) -> Result<usize, ModelConfigError> {
        let own = self.take(ORIGINAL)?;
        match (beside.original_max_position_embeddings, own) {
            (Some(original), Some(own)) if original != own => {
                tracing::warn!(
                    "`{ORIGINAL}` is {own} in the rotary scaling, and {original} for the model: the second counts, as in transformers"
                );
                Ok(original)
            }
            (original, own) => Ok(original.or(own).unwrap_or(beside.max_position_embeddings)),
        }
    }

    /// Removes a field and returns its value; `null` counts as absent.
    fn take<T: DeserializeOwned>(
        &mut self,
        field: &'static str,
    ) -> Result<Option<T>, ModelConfigError> {
        let value = self.0.remove(field).unwrap_or_default();
        serde_json::from_value(value)
            .map_err(|source| ModelConfigError::RopeField { field, source })
    }

    fn need<T: DeserializeOwned>(
        &mut self,
        field: &'static str,
        rope_type: &'static str,
    ) -> Result<T, ModelConfigError> {
        self.take(field)?
            .ok_or(ModelConfigError::MissingRopeField { field, rope_type })
    }

    /// Checks the fields that were not taken: refuses fields that change logits, and warns of all
    /// others.
    fn refuse_unread(self, rope_type: &str) -> Result<(), ModelConfigError> {
        let unread: Map<String, Value> = self
            .0
            .into_iter()
            .filter(|(_, value)| !value.is_null())
            .collect();
        if let Some((field, value)) = unread
            .iter()
            .find(|(field, value)| changes_logits(field, value))
        {
            return Err(ModelConfigError::UnreadRopeField {
                field: field.clone(),
                found: value.to_string(),
            });
        }
        if !unread.is_empty() {
            let fields = unread
                .keys()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join("`, `");
            tracing::warn!(
                "rotary scaling of type {rope_type} does not read `{}`",
                fields.escape_debug()
            );
        }
        Ok(())
    }
}

impl From<RopeScaling> for RawRope {
    fn from(scaling: RopeScaling) -> Self {
        let fields: Vec<(&str, Value)> = match scaling {
            RopeScaling::Llama3(scaling) => vec![
                ("rope_type", "llama3".into()),
                ("factor", scaling.factor.into()),
                ("low_freq_factor", scaling.low_freq_factor.into()),
                ("high_freq_factor", scaling.high_freq_factor.into()),
                (ORIGINAL, scaling.original_max_position_embeddings.into()),
            ],
            RopeScaling::Yarn(scaling) => vec![
                ("rope_type", "yarn".into()),
                ("factor", scaling.factor.into()),
                (ORIGINAL, scaling.original_max_position_embeddings.into()),
                ("beta_fast", scaling.beta_fast.into()),
                ("beta_slow", scaling.beta_slow.into()),
                ("attention_factor", scaling.attention_factor.into()),
                ("mscale", scaling.mscale.into()),
                ("mscale_all_dim", scaling.mscale_all_dim.into()),
                ("truncate", scaling.truncate.into()),
            ],
            // Old versions of Hugging Face's `Phi3Config` accept only the first three fields; the
            // original context is a field beside the scaling.
            RopeScaling::LongRope(scaling) => vec![
                ("type", "longrope".into()),
                ("short_factor", scaling.short_factor.into()),
                ("long_factor", scaling.long_factor.into()),
                ("factor", scaling.factor.into()),
                ("attention_factor", scaling.attention_factor.into()),
            ],
        };
        Self(
            fields
                .into_iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(field, value)| (field.to_owned(), value))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests;
