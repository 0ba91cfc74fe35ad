//! Creation of the `quantization_config` in a checkpoint's `config.json`.

use std::cmp::Reverse;

use serde_json::{Map, Value, json};

use super::LayerPattern;
use super::floats::FloatFormat;
use crate::checkpoint::ConfigError;
use crate::{GroupSize, QuantSpec};

const METHOD: &str = "compressed-tensors";
const PACK_QUANTIZED: &str = "pack-quantized";
const MARLIN_24: &str = "marlin-24";
const MIXED: &str = "mixed-precision";
/// The PyTorch class of the layers that are quantised.
const TARGET: &str = "Linear";
/// The part of a layer's name that says that it is one of an expert's.
const EXPERTS: &str = ".experts.";
/// The pattern of the layers of all experts.
const EXPERTS_PATTERN: &str = r"re:.*\.experts\..*";

/// Returns true if a layer with this name is one of an expert in a mixture.
pub fn is_expert(layer: &str) -> bool {
    layer.contains(EXPERTS)
}

/// The quantisation of a checkpoint to write: the spec of its linear layers, the layers with
/// another spec, and the skipped layers, which stay floats.
/// [`Quantization`](crate::checkpoint::Quantization) reads the resulting config.
#[derive(Debug, Clone)]
pub struct QuantizationConfig {
    spec: QuantSpec,
    ignore: Vec<LayerPattern>,
    act_order: bool,
    format: &'static str,
    /// The spec, act-order and names of layers with another quantisation.
    others: Vec<(QuantSpec, bool, Vec<String>)>,
    /// The spec of all experts.
    experts: Option<QuantSpec>,
}

impl QuantizationConfig {
    /// Creates a config that quantises all linear layers with `spec`, except those that `ignore`
    /// names. Each entry of `ignore` is a [`LayerPattern`].
    ///
    /// # Errors
    /// [`ConfigError::Pattern`] for an invalid regular expression, or one with look-around.
    pub fn new(spec: QuantSpec, ignore: Vec<String>) -> Result<Self, ConfigError> {
        let ignore = ignore
            .into_iter()
            .map(LayerPattern::new)
            .collect::<Result<_, _>>()?;
        Ok(Self {
            spec,
            ignore,
            act_order: false,
            format: PACK_QUANTIZED,
            others: Vec::new(),
            experts: None,
        })
    }

    /// Returns the config with a declaration that layers have a `weight_g_idx` (`actorder` is
    /// `group`). Versions of the package before 0.19 require this declaration; later versions and
    /// vLLM refuse it. Layers with one group per channel have no `weight_g_idx`.
    pub fn with_act_order(self, act_order: bool) -> Self {
        Self { act_order, ..self }
    }

    /// Returns the config for weights stored as `marlin-24`, with two of every four values.
    pub fn as_marlin_24(self) -> Self {
        Self {
            format: MARLIN_24,
            ..self
        }
    }

    /// Returns the config with another quantisation for the layers with these names, as a separate
    /// group of the config.
    pub fn with_layers(mut self, spec: QuantSpec, act_order: bool, names: Vec<String>) -> Self {
        self.others.push((spec, act_order, names));
        self
    }

    /// Returns the config with a group of their own for the experts of the model, all of which have
    /// this spec. transformers (5.24) has one setting for all experts: that of the group with a
    /// pattern that has the word `experts`, or of the first group.
    pub fn with_experts(self, spec: QuantSpec) -> Self {
        Self {
            experts: Some(spec),
            ..self
        }
    }

    /// Returns the config with more entries of `ignore`.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with_ignored(mut self, entries: Vec<String>) -> Result<Self, ConfigError> {
        let entries = entries
            .into_iter()
            .map(LayerPattern::new)
            .collect::<Result<Vec<_>, _>>()?;
        self.ignore.extend(entries);
        Ok(self)
    }

    /// Returns the quantisation of layers without a group of their own.
    pub fn spec(&self) -> QuantSpec {
        self.spec
    }

    /// Returns the entries of `ignore`, as written in the config.
    pub fn ignore(&self) -> impl Iterator<Item = &str> {
        self.ignore.iter().map(LayerPattern::entry)
    }

    /// Returns true if layers may have a `weight_g_idx` (`actorder` is `group`).
    pub fn act_order(&self) -> bool {
        self.act_order
    }

    /// Returns true if the layer `name` is not quantised.
    pub fn ignores(&self, name: &str) -> bool {
        self.ignore.iter().any(|pattern| pattern.matches(name))
    }

    /// Returns the storage format of the layers with a spec.
    fn format_of(&self, spec: &QuantSpec) -> &'static str {
        FloatFormat::of(spec).map_or(self.format, FloatFormat::name)
    }

    /// Returns the spec, act-order and targets of each group, the widest values first. With
    /// `dequantize=True` transformers (5.24) reads all dense layers with the first group that is
    /// not the experts': that fails for narrower values, and would take the first part of wider
    /// ones for all of them, without an error.
    fn groups(&self) -> Vec<(&QuantSpec, bool, Vec<&str>)> {
        let mut groups = vec![(&self.spec, self.act_order, vec![TARGET])];
        // Without others, the experts are in the only group.
        let experts = self.experts.as_ref().filter(|_| !self.others.is_empty());
        for (spec, act_order, names) in &self.others {
            let names = names.iter().map(String::as_str);
            let names = names.filter(|name| experts.is_none() || !is_expert(name));
            groups.push((spec, *act_order, names.collect()));
        }
        groups.extend(experts.map(|spec| (spec, self.act_order, vec![EXPERTS_PATTERN])));
        groups.retain(|(.., targets)| !targets.is_empty());
        groups.sort_by_key(|(spec, ..)| Reverse(spec.value.bits()));
        groups
    }

    /// Returns the `quantization_config` object.
    pub fn to_json(&self) -> Value {
        let groups = self.groups().into_iter().enumerate();
        let groups = groups.map(|(index, (spec, act_order, targets))| {
            let mut group = group(spec, act_order, json!(targets));
            group["format"] = self.format_of(spec).into();
            (format!("group_{index}"), group)
        });
        let mut formats = self.others.iter().map(|(spec, ..)| self.format_of(spec));
        let own = self.format_of(&self.spec);
        let format = if formats.all(|format| format == own) {
            own
        } else {
            MIXED
        };
        json!({
            "quant_method": METHOD,
            "format": format,
            "quantization_status": "compressed",
            "config_groups": groups.collect::<Map<_, _>>(),
            "ignore": self.ignore().collect::<Vec<_>>(),
            "kv_cache_scheme": null,
        })
    }
}

/// Returns the `input_activations` of a group: e4m3 with a scale for each row, or null.
fn activations(spec: &QuantSpec) -> Value {
    if !spec.fp8_activations {
        return Value::Null;
    }
    json!({
        "num_bits": 8,
        "type": "float",
        "symmetric": true,
        "strategy": "token",
        "dynamic": true,
    })
}

/// Returns one of the `config_groups`, without its format.
fn group(spec: &QuantSpec, act_order: bool, targets: Value) -> Value {
    if let Some(format) = FloatFormat::of(spec) {
        return json!({
            "targets": targets,
            "weights": format.weights(),
            "input_activations": activations(spec),
            "output_activations": null,
        });
    }
    let (strategy, group_size) = match spec.scales.group {
        GroupSize::Channel => ("channel", Value::Null),
        group => ("group", group.as_i64().into()),
    };
    json!({
        "targets": targets,
        "weights": {
            "num_bits": spec.value,
            "type": "int",
            "symmetric": !spec.has_zero_points(),
            "strategy": strategy,
            "group_size": group_size,
            "actorder": if act_order && spec.scales.group != GroupSize::Channel { "group".into() } else { Value::Null },
            "dynamic": false,
        },
        "input_activations": null,
        "output_activations": null,
    })
}
