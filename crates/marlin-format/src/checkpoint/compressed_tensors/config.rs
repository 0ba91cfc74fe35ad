//! The `quantization_config` of a checkpoint's `config.json`, as it is written.

use regex::Regex;
use serde_json::{Value, json};

use crate::checkpoint::ConfigError;
use crate::{GroupSize, QuantSpec};

const METHOD: &str = "compressed-tensors";
const FORMAT: &str = "pack-quantized";
/// The class of layers that is quantised, by its name in PyTorch.
const TARGET: &str = "Linear";
/// What an entry of `ignore` starts with that is a pattern, not a name.
const PATTERN_PREFIX: &str = "re:";

/// How the linear layers of a checkpoint that is written are quantised, all in one way, and which of them are not.
/// [`Quantization`](crate::checkpoint::Quantization) reads it again.
#[derive(Debug, Clone)]
pub struct QuantizationConfig {
    spec: QuantSpec,
    ignore: Vec<String>,
    /// One for each `re:` entry of `ignore`.
    patterns: Vec<Regex>,
    act_order: bool,
}

impl QuantizationConfig {
    /// All linear layers as `spec` says, but those that `ignore` names: names of layers, or `re:` and a regular expression that matches
    /// from the start of the name.
    ///
    /// # Errors
    /// [`ConfigError::Pattern`] for an expression that is none, or that looks around.
    pub fn new(spec: QuantSpec, ignore: Vec<String>) -> Result<Self, ConfigError> {
        let compile = |pattern: &str| {
            let invalid = |source| ConfigError::Pattern { pattern: pattern.into(), source: Box::new(source) };
            Regex::new(&format!("^(?:{pattern})")).map_err(invalid)
        };
        let patterns = ignore.iter().filter_map(|entry| entry.strip_prefix(PATTERN_PREFIX)).map(compile).collect::<Result<_, _>>()?;
        Ok(Self { spec, ignore, patterns, act_order: false })
    }

    /// The same, saying whether layers have a `weight_g_idx`, which other readers expect to be told.
    pub fn with_act_order(self, act_order: bool) -> Self {
        Self { act_order, ..self }
    }

    /// How layers are quantised.
    pub fn spec(&self) -> QuantSpec {
        self.spec
    }

    /// The entries of `ignore`, as they are in the config.
    pub fn ignore(&self) -> &[String] {
        &self.ignore
    }

    /// Whether layers may have a `weight_g_idx` (`actorder` is `group`).
    pub fn act_order(&self) -> bool {
        self.act_order
    }

    /// Whether the layer `name` is not quantised.
    pub fn ignores(&self, name: &str) -> bool {
        self.ignore.iter().any(|entry| entry == name) || self.patterns.iter().any(|pattern| pattern.is_match(name))
    }

    /// The `quantization_config` object.
    pub fn to_json(&self) -> Value {
        let (strategy, group_size) = match self.spec.group {
            GroupSize::Channel => ("channel", Value::Null),
            group => ("group", group.as_i64().into()),
        };
        json!({
            "quant_method": METHOD,
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": [TARGET],
                    "weights": {
                        "num_bits": self.spec.bits,
                        "type": "int",
                        "symmetric": !self.spec.zero_points,
                        "strategy": strategy,
                        "group_size": group_size,
                        "actorder": if self.act_order { "group".into() } else { Value::Null },
                        "dynamic": false,
                    },
                    "input_activations": null,
                    "output_activations": null,
                },
            },
            "ignore": self.ignore,
            "kv_cache_scheme": null,
        })
    }
}
