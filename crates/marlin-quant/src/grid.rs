//! The levels that a group of weights is rounded to.

use crate::QuantError;
use marlin_format::{FormatError, PlainWeight, QuantSpec, Sparsity, WeightValue};

/// The number of ranges that a search tries: the whole range, and 99 to 25 hundredths of the whole
/// range.
pub const SHRINKS: usize = 76;

/// The part of the whole range that a search tries beyond it for floats: with the next power of two
/// as the scale, no value of a group of MXFP4 is above the largest number, 6.
const FLOAT_GROWTH: f32 = 4.0 / 3.0;

/// Returns the part of the whole range that step `index` of a search covers.
fn shrink(index: usize) -> f32 {
    1.0 - index as f32 / 100.0
}

/// The format of a weight's groups: its spec, and the scale of the whole tensor in formats that
/// have one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupFormat {
    spec: QuantSpec,
    tensor: f32,
}

impl GroupFormat {
    /// Returns the format of the groups of a weight with these values.
    pub fn of(weight: &[f32], spec: &QuantSpec) -> Self {
        Self {
            spec: *spec,
            tensor: spec.tensor_scale(weight),
        }
    }
}

/// The levels of one group of a column: `scale * (q - zero)` for q from 0 to `top`, or `scale`
/// times the numbers of a kind of floats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Grid {
    pub scale: f32,
    pub zero: f32,
    value: WeightValue,
    top: f32,
    /// The scale before it was rounded to its dtype.
    exact: f32,
}

impl Grid {
    /// Creates the levels for values in `low..=high`, a range that includes 0, as
    /// [`quantize_rtn`](marlin_format::quantize_rtn) defines them for the whole range.
    pub fn new([low, high]: [f32; 2], format: &GroupFormat) -> Self {
        let GroupFormat { spec, tensor } = format;
        let top = f32::from(spec.value.max());
        let exact = spec.exact_scale(low, high);
        let scale = spec.round_scale(exact, *tensor);
        let zero = match spec.has_zero_points() {
            true => (-low / scale).round_ties_even().clamp(0.0, top),
            false => f32::from(spec.value.midpoint()),
        };
        Self {
            scale,
            zero,
            value: spec.value,
            top,
            exact,
        }
    }

    /// Returns the number of grids that a search tries for a range: [`SHRINKS`] parts of it. For
    /// symmetric integers, each part is tried with either sign of the scale, because the levels
    /// reach one step further on one side of zero. For floats, a larger range is tried, too: a
    /// scale that is a power of two may be less than the largest value needs.
    pub fn candidates(spec: &QuantSpec) -> usize {
        if spec.value.is_float() {
            SHRINKS + 1
        } else if spec.has_zero_points() {
            SHRINKS
        } else {
            2 * SHRINKS
        }
    }

    /// Returns grid `index` of a search; the first has the levels of the whole range.
    pub fn candidate([low, high]: [f32; 2], index: usize, format: &GroupFormat) -> Self {
        let spec = &format.spec;
        let (part, sign) = match spec.value.is_float() || spec.has_zero_points() {
            true if index == SHRINKS => (FLOAT_GROWTH, 1.0),
            true => (shrink(index), 1.0),
            false => (
                shrink(index / 2),
                if index.is_multiple_of(2) { 1.0 } else { -1.0 },
            ),
        };
        let grid = Self::new([low * part, high * part], format);
        Self {
            scale: sign * grid.scale,
            ..grid
        }
    }

    /// Returns the code q of the nearest level.
    pub fn q(&self, value: f32) -> f32 {
        if self.value.is_float() {
            return f32::from(self.value.encode(value / self.scale));
        }
        ((value / self.scale).round_ties_even() + self.zero).clamp(0.0, self.top)
    }

    /// Returns the nearest level.
    pub fn nearest(&self, value: f32) -> f32 {
        if self.value.is_float() {
            let code = self.value.encode(value / self.scale);
            return self.value.decode(code) * self.scale;
        }
        (self.q(value) - self.zero) * self.scale
    }

    /// Checks that the scale is finite in its dtype.
    pub fn check(&self, row: usize, column: usize, spec: &QuantSpec) -> Result<(), FormatError> {
        match self.scale.is_finite() {
            true => Ok(()),
            false => Err(FormatError::ScaleOverflow {
                row,
                column,
                value: self.exact,
                dtype: spec.scales.dtype,
            }),
        }
    }
}

/// Checks that `weight` has K * N values, all of them finite.
pub(crate) fn expect_weight(weight: &[f32], k: usize, n: usize) -> Result<(), QuantError> {
    QuantSpec::check_shape(k, n)?;
    if weight.len() != k * n {
        return Err(QuantError::Shape {
            k,
            n,
            found: weight.len(),
        });
    }
    if let Some(place) = weight.iter().position(|value| !value.is_finite()) {
        return Err(FormatError::NonFiniteWeight {
            row: place / n,
            column: place % n,
            value: weight[place],
        }
        .into());
    }
    Ok(())
}

/// Returns the smallest range that includes all values and 0.
pub(crate) fn range(values: impl Iterator<Item = f32>) -> [f32; 2] {
    values.fold([0.0, 0.0], |[low, high], value| {
        [low.min(value), high.max(value)]
    })
}

/// Returns the weight in 2:4 form if `sparsity` is 2:4, or if the weight is already 2:4.
pub(crate) fn in_form(weight: PlainWeight, sparsity: Sparsity) -> Result<PlainWeight, QuantError> {
    Ok(match sparsity {
        Sparsity::Dense => weight.detect_two_four(),
        Sparsity::TwoFour => weight.to_two_four()?.into_owned(),
    })
}

/// Returns true if any column of a weight [K, N] is 2:4: at least two of every four rows are zero.
#[cfg(feature = "cubecl-runtime")]
pub(crate) fn has_two_four(weight: &[f32], n: usize) -> bool {
    weight.len().is_multiple_of(4 * n)
        && (0..n).any(|column| is_two_four(|row| weight[row * n + column] == 0.0, weight.len() / n))
}

/// Returns true if K is a multiple of 4 and at least two of every four rows are zero.
pub(crate) fn is_two_four(is_zero: impl Fn(usize) -> bool, k: usize) -> bool {
    k.is_multiple_of(4)
        && (0..k)
            .step_by(4)
            .all(|row| (row..row + 4).filter(|&row| is_zero(row)).count() >= 2)
}
