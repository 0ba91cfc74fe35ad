//! What every config comes down to: rules, of which the first that selects a layer counts.

use super::json::{Fields, Json};
use super::pattern::Pattern;
use crate::checkpoint::{ConfigError, LayerFormat};

/// How the layers of a selector are held.
#[derive(Debug, Clone)]
pub(super) struct Rule {
    pub selector: Selector,
    pub format: LayerFormat,
}

/// Which layers a rule is for.
#[derive(Debug, Clone)]
pub(super) enum Selector {
    /// The layer of this name.
    Name(String),
    /// Layers whose name matches.
    Pattern(Pattern),
    /// Layers whose name has this as a part, which need not begin or end where a module's name does.
    Containing(String),
    /// The output head.
    OutputHead,
    /// Layers, but for the output head, that lie in none of the modules of these names.
    OutsideBlocks(Vec<String>),
    /// Layers, but for the output head, whose names have none of these in them. They are names without the prefix of their block.
    OutsideModules(Vec<String>),
    /// Every linear layer.
    Any,
}

impl Selector {
    pub fn selects(&self, layer: &str) -> Result<bool, ConfigError> {
        Ok(match self {
            Self::Name(name) => name == layer,
            Self::Pattern(pattern) => pattern.matches(layer)?,
            Self::Containing(part) => layer.contains(part.as_str()),
            Self::OutputHead => is_output_head(layer),
            Self::OutsideBlocks(blocks) => !is_output_head(layer) && !blocks.iter().any(|block| starts_with_module(layer, block)),
            Self::OutsideModules(modules) => !is_output_head(layer) && !modules.iter().any(|module| has_module(layer, module)),
            Self::Any => true,
        })
    }
}

/// The rule for what lies outside of the blocks that one of these fields names, in a list or separated by commas.
pub(super) fn outside_blocks_rule(root: &Fields<'_>, fields: &[&str]) -> Result<Option<Rule>, ConfigError> {
    let Some((name, found)) = root.first(fields) else { return Ok(None) };
    let blocks = match found {
        Json::String(names) => names.split(',').map(str::trim).collect(),
        _ => root.strings(name)?.unwrap_or_default(),
    };
    let blocks: Vec<String> = blocks.into_iter().filter(|block| !block.is_empty()).map(String::from).collect();
    // No names are no restriction.
    Ok((!blocks.is_empty()).then_some(Rule { selector: Selector::OutsideBlocks(blocks), format: LayerFormat::Float }))
}

fn is_output_head(layer: &str) -> bool {
    layer.rsplit('.').next() == Some("lm_head")
}

/// Whether the first parts of a layer's name are those of `module`.
fn starts_with_module(layer: &str, module: &str) -> bool {
    layer.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Whether the parts of `module` are in a layer's name, one after the other.
fn has_module(layer: &str, module: &str) -> bool {
    let starts = std::iter::once(0).chain(layer.match_indices('.').map(|(dot, _)| dot + 1));
    starts.into_iter().any(|start| starts_with_module(&layer[start..], module))
}
