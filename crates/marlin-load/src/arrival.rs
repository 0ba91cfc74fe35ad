//! The times at which requests arrive.

use crate::options::{Amount, Load};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Gamma};

/// The time between two arrivals, in seconds.
enum Gap {
    None,
    Constant(f64),
    Gamma(Gamma<f64>),
}

impl Gap {
    fn new(load: &Load) -> Self {
        let Some(rate) = load.rate else {
            return Self::None;
        };
        // A shape that is too large or too small for the distribution is constant in effect.
        match Gamma::new(load.burstiness, 1.0 / (rate * load.burstiness)) {
            Ok(gamma) if load.burstiness.is_finite() => Self::Gamma(gamma),
            _ => Self::Constant(1.0 / rate),
        }
    }

    fn draw(&self, rng: &mut StdRng) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Constant(gap) => *gap,
            Self::Gamma(gamma) => gamma.sample(rng),
        }
    }
}

/// Returns the seconds from the start of a run at which requests arrive.
pub(crate) fn arrivals(
    load: &Load,
    amount: Amount,
    seed: u64,
) -> Box<dyn Iterator<Item = f64> + Send> {
    let gap = Gap::new(load);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut at = 0.0;
    let times = std::iter::repeat_with(move || {
        at += gap.draw(&mut rng);
        at
    });
    match amount {
        Amount::Duration(duration) => {
            let end = duration.as_secs_f64();
            Box::new(times.take_while(move |&at| at < end))
        }
        Amount::Requests(count) => {
            let times: Vec<f64> = times.take(count).collect();
            let scale = match (load.rate, times.last()) {
                (Some(rate), Some(&last)) if last > 0.0 => count as f64 / rate / last,
                _ => 1.0,
            };
            Box::new(times.into_iter().map(move |at| at * scale))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Returns the mean of the gaps, and their variance by the square of the mean.
    fn moments(times: &[f64]) -> (f64, f64) {
        let gaps: Vec<f64> = (0..times.len())
            .map(|index| times[index] - index.checked_sub(1).map_or(0.0, |before| times[before]))
            .collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let squares = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>();
        (mean, squares / gaps.len() as f64 / (mean * mean))
    }

    fn load(rate: f64, burstiness: f64) -> Load {
        Load {
            rate: Some(rate),
            burstiness,
            concurrency: None,
        }
    }

    #[test]
    fn gaps_have_the_mean_and_the_variance_of_their_distribution() {
        const COUNT: usize = 100_000;
        let seed = marlin_testing::seed();
        for (rate, burstiness) in [(10.0, 1.0), (3.0, 0.25), (200.0, 4.0), (7.0, f64::INFINITY)] {
            let duration = Duration::from_secs_f64(COUNT as f64 / rate);
            let drawn: Vec<f64> =
                arrivals(&load(rate, burstiness), Amount::Duration(duration), seed).collect();
            let (mean, variance) = moments(&drawn);
            // Four standard errors of the mean; those of the variance are up to sqrt(2 + 6 / shape)
            // times 1 / shape.
            let expected = 1.0 / burstiness;
            let error = 4.0 / (COUNT as f64).sqrt();
            assert!(
                (mean * rate - 1.0).abs() <= error * expected.sqrt() + 1e-4,
                "mean {mean} for rate {rate} and burstiness {burstiness}"
            );
            assert!(
                (variance - expected).abs()
                    <= error * expected * (2.0 + 6.0 * expected).sqrt() + 1e-9,
                "variance {variance} for burstiness {burstiness}"
            );
        }
    }

    #[test]
    fn a_number_of_requests_ends_at_number_by_rate() {
        let seed = marlin_testing::seed();
        let times: Vec<f64> = arrivals(&load(20.0, 1.0), Amount::Requests(500), seed).collect();
        assert_eq!(times.len(), 500);
        assert!((times[499] - 25.0).abs() < 1e-9, "{}", times[499]);
        assert!(times.windows(2).all(|pair| pair[0] <= pair[1]));
        let again: Vec<f64> = arrivals(&load(20.0, 1.0), Amount::Requests(500), seed).collect();
        assert_eq!(times, again);
        let other: Vec<f64> = arrivals(&load(20.0, 1.0), Amount::Requests(500), seed ^ 1).collect();
        assert_ne!(times, other);
    }

    #[test]
    fn without_a_rate_all_requests_arrive_at_once() {
        let times: Vec<f64> = arrivals(&Load::default(), Amount::Requests(3), 0).collect();
        assert_eq!(times, [0.0; 3]);
    }
}
