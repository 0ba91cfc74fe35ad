//! The rows of K that share a scale.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::FormatError;

/// The number of rows of K (input features) that share one scale in each column (output feature).
///
/// If the group size does not divide K, the last group is incomplete: K = 344 in groups of 32 is 10
/// whole groups and one group of 24 rows.
///
/// The JSON form is the number in the config of a checkpoint: -1, 16, 32, 64 or 128.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub enum GroupSize {
    /// A single group over all of K: one scale for each output channel.
    Channel,
    /// Groups of 16 rows, of NVFP4.
    G16,
    /// Groups of 32 rows.
    G32,
    /// Groups of 64 rows.
    G64,
    /// Groups of 128 rows.
    G128,
}

impl GroupSize {
    /// All group sizes, in descending order.
    pub const ALL: [GroupSize; 5] = [Self::Channel, Self::G128, Self::G64, Self::G32, Self::G16];
    /// The group sizes of integer values, in descending order.
    pub const INTEGERS: [GroupSize; 4] = [Self::Channel, Self::G128, Self::G64, Self::G32];

    /// Returns the number of rows of K in one group of a weight with `k` input features. For
    /// [`Channel`](Self::Channel) this is `k`. The last group may have fewer rows.
    pub fn rows(self, k: usize) -> usize {
        match self {
            Self::Channel => k,
            Self::G16 => 16,
            Self::G32 => 32,
            Self::G64 => 64,
            Self::G128 => 128,
        }
    }

    /// Returns the number of groups along K of a weight with `k` input features, including an
    /// incomplete last group.
    pub fn count(self, k: usize) -> usize {
        match self {
            Self::Channel => 1,
            grouped => k.div_ceil(grouped.rows(k)),
        }
    }

    /// Returns the number of this group size in the config of a checkpoint: -1 for
    /// [`Channel`](Self::Channel).
    pub fn as_i64(self) -> i64 {
        match self {
            Self::Channel => -1,
            Self::G16 => 16,
            Self::G32 => 32,
            Self::G64 => 64,
            Self::G128 => 128,
        }
    }
}

impl TryFrom<i64> for GroupSize {
    type Error = FormatError;

    fn try_from(found: i64) -> Result<Self, FormatError> {
        Self::ALL
            .into_iter()
            .find(|group| group.as_i64() == found)
            .ok_or(FormatError::GroupSize { found })
    }
}

impl From<GroupSize> for i64 {
    fn from(group: GroupSize) -> i64 {
        group.as_i64()
    }
}

impl fmt::Display for GroupSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Channel => "channel",
            Self::G16 => "g16",
            Self::G32 => "g32",
            Self::G64 => "g64",
            Self::G128 => "g128",
        })
    }
}

impl FromStr for GroupSize {
    type Err = FormatError;

    /// Parses `channel`, `g16`, `g32`, `g64`, `g128` or the number in a config (for example `-1` or
    /// `128`).
    fn from_str(text: &str) -> Result<Self, FormatError> {
        Self::ALL
            .into_iter()
            .find(|group| text == group.to_string() || text == group.as_i64().to_string())
            .ok_or_else(|| FormatError::GroupSizeName {
                found: text.to_string(),
            })
    }
}
