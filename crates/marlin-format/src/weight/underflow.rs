//! Weights that are too small for the dtype of their scales.

use half::{bf16, f16};

use super::spec::{QuantSpec, ScaleDtype};
use super::{PlainWeight, Scales};

impl QuantSpec {
    /// The scale of a group with values in `low..=high`, a range that includes 0, before it is
    /// rounded to its dtype: `max|w| / (top / 2)`, or with zero points `(high - low) / top`, where
    /// `top` is the largest q, 15 or 255.
    pub fn exact_scale(&self, low: f32, high: f32) -> f32 {
        let top = self.bits.max();
        match self.zero_points {
            // In f64: the range of finite f32 values can be infinite in f32.
            true => ((f64::from(high) - f64::from(low)) / f64::from(top)) as f32,
            false => high.max(-low) / (f32::from(top) / 2.0),
        }
    }

    /// Returns true if a scale is so small that rounding it to its dtype moves the group's
    /// outermost level by more than half the distance of two levels. In f16 those below 4.5e-7 may
    /// be (4 bits; 7.6e-6 in 8), and all below 5.6e-8 are.
    pub fn scale_underflows(&self, exact: f32) -> bool {
        exact > 0.0
            && (self.scale_dtype.round_scale(exact) - exact).abs() * f32::from(self.bits.max())
                > exact
    }

    /// No stored scale above it underflowed, whatever part of the exact one it is.
    fn least_sure_scale(&self) -> f32 {
        let distance = match self.scale_dtype {
            ScaleDtype::F16 => f16::MIN_POSITIVE_SUBNORMAL.to_f32(),
            ScaleDtype::BF16 => bf16::MIN_POSITIVE_SUBNORMAL.to_f32(),
            ScaleDtype::F32 => f32::MIN_POSITIVE,
        };
        (distance * f32::from(self.bits.max()) + distance).max(f32::MIN_POSITIVE)
    }
}

impl PlainWeight {
    /// The groups of columns whose [scale underflows](QuantSpec::scale_underflows), of `groups *
    /// N`: their values are rounded with a larger error than that of the bits, or to 0. `weight`
    /// gives the float weight [K, N] that this one was quantised from; it is asked for only where a
    /// scale is small.
    ///
    /// # Errors
    /// Those of `weight`. A weight of another shape has no such groups.
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
            spec.group.rows(k),
            vec![[0.0f32; 2]; spec.group.count(k) * n],
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
