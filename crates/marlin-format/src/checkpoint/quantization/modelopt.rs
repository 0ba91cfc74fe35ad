//! `quant_method` modelopt and modelopt_fp4, and `hf_quant_config.json`: floats of ModelOpt.
//!
//! | field | means |
//! |---|---|
//! | `quantization` | in `hf_quant_config.json`, the object with the other fields |
//! | `quant_algo` | `FP8`: e4m3, one scale for a weight; `FP8_PER_CHANNEL_PER_TOKEN`: one for each output feature; `NVFP4`, `W4A16_NVFP4`: e2m1 in groups of 16; `MIXED_PRECISION`: the next field |
//! | `quantized_layers` | by layer, its `quant_algo`; other layers are not quantised |
//! | `group_size` | 16, of NVFP4 |
//! | `exclude_modules`, otherwise `ignore` | names of modules that are not quantised, with the wildcards `*` and `?` |
//!
//! With FP8, activations may be rounded to e4m3, too, with a scale for each row
//! ([`QuantSpec::fp8_activations`](crate::QuantSpec)); beside NVFP4 they keep their bits.
//! `kv_cache_quant_algo` and `kv_cache_scheme` are ignored: a cache in e4m3 has a scale for each
//! position of a head here, which it computes itself.
//!
//! Sources: ModelOpt `torch/export/{unified_export_hf,convert_hf_config}.py`; vLLM
//! `quantization/modelopt.py`.

use super::fields::Fields;
use super::pattern::Pattern;
use super::rules::{Rules, Selector};
use crate::checkpoint::{ConfigError, Fp4Format, Fp8Config, Fp8Format, LayerFormat};

/// The field of `hf_quant_config.json` that holds the config.
pub(super) const NESTED: &str = "quantization";
const ALGORITHM: &str = "quant_algo";
const MIXED: &str = "MIXED_PRECISION";

/// Returns the rules of a ModelOpt config.
pub(super) fn rules(root: &Fields<'_>) -> Result<Rules, ConfigError> {
    match root.object(NESTED)? {
        Some(nested) => rules_of(&nested),
        None => rules_of(root),
    }
}

fn rules_of(root: &Fields<'_>) -> Result<Rules, ConfigError> {
    let mut rules = Rules::default();
    if let Some((field, _)) = root.first(&["exclude_modules", "ignore"]) {
        for entry in root.strings(field)?.unwrap_or_default() {
            let selector = match entry.contains(['*', '?']) {
                true => Selector::Pattern(Pattern::wildcards(root.path(field), entry)?),
                false => Selector::Module(entry.into()),
            };
            rules.push(selector, LayerFormat::Float)?;
        }
    }
    if root.text(ALGORITHM)? != Some(MIXED) {
        rules.push(Selector::Any, layer_format(root)?)?;
        return Ok(rules);
    }
    let layers = root
        .object("quantized_layers")?
        .ok_or_else(|| root.missing("quantized_layers", "an object"))?;
    for (layer, fields) in layers.entries() {
        let format = layer_format(&Fields::new(fields, layers.path(layer))?)?;
        rules.push(Selector::Name(layer.into()), format)?;
    }
    Ok(rules)
}

/// Returns the format of the layers with these fields.
fn layer_format(fields: &Fields<'_>) -> Result<LayerFormat, ConfigError> {
    const ALGORITHMS: &str = "`FP8`, `FP8_PER_CHANNEL_PER_TOKEN`, `NVFP4`, `W4A16_NVFP4` or, for the whole config, `MIXED_PRECISION`";
    let algorithm = fields
        .text(ALGORITHM)?
        .ok_or_else(|| fields.missing(ALGORITHM, ALGORITHMS))?;
    match algorithm {
        "FP8" | "FP8_PER_CHANNEL_PER_TOKEN" => Ok(LayerFormat::Fp8(Fp8Format {
            config: Fp8Config::ModelOpt,
            blocks: false,
            activations: true,
        })),
        "NVFP4" | "W4A16_NVFP4" => match fields.integer("group_size")? {
            None | Some(16) => Ok(LayerFormat::Fp4(Fp4Format::ModelOptNvFp4)),
            Some(found) => Err(fields.unsupported("group_size", "16 for NVFP4", &found.into())),
        },
        found => Err(fields.unsupported(ALGORITHM, ALGORITHMS, &found.into())),
    }
}
