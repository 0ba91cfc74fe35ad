//! The learning rate over a run that ends after a number of steps or a time, whichever comes first.

use std::time::Duration;

/// A learning-rate schedule with a linear warm-up, then half a cosine down to a tenth of the peak.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// Peak learning rate.
    pub peak: f64,
    /// The number of steps of warm-up.
    pub warmup: usize,
    /// The number of steps of the whole run.
    pub steps: usize,
    /// Maximum time of the run; `None` for a run limited only by its steps.
    pub limit: Option<Duration>,
}

/// The learning rate at the end, as a fraction of the peak.
const FLOOR: f64 = 0.1;

impl Schedule {
    /// Returns the progress of the run, from 0 to 1: by steps or by time, whichever is further.
    pub fn progress(&self, step: usize, elapsed: Duration) -> f64 {
        let by_steps = step as f64 / self.steps.max(1) as f64;
        let by_time = self.limit.map_or(0.0, |limit| {
            elapsed.as_secs_f64() / limit.as_secs_f64().max(1e-9)
        });
        by_steps.max(by_time).min(1.0)
    }

    /// Returns the learning rate of a step; the first step is 0.
    pub fn learning_rate(&self, step: usize, elapsed: Duration) -> f64 {
        let warmup = ((step + 1) as f64 / self.warmup.max(1) as f64).min(1.0);
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * self.progress(step, elapsed)).cos());
        self.peak * warmup * (FLOOR + (1.0 - FLOOR) * cosine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn rises_then_falls_to_a_tenth() {
        let schedule = Schedule {
            peak: 2.0,
            warmup: 10,
            steps: 1_000_000,
            limit: None,
        };
        let rate = |step| schedule.learning_rate(step, Duration::ZERO);
        assert!(close(rate(0), 0.2) && (rate(9) - 2.0).abs() < 1e-6);
        assert!(
            (rate(500_000) - 1.1).abs() < 1e-4,
            "half way between peak and floor"
        );
        assert!(close(rate(1_000_000), 0.2));
        assert!(
            (10..1000)
                .map(|k| rate(k * 1000))
                .collect::<Vec<_>>()
                .is_sorted_by(|a, b| a > b)
        );
    }

    #[test]
    fn the_further_of_steps_and_time_counts() {
        let schedule = Schedule {
            peak: 1.0,
            warmup: 0,
            steps: 100,
            limit: Some(Duration::from_secs(10)),
        };
        assert!(close(schedule.progress(10, Duration::from_secs(5)), 0.5));
        assert!(close(schedule.progress(80, Duration::from_secs(5)), 0.8));
        assert!(close(schedule.progress(10, Duration::from_secs(11)), 1.0));
        assert!(close(
            schedule.learning_rate(0, Duration::from_secs(20)),
            FLOOR
        ));
    }
}
