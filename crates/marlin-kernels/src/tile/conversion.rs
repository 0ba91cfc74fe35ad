//! The conversion of packed values to the dtype of activations.

use marlin_format::WeightValue;

/// The instructions that convert packed values to pairs of operands of a product, by the kind of
/// the values and the dtype of the activations. Those of integers make the values the last bits of
/// a float whose last bit is 1 or 1/16, and subtract the rest of that float with the zero point.
/// Those of floats move the sign, exponent and mantissa to their places
/// ([`floats`](super::floats)).
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
    /// e2m1 to f16: the bits of a code in f16 are the number divided by 2^14.
    E2m1ToF16,
    /// e2m1 to bf16: the bits of a code in bf16 are the number divided by 2^126.
    E2m1ToBf16,
    /// e4m3 to f16: the bits of a code in f16 are the number divided by 2^8.
    E4m3ToF16,
    /// e4m3 to f16 by the instruction of newer cards, which gives the number.
    E4m3ToF16ByCvt,
    /// e4m3 to bf16: the bits of a code in bf16 are the number divided by 2^120.
    E4m3ToBf16,
}

impl Conversion {
    /// Returns the conversion of a kind of values to bf16, or to f16; `has_cvt` is true on cards
    /// that have an instruction from e4m3.
    pub const fn new(value: WeightValue, bf16: bool, has_cvt: bool) -> Self {
        match (value, bf16) {
            (WeightValue::Int4, false) => Self::Int4ToF16,
            (WeightValue::Int4, true) => Self::Int4ToBf16,
            (WeightValue::Int8, false) => Self::Int8ToF16,
            (WeightValue::Int8, true) => Self::Int8ToBf16,
            (WeightValue::E2m1, false) => Self::E2m1ToF16,
            (WeightValue::E2m1, true) => Self::E2m1ToBf16,
            (WeightValue::E4m3, false) if has_cvt => Self::E4m3ToF16ByCvt,
            (WeightValue::E4m3, false) => Self::E4m3ToF16,
            (WeightValue::E4m3, true) => Self::E4m3ToBf16,
        }
    }

    /// Returns true if converted floats have yet to be multiplied by a power of two
    /// ([`lift`](Self::lift)).
    pub const fn needs_lift(self) -> bool {
        self.lift() != 0x3c00_3c00 && self.lift() != 0x3f80_3f80
    }

    /// Returns the pair of powers of two that multiplies the bits of floats to their numbers; a
    /// pair of ones for integers and numbers.
    pub const fn lift(self) -> u32 {
        match self {
            Self::E2m1ToF16 => 0x7400_7400,
            Self::E2m1ToBf16 => 0x7e80_7e80,
            Self::E4m3ToF16 => 0x5c00_5c00,
            Self::E4m3ToBf16 => 0x7b80_7b80,
            Self::Int4ToF16 | Self::Int8ToF16 | Self::E4m3ToF16ByCvt => 0x3c00_3c00,
            Self::Int4ToBf16 | Self::Int8ToBf16 => 0x3f80_3f80,
        }
    }

    /// Returns the number of [`lift`](Self::lift) as the factor of sums.
    pub const fn lift_of_sums(self) -> f32 {
        match self {
            Self::E2m1ToF16 => 16_384.0,
            Self::E4m3ToF16 => 256.0,
            _ => 1.0,
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
