//! Evaluation of models against the model that they were made from: perplexity, and the difference
//! between their distributions of the next token.

use burn::tensor::Tensor;

use crate::perplexity::{
    WindowBatch, batches, check_likelihoods, check_text, dense_batch, log_probabilities, unread,
};
use crate::{Model, ModelError};

/// A mean over the tokens of texts, and its standard error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// The standard error of the mean. Windows are the independent samples, since tokens of one
    /// window depend on each other. NaN for a single window.
    pub error: f64,
}

/// The results of a model on one or more texts.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// The number of predicted tokens.
    pub tokens: usize,
    /// The negative log-likelihood of a token, in nats. The perplexity is e to the power of its
    /// mean.
    pub nll: Mean,
    /// The comparison with the reference; `None` for the reference itself.
    pub against: Option<Against>,
}

/// The comparison of a model with the reference, token by token.
#[derive(Debug, Clone, PartialEq)]
pub struct Against {
    /// The difference between the negative log-likelihoods of a token in the model and in the
    /// reference.
    pub nll_change: Mean,
    /// The Kullback-Leibler divergence of the next token's distribution from the reference's, in
    /// nats.
    pub divergence: Mean,
    /// The fraction of tokens for which both models have the same most likely next token.
    pub agreement: Mean,
    /// The number of tokens for which the most likely next tokens differ.
    pub differ: usize,
}

impl Evaluation {
    /// Returns the perplexity, e to the power of the mean negative log-likelihood.
    pub fn perplexity(&self) -> f64 {
        self.nll.mean.exp()
    }
}

/// The results of several models on several texts.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluations {
    /// The results for each text, one for each model in order.
    pub texts: Vec<Vec<Evaluation>>,
    /// The results for all texts together, with the same weight for each token.
    pub all: Vec<Evaluation>,
}

/// The values of tokens, grouped by window.
#[derive(Default)]
struct Values {
    windows: Vec<Vec<f64>>,
}

impl Values {
    fn add(&mut self, values: impl Iterator<Item = f64>, window: usize) {
        let values: Vec<f64> = values.collect();
        self.windows
            .extend(values.chunks(window).map(<[f64]>::to_vec));
    }

    fn tokens(&self) -> usize {
        self.windows.iter().map(Vec::len).sum()
    }

    fn sum(&self) -> f64 {
        self.windows.iter().flatten().sum()
    }

    /// Returns the mean over all tokens, with a standard error that treats windows as clusters.
    fn mean(&self) -> Mean {
        let (count, tokens) = (self.windows.len() as f64, self.tokens() as f64);
        let mean = self.sum() / tokens;
        let squares: f64 = self
            .windows
            .iter()
            .map(|window| window.iter().map(|value| value - mean).sum::<f64>().powi(2))
            .sum();
        Mean {
            mean,
            error: (squares * count / (count - 1.0)).sqrt() / tokens,
        }
    }
}

/// Evaluates models over the tokens of texts, in windows of `window` tokens that do not overlap, as
/// [`perplexity`](crate::perplexity()) does. The first model is the reference for the others. The
/// models are called in turn on the same windows.
///
/// # Errors
/// See [`perplexity`](crate::perplexity()), for each model; also [`ModelError::Vocabulary`] if the
/// models have different vocabularies.
pub fn evaluate(
    models: &[&Model],
    texts: &[&[u32]],
    window: usize,
    mut on_progress: impl FnMut(usize, usize),
) -> Result<Evaluations, ModelError> {
    let mut found = Evaluations {
        texts: Vec::new(),
        all: Vec::new(),
    };
    let Some(reference) = models.first() else {
        return Ok(found);
    };
    for model in models {
        texts
            .iter()
            .try_for_each(|tokens| check_text(model, tokens, window))?;
        let (expected, found) = (reference.config().vocab_size, model.config().vocab_size);
        if expected != found {
            return Err(ModelError::Vocabulary { expected, found });
        }
    }
    let total = texts.iter().map(|tokens| tokens.len()).sum();
    let (mut all, mut done) = (Collected::new(models.len()), 0);
    for tokens in texts {
        let mut text = Collected::new(models.len());
        for batch in batches(tokens, window, dense_batch(reference, window)) {
            text.add(models, &batch)?;
            done += batch.tokens.len();
            on_progress(done, total);
        }
        found.texts.push(text.evaluations());
        all.append(text);
    }
    found.all = all.evaluations();
    Ok(found)
}

/// Values collected over tokens: the negative log-likelihoods of each model, and the comparison of
/// each model with the first.
struct Collected {
    nll: Vec<Values>,
    against: Vec<[Values; 3]>,
}

impl Collected {
    fn new(models: usize) -> Self {
        let nll = (0..models).map(|_| Values::default()).collect();
        Self {
            nll,
            against: (1..models).map(|_| Default::default()).collect(),
        }
    }

    /// Runs the models on a batch of windows, and adds their values.
    fn add(&mut self, models: &[&Model], batch: &WindowBatch<'_>) -> Result<(), ModelError> {
        let Some((reference, others)) = models.split_first() else {
            return Ok(());
        };
        let predicted = batch.seq - 1;
        let expected = Predicted::of(reference, batch)?;
        self.nll[0].add(expected.nll.iter().copied(), predicted);
        let probabilities = expected.log_probabilities.clone().exp();
        for (index, model) in others.iter().enumerate() {
            let found = Predicted::of(model, batch)?;
            let divergence = (probabilities.clone()
                * (expected.log_probabilities.clone() - found.log_probabilities))
                .sum_dim(2);
            let divergence = divergence.try_into_vec_as::<f32>().map_err(unread)?;
            let [changes, divergences, agreements] = &mut self.against[index];
            changes.add(
                found
                    .nll
                    .iter()
                    .zip(&expected.nll)
                    .map(|(found, expected)| found - expected),
                predicted,
            );
            divergences.add(divergence.into_iter().map(f64::from), predicted);
            agreements.add(
                found
                    .top
                    .iter()
                    .zip(&expected.top)
                    .map(|(found, expected)| f64::from(u8::from(found == expected))),
                predicted,
            );
            self.nll[1 + index].add(found.nll.into_iter(), predicted);
        }
        Ok(())
    }

    /// Adds the values of the same models on another text.
    fn append(&mut self, other: Self) {
        let against = self
            .against
            .iter_mut()
            .flatten()
            .zip(other.against.into_iter().flatten());
        self.nll
            .iter_mut()
            .zip(other.nll)
            .chain(against)
            .for_each(|(values, other)| values.windows.extend(other.windows));
    }

    fn evaluations(&self) -> Vec<Evaluation> {
        let mut against = self
            .against
            .iter()
            .map(|[changes, divergences, agreements]| Against {
                nll_change: changes.mean(),
                divergence: divergences.mean(),
                agreement: agreements.mean(),
                differ: agreements.tokens() - agreements.sum().round() as usize,
            });
        let evaluation = |(index, nll): (usize, &Values)| Evaluation {
            tokens: nll.tokens(),
            nll: nll.mean(),
            against: if index == 0 { None } else { against.next() },
        };
        self.nll.iter().enumerate().map(evaluation).collect()
    }
}

/// The predictions of a model for all tokens of windows except each window's first.
struct Predicted {
    /// The log-probabilities of all tokens of the vocabulary, [windows, seq - 1, vocab], in f32.
    log_probabilities: Tensor<3>,
    nll: Vec<f64>,
    /// The most likely token after each position.
    top: Vec<i64>,
}

impl Predicted {
    fn of(model: &Model, batch: &WindowBatch<'_>) -> Result<Self, ModelError> {
        let (log_probabilities, likelihoods) = log_probabilities(model, batch);
        let likelihoods = likelihoods.try_into_vec_as::<f32>().map_err(unread)?;
        model.check_ranks()?;
        check_likelihoods(model, batch, &likelihoods)?;
        let top = log_probabilities
            .clone()
            .argmax(2)
            .try_into_vec_as::<i64>()
            .map_err(unread)?;
        Ok(Self {
            log_probabilities,
            nll: likelihoods
                .into_iter()
                .map(|value| -f64::from(value))
                .collect(),
            top,
        })
    }
}
