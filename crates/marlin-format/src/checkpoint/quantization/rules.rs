//! Rules that every config reduces to. The first rule that selects a layer takes effect.

use std::collections::HashMap;

use serde_json::Value;

use super::fields::Fields;
use super::pattern::Pattern;
use crate::checkpoint::{ConfigError, LayerFormat};

/// The maximum number of patterns and other entries that are compared one by one with every layer.
/// Published configs have hundreds.
const MAX_TRIED: usize = 4096;

/// A list of rules in order of precedence.
#[derive(Debug, Clone, Default)]
pub(super) struct Rules {
    /// The format for each layer name, and the number of other rules that take precedence over it.
    names: HashMap<String, (usize, LayerFormat)>,
    others: Vec<Rule>,
    /// The number of entries in `others` that are compared with every layer.
    tried: usize,
}

/// The format of the layers that a selector selects.
#[derive(Debug, Clone)]
struct Rule {
    selector: Selector,
    format: LayerFormat,
}

impl Rules {
    /// Adds a rule after the existing rules.
    ///
    /// # Errors
    /// [`ConfigError::TooManyPatterns`] if there are too many entries to compare with every layer.
    pub fn push(&mut self, selector: Selector, format: LayerFormat) -> Result<(), ConfigError> {
        self.tried += match &selector {
            Selector::Name(_) => 0,
            Selector::OutsideBlocks(names) | Selector::OutsideModules(names) => names.len(),
            _ => 1,
        };
        if self.tried > MAX_TRIED {
            return Err(ConfigError::TooManyPatterns { limit: MAX_TRIED });
        }
        match selector {
            // The first of two rules for the same name takes effect.
            Selector::Name(name) => {
                self.names
                    .entry(name)
                    .or_insert((self.others.len(), format));
            }
            selector => self.others.push(Rule { selector, format }),
        }
        Ok(())
    }

    /// Returns the format of a layer from the first rule that selects it.
    ///
    /// # Errors
    /// [`ConfigError::Match`] if a match exceeds the limit of steps.
    pub fn format(&self, layer: &str) -> Result<Option<LayerFormat>, ConfigError> {
        let named = self.names.get(layer);
        let before = named.map_or(self.others.len(), |&(before, _)| before);
        for rule in &self.others[..before] {
            if rule.selector.selects(layer)? {
                return Ok(Some(rule.format));
            }
        }
        Ok(named.map(|&(_, format)| format))
    }

    /// Returns the formats of all rules, those of single layers first.
    pub fn formats(&self) -> impl DoubleEndedIterator<Item = LayerFormat> {
        let mut named: Vec<_> = self.names.values().copied().collect();
        named.sort_by_key(|&(before, format)| (before, format.to_string()));
        let named = named.into_iter().map(|(_, format)| format);
        named.chain(self.others.iter().map(|rule| rule.format))
    }
}

/// The layers that a rule applies to.
#[derive(Debug, Clone)]
pub(super) enum Selector {
    /// The layer with this name.
    Name(String),
    /// Layers whose name matches the pattern.
    Pattern(Pattern),
    /// Layers whose name contains this text, which need not begin or end at a dot.
    Containing(String),
    /// The module with this name, and the layers in it.
    Module(String),
    /// Layers whose name ends with this text, which need not begin at a dot.
    Ending(String),
    /// The output head.
    OutputHead,
    /// Layers outside the modules with these names, except the output head.
    OutsideBlocks(Vec<String>),
    /// Layers whose names contain none of these module names, except the output head. Module names
    /// are given without the prefix of their block.
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
            Self::Module(module) => starts_with_module(layer, module),
            Self::Ending(end) => layer.ends_with(end.as_str()),
            Self::OutputHead => is_output_head(layer),
            Self::OutsideBlocks(blocks) => {
                !is_output_head(layer)
                    && !blocks.iter().any(|block| starts_with_module(layer, block))
            }
            Self::OutsideModules(modules) => {
                !is_output_head(layer) && !modules.iter().any(|module| has_module(layer, module))
            }
            Self::Any => true,
        })
    }
}

/// Adds the rule for layers outside the blocks that one of these fields names. The field is a list
/// or a string separated by commas.
pub(super) fn push_outside_blocks(
    rules: &mut Rules,
    root: &Fields<'_>,
    fields: &[&str],
) -> Result<(), ConfigError> {
    let Some((name, found)) = root.first(fields) else {
        return Ok(());
    };
    let blocks = match found {
        Value::String(names) => names.split(',').map(str::trim).collect(),
        _ => root.strings(name)?.unwrap_or_default(),
    };
    let blocks: Vec<String> = blocks
        .into_iter()
        .filter(|block| !block.is_empty())
        .map(String::from)
        .collect();
    // An empty list means no restriction.
    if blocks.is_empty() {
        Ok(())
    } else {
        rules.push(Selector::OutsideBlocks(blocks), LayerFormat::Float)
    }
}

fn is_output_head(layer: &str) -> bool {
    layer.rsplit('.').next() == Some("lm_head")
}

/// Returns true if the first components of a layer's name are those of `module`.
fn starts_with_module(layer: &str, module: &str) -> bool {
    layer
        .strip_prefix(module)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns true if a layer's name contains the components of `module` in sequence.
fn has_module(layer: &str, module: &str) -> bool {
    let starts = std::iter::once(0).chain(layer.match_indices('.').map(|(dot, _)| dot + 1));
    starts
        .into_iter()
        .any(|start| starts_with_module(&layer[start..], module))
}
