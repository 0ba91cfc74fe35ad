use std::fmt;

use serde::{Deserialize, Serialize};

use super::{GroupSize, QuantSpec, ScaleDtype, WeightLayout, WeightValue, ZeroPoint};

/// The pattern of values that a weight does not store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Sparsity {
    /// Every value is stored.
    #[default]
    Dense,
    /// The 2:4 pattern of NVIDIA's sparse tensor cores. Of every four rows of K, starting at a
    /// multiple of four, a column stores two values and the indices of their rows. The other two
    /// values are zero.
    TwoFour,
}

impl Sparsity {
    /// All patterns.
    pub const ALL: [Self; 2] = [Self::Dense, Self::TwoFour];

    /// Returns the number of stored rows of a weight with `k` input features.
    pub const fn stored_rows(self, k: usize) -> usize {
        match self {
            Self::Dense => k,
            Self::TwoFour => k / 2,
        }
    }
}

impl fmt::Display for Sparsity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Dense => "dense",
            Self::TwoFour => "2:4",
        })
    }
}

/// The format of a quantised weight, independent of its shape and layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightFormat {
    /// The bits, group size, zero points and scale dtype.
    pub spec: QuantSpec,
    /// True if stored rows are in an order other than that of the input features (act-order).
    pub permuted: bool,
    /// The pattern of the stored values.
    pub sparsity: Sparsity,
}

/// The number of digits of [`WeightFormat::to_code`], each below [`DIGIT`].
const DIGITS: usize = 7;
/// The base of the digits of a code.
const DIGIT: u64 = 16;

const LAYOUTS: [WeightLayout; 2] = [WeightLayout::Plain, WeightLayout::Tile];
const SCALE_DTYPES: [ScaleDtype; 3] = [ScaleDtype::F16, ScaleDtype::BF16, ScaleDtype::F32];
const FLAGS: [bool; 2] = [false, true];

impl WeightFormat {
    /// Creates the format of a dense weight whose rows are in their natural order.
    pub const fn dense(spec: QuantSpec) -> Self {
        Self {
            spec,
            permuted: false,
            sparsity: Sparsity::Dense,
        }
    }

    /// Returns the format with or without act-order.
    pub const fn with_permutation(self, permuted: bool) -> Self {
        Self { permuted, ..self }
    }

    /// Returns the format with another sparsity pattern.
    pub const fn with_sparsity(self, sparsity: Sparsity) -> Self {
        Self { sparsity, ..self }
    }

    /// Encodes the format and a layout as one number, for interfaces that pass only scalars.
    /// [`from_code`](Self::from_code) is the inverse.
    pub fn to_code(self, layout: WeightLayout) -> u64 {
        let Self {
            spec: QuantSpec { value, scales },
            permuted,
            sparsity,
        } = self;
        let digits: [u64; DIGITS] = [
            digit(&WeightValue::ALL, value),
            digit(&GroupSize::ALL, scales.group),
            digit(&ZeroPoint::ALL, scales.zero_point),
            digit(&SCALE_DTYPES, scales.dtype),
            digit(&FLAGS, permuted),
            digit(&Sparsity::ALL, sparsity),
            digit(&LAYOUTS, layout),
        ];
        digits
            .into_iter()
            .rev()
            .fold(0, |code, digit| code * DIGIT + digit)
    }

    /// Decodes a format and a layout from a code. Returns `None` if the number is not a valid code.
    pub fn from_code(code: u64) -> Option<(Self, WeightLayout)> {
        let digit = |place: usize| (code / DIGIT.pow(place as u32) % DIGIT) as usize;
        if code >= DIGIT.pow(DIGITS as u32) {
            return None;
        }
        let spec = QuantSpec::new(
            *WeightValue::ALL.get(digit(0))?,
            *GroupSize::ALL.get(digit(1))?,
        )
        .with_zero_point((*FLAGS.get(digit(2))?).into())
        .with_scale_dtype(*SCALE_DTYPES.get(digit(3))?);
        let format = Self {
            spec,
            permuted: *FLAGS.get(digit(4))?,
            sparsity: *Sparsity::ALL.get(digit(5))?,
        };
        Some((format, *LAYOUTS.get(digit(6))?))
    }
}

/// Returns the index of a value in the list of all values of its type.
fn digit<T: PartialEq>(all: &[T], value: T) -> u64 {
    all.iter()
        .position(|other| *other == value)
        .unwrap_or_default() as u64
}

impl From<QuantSpec> for WeightFormat {
    fn from(spec: QuantSpec) -> Self {
        Self::dense(spec)
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            spec,
            permuted,
            sparsity,
        } = self;
        let sparsity = if *sparsity == Sparsity::TwoFour {
            " 2:4"
        } else {
            ""
        };
        write!(
            f,
            "{spec}{}{sparsity}",
            if *permuted { " act-order" } else { "" }
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_code_is_of_one_format() {
        let mut codes = HashSet::new();
        for bits in WeightValue::ALL {
            for group in GroupSize::ALL {
                for (zero_points, permuted) in
                    [(false, false), (false, true), (true, false), (true, true)]
                {
                    for scale_dtype in SCALE_DTYPES {
                        for layout in LAYOUTS {
                            let spec = QuantSpec::new(bits, group)
                                .with_zero_point((zero_points).into())
                                .with_scale_dtype(scale_dtype);
                            for sparsity in Sparsity::ALL {
                                let format = WeightFormat::dense(spec)
                                    .with_permutation(permuted)
                                    .with_sparsity(sparsity);
                                let code = format.to_code(layout);
                                assert!(
                                    codes.insert(code),
                                    "{format}, {layout}: {code} is another's, too"
                                );
                                assert_eq!(WeightFormat::from_code(code), Some((format, layout)));
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn other_numbers_are_no_code() {
        let code =
            WeightFormat::dense(QuantSpec::int4(GroupSize::G128)).to_code(WeightLayout::Plain);
        for wrong in [
            code + 2,
            code + 16 * 8,
            code + DIGIT.pow(6) * 2,
            code + DIGIT.pow(7),
            u64::MAX,
        ] {
            assert_eq!(WeightFormat::from_code(wrong), None, "{wrong:#x}");
        }
    }
}
