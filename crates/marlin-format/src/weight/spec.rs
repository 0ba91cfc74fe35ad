//! The quantisation of a weight: one value, carried from a checkpoint's config to the kernel.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::FormatError;

/// Width of a weight's integers.
///
/// In JSON it is the number that checkpoints' configs hold: 4 or 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub enum Bits {
    /// 4 bits: 0..=15.
    Four,
    /// 8 bits: 0..=255.
    Eight,
}

impl Bits {
    /// Both widths, the narrow one first.
    pub const ALL: [Bits; 2] = [Self::Four, Self::Eight];

    /// Bits of one value.
    pub const fn count(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// Values in a 32-bit word.
    pub const fn per_word(self) -> usize {
        32 / self.count()
    }

    /// The largest value: 15 or 255.
    pub const fn max(self) -> u8 {
        match self {
            Self::Four => 15,
            Self::Eight => 255,
        }
    }

    /// The zero point of a symmetric weight, and the value of padding: 8 or 128.
    pub const fn midpoint(self) -> u8 {
        self.max() / 2 + 1
    }

    /// A packed word whose every value is the [`midpoint`](Self::midpoint).
    pub const fn padding_word(self) -> u32 {
        match self {
            Self::Four => 0x8888_8888,
            Self::Eight => 0x8080_8080,
        }
    }
}

impl TryFrom<i64> for Bits {
    type Error = FormatError;

    fn try_from(found: i64) -> Result<Self, FormatError> {
        Self::ALL
            .into_iter()
            .find(|&bits| i64::from(bits) == found)
            .ok_or(FormatError::Bits { found })
    }
}

impl From<Bits> for i64 {
    fn from(bits: Bits) -> i64 {
        bits.count() as i64
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Four => "int4",
            Self::Eight => "int8",
        })
    }
}

/// The number of rows of K (input features) that share one scale in each column (output feature).
///
/// If it does not divide K, the last group is incomplete: K = 344 in groups of 32 is 10 groups and
/// one of 24 rows.
///
/// In JSON it is the number that checkpoints' configs hold: -1, 32, 64 or 128.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub enum GroupSize {
    /// One group over all of K: one scale for each output channel.
    Channel,
    /// 32 rows.
    G32,
    /// 64 rows.
    G64,
    /// 128 rows.
    G128,
}

impl GroupSize {
    /// Every group size, the largest group first.
    pub const ALL: [GroupSize; 4] = [Self::Channel, Self::G128, Self::G64, Self::G32];

    /// Rows of K in one group of a weight with `k` input features, `k` itself for
    /// [`Channel`](Self::Channel). The last group may have fewer.
    pub fn rows(self, k: usize) -> usize {
        match self {
            Self::Channel => k,
            Self::G32 => 32,
            Self::G64 => 64,
            Self::G128 => 128,
        }
    }

    /// Groups along K of a weight with `k` input features; an incomplete last group counts.
    pub fn count(self, k: usize) -> usize {
        match self {
            Self::Channel => 1,
            grouped => k.div_ceil(grouped.rows(k)),
        }
    }

    /// The number that stands for this group size in checkpoints' configs: -1 for
    /// [`Channel`](Self::Channel).
    pub fn as_i64(self) -> i64 {
        match self {
            Self::Channel => -1,
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
            Self::G32 => "g32",
            Self::G64 => "g64",
            Self::G128 => "g128",
        })
    }
}

impl FromStr for GroupSize {
    type Err = FormatError;

    /// Reads `channel`, `g128` or the number of a config (`-1`, `128`).
    fn from_str(text: &str) -> Result<Self, FormatError> {
        Self::ALL
            .into_iter()
            .find(|group| text == group.to_string() || text == group.as_i64().to_string())
            .ok_or_else(|| FormatError::GroupSizeName {
                found: text.to_string(),
            })
    }
}

/// The dtype that scales are stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleDtype {
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of an f32.
    BF16,
    /// IEEE 754 binary32, of models that were quantised in f32.
    F32,
}

impl ScaleDtype {
    /// Returns `scale` as this dtype holds it, at least its smallest positive number: no scale
    /// divides by 0. A scale that is too large becomes infinite.
    pub fn round_scale(self, scale: f32) -> f32 {
        match self {
            Self::F16 => f16::from_f32(scale)
                .max(f16::MIN_POSITIVE_SUBNORMAL)
                .to_f32(),
            Self::BF16 => bf16::from_f32(scale)
                .max(bf16::MIN_POSITIVE_SUBNORMAL)
                .to_f32(),
            // A smaller one would not be divided by without infinity.
            Self::F32 => scale.max(f32::MIN_POSITIVE),
        }
    }
}

impl fmt::Display for ScaleDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
        })
    }
}

/// The quantisation of a weight.
///
/// `weight[k][n] = scale[g][n] * (q[k][n] - z)` with `q` in 0..=15 (4 bits) or 0..=255 (8 bits);
/// `z` is the zero point of the group, or 8 or 128, the [midpoint](Bits::midpoint), where the spec
/// is symmetric.
///
/// ```
/// use marlin_format::{GroupSize, QuantSpec};
///
/// let spec = QuantSpec::int4(GroupSize::G128);
/// assert_eq!(spec.to_string(), "int4 g128 f16");
/// assert_eq!(QuantSpec::int8(GroupSize::Channel).to_string(), "int8 channel f16");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QuantSpec {
    /// Width of the quantised values.
    pub bits: Bits,
    /// Rows of K that share a scale.
    pub group: GroupSize,
    /// True if every group has a zero point of its own; otherwise symmetric around the midpoint.
    pub zero_points: bool,
    /// The dtype of the scales.
    pub scale_dtype: ScaleDtype,
}

impl QuantSpec {
    /// The largest K or N: kernels and file formats count features in 32 signed bits.
    pub const MAX_FEATURES: usize = i32::MAX as usize;
    /// The largest K * N: kernels count the weights of a matrix in 32 bits.
    pub const MAX_ELEMENTS: usize = u32::MAX as usize;

    /// Symmetric 4-bit values with f16 scales.
    pub const fn int4(group: GroupSize) -> Self {
        Self {
            bits: Bits::Four,
            group,
            zero_points: false,
            scale_dtype: ScaleDtype::F16,
        }
    }

    /// Symmetric 8-bit values with f16 scales.
    pub const fn int8(group: GroupSize) -> Self {
        Self {
            bits: Bits::Eight,
            ..Self::int4(group)
        }
    }

    /// The same with a zero point for every group.
    pub const fn with_zero_points(self) -> Self {
        Self {
            zero_points: true,
            ..self
        }
    }

    /// The same with another dtype of the scales.
    pub const fn with_scale_dtype(self, scale_dtype: ScaleDtype) -> Self {
        Self {
            scale_dtype,
            ..self
        }
    }

    /// Checks that a weight can have `k` input and `n` output features, in any format.
    ///
    /// # Errors
    /// [`FormatError::Empty`], [`FormatError::TooLarge`], [`FormatError::TooManyElements`].
    pub fn check_shape(k: usize, n: usize) -> Result<(), FormatError> {
        if k == 0 || n == 0 {
            return Err(FormatError::Empty { k, n });
        }
        if k > Self::MAX_FEATURES || n > Self::MAX_FEATURES {
            return Err(FormatError::TooLarge {
                k,
                n,
                limit: Self::MAX_FEATURES,
            });
        }
        let elements = k.saturating_mul(n);
        if elements > Self::MAX_ELEMENTS {
            return Err(FormatError::TooManyElements {
                k,
                n,
                elements,
                limit: Self::MAX_ELEMENTS,
            });
        }
        Ok(())
    }
}

impl fmt::Display for QuantSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let zero_points = if self.zero_points { " zero-points" } else { "" };
        f.pad(&format!(
            "{} {}{zero_points} {}",
            self.bits, self.group, self.scale_dtype
        ))
    }
}
