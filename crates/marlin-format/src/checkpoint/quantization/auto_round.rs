//! `quant_method` auto-round: the tensors of GPTQ, AWQ or compressed-tensors' FP4, under
//! AutoRound's own config.
//!
//! | field | means |
//! |---|---|
//! | `bits`, `group_size`, `sym` | as in GPTQ; default of `sym`: true |
//! | `packing_format` | `auto_round:auto_gptq` (default, if symmetric): GPTQ v1; `auto_round` or `auto_round:gptqmodel`: GPTQ v2; `auto_round:auto_awq`: AWQ, always with zero points |
//! | `data_type` | `int` (default); `mx_fp` or `nv_fp` and 4 bits: compressed-tensors' `mxfp4-pack-quantized` or `nvfp4-pack-quantized`, with the packing format `auto_round:llm_compressor` |
//! | `act_bits` | 16 or more; less for floats, whose activations keep 16 or 32 bits here |
//! | `extra_config` | overrides by layer name or pattern; layers of 16 bits and more are not quantised. The entry of a layer's name takes precedence over patterns |
//! | `block_name_to_quantize`, `to_quant_block_names` | names of blocks, as a list or separated by commas; layers outside these blocks are not quantised |
//!
//! The output head is quantised only if `extra_config` has an entry with its name.
//!
//! Sources: AutoRound `export/export_to_autoround/export.py`,
//! `inference/{convert_model,backend,utils}.py`; vLLM `quantization/auto_round.py`.

use serde_json::Value;

use super::fields::Fields;
use super::pattern::{Pattern, is_pattern};
use super::rules::{Rules, Selector, push_outside_blocks};
use super::spec;
use crate::checkpoint::{ConfigError, Fp4Format, GptqFormat, GptqVersion, LayerFormat};

/// The smallest number of bits of a layer that counts as not quantised.
const FLOAT_BITS: i64 = 16;

/// Returns the rules of an AutoRound config.
pub(super) fn rules(root: &Fields<'_>) -> Result<Rules, ConfigError> {
    for transform in ["rotation_config", "spinquant_config"] {
        if let Some(found) = root
            .get(transform)
            .filter(|found| **found != Value::Object(Default::default()))
        {
            return Err(root.unsupported(transform, "null: no rotated activations", found));
        }
    }
    let (mut rules, mut matched) = (Rules::default(), Vec::new());
    if let Some(extra) = root.object("extra_config")? {
        for (key, overrides) in extra.entries() {
            let path = extra.path(key);
            let format = layer_format(&Fields::new(overrides, path.clone())?.overriding(root))?;
            match is_pattern(key) {
                true => matched.push((path, key, format)),
                false => rules.push(Selector::Name(key.into()), format)?,
            }
        }
    }
    rules.push(Selector::OutputHead, LayerFormat::Float)?;
    push_outside_blocks(
        &mut rules,
        root,
        &[
            "block_name_to_quantize",
            "to_quant_block_names",
            "quant_block_list",
        ],
    )?;
    for (path, key, format) in matched {
        rules.push(Selector::Pattern(Pattern::anywhere(path, key)?), format)?;
    }
    rules.push(Selector::Any, layer_format(root)?)?;
    Ok(rules)
}

fn layer_format(fields: &Fields<'_>) -> Result<LayerFormat, ConfigError> {
    const PACKINGS: &str =
        "`auto_round:auto_gptq`, `auto_round:auto_awq`, `auto_round:gptqmodel` or `auto_round`";
    if fields
        .integer("bits")?
        .is_some_and(|bits| bits >= FLOAT_BITS)
    {
        return Ok(LayerFormat::Float);
    }
    match fields.text("data_type")? {
        None | Some("int") => {}
        // What follows these prefixes says how scales were chosen.
        Some(kind) if kind.starts_with("mx_fp") => return fp4(fields, Fp4Format::MxFp4Packed),
        Some(kind) if kind.starts_with("nv_fp") => return fp4(fields, Fp4Format::NvFp4Packed),
        Some(found) => {
            return Err(fields.unsupported(
                "data_type",
                "`int`, `mx_fp` or `nv_fp`",
                &found.into(),
            ));
        }
    }
    if let Some(bits) = fields
        .integer("act_bits")?
        .filter(|&bits| bits < FLOAT_BITS)
    {
        return Err(fields.unsupported(
            "act_bits",
            "16 or more: activations in 16 or 32 bits",
            &bits.into(),
        ));
    }
    let symmetric = fields.boolean("sym")?.unwrap_or(true);
    let spec = spec::spec(
        spec::bits(fields, &["bits"])?,
        spec::group_size(fields, &["group_size"])?,
        symmetric,
    );
    let version = match fields.text("packing_format")? {
        // For symmetric weights, versions 1 and 2 are the same.
        None if !symmetric => return Err(fields.missing("packing_format", PACKINGS)),
        None | Some("auto" | "auto_round:auto_gptq" | "auto_round:gptq") => GptqVersion::V1,
        Some("auto_round" | "auto_round:gptqmodel") => GptqVersion::V2,
        Some("auto_round:auto_awq" | "auto_round:awq") => {
            // AutoRound's AWQ packer also writes zero points for symmetric weights.
            return spec::check_awq(fields, &["bits"], spec)
                .map(|()| LayerFormat::Awq(spec.with_zero_points()));
        }
        Some(found) => return Err(fields.unsupported("packing_format", PACKINGS, &found.into())),
    };
    Ok(LayerFormat::Gptq(GptqFormat {
        spec,
        version,
        act_order: false,
    }))
}

/// Returns the format of a layer of 4-bit floats with these fields.
fn fp4(fields: &Fields<'_>, format: Fp4Format) -> Result<LayerFormat, ConfigError> {
    const PACKING: &str = "auto_round:llm_compressor";
    let group = format.spec().scales.group.as_i64();
    let expected_group = match format {
        Fp4Format::MxFp4Packed => "32 for `mx_fp`",
        _ => "16 for `nv_fp`",
    };
    for (field, expected, text) in [
        ("bits", 4, "4 for floats, or 16"),
        ("group_size", group, expected_group),
    ] {
        match fields.integer(field)? {
            Some(found) if found == expected => {}
            Some(found) => return Err(fields.unsupported(field, text, &found.into())),
            None => return Err(fields.missing(field, text)),
        }
    }
    if fields.boolean("sym")? == Some(false) {
        return Err(fields.unsupported("sym", "true for floats", &Value::Bool(false)));
    }
    match fields.text("packing_format")? {
        None | Some(PACKING) => Ok(LayerFormat::Fp4(format)),
        Some(found) => Err(fields.unsupported(
            "packing_format",
            "`auto_round:llm_compressor` for floats",
            &found.into(),
        )),
    }
}
