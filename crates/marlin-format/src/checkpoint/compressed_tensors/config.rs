//! The `quantization_config` of a checkpoint's `config.json`.

use regex::Regex;
use serde_json::{Map, Value, json};

use crate::checkpoint::ConfigError;
use crate::{Bits, GroupSize, QuantSpec};

const METHOD: &str = "compressed-tensors";
const FORMAT: &str = "pack-quantized";
/// The class of layers that is quantised, by its name in PyTorch.
const TARGET: &str = "Linear";
/// The widths that are read.
const BITS: &str = "4 or 8";
/// What an entry of `ignore` starts with that is a pattern, not a name.
const PATTERN_PREFIX: &str = "re:";

/// How a checkpoint's linear layers are quantised, and which of them are not.
///
/// What is read: `quant_method` compressed-tensors, `format` pack-quantized, integers of 4 or 8 bits, symmetric or not, `strategy` group (32, 64,
/// 128) or channel, one way for every layer of class `Linear` outside `ignore`. A `kv_cache_scheme` concerns no weight and is left alone.
/// Everything else is refused with the field and what it holds.
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

    /// How layers are quantised. The scale dtype is f16 where this was read from a config, which does not say it: the scale tensors do.
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

    /// Reads a `quantization_config` object.
    ///
    /// # Errors
    /// [`ConfigError`], with the field and what it holds, for every method, format or option that is not read.
    pub fn parse(config: &Value) -> Result<Self, ConfigError> {
        let root = Fields::new(config, String::new(), "an object")?;
        root.expect("quant_method", &METHOD.into(), "`compressed-tensors`")?;
        root.expect("format", &FORMAT.into(), "`pack-quantized`")?;
        if let Some(sparsity) = root.optional("sparsity_config") {
            let sparsity = Fields::new(sparsity, root.path("sparsity_config"), "an object or null")?;
            if let Some(format) = sparsity.optional("format").filter(|&format| format != "dense") {
                return Err(sparsity.unsupported("format", "`dense`", format));
            }
        }

        let groups = Fields::new(root.required("config_groups", "an object")?, root.path("config_groups"), "an object")?;
        let mut first = None;
        for (name, group) in groups.map {
            let found = parse_group(&Fields::new(group, groups.path(name), "an object")?)?;
            if *first.get_or_insert(found) != found {
                return Err(ConfigError::DifferentGroups { group: name.clone() });
            }
        }
        let Some((spec, act_order)) = first else {
            return Err(root.unsupported("config_groups", "at least one group", &json!({})));
        };

        let ignore = match root.optional("ignore") {
            None => Vec::new(),
            Some(entries) => {
                serde_json::from_value(entries.clone()).map_err(|_| root.unsupported("ignore", "a list of strings", entries))?
            }
        };
        Ok(Self::new(spec, ignore)?.with_act_order(act_order))
    }
}

/// The spec of one entry of `config_groups`, and whether it is activation-ordered.
fn parse_group(group: &Fields<'_>) -> Result<(QuantSpec, bool), ConfigError> {
    group.expect("targets", &json!([TARGET]), "[\"Linear\"]")?;
    for activations in ["input_activations", "output_activations"] {
        if let Some(found) = group.optional(activations) {
            return Err(group.unsupported(activations, "null: activations in 16 or 32 bits", found));
        }
    }
    if let Some(format) = group.optional("format").filter(|&format| format != FORMAT) {
        return Err(group.unsupported("format", "`pack-quantized`", format));
    }

    let weights = Fields::new(group.required("weights", "an object")?, group.path("weights"), "an object")?;
    let num_bits = weights.required("num_bits", BITS)?;
    let bits = num_bits.as_i64().and_then(|bits| Bits::try_from(bits).ok());
    let bits = bits.ok_or_else(|| weights.unsupported("num_bits", BITS, num_bits))?;
    if weights.optional("type").is_some() {
        weights.expect("type", &"int".into(), "`int`")?;
    }
    if weights.optional("dynamic").is_some() {
        weights.expect("dynamic", &false.into(), "false")?;
    }
    let symmetric = match weights.optional("symmetric") {
        None => true,
        Some(Value::Bool(symmetric)) => *symmetric,
        Some(found) => return Err(weights.unsupported("symmetric", "true or false", found)),
    };
    // Rows in their natural order are `weight` or null; `group` (or its older name, true) comes with `weight_g_idx`.
    let act_order = match weights.optional("actorder") {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Bool(true)) => true,
        Some(order) if order == "weight" || order == "static" => false,
        Some(order) if order == "group" || order == "dynamic" => true,
        Some(found) => return Err(weights.unsupported("actorder", "`group`, `weight` or null", found)),
    };

    let spec = QuantSpec { bits, ..QuantSpec::int4(parse_group_size(&weights)?) };
    Ok((if symmetric { spec } else { spec.with_zero_points() }, act_order))
}

fn parse_group_size(weights: &Fields<'_>) -> Result<GroupSize, ConfigError> {
    const STRATEGIES: &str = "`group` or `channel`";
    let size = match weights.optional("group_size") {
        None => None,
        Some(value) => Some(value.as_i64().ok_or_else(|| weights.unsupported("group_size", "32, 64, 128, -1 or null", value))?),
    };
    match (weights.optional("strategy").map(|strategy| (strategy.as_str(), strategy)), size) {
        (Some((Some("channel"), _)), None | Some(-1)) => Ok(GroupSize::Channel),
        (Some((Some("channel"), _)), Some(size)) => {
            Err(weights.unsupported("group_size", "null where the strategy is `channel`", &size.into()))
        }
        // Where no strategy is given, the group size implies one, as in the Python package.
        (Some((Some("group"), _)) | None, Some(size)) => {
            GroupSize::try_from(size).map_err(|source| ConfigError::GroupSize { field: weights.path("group_size"), source })
        }
        (Some((Some("group"), _)), None) => Err(ConfigError::Missing { field: weights.path("group_size"), expected: "32, 64 or 128" }),
        (None, None) => Err(ConfigError::Missing { field: weights.path("strategy"), expected: STRATEGIES }),
        (Some((_, found)), _) => Err(weights.unsupported("strategy", STRATEGIES, found)),
    }
}

/// A JSON object and the path to it, for errors. Null fields count as absent.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    fn new(value: &'a Value, path: String, expected: &'static str) -> Result<Self, ConfigError> {
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            _ => Err(ConfigError::Unsupported { field: path, expected, found: shortened(value) }),
        }
    }

    fn path(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_string() } else { format!("{}.{field}", self.path) }
    }

    fn optional(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn required(&self, field: &str, expected: &'static str) -> Result<&'a Value, ConfigError> {
        self.optional(field).ok_or_else(|| ConfigError::Missing { field: self.path(field), expected })
    }

    fn expect(&self, field: &str, only: &Value, expected: &'static str) -> Result<(), ConfigError> {
        let found = self.required(field, expected)?;
        if found == only { Ok(()) } else { Err(self.unsupported(field, expected, found)) }
    }

    fn unsupported(&self, field: &str, expected: &'static str, found: &Value) -> ConfigError {
        ConfigError::Unsupported { field: self.path(field), expected, found: shortened(found) }
    }
}

/// A value as JSON, at a length that fits a message.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(200) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
