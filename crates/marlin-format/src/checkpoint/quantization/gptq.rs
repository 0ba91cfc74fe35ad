//! `quant_method` gptq and awq: one spec for every layer, and overrides.
//!
//! | field | method | meaning |
//! |---|---|---|
//! | `bits`, `w_bit` | both | 4 or 8; 4 for AWQ and Marlin |
//! | `group_size`, `q_group_size` | both | -1, 32, 64 or 128 |
//! | `sym`, `desc_act` | GPTQ | symmetric (default: true), act-order (default: false) |
//! | `checkpoint_format`, otherwise `format` | GPTQ | `gptq` (default), `gptq_v2`, `marlin` (also as `is_marlin_format`), `marlin_24` |
//! | `zero_point`, otherwise not `sym` | AWQ | zero points (default: true) |
//! | `version`, otherwise `format` | AWQ | `gemm` (default) |
//! | `lm_head` | both | true if the output head is quantised (default: false) |
//! | `dynamic` | both | a map from patterns to overrides, of which the first match takes effect: `-:` is not quantised, `+:` or no prefix overrides fields |
//! | `block_name_to_quantize` | GPTQ | names of blocks or of their parent, as a list or separated by commas: layers outside these blocks are not quantised |
//! | `modules_in_block_to_quantize` | GPTQ | names of modules; other modules are not quantised |
//! | `modules_to_not_convert` | AWQ | parts of names, or patterns, of modules that are not quantised |
//!
//! Sources: GPTQModel `quantization/config.py`; AutoAWQ `models/_config.py`, `utils/module.py`;
//! transformers `quantizers/quantizers_utils.py`; Optimum `gptq/quantizer.py`; vLLM
//! `quantization/utils/gptq_utils.py`.

use serde_json::Value;

use super::fields::Fields;
use super::pattern::{Pattern, is_pattern};
use super::rules::{Rules, Selector, push_outside_blocks};
use super::spec;
use crate::WeightValue;
use crate::checkpoint::{ConfigError, GptqFormat, GptqVersion, LayerFormat, Marlin24Names};

/// Returns the rules of a GPTQ config.
pub(super) fn gptq_rules(root: &Fields<'_>) -> Result<Rules, ConfigError> {
    refuse_transforms(root)?;
    let mut rules = head_rule(root)?;
    push_outside_blocks(&mut rules, root, &["block_name_to_quantize"])?;
    if let Some(modules) = root
        .strings("modules_in_block_to_quantize")?
        .filter(|modules| !modules.is_empty())
    {
        let modules = modules.into_iter().map(String::from).collect();
        rules.push(Selector::OutsideModules(modules), LayerFormat::Float)?;
    }
    dynamic_rules(root, gptq_format, &mut rules)?;
    rules.push(Selector::Any, gptq_format(root)?)?;
    Ok(rules)
}

/// Returns the rules of an AWQ config.
pub(super) fn awq_rules(root: &Fields<'_>) -> Result<Rules, ConfigError> {
    const SKIPPED: &str = "modules_to_not_convert";
    refuse_transforms(root)?;
    let mut rules = head_rule(root)?;
    for skipped in root.strings(SKIPPED)?.unwrap_or_default() {
        // AutoAWQ treats entries as parts of names. transformers treats entries as patterns that
        // end at the end of a module's name.
        let selector = match is_pattern(skipped) {
            true => Selector::Pattern(Pattern::module(root.path(SKIPPED), skipped)?),
            false => Selector::Containing(skipped.into()),
        };
        rules.push(selector, LayerFormat::Float)?;
    }
    dynamic_rules(root, awq_format, &mut rules)?;
    rules.push(Selector::Any, awq_format(root)?)?;
    Ok(rules)
}

/// Returns the GPTQ format of a layer with these fields.
pub(super) fn gptq_format(fields: &Fields<'_>) -> Result<LayerFormat, ConfigError> {
    const FORMATS: &str = "`gptq`, `gptq_v2`, `marlin` or `marlin_24`";
    let group = spec::group_size(fields, &["group_size"])?;
    let symmetric = fields.boolean("sym")?.unwrap_or(true);
    let act_order = fields.boolean("desc_act")?.unwrap_or(false);
    let old_marlin = fields.text("quant_method")? == Some("marlin")
        || fields.boolean("is_marlin_format")?.unwrap_or(false);
    let (name, format) = match fields.first(&["checkpoint_format", "format"]) {
        _ if old_marlin => ("is_marlin_format", "marlin".to_string()),
        None => ("checkpoint_format", "gptq".to_string()),
        Some((name, Value::String(format))) => (name, format.to_lowercase()),
        Some((name, found)) => return Err(fields.unsupported(name, FORMATS, found)),
    };
    // Some of the oldest Marlin checkpoints declare only the group size.
    let bits = if old_marlin && fields.get("bits").is_none() {
        WeightValue::Int4
    } else {
        spec::bits(fields, &["bits"])?
    };
    let spec = spec::spec(bits, group, symmetric);
    let marlin = |dense| {
        spec::check_marlin(
            fields,
            ["bits", "group_size", "sym", "desc_act"],
            spec,
            act_order,
            dense,
        )
    };
    match format.as_str() {
        "gptq" => Ok(LayerFormat::Gptq(GptqFormat {
            spec,
            version: GptqVersion::V1,
            act_order,
        })),
        "gptq_v2" => Ok(LayerFormat::Gptq(GptqFormat {
            spec,
            version: GptqVersion::V2,
            act_order,
        })),
        "marlin" => marlin(true).map(|()| LayerFormat::Marlin(spec)),
        "marlin_24" => marlin(false).map(|()| LayerFormat::Marlin24(spec, Marlin24Names::Gptq)),
        _ => Err(fields.unsupported(name, FORMATS, &Value::String(format))),
    }
}

/// Returns the AWQ format of a layer with these fields.
pub(super) fn awq_format(fields: &Fields<'_>) -> Result<LayerFormat, ConfigError> {
    const VERSIONS: &str = "`gemm`";
    const BITS: &[&str] = &["bits", "w_bit"];
    match fields.first(&["version", "format", "checkpoint_format"]) {
        None => {}
        Some((_, Value::String(version))) if version.eq_ignore_ascii_case("gemm") => {}
        Some((name, found)) => return Err(fields.unsupported(name, VERSIONS, found)),
    }
    if let Some(found) = fields
        .get("backend")
        .filter(|backend| **backend == "llm-awq")
    {
        return Err(fields.unsupported("backend", "the packing of AutoAWQ", found));
    }
    let group = spec::group_size(fields, &["group_size", "q_group_size"])?;
    let zero_points = match (fields.boolean("zero_point")?, fields.boolean("sym")?) {
        (Some(zero_points), _) => zero_points,
        (None, Some(symmetric)) => !symmetric,
        (None, None) => true,
    };
    let spec = spec::spec(spec::bits(fields, BITS)?, group, !zero_points);
    spec::check_awq(fields, BITS, spec).map(|()| LayerFormat::Awq(spec))
}

/// Returns a rule that skips the output head, unless the config declares that it is quantised.
fn head_rule(root: &Fields<'_>) -> Result<Rules, ConfigError> {
    let mut rules = Rules::default();
    if !root.boolean("lm_head")?.unwrap_or(false) {
        rules.push(Selector::OutputHead, LayerFormat::Float)?;
    }
    Ok(rules)
}

fn dynamic_rules(
    root: &Fields<'_>,
    format: impl Fn(&Fields<'_>) -> Result<LayerFormat, ConfigError>,
    rules: &mut Rules,
) -> Result<(), ConfigError> {
    let Some(dynamic) = root.object("dynamic")? else {
        return Ok(());
    };
    for (key, overrides) in dynamic.entries() {
        let path = dynamic.path(key);
        let (skipped, pattern) = match (key.strip_prefix("-:"), key.strip_prefix("+:")) {
            (Some(pattern), _) => (true, pattern),
            (None, pattern) => (false, pattern.unwrap_or(key)),
        };
        let selector = Selector::Pattern(Pattern::from_start(path.clone(), pattern)?);
        let format = if skipped {
            LayerFormat::Float
        } else {
            format(&Fields::new(overrides, path)?.overriding(root))?
        };
        rules.push(selector, format)?;
    }
    Ok(())
}

/// Refuses rotated or quantised activations, and packed words of a dtype other than int32.
fn refuse_transforms(root: &Fields<'_>) -> Result<(), ConfigError> {
    if let Some(found) = root.get("rotation") {
        return Err(root.unsupported("rotation", "null: no rotated activations", found));
    }
    if let Some(found) = root.get("activation") {
        return Err(root.unsupported("activation", "null: activations in 16 or 32 bits", found));
    }
    if let Some(found) = root.get("pack_dtype").filter(|dtype| **dtype != "int32") {
        return Err(root.unsupported("pack_dtype", "`int32`", found));
    }
    Ok(())
}
