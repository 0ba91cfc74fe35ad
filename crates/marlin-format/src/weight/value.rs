//! The kinds of quantised values, and the numbers that their codes stand for.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::{GroupSize, Sparsity, ZeroPoint};
use crate::FormatError;

/// The kind of a quantised value.
///
/// In JSON an integer is the number of its bits, as checkpoints' configs hold it, 4 or 8, and a
/// float is its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "ValueName", into = "ValueName")]
pub enum WeightValue {
    /// An integer of 4 bits, 0..=15.
    Int4,
    /// An integer of 8 bits, 0..=255.
    Int8,
    /// A float of 4 bits: a sign, 2 bits of exponent with the bias 1, and 1 bit of mantissa. Its
    /// magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 (OCP Microscaling Formats 1.0, section 5.3.3).
    E2m1,
    /// A float of 8 bits: a sign, 4 bits of exponent with the bias 7, and 3 bits of mantissa. It
    /// has no infinities; the codes 0x7f and 0xff are NaN, and the largest magnitude is 448 (OCP
    /// 8-bit Floating Point 1.0, section 5.2).
    E4m3,
}

/// A [`WeightValue`] in JSON.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum ValueName {
    Bits(i64),
    Float(String),
}

/// The number of each code of e2m1.
const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The number of each code of e4m3.
static E4M3: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| e4m3(code as u8)));

/// Returns the number of a code of e4m3.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 0x7f) {
        (_, 0x7f) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

impl WeightValue {
    /// Every kind of value.
    pub const ALL: [WeightValue; 4] = [Self::Int4, Self::Int8, Self::E2m1, Self::E4m3];
    /// The integers, the narrowest first.
    pub const INTEGERS: [WeightValue; 2] = [Self::Int4, Self::Int8];
    /// The floats, the narrowest first.
    pub const FLOATS: [WeightValue; 2] = [Self::E2m1, Self::E4m3];

    /// Returns the number of bits of a value.
    pub const fn bits(self) -> usize {
        match self {
            Self::Int4 | Self::E2m1 => 4,
            Self::Int8 | Self::E4m3 => 8,
        }
    }

    /// Returns true if values are floats.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::E2m1 | Self::E4m3)
    }

    /// Returns the number of values in a 32-bit word.
    pub const fn per_word(self) -> usize {
        32 / self.bits()
    }

    /// Returns the largest code: 15 or 255.
    pub const fn max(self) -> u8 {
        match self.bits() {
            4 => 15,
            _ => 255,
        }
    }

    /// Returns the code of zero in a symmetric weight, which is also the code of padding: 8 or 128
    /// for integers, whose zero point it is, and 0 for floats.
    pub const fn midpoint(self) -> u8 {
        match self {
            Self::Int4 => 8,
            Self::Int8 => 128,
            Self::E2m1 | Self::E4m3 => 0,
        }
    }

    /// Returns a packed word whose values are all the [`midpoint`](Self::midpoint).
    pub const fn padding_word(self) -> u32 {
        match self {
            Self::Int4 => 0x8888_8888,
            Self::Int8 => 0x8080_8080,
            Self::E2m1 | Self::E4m3 => 0,
        }
    }

    /// Returns the group sizes that kernels support for this kind of values, in descending order.
    pub const fn groups(self) -> &'static [GroupSize] {
        match self {
            Self::Int4 | Self::Int8 => &GroupSize::INTEGERS,
            Self::E2m1 => &[GroupSize::G32, GroupSize::G16],
            Self::E4m3 => &[GroupSize::Channel, GroupSize::G128],
        }
    }

    /// Returns the sparsity patterns that kernels support for this kind of values.
    pub const fn sparsities(self) -> &'static [Sparsity] {
        if self.is_float() {
            &[Sparsity::Dense]
        } else {
            &Sparsity::ALL
        }
    }

    /// Returns the kinds of zero points that this kind of values can have.
    pub const fn zero_points(self) -> &'static [ZeroPoint] {
        if self.is_float() {
            &[ZeroPoint::None]
        } else {
            &ZeroPoint::ALL
        }
    }

    /// Returns the number that a code stands for in a symmetric weight with a scale of 1. Only the
    /// lowest [`bits`](Self::bits) of the code count.
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Self::Int4 | Self::Int8 => f32::from(code & self.max()) - f32::from(self.midpoint()),
            Self::E2m1 => E2M1[usize::from(code & 15)],
            Self::E4m3 => E4M3[usize::from(code)],
        }
    }

    /// Returns the code of the nearest number, ties to even. Numbers beyond the largest become the
    /// largest. NaN becomes 0 where the kind has no NaN.
    pub fn encode(self, value: f32) -> u8 {
        match self {
            Self::Int4 | Self::Int8 => {
                let midpoint = f32::from(self.midpoint());
                (value.round_ties_even() + midpoint).clamp(0.0, f32::from(self.max())) as u8
            }
            Self::E2m1 => float_code::<1, 1>(value, self.largest()),
            Self::E4m3 if value.is_nan() => 0x7f,
            Self::E4m3 => float_code::<3, 7>(value, self.largest()),
        }
    }

    /// Returns the largest magnitude to which a group is scaled: 6 or 448; for integers half of the
    /// largest code, 7.5 or 127.5.
    pub fn largest(self) -> f32 {
        match self {
            Self::Int4 | Self::Int8 => f32::from(self.max()) / 2.0,
            Self::E2m1 => 6.0,
            Self::E4m3 => 448.0,
        }
    }

    /// Returns the bits of a word that random codes may have: without the lowest bits of their
    /// exponents, no code of e4m3 is NaN. All bits for the other kinds of values.
    pub const fn finite_mask(self) -> u32 {
        match self {
            Self::E4m3 => 0xf7f7_f7f7,
            _ => u32::MAX,
        }
    }

    /// Returns the kind of floats with this name.
    fn of_float(name: &str) -> Result<Self, FormatError> {
        Self::FLOATS
            .into_iter()
            .find(|value| value.to_string() == name)
            .ok_or_else(|| FormatError::ValueName { found: name.into() })
    }

    /// Returns true if a code is NaN.
    pub const fn is_nan(self, code: u8) -> bool {
        matches!(self, Self::E4m3) && code & 0x7f == 0x7f
    }
}

/// Rounds a number to a float with `MANTISSA` bits of mantissa, an exponent of the bias `BIAS` and
/// no number above `largest`, ties to even. The sign is the bit above the exponent.
fn float_code<const MANTISSA: i32, const BIAS: i32>(value: f32, largest: f32) -> u8 {
    let magnitude = value.abs().min(largest);
    // The exponent of the smallest normal number is that of all subnormal numbers, too.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(1 - BIAS);
    // The distance of two numbers with this exponent, a power of two, divides exactly.
    let inverse = f32::from_bits(((127 + MANTISSA - exponent) as u32) << 23);
    let steps = (magnitude * inverse).round_ties_even() as i32;
    // A normal number has the leading bit of its mantissa in `steps`, which adds 1 to the exponent.
    let code = ((exponent + BIAS - 1) << MANTISSA) + steps;
    let sign = if value.is_sign_negative() {
        1 << (if MANTISSA == 1 { 3 } else { 7 })
    } else {
        0
    };
    (code | sign) as u8
}

impl TryFrom<i64> for WeightValue {
    type Error = FormatError;

    /// Returns the integer of as many bits.
    fn try_from(found: i64) -> Result<Self, FormatError> {
        Self::INTEGERS
            .into_iter()
            .find(|value| value.bits() as i64 == found)
            .ok_or(FormatError::Bits { found })
    }
}

impl TryFrom<ValueName> for WeightValue {
    type Error = FormatError;

    fn try_from(name: ValueName) -> Result<Self, FormatError> {
        match name {
            ValueName::Bits(bits) => bits.try_into(),
            ValueName::Float(name) => Self::of_float(&name),
        }
    }
}

impl FromStr for WeightValue {
    type Err = FormatError;

    /// Parses the number of bits of an integer, `4` or `8`, or the name of a float, `e2m1` or
    /// `e4m3`.
    fn from_str(text: &str) -> Result<Self, FormatError> {
        match text.parse::<i64>() {
            Ok(bits) => bits.try_into(),
            Err(_) => Self::of_float(text),
        }
    }
}

impl From<WeightValue> for ValueName {
    fn from(value: WeightValue) -> Self {
        if value.is_float() {
            Self::Float(value.to_string())
        } else {
            Self::Bits(value.bits() as i64)
        }
    }
}

impl fmt::Display for WeightValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Int4 => "int4",
            Self::Int8 => "int8",
            Self::E2m1 => "e2m1",
            Self::E4m3 => "e4m3",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks every code against the definition of the format, and that every number is its own
    /// nearest number.
    #[test]
    fn codes_are_floats_with_a_few_bits() {
        for (value, mantissa, bias) in [(WeightValue::E2m1, 1, 1), (WeightValue::E4m3, 3, 7)] {
            for code in 0..=value.max() {
                let sign_bit = value.bits() - 1;
                let exponent = i32::from(code & !(1 << sign_bit)) >> mantissa;
                let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
                let magnitude = match exponent {
                    0 => fraction * 2f64.powi(1 - bias),
                    _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
                };
                let expected = if code >> sign_bit == 0 {
                    magnitude
                } else {
                    -magnitude
                };
                let found = value.decode(code);
                if value.is_nan(code) {
                    assert!(found.is_nan(), "{value} {code:#x}: {found}");
                } else {
                    assert_eq!(f64::from(found), expected, "{value} {code:#x}");
                    assert_eq!(value.encode(found), code, "{value} {code:#x}");
                }
            }
        }
        for value in WeightValue::ALL {
            let is_finite = |code: u8| !value.is_nan(code & value.finite_mask() as u8);
            assert!((0..=value.max()).all(is_finite), "{value}");
        }
        assert_eq!(WeightValue::E4m3.decode(0x7e), 448.0);
        assert_eq!(WeightValue::E2m1.decode(15), -6.0);
    }

    #[test]
    fn numbers_between_codes_are_rounded_to_even() {
        for value in WeightValue::FLOATS {
            let top = if value == WeightValue::E2m1 { 7 } else { 0x7e };
            for code in 0..top {
                let (low, high) = (value.decode(code), value.decode(code + 1));
                let middle = (low + high) / 2.0;
                let even = code + code % 2;
                for (number, expected) in [
                    (middle, even),
                    (middle.next_down(), code),
                    (middle.next_up(), code + 1),
                ] {
                    assert_eq!(value.encode(number), expected, "{value} {number}");
                    let negative = expected | 1 << (value.bits() - 1);
                    assert_eq!(value.encode(-number), negative, "{value} -{number}");
                }
            }
            for large in [value.largest() * 1.5, f32::MAX, f32::INFINITY] {
                assert_eq!(value.encode(large), top, "{value} {large}");
            }
        }
        assert_eq!(WeightValue::E4m3.encode(f32::NAN), 0x7f);
        assert_eq!(WeightValue::E4m3.encode(1e-38), 0);
    }
}
