//! The conversion of packed values to the dtype of activations.

use marlin_format::WeightValue;

/// The instructions that convert packed values to pairs of operands of a product, by the kind of
/// the values and the dtype of the activations. Each makes the values the last bits of a float
/// whose last bit is 1 or 1/16, and subtracts the rest of that float with the zero point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Conversion {
    /// 4-bit integers to f16: a nibble is the end of 1024 + q, the next one of 1024 + 16q.
    Int4ToF16,
    /// 4-bit integers to bf16: a nibble is the end of 128 + q.
    Int4ToBf16,
    /// 8-bit integers to f16: a byte is the end of 1024 + q.
    Int8ToF16,
    /// 8-bit integers to bf16: a byte is the end of 2^23 + q in f32, and the difference is rounded.
    Int8ToBf16,
}

impl Conversion {
    /// Returns the conversion of a kind of values to bf16, or to f16.
    pub const fn new(value: WeightValue, bf16: bool) -> Self {
        match (value, bf16) {
            (WeightValue::Int4, false) => Self::Int4ToF16,
            (WeightValue::Int4, true) => Self::Int4ToBf16,
            (WeightValue::Int8, false) => Self::Int8ToF16,
            (WeightValue::Int8, true) => Self::Int8ToBf16,
        }
    }

    /// Returns the pairs of the number that is 1 in the units in which
    /// [`stored`](super::fragment::stored) values are multiplied: for the columns of `groupID` and
    /// of `groupID + 8`.
    pub const fn stored_ones(self) -> (u32, u32) {
        match self {
            Self::Int4ToF16 => (0x0001_0001, 0x0010_0010),
            _ => (0x3f80_3f80, 0x3f80_3f80),
        }
    }

    /// Returns the inverses of these units.
    pub const fn stored_units(self) -> (f32, f32) {
        match self {
            Self::Int4ToF16 => (16_777_216.0, 1_048_576.0),
            _ => (1.0, 1.0),
        }
    }

    /// Returns the number that is added to every [`stored`](super::fragment::stored) value.
    pub const fn stored_offset(self) -> f32 {
        match self {
            Self::Int4ToBf16 => 128.0,
            _ => 0.0,
        }
    }
}
