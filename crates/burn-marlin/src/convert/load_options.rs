use super::LoadError;
use burn::store::KeyRemapper;
use regex::Regex;

/// Options for loading a checkpoint into a model with
/// [`WeightQuantizer::load_with`](super::WeightQuantizer::load_with).
///
/// ```
/// use burn::store::KeyRemapper;
/// use burn_marlin::convert::LoadOptions;
///
/// // The head of the model shares the embedding's weight, and the checkpoint holds that once.
/// let options = LoadOptions::new(KeyRemapper::new()).allow_missing(r"^lm_head\.weight$");
/// ```
#[derive(Debug, Clone)]
pub struct LoadOptions {
    keys: KeyRemapper,
    missing: Vec<String>,
    fp8_activations: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self::new(KeyRemapper::default())
    }
}

impl LoadOptions {
    /// Creates options with a key map, which renames tensors of the files to parameters of the
    /// model as in Burn's own stores. Every parameter needs a tensor.
    pub fn new(keys: KeyRemapper) -> Self {
        Self {
            keys,
            missing: Vec::new(),
            fp8_activations: true,
        }
    }

    /// Allows the checkpoint to have no tensor for parameters whose path matches `pattern` or
    /// another such pattern; these parameters are unchanged. A pattern is a regular expression,
    /// searched anywhere in the path. [`Report::missing`](super::Report::missing) lists the
    /// parameters.
    pub fn allow_missing(mut self, pattern: impl Into<String>) -> Self {
        self.missing.push(pattern.into());
        self
    }

    /// Keeps activations in their dtype where the checkpoint declares that they are rounded to e4m3
    /// (W8A8).
    pub fn without_fp8_activations(mut self) -> Self {
        self.fp8_activations = false;
        self
    }

    pub(super) fn fp8_activations(&self) -> bool {
        self.fp8_activations
    }

    pub(super) fn keys(&self) -> &KeyRemapper {
        &self.keys
    }

    pub(super) fn optional(&self) -> Result<Optional, LoadError> {
        let compile = |pattern: &String| match Regex::new(pattern) {
            Ok(compiled) => Ok((compiled, false)),
            Err(source) => Err(LoadError::Pattern {
                pattern: pattern.clone(),
                source: Box::new(source),
            }),
        };
        Ok(Optional(
            self.missing.iter().map(compile).collect::<Result<_, _>>()?,
        ))
    }
}

/// The patterns of parameters that may be missing, and whether each pattern has matched a
/// parameter.
pub(super) struct Optional(Vec<(Regex, bool)>);

impl Optional {
    /// Returns true if the parameter at a path may be missing.
    pub fn matches(&mut self, path: &str) -> bool {
        self.0.iter_mut().fold(false, |any, (pattern, matched)| {
            let matches = pattern.is_match(path);
            *matched |= matches;
            any || matches
        })
    }

    /// Returns the patterns that have matched no parameter.
    pub fn unmatched(self) -> Vec<String> {
        self.0
            .into_iter()
            .filter(|(_, matched)| !matched)
            .map(|(pattern, _)| pattern.to_string())
            .collect()
    }
}
