//! An axis of a plot: the pixel of each value, and the values that have ticks.

/// The range of values in one direction, and the pixels that the range maps to.
pub(super) struct Axis {
    low: f64,
    high: f64,
    /// The pixel of `low`; `end` is the pixel of `high`.
    pub start: i32,
    pub end: i32,
    is_logarithmic: bool,
}

impl Axis {
    /// Creates an axis with a margin around the values. The axis is logarithmic if the largest
    /// value is more than five times the smallest.
    pub fn new(values: impl Iterator<Item = f64>, start: i32, end: i32) -> Self {
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        let is_logarithmic = low > 0.0 && high > 5.0 * low;
        let scale = |value: f64| if is_logarithmic { value.ln() } else { value };
        let (low, high) = (scale(low), scale(high));
        // A single value also has a margin.
        let room = if high > low {
            0.1 * (high - low)
        } else {
            (0.05 * high.abs()).max(1e-6)
        };
        Self {
            low: low - room,
            high: high + room,
            start,
            end,
            is_logarithmic,
        }
    }

    pub fn place(&self, value: f64) -> i32 {
        let scaled = if self.is_logarithmic {
            value.ln()
        } else {
            value
        };
        let part = (scaled - self.low) / (self.high - self.low);
        self.start + (part * f64::from(self.end - self.start)).round() as i32
    }

    /// Returns the ticks: the pixels and labels of round values.
    pub fn ticks(&self) -> Vec<(i32, String)> {
        let values: Vec<(f64, usize)> = if self.is_logarithmic {
            let decades = (self.low / std::f64::consts::LN_10).floor() as i32
                ..=(self.high / std::f64::consts::LN_10).ceil() as i32;
            let factors: &[f64] = if self.high - self.low > 8.0 {
                &[1.0]
            } else {
                &[1.0, 2.0, 5.0]
            };
            let values = decades.flat_map(|decade| {
                factors
                    .iter()
                    .map(move |factor| (factor * 10f64.powi(decade), (-decade).max(0) as usize))
            });
            values
                .filter(|(value, _)| (self.low..=self.high).contains(&value.ln()))
                .collect()
        } else {
            let least = (self.high - self.low) / 6.0;
            let decade = 10f64.powi(least.log10().floor() as i32);
            let step = [1.0, 2.0, 5.0]
                .into_iter()
                .map(|factor| factor * decade)
                .find(|step| *step >= least)
                .unwrap_or(10.0 * decade);
            let decimals = (-step.log10().floor()).max(0.0) as usize;
            let multiples = (self.low / step).ceil() as i64..=(self.high / step).floor() as i64;
            multiples
                .map(|multiple| (multiple as f64 * step, decimals))
                .collect()
        };
        values
            .into_iter()
            .map(|(value, decimals)| (self.place(value), format!("{value:.decimals$}")))
            .collect()
    }
}
