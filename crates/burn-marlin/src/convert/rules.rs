//! The selection of parameters for a conversion, and the spec of each.

use super::survey::Candidate;
use super::{LeftReason, W4A16, Weights};
use crate::Error;
use marlin_format::{FormatError, QuantSpec, Sparsity, WeightDescriptor, WeightFormat};
use regex::Regex;

/// The choice for one parameter.
pub(super) enum Choice {
    /// Convert to this spec; with `None`, to a spec that is chosen when the weight's K is known.
    Convert(Option<QuantSpec>),
    Left(LeftReason),
}

/// The rules of a [`W4A16`], with compiled patterns.
pub(super) struct Rules {
    include: Vec<Regex>,
    exclude: Vec<Regex>,
    specs: Vec<(Regex, QuantSpec)>,
    spec: QuantSpec,
    pub sparsity: Sparsity,
}

impl Rules {
    pub fn new(w4a16: &W4A16) -> Result<Self, Error> {
        let compile = |pattern: &String| {
            Regex::new(pattern).map_err(|source| Error::Pattern {
                pattern: pattern.clone(),
                source: Box::new(source),
            })
        };
        Ok(Self {
            include: w4a16
                .include
                .iter()
                .map(compile)
                .collect::<Result<_, _>>()?,
            exclude: w4a16
                .exclude
                .iter()
                .map(compile)
                .collect::<Result<_, _>>()?,
            specs: w4a16
                .specs
                .iter()
                .map(|(pattern, spec)| Ok((compile(pattern)?, *spec)))
                .collect::<Result<_, Error>>()?,
            spec: w4a16.spec,
            sparsity: w4a16.sparsity,
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
            path, shape, left, ..
        } = candidate;
        let matching = |patterns: &[Regex]| {
            patterns
                .iter()
                .find(|pattern| pattern.is_match(path))
                .map(Regex::to_string)
        };
        if let Some(LeftReason::NotLinear) = left {
            return Choice::Left(LeftReason::NotLinear);
        }
        if let Some(pattern) = matching(&self.exclude) {
            return Choice::Left(LeftReason::Excluded { pattern });
        }
        if !self.include.is_empty() && matching(&self.include).is_none() {
            return Choice::Left(LeftReason::NotIncluded);
        }
        if let Some(reason) = left {
            return Choice::Left(reason.clone());
        }
        // A weight that is still lazy may be stored transposed: its K is known only when it is
        // converted.
        if weights == Weights::Unloaded {
            return Choice::Convert(None);
        }
        match self.spec_of(path, shape[0], shape[1]) {
            Ok(spec) => Choice::Convert(Some(spec)),
            Err(error) => Choice::Left(LeftReason::Shape { error }),
        }
    }

    /// The spec of a layer [K, N].
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
