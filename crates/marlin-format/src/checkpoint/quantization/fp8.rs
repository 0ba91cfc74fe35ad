//! `quant_method` fp8 and fbgemm_fp8: 8-bit floats in every layer, except for skipped modules.
//!
//! | field | method | meaning |
//! |---|---|---|
//! | `weight_block_size` | fp8 | `[128, 128]`: a scale for each block; absent or null: one scale for a weight, or for each output feature |
//! | `fmt` | fp8 | `e4m3` (default) |
//! | `scale_fmt` | fp8 | `float` or `ue8m0`; the dtype of the scales decides |
//! | `activation_scheme` | fp8 | `dynamic` or `static`: activations are rounded to e4m3, by other programs with a scale for each row or one of the file; here always with a scale for each row ([`QuantSpec::fp8_activations`](crate::QuantSpec)) |
//! | `modules_to_not_convert`, otherwise `ignored_layers` | both | names, ends of names, or patterns of modules that are not quantised |
//!
//! The output head is not quantised, whether a list names it or not.
//!
//! Sources: transformers `utils/quantization_config.py`, `quantizers/quantizers_utils.py`; vLLM
//! `quantization/{fp8,fbgemm_fp8}.py`.

use serde_json::{Value, json};

use super::fields::Fields;
use super::pattern::{Pattern, is_pattern};
use super::rules::{Rules, Selector};
use crate::checkpoint::{ConfigError, Fp8Config, Fp8Format, LayerFormat};

/// Returns the rules of a config of `quant_method: fp8`.
pub(super) fn fp8_rules(root: &Fields<'_>) -> Result<Rules, ConfigError> {
    const BLOCKS: &str = "weight_block_size";
    for (field, accepted, expected) in [
        ("fmt", &["e4m3"][..], "`e4m3`"),
        ("scale_fmt", &["float", "ue8m0"], "`float` or `ue8m0`"),
        (
            "activation_scheme",
            &["dynamic", "static"],
            "`dynamic` or `static`",
        ),
    ] {
        match root.get(field) {
            Some(Value::String(text)) if accepted.contains(&text.to_lowercase().as_str()) => {}
            None => {}
            Some(found) => return Err(root.unsupported(field, expected, found)),
        }
    }
    let blocks = match root.get(BLOCKS) {
        None => false,
        Some(found) if *found == json!([128, 128]) => true,
        Some(found) => return Err(root.unsupported(BLOCKS, "[128, 128] or null", found)),
    };
    rules(root, Fp8Config::Fp8, blocks)
}

/// Returns the rules of a config of `quant_method: fbgemm_fp8`.
pub(super) fn fbgemm_rules(root: &Fields<'_>) -> Result<Rules, ConfigError> {
    rules(root, Fp8Config::FbgemmFp8, false)
}

fn rules(root: &Fields<'_>, config: Fp8Config, blocks: bool) -> Result<Rules, ConfigError> {
    let mut rules = Rules::default();
    rules.push(Selector::OutputHead, LayerFormat::Float)?;
    let skipped = root.first(&["modules_to_not_convert", "ignored_layers"]);
    if let Some((field, _)) = skipped {
        for entry in root.strings(field)?.unwrap_or_default() {
            push_skipped(&mut rules, root.path(field), entry)?;
        }
    }
    rules.push(
        Selector::Any,
        LayerFormat::Fp8(Fp8Format {
            config,
            blocks,
            activations: true,
        }),
    )?;
    Ok(rules)
}

/// Adds the rules for an entry of the list of skipped modules. vLLM treats an entry as the name of
/// a layer, transformers as the name of a module, the end of a name, or a pattern.
fn push_skipped(rules: &mut Rules, field: String, entry: &str) -> Result<(), ConfigError> {
    if is_pattern(entry) {
        let pattern = Pattern::module(field, entry)?;
        return rules.push(Selector::Pattern(pattern), LayerFormat::Float);
    }
    rules.push(Selector::Module(entry.into()), LayerFormat::Float)?;
    rules.push(Selector::Ending(entry.into()), LayerFormat::Float)
}
