//! `quant_method` compressed-tensors: groups of layers, each with its own quantisation.
//!
//! | field | means |
//! |---|---|
//! | `format` | the storage format of weights: `pack-quantized` or `marlin-24` of integers; `float-quantized` (also `naive-quantized`), `nvfp4-pack-quantized` or `mxfp4-pack-quantized` of floats; with `mixed-precision`, every group declares its own |
//! | `config_groups.*.format` | the storage format of a group |
//! | `config_groups.*.targets` | the layers of a group: names, `re:` and a pattern, or `Linear` for all linear layers. Names take precedence over patterns, patterns over `Linear` |
//! | `config_groups.*.weights` | `num_bits` 4 or 8, `type` int, `symmetric`, `strategy` and `group_size`, `actorder`; or the fields of [floats](super::compressed_floats) |
//! | `config_groups.*.input_activations` | null; of weights of floats also floats. Beside weights of 8 bits, those of 8 bits mean that activations may be rounded to e4m3, with a scale for each row ([`QuantSpec::fp8_activations`]); beside weights of 4 bits, activations keep their bits |
//! | `ignore` | layers that are not quantised, in the form of `targets` |
//! | `quantization_status` | `compressed`, or `frozen` in older files |
//! | `sparsity_config.format` | the storage format of float weights: `dense`, or in unquantised models `sparse-24-bitmask`, which [`Checkpoint`](super::super::Checkpoint) reads |
//!
//! A layer that no target selects is not quantised. A `kv_cache_scheme` does not affect weights and
//! is ignored.
//!
//! Source: the `compressed-tensors` Python package,
//! `quantization/{quant_config,quant_scheme,quant_args}.py`, `utils/match.py`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::compressed_floats::{fp4_format, fp8_format};
use super::fields::Fields;
use super::pattern::Pattern;
use super::rules::{Rules, Selector};
use super::spec;
use crate::checkpoint::{ConfigError, Fp4Format, LayerFormat, Marlin24Names, PackQuantizedFormat};
use crate::{GroupSize, QuantSpec};

/// The PyTorch class of linear layers.
const LINEAR: &str = "Linear";
/// The prefix of an entry that is a pattern, not a name.
const PATTERN_PREFIX: &str = "re:";
/// The field of a group with the quantisation of activations.
const INPUT: &str = "input_activations";
/// The format of 2:4 float weights.
const BITMASK_FORMAT: &str = "sparse-24-bitmask";
const FORMATS: &str = "`pack-quantized`, `marlin-24`, `float-quantized`, `nvfp4-pack-quantized` or `mxfp4-pack-quantized`";

/// Returns the rules of a compressed-tensors config.
pub(super) fn rules(root: &Fields<'_>) -> Result<Rules, ConfigError> {
    let is_quantized = root.get("config_groups").is_some();
    let names_format_of_floats = check_sparsity(root, is_quantized)?;
    refuse_transforms(root)?;
    if names_format_of_floats && !is_quantized {
        return Ok(Rules::default());
    }
    let mut rules = Rules::default();
    for entry in root.strings("ignore")?.unwrap_or_default() {
        rules.push(selector(root.path("ignore"), entry)?, LayerFormat::Float)?;
    }

    let groups = root
        .object("config_groups")?
        .ok_or_else(|| root.missing("config_groups", "an object"))?;
    // The key is the target: a later group overrides the same target of an earlier group. The
    // Python package does the same, and also sorts patterns.
    let mut targets = BTreeMap::new();
    for (name, group) in groups.entries() {
        let group = Fields::new(group, groups.path(name))?;
        let format = group_format(root, &group)?;
        let named = group
            .strings("targets")?
            .ok_or_else(|| group.missing("targets", "a list of strings"))?;
        targets.extend(
            named
                .into_iter()
                .map(|target| (target, (group.path("targets"), format))),
        );
    }
    if targets.is_empty() {
        return Err(root.unsupported(
            "config_groups",
            "at least one group with targets",
            &Value::Object(Default::default()),
        ));
    }
    let mut targets: Vec<_> = targets.into_iter().collect();
    targets.sort_by_key(|(target, _)| (*target == LINEAR, target.starts_with(PATTERN_PREFIX)));
    for (target, (field, format)) in targets {
        rules.push(selector(field, target)?, format)?;
    }
    Ok(rules)
}

fn selector(field: String, entry: &str) -> Result<Selector, ConfigError> {
    Ok(match entry.strip_prefix(PATTERN_PREFIX) {
        Some(pattern) => Selector::Pattern(Pattern::from_start(field, pattern)?),
        None if entry == LINEAR => Selector::Any,
        None => Selector::Name(entry.into()),
    })
}

/// Returns the format of the layers of a group.
fn group_format(root: &Fields<'_>, group: &Fields<'_>) -> Result<LayerFormat, ConfigError> {
    let weights = group.object("weights")?;
    check_activations(group, weights.as_ref())?;
    // Layers of a group without `weights` are not quantised.
    let Some(weights) = weights else {
        return Ok(LayerFormat::Float);
    };

    let (fields, format) = match (group.text("format")?, root.text("format")?) {
        (Some(format), _) => (group, format),
        (None, Some("mixed-precision")) => return Err(group.missing("format", FORMATS)),
        (None, Some(format)) => (root, format),
        (None, None) => return Err(root.missing("format", FORMATS)),
    };
    match format {
        "pack-quantized" => {
            let (spec, act_order) = weights_spec(&weights)?;
            Ok(LayerFormat::PackQuantized(PackQuantizedFormat {
                spec,
                act_order,
            }))
        }
        "marlin-24" => {
            let (spec, act_order) = weights_spec(&weights)?;
            spec::check_marlin(
                &weights,
                ["num_bits", "group_size", "symmetric", "actorder"],
                spec,
                act_order,
                false,
            )?;
            Ok(LayerFormat::Marlin24(
                spec,
                Marlin24Names::CompressedTensors,
            ))
        }
        "float-quantized" | "naive-quantized" => {
            let input = group.object(INPUT)?;
            let bits = input.map(|input| input.integer("num_bits")).transpose()?;
            let activations = bits.flatten() == Some(8);
            fp8_format(&weights, activations).map(LayerFormat::Fp8)
        }
        "nvfp4-pack-quantized" => {
            fp4_format(&weights, Fp4Format::NvFp4Packed).map(LayerFormat::Fp4)
        }
        "mxfp4-pack-quantized" => {
            fp4_format(&weights, Fp4Format::MxFp4Packed).map(LayerFormat::Fp4)
        }
        found => Err(fields.unsupported("format", FORMATS, &found.into())),
    }
}

/// Refuses quantised activations, except for the floats beside weights of floats, whose products
/// with activations in 16 or 32 bits are more accurate, while the integers of `int-quantized`
/// weights would need the activations' scales.
fn check_activations(group: &Fields<'_>, weights: Option<&Fields<'_>>) -> Result<(), ConfigError> {
    if let Some(found) = group.get("output_activations") {
        return Err(group.unsupported(
            "output_activations",
            "null: activations in 16 or 32 bits",
            found,
        ));
    }
    let Some(input) = group.get(INPUT) else {
        return Ok(());
    };
    if !weights.is_some_and(is_float) {
        return Err(group.unsupported(INPUT, "null: activations in 16 or 32 bits", input));
    }
    if is_float(&Fields::new(input, group.path(INPUT))?) {
        Ok(())
    } else {
        Err(group.unsupported(INPUT, "floats or null beside weights of floats", input))
    }
}

/// Returns true if values are declared to be floats.
fn is_float(values: &Fields<'_>) -> bool {
    values.get("type").is_some_and(|kind| *kind == "float")
}

/// Returns the spec of a group's `weights`, and true if the weights have act-order.
fn weights_spec(weights: &Fields<'_>) -> Result<(QuantSpec, bool), ConfigError> {
    if let Some(found) = weights.get("type").filter(|kind| **kind != "int") {
        return Err(weights.unsupported("type", "`int`", found));
    }
    if let Some(found) = weights
        .get("dynamic")
        .filter(|dynamic| **dynamic != Value::Bool(false))
    {
        return Err(weights.unsupported("dynamic", "false", found));
    }
    let symmetric = weights.boolean("symmetric")?.unwrap_or(true);
    // `weight` or null means that rows are in their natural order. `group`, or its older name true,
    // means that there is a `weight_g_idx`.
    let act_order = match weights.get("actorder") {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Bool(true)) => true,
        Some(Value::String(order)) if ["weight", "static"].contains(&order.as_str()) => false,
        Some(Value::String(order)) if ["group", "dynamic"].contains(&order.as_str()) => true,
        Some(found) => {
            return Err(weights.unsupported("actorder", "`group`, `weight` or null", found));
        }
    };
    Ok((
        spec::spec(
            spec::bits(weights, &["num_bits"])?,
            group_size(weights)?,
            symmetric,
        ),
        act_order,
    ))
}

fn group_size(weights: &Fields<'_>) -> Result<GroupSize, ConfigError> {
    const STRATEGIES: &str = "`group` or `channel`";
    match (weights.text("strategy")?, weights.integer("group_size")?) {
        (Some("channel"), None | Some(-1)) => Ok(GroupSize::Channel),
        (Some("channel"), Some(size)) => Err(weights.unsupported(
            "group_size",
            "null where the strategy is `channel`",
            &size.into(),
        )),
        // Without a strategy, the group size implies one, as in the Python package.
        (Some("group") | None, Some(_)) => spec::group_size(weights, &["group_size"]),
        (Some("group"), None) => Err(weights.missing("group_size", "32, 64 or 128")),
        (None, None) => Err(weights.missing("strategy", STRATEGIES)),
        (Some(found), _) => Err(weights.unsupported("strategy", STRATEGIES, &found.into())),
    }
}

/// Refuses weights whose storage differs from their declared format. Returns true if the config
/// declares the storage format of float weights.
fn check_sparsity(root: &Fields<'_>, is_quantized: bool) -> Result<bool, ConfigError> {
    let Some(sparsity) = root.object("sparsity_config")? else {
        return Ok(false);
    };
    match sparsity.get("format") {
        None => Ok(false),
        Some(format) if *format == "dense" || *format == BITMASK_FORMAT && !is_quantized => {
            Ok(true)
        }
        Some(found) => Err(sparsity.unsupported(
            "format",
            if is_quantized {
                "`dense`"
            } else {
                "`dense` or `sparse-24-bitmask`"
            },
            found,
        )),
    }
}

/// Refuses transforms of a layer's input or output, and weights that are not compressed yet.
fn refuse_transforms(root: &Fields<'_>) -> Result<(), ConfigError> {
    if let Some(transforms) = root.object("transform_config")?
        && let Some(groups) = transforms.object("config_groups")?
        && let Some((name, found)) = groups.entries().next()
    {
        return Err(groups.unsupported(name, "no transforms", found));
    }
    match root.text("quantization_status")? {
        None | Some("compressed" | "frozen") => Ok(()),
        Some(found) => Err(root.unsupported("quantization_status", "`compressed`", &found.into())),
    }
}
