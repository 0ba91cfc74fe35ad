//! The selection of parameters for a conversion, and the spec of each.

use super::survey::Candidate;
use super::{SkipReason, WeightQuantizer, Weights};
use crate::Error;
use marlin_format::{FormatError, QuantSpec, Sparsity, WeightDescriptor, WeightFormat};
use regex::Regex;

/// The choice for one parameter.
pub(super) enum Choice {
    /// The parameter is converted to this spec; with `None`, the spec is chosen when K is known.
    Convert(Option<QuantSpec>),
    Skipped(SkipReason),
}

/// The rules of a [`WeightQuantizer`], with compiled patterns.
pub(super) struct Rules {
    include: Vec<Regex>,
    exclude: Vec<Regex>,
    specs: Vec<(Regex, QuantSpec)>,
    spec: QuantSpec,
    pub sparsity: Sparsity,
}

impl Rules {
    pub fn new(quantizer: &WeightQuantizer) -> Result<Self, Error> {
        let compile = |pattern: &String| {
            Regex::new(pattern).map_err(|source| Error::Pattern {
                pattern: pattern.clone(),
                source: Box::new(source),
            })
        };
        Ok(Self {
            include: quantizer
                .include
                .iter()
                .map(compile)
                .collect::<Result<_, _>>()?,
            exclude: quantizer
                .exclude
                .iter()
                .map(compile)
                .collect::<Result<_, _>>()?,
            specs: quantizer
                .specs
                .iter()
                .map(|(pattern, spec)| Ok((compile(pattern)?, *spec)))
                .collect::<Result<_, Error>>()?,
            spec: quantizer.spec,
            sparsity: quantizer.sparsity,
        })
    }

    pub fn patterns(&self) -> impl Iterator<Item = &Regex> {
        self.include
            .iter()
            .chain(&self.exclude)
            .chain(self.specs.iter().map(|(pattern, _)| pattern))
    }

    pub fn choice(&self, candidate: &Candidate, weights: Weights) -> Choice {
        let Candidate {
            path,
            shape,
            skipped,
            ..
        } = candidate;
        let matching = |patterns: &[Regex]| {
            patterns
                .iter()
                .find(|pattern| pattern.is_match(path))
                .map(Regex::to_string)
        };
        if let Some(SkipReason::NotLinear) = skipped {
            return Choice::Skipped(SkipReason::NotLinear);
        }
        if let Some(pattern) = matching(&self.exclude) {
            return Choice::Skipped(SkipReason::Excluded { pattern });
        }
        if !self.include.is_empty() && matching(&self.include).is_none() {
            return Choice::Skipped(SkipReason::NotIncluded);
        }
        if let Some(reason) = skipped {
            return Choice::Skipped(reason.clone());
        }
        // A weight that is still lazy may be stored transposed: its K is known only when it is
        // converted.
        if weights == Weights::Unloaded {
            return Choice::Convert(None);
        }
        match self.spec_of(path, shape[0], shape[1]) {
            Ok(spec) => Choice::Convert(Some(spec)),
            Err(error) => Choice::Skipped(SkipReason::Shape { error }),
        }
    }

    /// Returns the spec of the layer [K, N] at `path`, or an error if no weight can have that
    /// shape.
    pub fn spec_of(&self, path: &str, k: usize, n: usize) -> Result<QuantSpec, FormatError> {
        WeightDescriptor::plain(
            WeightFormat::dense(self.spec).with_sparsity(self.sparsity),
            k,
            n,
        )
        .check()?;
        Ok(self
            .specs
            .iter()
            .find(|(pattern, _)| pattern.is_match(path))
            .map_or(self.spec, |(_, spec)| *spec))
    }
}
