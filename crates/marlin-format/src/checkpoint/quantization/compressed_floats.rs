//! The `weights` of a compressed-tensors group whose values are floats.
//!
//! | format | `num_bits` | `strategy` | `group_size`, `block_structure` |
//! |---|---|---|---|
//! | `float-quantized` | 8 | `tensor`, `channel` | null, or -1 for `channel` |
//! | `float-quantized` | 8 | `block` | `[128, 128]` |
//! | `nvfp4-pack-quantized` | 4 | `tensor_group` | 16 |
//! | `mxfp4-pack-quantized` | 4 | `group` | 32 |
//!
//! `type` is float, and weights are symmetric. `scale_dtype` and `zp_dtype` are ignored: the
//! tensors decide.

use serde_json::{Value, json};

use super::fields::Fields;
use crate::checkpoint::{ConfigError, Fp4Format, Fp8Config, Fp8Format};

/// Returns the format of a group with the format `float-quantized`.
/// `activations` is true if it rounds activations to e4m3.
pub(super) fn fp8_format(
    weights: &Fields<'_>,
    activations: bool,
) -> Result<Fp8Format, ConfigError> {
    const BLOCKS: &str = "block_structure";
    check_floats(weights, 8, "8 for `float-quantized`")?;
    let group = weights.integer("group_size")?;
    let structure = weights.get(BLOCKS);
    let blocks = match weights.text("strategy")? {
        // Without a strategy, the group size implies one, as in the Python package.
        None | Some("tensor" | "channel") => false,
        Some("block") => true,
        Some(found) => {
            return Err(weights.unsupported(
                "strategy",
                "`tensor`, `channel` or `block` for `float-quantized`",
                &found.into(),
            ));
        }
    };
    if let Some(size) = group.filter(|&size| size != -1) {
        return Err(weights.unsupported("group_size", "null for `float-quantized`", &size.into()));
    }
    match structure {
        None if blocks => Err(weights.missing(BLOCKS, "[128, 128]")),
        // Older versions wrote a text.
        Some(found) if blocks && *found != json!([128, 128]) && *found != "128x128" => {
            Err(weights.unsupported(BLOCKS, "[128, 128]", found))
        }
        _ => Ok(Fp8Format {
            config: Fp8Config::CompressedTensors,
            blocks,
            activations,
        }),
    }
}

/// Returns the format of a group with one of the formats of FP4, after a check of its fields.
pub(super) fn fp4_format(
    weights: &Fields<'_>,
    format: Fp4Format,
) -> Result<Fp4Format, ConfigError> {
    let (bits, strategy, strategies, size, sizes) = match format {
        Fp4Format::MxFp4Packed => (
            "4 for `mxfp4-pack-quantized`",
            "group",
            "`group` for `mxfp4-pack-quantized`",
            32,
            "32 for `mxfp4-pack-quantized`",
        ),
        _ => (
            "4 for `nvfp4-pack-quantized`",
            "tensor_group",
            "`tensor_group` for `nvfp4-pack-quantized`",
            16,
            "16 for `nvfp4-pack-quantized`",
        ),
    };
    check_floats(weights, 4, bits)?;
    match weights.text("strategy")? {
        None => return Err(weights.missing("strategy", strategies)),
        Some(found) if found != strategy => {
            return Err(weights.unsupported("strategy", strategies, &found.into()));
        }
        Some(_) => {}
    }
    match weights.integer("group_size")? {
        None => Err(weights.missing("group_size", sizes)),
        Some(found) if found != size => {
            Err(weights.unsupported("group_size", sizes, &found.into()))
        }
        Some(_) => Ok(format),
    }
}

/// Checks the fields that all formats of floats have in common.
fn check_floats(
    weights: &Fields<'_>,
    bits: i64,
    expected: &'static str,
) -> Result<(), ConfigError> {
    match weights.text("type")? {
        Some("float") => {}
        Some(found) => return Err(weights.unsupported("type", "`float`", &found.into())),
        None => return Err(weights.missing("type", "`float`")),
    }
    match weights.integer("num_bits")? {
        Some(found) if found == bits => {}
        Some(found) => return Err(weights.unsupported("num_bits", expected, &found.into())),
        None => return Err(weights.missing("num_bits", expected)),
    }
    for (field, accepted, expected) in [
        ("symmetric", Value::Bool(true), "true for floats"),
        ("dynamic", Value::Bool(false), "false"),
    ] {
        if let Some(found) = weights.get(field).filter(|found| **found != accepted) {
            return Err(weights.unsupported(field, expected, found));
        }
    }
    match weights.get("actorder") {
        None | Some(Value::Bool(false)) => Ok(()),
        Some(Value::String(order)) if ["weight", "static"].contains(&order.as_str()) => Ok(()),
        Some(found) => Err(weights.unsupported("actorder", "`weight` or null for floats", found)),
    }
}
