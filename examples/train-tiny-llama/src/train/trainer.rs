//! A model in training: steps, the loss and the perplexity.

use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, activation};
use marlin_lm::{Model, ModelConfig};
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::Options;
use super::clip::clip_by_global_norm;
use super::prune::{Masks, Pruning, prune};
use super::tokens::{self, Windows};
use crate::error::Error;

/// The maximum joint L2 norm of the gradients.
const MAX_GRADIENT_NORM: f32 = 1.0;
/// The coefficient of weight decay. Weight decay keeps weights small and free of outliers, as 4-bit
/// groups need.
const WEIGHT_DECAY: f32 = 0.1;

/// A model in training on one device.
pub struct Trainer {
    model: Model,
    optimizer: ModuleOptimizer,
    windows: Windows,
    batch: usize,
    seq: usize,
    /// The masks of a 2:4 model; `None` for a dense model.
    masks: Option<Masks>,
    /// The sum of the losses since the last read, on the device, and their number.
    losses: Option<(Tensor<1>, usize)>,
}

impl Trainer {
    /// Creates a model with random weights on the device, and copies the training tokens to the
    /// device.
    pub fn new(
        config: &ModelConfig,
        train_tokens: Vec<i32>,
        options: &Options,
        device: &Device,
    ) -> Self {
        device.seed(options.seed);
        let model = Model::new(config, &device.clone().autodiff());
        Self::of(model, None, train_tokens, options, device)
    }

    /// Prunes the projections of a float model that are not 2:4, for fine-tuning with a fixed mask.
    pub fn sparse(
        model: Model,
        train_tokens: Vec<i32>,
        options: &Options,
        device: &Device,
    ) -> Result<Self, Error> {
        device.seed(options.seed);
        let (model, masks) = prune(model)?;
        Ok(Self::of(model, Some(masks), train_tokens, options, device))
    }

    fn of(
        model: Model,
        masks: Option<Masks>,
        train_tokens: Vec<i32>,
        options: &Options,
        device: &Device,
    ) -> Self {
        let device = device.clone().autodiff();
        let windows = Windows::new(
            train_tokens,
            options.seq,
            StdRng::seed_from_u64(options.seed),
            &device,
        );
        let optimizer = optimizer(&model);
        Self {
            model,
            optimizer,
            windows,
            batch: options.batch,
            seq: options.seq,
            masks,
            losses: None,
        }
    }

    /// Returns the number of parameters of the model.
    pub fn num_params(&self) -> usize {
        self.model.num_params()
    }

    /// Returns the extent to which a 2:4 model was pruned; `None` for a dense model.
    pub fn pruning(&self) -> Option<Pruning> {
        self.masks.as_ref().map(Masks::pruning)
    }

    /// Returns the model without its autodiff graph.
    pub fn model(&self) -> Model {
        self.model.valid()
    }

    /// Takes one step of AdamW on a batch of random windows, without waiting for the device.
    pub fn step(&mut self, learning_rate: f64) -> Result<(), Error> {
        let (inputs, targets) = self.windows.batch(self.batch);
        let loss = token_losses(self.model.forward_full(inputs), targets).mean();
        let grads = GradientsParams::from_grads(loss.backward(), &self.model);
        let grads = match &self.masks {
            Some(masks) => masks.apply(&self.model, grads),
            None => grads,
        };
        let grads = clip_by_global_norm(&self.model, grads, MAX_GRADIENT_NORM);
        self.model = self
            .optimizer
            .step(learning_rate, self.model.clone(), grads);
        let loss = loss.inner();
        self.losses = Some(match self.losses.take() {
            Some((sum, count)) => (sum + loss, count + 1),
            None => (loss, 1),
        });
        // With the flush, Burn's fusion gets the same sequence of operations in every step, and
        // reuses its plan.
        self.model
            .device()
            .flush()
            .map_err(|error| Error::Device(error.to_string()))
    }

    /// Returns the mean training loss of the steps since the last call, in nats per token. Waits
    /// for the device.
    pub fn mean_loss(&mut self) -> Result<f32, Error> {
        match self.losses.take() {
            Some((sum, count)) => Ok(read(sum)? / count as f32),
            None => Ok(f32::NAN),
        }
    }

    /// Returns the perplexity over windows of `seq` tokens that do not overlap; each token except
    /// the first of a window is predicted once.
    pub fn perplexity(&self, tokens: &[i32]) -> Result<f64, Error> {
        let model = self.model();
        let (mut sum, mut count) = (0.0, 0);
        for windows in tokens::in_order(tokens, self.seq, self.batch, &model.device()) {
            let (inputs, targets) = tokens::split(windows);
            count += targets.shape().num_elements();
            sum += f64::from(read(
                token_losses(model.forward_full(inputs), targets).sum(),
            )?);
        }
        Ok((sum / f64::from(count as u32)).exp())
    }
}

/// Returns the negative log-likelihood [batch * seq] of each target [batch, seq] under logits
/// [batch, seq, vocab], in nats.
fn token_losses(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    let [batch, seq, vocab] = logits.dims();
    let log_probabilities = activation::log_softmax(logits.reshape([batch * seq, vocab]), 1);
    log_probabilities
        .gather(1, targets.reshape([batch * seq, 1]))
        .reshape([batch * seq])
        .neg()
}

fn read(value: Tensor<1>) -> Result<f32, Error> {
    value
        .try_into_scalar::<f32>()
        .map_err(|error| Error::Device(error.to_string()))
}

/// Returns AdamW with weight decay for matrices, and without weight decay for the vectors of norms.
fn optimizer(model: &Model) -> ModuleOptimizer {
    let adamw = AdamWConfig::new()
        .with_beta_1(0.9)
        .with_beta_2(0.95)
        .with_epsilon(1e-8);
    let mut vectors = Vectors(Vec::new());
    model.visit(&mut vectors);
    ModuleOptimizer::from(adamw.clone().with_weight_decay(WEIGHT_DECAY).build()).with_group(
        ParamGroup::from_ids(vectors.0),
        adamw.with_weight_decay(0.0).build(),
        None,
    )
}

/// A visitor that collects the ids of parameters of rank 1.
struct Vectors(Vec<ParamId>);

impl ModuleVisitor for Vectors {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if D == 1 {
            self.0.push(param.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_cross_entropies() {
        let device = Device::flex();
        let logits = Tensor::<3>::from_floats([[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]], &device);
        let targets = Tensor::<2, Int>::from_ints([[2, 0]], &device);
        let losses: Vec<f32> = token_losses(logits, targets)
            .into_data()
            .iter::<f32>()
            .collect();
        let first = (1f32.exp() + 2f32.exp() + 3f32.exp()).ln() - 3.0;
        assert!(
            (losses[0] - first).abs() < 1e-6 && (losses[1] - 3f32.ln()).abs() < 1e-6,
            "{losses:?}"
        );
    }
}
