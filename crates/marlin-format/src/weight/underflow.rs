//! Detection of weights that are too small for the dtype of their scales.

use half::{bf16, f16};

use super::spec::{QuantSpec, ScaleDtype};
use super::{PlainWeight, Scales};
#[cfg(doc)]
use crate::WeightValue;

impl QuantSpec {
    /// Returns the scale of a group with values in `low..=high`, before rounding to its dtype. The
    /// range must include 0. The scale is `max|w|` divided by the [largest](WeightValue::largest)
    /// value, or with zero points `(high - low) / top`, where `top` is the largest q, 15 or 255.
    pub fn exact_scale(&self, low: f32, high: f32) -> f32 {
        match self.has_zero_points() {
            // In f64: the range of finite f32 values can be infinite in f32.
            true => ((f64::from(high) - f64::from(low)) / f64::from(self.value.max())) as f32,
            false => high.max(-low) / self.value.largest(),
        }
    }

    /// Returns true if rounding a scale to its dtype moves the outermost level of the group by more
    /// than half the distance of two levels. In f16, scales below 4.5e-7 may underflow (4 bits;
    /// 7.6e-6 for 8 bits), and all scales below 5.6e-8 underflow.
    pub fn scale_underflows(&self, exact: f32) -> bool {
        exact > 0.0
            && (self.scales.dtype.round_scale(exact) - exact).abs() * f32::from(self.value.max())
                > exact
    }

    /// Returns a bound on stored scales. A group whose stored scale is above the bound did not
    /// underflow, whatever fraction of the exact scale the stored scale is.
    fn least_sure_scale(&self) -> f32 {
        let distance = match self.scales.dtype {
            ScaleDtype::F16 => f16::MIN_POSITIVE_SUBNORMAL.to_f32(),
            ScaleDtype::BF16 => bf16::MIN_POSITIVE_SUBNORMAL.to_f32(),
            ScaleDtype::F32 => f32::MIN_POSITIVE,
        };
        (distance * f32::from(self.value.max()) + distance).max(f32::MIN_POSITIVE)
    }
}

impl PlainWeight {
    /// Returns the number of groups, out of G * N, whose [scale
    /// underflows](QuantSpec::scale_underflows). Values of these groups are rounded with a larger
    /// error than that of the bit width, or become zero. `weight` returns the float weight `[K, N]`
    /// from which this weight was quantised. It is called only if a scale is small.
    ///
    /// # Errors
    /// The errors of `weight`. If the float weight has another number of elements, the result is 0.
    pub fn underflows<E>(&self, weight: impl FnOnce() -> Result<Vec<f32>, E>) -> Result<usize, E> {
        let (k, n, spec, sure) = (
            self.k(),
            self.n(),
            self.spec(),
            self.spec().least_sure_scale(),
        );
        let is_sure = match self.scales() {
            Scales::F16(scales) => scales.iter().all(|scale| scale.to_f32().abs() > sure),
            Scales::BF16(scales) => scales.iter().all(|scale| scale.to_f32().abs() > sure),
            Scales::F32(scales) => scales.iter().all(|scale| scale.abs() > sure),
        };
        if is_sure {
            return Ok(0);
        }
        let weight = weight()?;
        if weight.len() != k * n {
            return Ok(0);
        }
        let (rows, mut ranges) = (
            spec.scales.group.rows(k),
            vec![[0.0f32; 2]; spec.scales.group.count(k) * n],
        );
        for stored in 0..k {
            let row = self
                .row_permutation()
                .map_or(stored, |permutation| permutation[stored] as usize);
            for ([low, high], &value) in ranges[stored / rows * n..]
                .iter_mut()
                .zip(&weight[row * n..(row + 1) * n])
            {
                (*low, *high) = (low.min(value), high.max(value));
            }
        }
        Ok(ranges
            .iter()
            .filter(|[low, high]| spec.scale_underflows(spec.exact_scale(*low, *high)))
            .count())
    }
}
