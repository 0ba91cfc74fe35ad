//! The rules that every config reduces to; the first one that selects a layer counts.

use std::collections::HashMap;

use serde_json::Value;

use super::fields::Fields;
use super::pattern::Pattern;
use crate::checkpoint::{ConfigError, LayerFormat};

/// Most patterns and other entries that are tried one by one for every layer: published configs
/// have hundreds.
const MAX_TRIED: usize = 4096;

/// Rules in the order in which they count.
#[derive(Debug, Clone, Default)]
pub(super) struct Rules {
    /// The format of the layers of each name, and the number of other rules that come before it.
    names: HashMap<String, (usize, LayerFormat)>,
    others: Vec<Rule>,
    /// Entries of `others`.
    tried: usize,
}

/// The format of the layers of a selector.
#[derive(Debug, Clone)]
struct Rule {
    selector: Selector,
    format: LayerFormat,
}

impl Rules {
    /// Adds a rule that counts after those that are there.
    ///
    /// # Errors
    /// [`ConfigError::TooManyPatterns`].
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
            // Of two rules for a name the first counts.
            Selector::Name(name) => {
                self.names
                    .entry(name)
                    .or_insert((self.others.len(), format));
            }
            selector => self.others.push(Rule { selector, format }),
        }
        Ok(())
    }

    /// The format of a layer by the first rule that selects it.
    ///
    /// # Errors
    /// [`ConfigError::Match`] where trying takes too many steps.
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

    /// Every format that a rule has, those of single layers first.
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
    /// The layer of this name.
    Name(String),
    /// Layers whose name matches.
    Pattern(Pattern),
    /// Layers whose name has this as a part, which need not begin or end where a module's name
    /// does.
    Containing(String),
    /// The output head.
    OutputHead,
    /// Layers, but for the output head, that lie in none of the modules of these names.
    OutsideBlocks(Vec<String>),
    /// Layers, but for the output head, whose names have none of these in them. They are names
    /// without the prefix of their block.
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

/// Adds the rule for layers outside of the blocks that one of these fields names, in a list or
/// separated by commas.
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
    // No names are no restriction.
    if blocks.is_empty() {
        Ok(())
    } else {
        rules.push(Selector::OutsideBlocks(blocks), LayerFormat::Float)
    }
}

fn is_output_head(layer: &str) -> bool {
    layer.rsplit('.').next() == Some("lm_head")
}

/// Returns true if the first parts of a layer's name are those of `module`.
fn starts_with_module(layer: &str, module: &str) -> bool {
    layer
        .strip_prefix(module)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns true if the parts of `module` are in a layer's name, one after the other.
fn has_module(layer: &str, module: &str) -> bool {
    let starts = std::iter::once(0).chain(layer.match_indices('.').map(|(dot, _)| dot + 1));
    starts
        .into_iter()
        .any(|start| starts_with_module(&layer[start..], module))
}
