//! `quant_method` mxfp4, as in gpt-oss: the experts are MXFP4, all others are floats.
//!
//! The field `modules_to_not_convert` lists the others, and is not read.
//!
//! Source: transformers `utils/quantization_config.py`, `integrations/mxfp4.py`.

use super::rules::{Rules, Selector};
use crate::checkpoint::{ConfigError, LayerFormat};

/// The ends of the names of the stacks of experts.
const STACKS: [&str; 2] = [".experts.gate_up_proj", ".experts.down_proj"];

/// Returns the rules of a config of `quant_method: mxfp4`.
pub(super) fn rules() -> Result<Rules, ConfigError> {
    let mut rules = Rules::default();
    for stack in STACKS {
        rules.push(Selector::Ending(stack.into()), LayerFormat::StackedMxFp4)?;
    }
    Ok(rules)
}
