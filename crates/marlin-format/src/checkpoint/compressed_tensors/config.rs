//! The `quantization_config` of a checkpoint's `config.json`, as it is written.

use serde_json::{Map, Value, json};

use super::LayerPattern;
use crate::checkpoint::ConfigError;
use crate::{GroupSize, QuantSpec};

const METHOD: &str = "compressed-tensors";
const PACK_QUANTIZED: &str = "pack-quantized";
const MARLIN_24: &str = "marlin-24";
/// The class of layers that is quantised, by its name in PyTorch.
const TARGET: &str = "Linear";

/// The quantisation of the linear layers of a checkpoint to write, the layers that differ from it,
/// and the layers left as floats. [`Quantization`](crate::checkpoint::Quantization) reads it again.
#[derive(Debug, Clone)]
pub struct QuantizationConfig {
    spec: QuantSpec,
    ignore: Vec<LayerPattern>,
    act_order: bool,
    format: &'static str,
    /// Spec, act-order and names of layers that are quantised otherwise.
    others: Vec<(QuantSpec, bool, Vec<String>)>,
}

impl QuantizationConfig {
    /// All linear layers in `spec`, except those that `ignore` names, each entry of it a
    /// [`LayerPattern`].
    ///
    /// # Errors
    /// [`ConfigError::Pattern`] for an expression that is none, or that looks around.
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
        })
    }

    /// The same, with a declaration that layers have a `weight_g_idx` (`actorder` is `group`),
    /// which versions of the package before 0.19 require, and later ones and vLLM refuse. Layers of
    /// one group a channel have none.
    pub fn with_act_order(self, act_order: bool) -> Self {
        Self { act_order, ..self }
    }

    /// The same, with weights stored as `marlin-24`, two of every four values.
    pub fn as_marlin_24(self) -> Self {
        Self {
            format: MARLIN_24,
            ..self
        }
    }

    /// The same, with the layers of these names quantised otherwise: a group of their own in the
    /// config.
    pub fn with_layers(mut self, spec: QuantSpec, act_order: bool, names: Vec<String>) -> Self {
        self.others.push((spec, act_order, names));
        self
    }

    /// The same, with more entries of `ignore`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_ignored(mut self, entries: Vec<String>) -> Result<Self, ConfigError> {
        let entries = entries
            .into_iter()
            .map(LayerPattern::new)
            .collect::<Result<Vec<_>, _>>()?;
        self.ignore.extend(entries);
        Ok(self)
    }

    /// The quantisation of layers without an entry of their own.
    pub fn spec(&self) -> QuantSpec {
        self.spec
    }

    /// The entries of `ignore`, as they are in the config.
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

    /// The `quantization_config` object.
    pub fn to_json(&self) -> Value {
        let first = (&self.spec, self.act_order, json!([TARGET]));
        let others = self
            .others
            .iter()
            .map(|(spec, act_order, names)| (spec, *act_order, json!(names)));
        let groups = std::iter::once(first).chain(others).enumerate();
        let groups = groups.map(|(index, (spec, act_order, targets))| {
            (format!("group_{index}"), group(spec, act_order, targets))
        });
        json!({
            "quant_method": METHOD,
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": groups.collect::<Map<_, _>>(),
            "ignore": self.ignore().collect::<Vec<_>>(),
            "kv_cache_scheme": null,
        })
    }
}

/// One of the `config_groups`.
fn group(spec: &QuantSpec, act_order: bool, targets: Value) -> Value {
    let (strategy, group_size) = match spec.group {
        GroupSize::Channel => ("channel", Value::Null),
        group => ("group", group.as_i64().into()),
    };
    json!({
        "targets": targets,
        "weights": {
            "num_bits": spec.bits,
            "type": "int",
            "symmetric": !spec.zero_points,
            "strategy": strategy,
            "group_size": group_size,
            "actorder": if act_order && spec.group != GroupSize::Channel { "group".into() } else { Value::Null },
            "dynamic": false,
        },
        "input_activations": null,
        "output_activations": null,
    })
}
