use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Bits, GroupSize, QuantSpec, ScaleDtype, WeightLayout};

/// The pattern of values that a weight does not store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Sparsity {
    /// Every value is stored.
    #[default]
    Dense,
    /// 2:4, the pattern of NVIDIA's sparse tensor cores: of every four rows of K, from a multiple
    /// of four on, a column stores two values, and which rows they are. The other two are zero.
    TwoFour,
}

impl Sparsity {
    /// All patterns.
    pub const ALL: [Self; 2] = [Self::Dense, Self::TwoFour];

    /// Rows of K whose values are stored, of a weight with `k` input features.
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

/// The format of a quantised weight, whatever its shape and wherever it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightFormat {
    /// Bits, group, zero points and scale dtype.
    pub spec: QuantSpec,
    /// True if stored rows are in another order than the input features (act-order).
    pub permuted: bool,
    /// The values that are stored.
    pub sparsity: Sparsity,
}

/// The digits of [`WeightFormat::to_code`], each below [`DIGIT`].
const DIGITS: usize = 7;
/// The base of the code's digits.
const DIGIT: u64 = 16;

const LAYOUTS: [WeightLayout; 2] = [WeightLayout::Plain, WeightLayout::Tile];
const SCALE_DTYPES: [ScaleDtype; 3] = [ScaleDtype::F16, ScaleDtype::BF16, ScaleDtype::F32];
const FLAGS: [bool; 2] = [false, true];

impl WeightFormat {
    /// The format of a dense weight whose rows are in their natural order.
    pub const fn dense(spec: QuantSpec) -> Self {
        Self {
            spec,
            permuted: false,
            sparsity: Sparsity::Dense,
        }
    }

    /// The format with or without act-order.
    pub const fn with_permutation(self, permuted: bool) -> Self {
        Self { permuted, ..self }
    }

    /// The same with the values of a pattern stored.
    pub const fn with_sparsity(self, sparsity: Sparsity) -> Self {
        Self { sparsity, ..self }
    }

    /// The format and a layout as one number, which carries them where only scalars pass. Undone by
    /// [`from_code`](Self::from_code).
    pub fn to_code(self, layout: WeightLayout) -> u64 {
        let Self {
            spec:
                QuantSpec {
                    bits,
                    group,
                    zero_points,
                    scale_dtype,
                },
            permuted,
            sparsity,
        } = self;
        let digits: [u64; DIGITS] = [
            digit(&Bits::ALL, bits),
            digit(&GroupSize::ALL, group),
            digit(&FLAGS, zero_points),
            digit(&SCALE_DTYPES, scale_dtype),
            digit(&FLAGS, permuted),
            digit(&Sparsity::ALL, sparsity),
            digit(&LAYOUTS, layout),
        ];
        digits
            .into_iter()
            .rev()
            .fold(0, |code, digit| code * DIGIT + digit)
    }

    /// The format and layout of a code; `None` if the number is no code.
    pub fn from_code(code: u64) -> Option<(Self, WeightLayout)> {
        let digit = |place: usize| (code / DIGIT.pow(place as u32) % DIGIT) as usize;
        if code >= DIGIT.pow(DIGITS as u32) {
            return None;
        }
        let spec = QuantSpec {
            bits: *Bits::ALL.get(digit(0))?,
            group: *GroupSize::ALL.get(digit(1))?,
            zero_points: *FLAGS.get(digit(2))?,
            scale_dtype: *SCALE_DTYPES.get(digit(3))?,
        };
        let format = Self {
            spec,
            permuted: *FLAGS.get(digit(4))?,
            sparsity: *Sparsity::ALL.get(digit(5))?,
        };
        Some((format, *LAYOUTS.get(digit(6))?))
    }
}

/// The place of a value among all of its type.
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
        for bits in Bits::ALL {
            for group in GroupSize::ALL {
                for (zero_points, permuted) in
                    [(false, false), (false, true), (true, false), (true, true)]
                {
                    for scale_dtype in SCALE_DTYPES {
                        for layout in LAYOUTS {
                            let spec = QuantSpec {
                                bits,
                                group,
                                zero_points,
                                scale_dtype,
                            };
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
