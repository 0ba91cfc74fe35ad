//! Choosing the next token from logits, on the host.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// How the next token is chosen.
///
/// Applied in this order, as Hugging Face's `generate` does: repetition penalty, temperature, top-k, top-p.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this; 0 always takes the most likely token.
    pub temperature: f32,
    /// Only this many of the most likely tokens count.
    pub top_k: Option<usize>,
    /// Only the most likely tokens that together reach this probability count; 1 for all.
    pub top_p: f32,
    /// Logits of tokens that were there before are divided by this where positive, multiplied where negative; 1 for no penalty.
    pub repetition_penalty: f32,
}

/// A choice that cannot be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// An option outside its range.
    #[error("{option} is {found}; it must be {expected}")]
    Option {
        /// The option.
        option: &'static str,
        /// What it is.
        found: f32,
        /// What it may be.
        expected: &'static str,
    },
    /// A logit that is no number, or infinite.
    #[error("the logit of token {token} is {value}; are the weights broken, or the activations too large for their dtype?")]
    Logit {
        /// The token.
        token: usize,
        /// Its logit.
        value: f32,
    },
    /// No token that could be chosen.
    #[error("none of {tokens} tokens can be chosen: there are no logits above minus infinity")]
    NoToken {
        /// How many logits there are.
        tokens: usize,
    },
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: 1.0, repetition_penalty: 1.0 };

    /// Whether every option is in its range.
    ///
    /// # Errors
    /// [`SamplingError::Option`], with the option's name.
    pub fn validate(&self) -> Result<(), SamplingError> {
        let check = |option, found: f32, ok, expected| if ok { Ok(()) } else { Err(SamplingError::Option { option, found, expected }) };
        let Self { temperature, top_k, top_p, repetition_penalty } = *self;
        check("temperature", temperature, temperature.is_finite() && temperature >= 0.0, "0 or a positive number")?;
        check("top_k", 0.0, top_k != Some(0), "at least 1")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        check("repetition_penalty", repetition_penalty, repetition_penalty.is_finite() && repetition_penalty > 0.0, "a positive number")
    }
}

impl Default for Sampling {
    /// [`GREEDY`](Self::GREEDY).
    fn default() -> Self {
        Self::GREEDY
    }
}

/// Chooses tokens. The same seed and logits give the same tokens.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: StdRng,
}

impl Sampler {
    /// A sampler with a random number generator of its own.
    ///
    /// # Errors
    /// As [`Sampling::validate`].
    pub fn new(sampling: Sampling, seed: u64) -> Result<Self, SamplingError> {
        sampling.validate()?;
        Ok(Self { sampling, rng: StdRng::seed_from_u64(seed) })
    }

    /// Chooses the token that follows `history`; `logits` has one value for each token of the vocabulary.
    ///
    /// Of equal logits the lower token is the more likely one.
    ///
    /// # Errors
    /// [`SamplingError::Logit`] for a logit that is NaN or plus infinity; [`SamplingError::NoToken`] where all are minus infinity, or there are
    /// none.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32, SamplingError> {
        if let Some((token, &value)) = logits.iter().enumerate().find(|&(_, &value)| value.is_nan() || value == f32::INFINITY) {
            return Err(SamplingError::Logit { token, value });
        }
        let penalised = self.penalise(logits, history);
        let logits = penalised.as_deref().unwrap_or(logits);
        if self.sampling.temperature == 0.0 {
            return most_likely(logits);
        }
        let candidates = self.candidates(logits)?;
        Ok(self.draw(&candidates))
    }

    /// The logits after the repetition penalty, or `None` where they stay as they are.
    fn penalise(&self, logits: &[f32], history: &[u32]) -> Option<Vec<f32>> {
        let penalty = self.sampling.repetition_penalty;
        if penalty == 1.0 || history.is_empty() {
            return None;
        }
        let mut penalised = logits.to_vec();
        for &token in history {
            let token = token as usize;
            // Read from `logits`, so that a token that came twice is penalised once.
            if let (Some(&logit), Some(out)) = (logits.get(token), penalised.get_mut(token)) {
                *out = if logit > 0.0 { logit / penalty } else { logit * penalty };
            }
        }
        Some(penalised)
    }

    /// The tokens that count with their weights, the most likely first.
    fn candidates(&self, logits: &[f32]) -> Result<Vec<(u32, f64)>, SamplingError> {
        let mut candidates: Vec<(u32, f32)> =
            logits.iter().enumerate().filter(|(_, logit)| logit.is_finite()).map(|(token, &logit)| (token as u32, logit)).collect();
        let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if let Some(k) = self.sampling.top_k.filter(|&k| k < candidates.len()) {
            candidates.select_nth_unstable_by(k - 1, order);
            candidates.truncate(k);
        }
        candidates.sort_unstable_by(order);
        let &(_, largest) = candidates.first().ok_or(SamplingError::NoToken { tokens: logits.len() })?;

        let temperature = f64::from(self.sampling.temperature);
        let weight = |logit: f32| ((f64::from(logit) - f64::from(largest)) / temperature).exp();
        let mut weighted: Vec<(u32, f64)> = candidates.into_iter().map(|(token, logit)| (token, weight(logit))).collect();
        if self.sampling.top_p < 1.0 {
            let enough = f64::from(self.sampling.top_p) * weighted.iter().map(|(_, weight)| weight).sum::<f64>();
            let mut sum = 0.0;
            let kept = weighted.iter().take_while(|(_, weight)| {
                let below = sum < enough;
                sum += weight;
                below
            });
            let kept = kept.count().max(1);
            weighted.truncate(kept);
        }
        Ok(weighted)
    }

    fn draw(&mut self, candidates: &[(u32, f64)]) -> u32 {
        let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
        let mut left = self.rng.random::<f64>() * total;
        for &(token, weight) in candidates {
            left -= weight;
            if left < 0.0 {
                return token;
            }
        }
        // Rounding can leave a little: it belongs to the last one.
        candidates.last().map_or(0, |&(token, _)| token)
    }
}

fn most_likely(logits: &[f32]) -> Result<u32, SamplingError> {
    let mut best = None;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > best.map_or(f32::NEG_INFINITY, |(_, best)| best) {
            best = Some((token as u32, logit));
        }
    }
    best.map(|(token, _)| token).ok_or(SamplingError::NoToken { tokens: logits.len() })
}

#[cfg(test)]
mod tests;
