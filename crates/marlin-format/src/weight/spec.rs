//! The quantisation of a weight as one value, which is passed from the checkpoint's config to the
//! kernel.

use std::fmt;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::{GroupSize, WeightValue};
use crate::FormatError;

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
/// Integers: `weight[k][n] = scale[g][n] * (q[k][n] - z)` with `q` in 0..=15 (4 bits) or 0..=255
/// (8 bits); `z` is the zero point of the group, or 8 or 128, the
/// [midpoint](WeightValue::midpoint), if the spec is symmetric.
///
/// Floats: `weight[k][n] = scale[g][n] * value(q[k][n])`, where `q` is the code of
/// [`value`](WeightValue::decode). They have no zero points.
///
/// In JSON it is `{"bits": 4, "group": 128, "zero_points": false, "scale_dtype": "f16"}`, with
/// `"bits": "e2m1"` or `"bits": "e4m3"` for floats, and `"fp8_activations": true` where activations
/// may be rounded.
///
/// ```
/// use marlin_format::{GroupSize, QuantSpec};
///
/// let spec = QuantSpec::int4(GroupSize::G128);
/// assert_eq!(spec.to_string(), "int4 g128 f16");
/// assert_eq!(QuantSpec::int8(GroupSize::Channel).to_string(), "int8 channel f16");
/// assert_eq!(QuantSpec::nvfp4().to_string(), "e2m1 g16 f32");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "QuantSpecJson", into = "QuantSpecJson")]
pub struct QuantSpec {
    /// The quantised values.
    pub value: WeightValue,
    /// The scales and zero points.
    pub scales: ScaleSpec,
    /// True if activations may be rounded to e4m3 with a scale for each row (W8A8), on cards that
    /// multiply e4m3 by e4m3, where that is faster. Otherwise, and on other devices, activations
    /// are multiplied as they are. Only weights of e4m3 can have it.
    pub fp8_activations: bool,
}

/// A [`QuantSpec`] in JSON.
#[derive(Serialize, Deserialize)]
struct QuantSpecJson {
    bits: WeightValue,
    group: GroupSize,
    zero_points: bool,
    scale_dtype: ScaleDtype,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    fp8_activations: bool,
}

impl From<QuantSpecJson> for QuantSpec {
    fn from(json: QuantSpecJson) -> Self {
        Self::new(json.bits, json.group)
            .with_zero_point(json.zero_points.into())
            .with_scale_dtype(json.scale_dtype)
            .with_fp8_activations(json.fp8_activations)
    }
}

impl From<QuantSpec> for QuantSpecJson {
    fn from(spec: QuantSpec) -> Self {
        Self {
            bits: spec.value,
            group: spec.scales.group,
            zero_points: spec.has_zero_points(),
            scale_dtype: spec.scales.dtype,
            fp8_activations: spec.fp8_activations,
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
            fp8_activations: false,
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

    /// Creates the spec of FP8 weights: e4m3 with an f32 scale for each output channel. A weight
    /// with one scale for all channels repeats it.
    pub const fn fp8() -> Self {
        Self::new(WeightValue::E4m3, GroupSize::Channel).with_scale_dtype(ScaleDtype::F32)
    }

    /// Creates the spec of FP8 weights in blocks of 128 x 128: e4m3 with an f32 scale for each
    /// group of 128 rows. The columns of a block repeat its scale.
    pub const fn fp8_blocks() -> Self {
        Self::fp8().with_group(GroupSize::G128)
    }

    /// Creates the spec of MXFP4 weights (OCP Microscaling Formats 1.0): e2m1 in groups of 32 whose
    /// scales are powers of two.
    pub const fn mxfp4() -> Self {
        Self::new(WeightValue::E2m1, GroupSize::G32).with_scale_dtype(ScaleDtype::F32)
    }

    /// Creates the spec of NVFP4 weights: e2m1 in groups of 16. A scale is the product of the e4m3
    /// scale of the group and the f32 scale of the tensor.
    pub const fn nvfp4() -> Self {
        Self::new(WeightValue::E2m1, GroupSize::G16).with_scale_dtype(ScaleDtype::F32)
    }

    /// The formats of floats to which models are quantised: FP8 with a scale for each output
    /// channel, the same with activations that may be rounded, MXFP4 and NVFP4.
    pub const FLOAT_FORMATS: [(&'static str, Self); 4] = [
        ("fp8", Self::fp8()),
        ("fp8-w8a8", Self::fp8().with_fp8_activations(true)),
        ("mxfp4", Self::mxfp4()),
        ("nvfp4", Self::nvfp4()),
    ];

    /// Returns the format among [`FLOAT_FORMATS`](Self::FLOAT_FORMATS) with this name.
    pub fn of_float_format(name: &str) -> Option<Self> {
        Self::FLOAT_FORMATS
            .into_iter()
            .find_map(|(other, spec)| (other == name).then_some(spec))
    }

    /// Returns the name of the format among [`FLOAT_FORMATS`](Self::FLOAT_FORMATS), whatever the
    /// dtype of the scales; `None` for others.
    pub fn float_format(&self) -> Option<&'static str> {
        Self::FLOAT_FORMATS
            .iter()
            .find(|(_, spec)| spec.with_scale_dtype(self.scales.dtype) == *self)
            .map(|(name, _)| *name)
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

    /// Returns the spec with activations that may be rounded to e4m3, or not.
    pub const fn with_fp8_activations(self, fp8_activations: bool) -> Self {
        Self {
            fp8_activations,
            ..self
        }
    }

    /// Returns true if every group has a zero point.
    pub const fn has_zero_points(&self) -> bool {
        matches!(self.scales.zero_point, ZeroPoint::Integer)
    }

    /// Checks that the values can have these groups, zero points and activations.
    ///
    /// # Errors
    /// [`FormatError::ValueGroup`], [`FormatError::FloatZeroPoints`],
    /// [`FormatError::Fp8Activations`].
    pub fn check(&self) -> Result<(), FormatError> {
        let Self {
            value,
            scales,
            fp8_activations,
        } = *self;
        if !value.groups().contains(&scales.group) {
            return Err(FormatError::ValueGroup {
                value,
                group: scales.group,
            });
        }
        if !value.zero_points().contains(&scales.zero_point) {
            return Err(FormatError::FloatZeroPoints { value });
        }
        if fp8_activations && value != WeightValue::E4m3 {
            return Err(FormatError::Fp8Activations { value });
        }
        Ok(())
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
        let Self {
            value,
            scales,
            fp8_activations,
        } = self;
        let zero_points = if self.has_zero_points() {
            " zero-points"
        } else {
            ""
        };
        f.pad(&format!(
            "{value} {}{zero_points} {}{}",
            scales.group,
            scales.dtype,
            if *fp8_activations { " W8A8" } else { "" }
        ))
    }
}
