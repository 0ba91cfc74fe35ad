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

/// The layouts, by their number in a code.
const LAYOUTS: [WeightLayout; 2] = [WeightLayout::Plain, WeightLayout::Tile];
/// The scale dtypes, by their number in a code.
const SCALE_DTYPES: [ScaleDtype; 3] = [ScaleDtype::F16, ScaleDtype::BF16, ScaleDtype::F32];
/// The bit of a code that is set for act-order.
const PERMUTED: u8 = 1;
/// The bit of a code that is set for 2:4 sparsity.
const TWO_FOUR: u8 = 2;
/// The bit of a code that is set for activations in e4m3.
const FP8_ACTIVATIONS: u8 = 4;

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

    /// Encodes the format as five bytes: the kind of the values (the bits of an integer; 20 for
    /// e2m1, 24 for e4m3), the rows of a group (0 for one group over all of K), 1 for zero points,
    /// the number of the scale dtype, and the sum of 1 for act-order, 2 for 2:4 sparsity and 4 for
    /// activations in e4m3. Saved records hold these bytes. [`from_bytes`](Self::from_bytes) is the
    /// inverse.
    pub fn to_bytes(self) -> [u8; 5] {
        let QuantSpec {
            value,
            scales,
            fp8_activations,
        } = self.spec;
        let group = match scales.group {
            GroupSize::Channel => 0,
            grouped => grouped.as_i64() as u8,
        };
        let permuted = if self.permuted { PERMUTED } else { 0 };
        let two_four = match self.sparsity {
            Sparsity::Dense => 0,
            Sparsity::TwoFour => TWO_FOUR,
        };
        let activations = if fp8_activations { FP8_ACTIVATIONS } else { 0 };
        [
            value_code(value),
            group,
            number(&ZeroPoint::ALL, scales.zero_point),
            number(&SCALE_DTYPES, scales.dtype),
            permuted | two_four | activations,
        ]
    }

    /// Decodes the bytes of a format. Returns `None` if they are not those of a format.
    pub fn from_bytes([value, group, zero_point, scale_dtype, rows]: [u8; 5]) -> Option<Self> {
        let group = match group {
            0 => GroupSize::Channel,
            rows => GroupSize::try_from(i64::from(rows)).ok()?,
        };
        let value = WeightValue::ALL
            .into_iter()
            .find(|&of| value_code(of) == value)?;
        let spec = QuantSpec::new(value, group)
            .with_zero_point(*ZeroPoint::ALL.get(usize::from(zero_point))?)
            .with_scale_dtype(*SCALE_DTYPES.get(usize::from(scale_dtype))?)
            .with_fp8_activations(rows & FP8_ACTIVATIONS != 0);
        let sparsity = match rows & TWO_FOUR {
            0 => Sparsity::Dense,
            _ => Sparsity::TwoFour,
        };
        (rows <= (PERMUTED | TWO_FOUR | FP8_ACTIVATIONS)).then_some(Self {
            spec,
            permuted: rows & PERMUTED != 0,
            sparsity,
        })
    }

    /// Encodes the format and a layout as one number, for interfaces that pass only scalars: the
    /// bytes of [`to_bytes`](Self::to_bytes), the lowest first, then the number of the layout.
    /// [`from_code`](Self::from_code) is the inverse.
    pub fn to_code(self, layout: WeightLayout) -> u64 {
        let [value, group, zero_point, scale_dtype, rows] = self.to_bytes();
        let layout = number(&LAYOUTS, layout);
        u64::from_le_bytes([value, group, zero_point, scale_dtype, rows, layout, 0, 0])
    }

    /// Decodes a format and a layout from a code. Returns `None` if the number is not a valid code.
    pub fn from_code(code: u64) -> Option<(Self, WeightLayout)> {
        let [bytes @ .., layout, 0, 0] = code.to_le_bytes() else {
            return None;
        };
        let layout = *LAYOUTS.get(usize::from(layout))?;
        Some((Self::from_bytes(bytes)?, layout))
    }
}

/// The number that is added to the bits of a float, to tell it from an integer.
const FLOAT: u8 = 16;

/// Returns the number of a kind of values in a code.
const fn value_code(value: WeightValue) -> u8 {
    let bits = value.bits() as u8;
    if value.is_float() { bits + FLOAT } else { bits }
}

/// Returns the index of a value in the list of all values of its type.
fn number<T: PartialEq>(all: &[T], value: T) -> u8 {
    all.iter()
        .position(|other| *other == value)
        .unwrap_or_default() as u8
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
                            let specs = [false, true].map(|fp8| spec.with_fp8_activations(fp8));
                            for (spec, sparsity) in specs
                                .into_iter()
                                .flat_map(|spec| Sparsity::ALL.map(|sparsity| (spec, sparsity)))
                            {
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
        let byte = |place: u32| 1 << (8 * place);
        for wrong in [
            code + 1,
            code + byte(1),
            code + 2 * byte(2),
            code + 3 * byte(3),
            code + 8 * byte(4),
            code + 2 * byte(5),
            code + byte(6),
            u64::MAX,
        ] {
            assert_eq!(WeightFormat::from_code(wrong), None, "{wrong:#x}");
        }
    }
}
