//! The quantisation of a weight as one value, which is passed from the checkpoint's config to the
//! kernel.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::FormatError;

/// The kind of a quantised value.
///
/// In JSON it is the number of its bits, as checkpoints' configs hold it: 4 or 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub enum WeightValue {
    /// An integer of 4 bits, 0..=15.
    Int4,
    /// An integer of 8 bits, 0..=255.
    Int8,
}

impl WeightValue {
    /// Every kind of value, the narrowest first.
    pub const ALL: [WeightValue; 2] = [Self::Int4, Self::Int8];

    /// Returns the number of bits of a value.
    pub const fn bits(self) -> usize {
        match self {
            Self::Int4 => 4,
            Self::Int8 => 8,
        }
    }

    /// Returns the number of values in a 32-bit word.
    pub const fn per_word(self) -> usize {
        32 / self.bits()
    }

    /// Returns the largest value: 15 or 255.
    pub const fn max(self) -> u8 {
        match self {
            Self::Int4 => 15,
            Self::Int8 => 255,
        }
    }

    /// Returns the zero point of a symmetric weight, which is also the value of padding: 8 or 128.
    pub const fn midpoint(self) -> u8 {
        self.max() / 2 + 1
    }

    /// Returns a packed word whose values are all the [`midpoint`](Self::midpoint).
    pub const fn padding_word(self) -> u32 {
        match self {
            Self::Int4 => 0x8888_8888,
            Self::Int8 => 0x8080_8080,
        }
    }
}

impl TryFrom<i64> for WeightValue {
    type Error = FormatError;

    fn try_from(found: i64) -> Result<Self, FormatError> {
        Self::ALL
            .into_iter()
            .find(|&value| i64::from(value) == found)
            .ok_or(FormatError::Bits { found })
    }
}

impl From<WeightValue> for i64 {
    fn from(value: WeightValue) -> i64 {
        value.bits() as i64
    }
}

impl fmt::Display for WeightValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Int4 => "int4",
            Self::Int8 => "int8",
        })
    }
}

/// The number of rows of K (input features) that share one scale in each column (output feature).
///
/// If the group size does not divide K, the last group is incomplete: K = 344 in groups of 32 is 10
/// whole groups and one group of 24 rows.
///
/// The JSON form is the number in the config of a checkpoint: -1, 32, 64 or 128.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub enum GroupSize {
    /// A single group over all of K: one scale for each output channel.
    Channel,
    /// Groups of 32 rows.
    G32,
    /// Groups of 64 rows.
    G64,
    /// Groups of 128 rows.
    G128,
}

impl GroupSize {
    /// All group sizes, in descending order.
    pub const ALL: [GroupSize; 4] = [Self::Channel, Self::G128, Self::G64, Self::G32];

    /// Returns the number of rows of K in one group of a weight with `k` input features. For
    /// [`Channel`](Self::Channel) this is `k`. The last group may have fewer rows.
    pub fn rows(self, k: usize) -> usize {
        match self {
            Self::Channel => k,
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

    /// Parses `channel`, `g32`, `g64`, `g128` or the number in a config (for example `-1` or
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

/// The dtype of stored scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleDtype {
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of an f32.
    BF16,
    /// IEEE 754 binary32, for models that were quantised in f32.
    F32,
}

impl ScaleDtype {
    /// Rounds `scale` to this dtype. The result is at least the smallest positive number of the
    /// dtype (the smallest normal number for f32), so that no value is divided by 0. A scale that
    /// is too large becomes infinite.
    pub fn round_scale(self, scale: f32) -> f32 {
        match self {
            Self::F16 => f16::from_f32(scale)
                .max(f16::MIN_POSITIVE_SUBNORMAL)
                .to_f32(),
            Self::BF16 => bf16::from_f32(scale)
                .max(bf16::MIN_POSITIVE_SUBNORMAL)
                .to_f32(),
            // Division by a smaller, subnormal scale could overflow to infinity.
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

/// The zero points of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ZeroPoint {
    /// None: values are symmetric around the [midpoint](WeightValue::midpoint).
    None,
    /// An integer for each group, of the width of the values.
    Integer,
}

impl ZeroPoint {
    /// Both kinds of zero points.
    pub const ALL: [ZeroPoint; 2] = [Self::None, Self::Integer];
}

impl From<bool> for ZeroPoint {
    /// Returns [`Integer`](Self::Integer) for true.
    fn from(has_zero_points: bool) -> Self {
        if has_zero_points {
            Self::Integer
        } else {
            Self::None
        }
    }
}

/// The scales of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScaleSpec {
    /// Rows of K that share a scale.
    pub group: GroupSize,
    /// The dtype of the scales.
    pub dtype: ScaleDtype,
    /// The zero points beside the scales.
    pub zero_point: ZeroPoint,
}

/// The quantisation of a weight.
///
/// `weight[k][n] = scale[g][n] * (q[k][n] - z)` with `q` in 0..=15 (4 bits) or 0..=255 (8 bits);
/// `z` is the zero point of the group, or 8 or 128, the [midpoint](WeightValue::midpoint), if the
/// spec is symmetric.
///
/// In JSON it is `{"bits": 4, "group": 128, "zero_points": false, "scale_dtype": "f16"}`.
///
/// ```
/// use marlin_format::{GroupSize, QuantSpec};
///
/// let spec = QuantSpec::int4(GroupSize::G128);
/// assert_eq!(spec.to_string(), "int4 g128 f16");
/// assert_eq!(QuantSpec::int8(GroupSize::Channel).to_string(), "int8 channel f16");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "QuantSpecJson", into = "QuantSpecJson")]
pub struct QuantSpec {
    /// The quantised values.
    pub value: WeightValue,
    /// The scales and zero points.
    pub scales: ScaleSpec,
}

/// A [`QuantSpec`] in JSON.
#[derive(Serialize, Deserialize)]
struct QuantSpecJson {
    bits: WeightValue,
    group: GroupSize,
    zero_points: bool,
    scale_dtype: ScaleDtype,
}

impl From<QuantSpecJson> for QuantSpec {
    fn from(json: QuantSpecJson) -> Self {
        Self::new(json.bits, json.group)
            .with_zero_point(json.zero_points.into())
            .with_scale_dtype(json.scale_dtype)
    }
}

impl From<QuantSpec> for QuantSpecJson {
    fn from(spec: QuantSpec) -> Self {
        Self {
            bits: spec.value,
            group: spec.scales.group,
            zero_points: spec.has_zero_points(),
            scale_dtype: spec.scales.dtype,
        }
    }
}

impl QuantSpec {
    /// The largest K or N: kernels and file formats store feature counts in signed 32-bit integers.
    pub const MAX_FEATURES: usize = i32::MAX as usize;
    /// The largest K * N: kernels index the elements of a matrix with 32 bits.
    pub const MAX_ELEMENTS: usize = u32::MAX as usize;

    /// Creates the spec of symmetric values with f16 scales.
    pub const fn new(value: WeightValue, group: GroupSize) -> Self {
        Self {
            value,
            scales: ScaleSpec {
                group,
                dtype: ScaleDtype::F16,
                zero_point: ZeroPoint::None,
            },
        }
    }

    /// Creates the spec of symmetric 4-bit integers with f16 scales.
    pub const fn int4(group: GroupSize) -> Self {
        Self::new(WeightValue::Int4, group)
    }

    /// Creates the spec of symmetric 8-bit integers with f16 scales.
    pub const fn int8(group: GroupSize) -> Self {
        Self::new(WeightValue::Int8, group)
    }

    /// Returns the spec with other values.
    pub const fn with_value(self, value: WeightValue) -> Self {
        Self { value, ..self }
    }

    /// Returns the spec with another group size.
    pub const fn with_group(mut self, group: GroupSize) -> Self {
        self.scales.group = group;
        self
    }

    /// Returns the spec with the given kind of zero points.
    pub const fn with_zero_point(mut self, zero_point: ZeroPoint) -> Self {
        self.scales.zero_point = zero_point;
        self
    }

    /// Returns the spec with an integer zero point for every group.
    pub const fn with_zero_points(self) -> Self {
        self.with_zero_point(ZeroPoint::Integer)
    }

    /// Returns the spec with another dtype of the scales.
    pub const fn with_scale_dtype(mut self, dtype: ScaleDtype) -> Self {
        self.scales.dtype = dtype;
        self
    }

    /// Returns true if every group has a zero point.
    pub const fn has_zero_points(&self) -> bool {
        matches!(self.scales.zero_point, ZeroPoint::Integer)
    }

    /// Checks that a weight of any format can have `k` input and `n` output features.
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
        let Self { value, scales } = self;
        let zero_points = if self.has_zero_points() {
            " zero-points"
        } else {
            ""
        };
        f.pad(&format!(
            "{value} {}{zero_points} {}",
            scales.group, scales.dtype
        ))
    }
}
