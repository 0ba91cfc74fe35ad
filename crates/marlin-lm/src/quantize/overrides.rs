//! Overrides: layers that are quantised differently from the rest.

use std::fmt;
use std::str::FromStr;

use marlin_format::checkpoint::ConfigError;
use marlin_format::checkpoint::compressed_tensors::LayerPattern;
use marlin_format::{GroupSize, QuantSpec, WeightValue};

use crate::ModelError;

/// A change to how some layers are quantised. As text it is `skip`, the name of a format of floats,
/// such as `fp8`, or `bits:8`, `group:g32`, or both with a comma.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Override {
    /// The layers are skipped, and keep their float weights.
    Skip,
    /// The layers are quantised to a format of floats, one of [`QuantSpec::FLOAT_FORMATS`].
    Format(QuantSpec),
    /// The layers are quantised with another spec.
    Spec {
        /// The width of the values, if it differs.
        value: Option<WeightValue>,
        /// The group size, if it differs.
        group: Option<GroupSize>,
    },
}

/// A text that is not a valid override.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{found}` is no override: {reason}; it is `skip`, `fp8`, `mxfp4`, `nvfp4`, or `bits:4`, `bits:8`, `group:g32`, `group:g64`, `group:g128`, `group:channel`, with a comma between bits and group"
)]
pub struct OverrideError {
    found: String,
    reason: String,
}

impl FromStr for Override {
    type Err = OverrideError;

    fn from_str(text: &str) -> Result<Self, OverrideError> {
        let invalid = |reason: String| OverrideError {
            found: text.into(),
            reason,
        };
        if text.trim() == "skip" {
            return Ok(Self::Skip);
        }
        if let Some(spec) = QuantSpec::of_float_format(text.trim()) {
            return Ok(Self::Format(spec));
        }
        let (mut value, mut group) = (None, None);
        for setting in text.split(',').map(str::trim) {
            let is_second =
                match setting.split_once(':') {
                    Some(("bits", width)) => {
                        let width: i64 = width
                            .parse()
                            .map_err(|_| invalid(format!("`{width}` is no number")))?;
                        value
                            .replace(
                                WeightValue::try_from(width)
                                    .map_err(|error| invalid(error.to_string()))?,
                            )
                            .is_some()
                    }
                    Some(("group", size)) => group
                        .replace(size.parse().map_err(|error: marlin_format::FormatError| {
                            invalid(error.to_string())
                        })?)
                        .is_some(),
                    _ if setting == "skip" => {
                        return Err(invalid(
                            "a layer that is skipped has no other settings".into(),
                        ));
                    }
                    _ => return Err(invalid(format!("`{setting}` is no setting"))),
                };
            if is_second {
                return Err(invalid("a setting comes twice".into()));
            }
        }
        Ok(Self::Spec { value, group })
    }
}

impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Skip => "skip".into(),
            Self::Format(spec) => spec.float_format().unwrap_or_default().into(),
            Self::Spec { value, group } => {
                let settings = [
                    value.map(|value| format!("bits:{}", value.bits())),
                    group.map(|group| format!("group:{group}")),
                ];
                settings.into_iter().flatten().collect::<Vec<_>>().join(",")
            }
        };
        f.pad(&text)
    }
}

/// The exclusions and overrides, with compiled patterns.
pub(super) struct Overrides {
    spec: QuantSpec,
    entries: Vec<Entry>,
}

struct Entry {
    /// The field of [`QuantizeOptions`](super::QuantizeOptions) that contains the entry.
    option: &'static str,
    pattern: LayerPattern,
    change: Override,
    /// True once the entry has matched a layer, including layers that an earlier entry matches.
    is_used: bool,
}

const EXCLUDE: &str = "exclude";

impl Overrides {
    /// Compiles the patterns. `spec` applies to layers that no entry matches; exclusions take
    /// precedence over overrides.
    pub fn new(
        spec: QuantSpec,
        exclude: &[String],
        overrides: &[(String, Override)],
    ) -> Result<Self, ConfigError> {
        let entry = |option, pattern: &str, change| {
            Ok(Entry {
                option,
                pattern: LayerPattern::new(pattern)?,
                change,
                is_used: false,
            })
        };
        let exclude = exclude
            .iter()
            .map(|pattern| entry(EXCLUDE, pattern, Override::Skip));
        let overrides = overrides
            .iter()
            .map(|(pattern, change)| entry("override", pattern, *change));
        Ok(Self {
            spec,
            entries: exclude
                .chain(overrides)
                .collect::<Result<_, ConfigError>>()?,
        })
    }

    /// Returns the spec of a layer, from the first entry that matches one of its names; `None` if
    /// the layer is skipped.
    pub fn spec_of(&mut self, names: [&str; 2]) -> Option<QuantSpec> {
        let mut first = None;
        for entry in self
            .entries
            .iter_mut()
            .filter(|entry| names.iter().any(|name| entry.pattern.matches(name)))
        {
            entry.is_used = true;
            first.get_or_insert(entry.change);
        }
        match first {
            None => Some(self.spec),
            Some(Override::Skip) => None,
            Some(Override::Format(spec)) => Some(spec),
            Some(Override::Spec { value, group }) => Some(
                self.spec
                    .with_value(value.unwrap_or(self.spec.value))
                    .with_group(group.unwrap_or(self.spec.scales.group)),
            ),
        }
    }

    /// Records a layer that overrides do not apply to, such as the head: an exclusion of it counts
    /// as used.
    pub fn stays(&mut self, name: &str) {
        for entry in self
            .entries
            .iter_mut()
            .filter(|entry| entry.option == EXCLUDE && entry.pattern.matches(name))
        {
            entry.is_used = true;
        }
    }

    /// Returns true if an exclusion matches a layer.
    pub fn excludes(&self, name: &str) -> bool {
        self.entries
            .iter()
            .any(|entry| entry.option == EXCLUDE && entry.pattern.matches(name))
    }

    /// Checks, after all layers are known, that each entry has matched a layer.
    pub fn check_used(&self) -> Result<(), ModelError> {
        match self.entries.iter().find(|entry| !entry.is_used) {
            Some(entry) => Err(ModelError::PatternOfNone {
                option: entry.option,
                pattern: entry.pattern.entry().into(),
            }),
            None => Ok(()),
        }
    }
}
