//! QLoRA on a Llama folder: converts the model, attaches adapters, trains them with AdamW, and
//! saves their record.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use burn::module::{Lora, Module, ParamGroup};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData, activation};
use burn_marlin::{GroupSize, QuantSpec, Report, WeightQuantizer};
use marlin_lm::{LanguageModel, Model, OpenOptions, perplexity};

/// The settings of the training.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Rank of the adapters.
    pub rank: usize,
    /// Steps of AdamW.
    pub steps: usize,
    /// Sequences per step.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Learning rate.
    pub learning_rate: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            rank: 8,
            steps: 30,
            batch: 4,
            seq: 64,
            learning_rate: 1e-3,
        }
    }
}

/// A folder's model in 4 bits, with adapters on every converted layer, and the tokens of the text
/// to learn.
pub struct Prepared {
    /// The model, not yet in training.
    pub model: Model,
    /// The report of the conversion.
    pub report: Report,
    /// The tokens of the text.
    pub tokens: Vec<u32>,
}

/// Opens a float Llama folder, converts the model, and attaches adapters, whose initial
/// contribution is zero.
///
/// # Errors
/// Returns an error if the folder cannot be opened or converted, or the text cannot be encoded.
pub fn prepare(
    folder: &Path,
    text: &str,
    options: &Options,
    device: &Device,
) -> Result<Prepared, Box<dyn Error>> {
    // Gradients can leave the range of f16.
    let llama = LanguageModel::open(
        folder,
        device,
        &OpenOptions {
            dtype: Some(FloatDType::F32),
            ..OpenOptions::default()
        },
    )?;
    let tokens = llama.tokenizer()?.encode(text)?;
    let quantizer = WeightQuantizer::new(QuantSpec::int4(GroupSize::G128));
    let (model, report) = quantizer
        .quantize(Arc::unwrap_or_clone(llama.model))
        .map_err(|refused| refused.error)?;
    // The call freezes all other parameters.
    let model = model.apply_lora(Lora::new(options.rank, 2.0 * options.rank as f64));
    Ok(Prepared {
        model,
        report,
        tokens,
    })
}

/// Trains the adapters to predict the tokens. Returns the model, and the mean loss of each step.
///
/// # Errors
/// Returns an error if there are fewer tokens than one sequence and its target.
pub fn train(
    model: Model,
    tokens: &[u32],
    options: &Options,
) -> Result<(Model, Vec<f32>), Box<dyn Error>> {
    let Options {
        steps,
        batch,
        seq,
        learning_rate,
        ..
    } = *options;
    let windows = tokens.len().checked_sub(seq + 1).ok_or_else(|| {
        format!(
            "the text has {} tokens, a step takes {}",
            tokens.len(),
            seq + 1
        )
    })?;
    let mut model = model.train();
    let device = model.device().autodiff();
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::with_capacity(steps);
    for step in 0..steps {
        // Windows of the text are consecutive, and continue at the start after the end of the text.
        let starts = (0..batch).map(|index| (step * batch + index) * seq % (windows + 1));
        let window: Vec<i32> = starts
            .flat_map(|start| {
                tokens[start..=start + seq]
                    .iter()
                    .map(|&token| token as i32)
            })
            .collect();
        let window =
            Tensor::<2, Int>::from_data(TensorData::new(window, [batch, seq + 1]), &device);
        let (inputs, targets) = (
            window.clone().slice([0..batch, 0..seq]),
            window.slice([0..batch, 1..seq + 1]),
        );
        let likelihoods = activation::log_softmax(model.forward_full(inputs), 2)
            .gather(2, targets.reshape([batch, seq, 1]));
        let loss = likelihoods.mean().neg();
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(learning_rate, model, gradients);
    }
    Ok((model.valid(), losses))
}

/// Returns the perplexity of the model on the tokens.
///
/// # Errors
/// Returns the errors of [`perplexity`].
pub fn measure(model: &Model, tokens: &[u32], seq: usize) -> Result<f64, Box<dyn Error>> {
    Ok(perplexity(model, tokens, seq, |_| {})?.perplexity)
}

/// Saves the adapters of a model, without the other parameters.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn save_adapters(model: Model, file: &Path) -> Result<(), Box<dyn Error>> {
    Ok(model
        .into_record_group(ParamGroup::from_predicate(".lora."))
        .save(file)?)
}

/// Loads adapters into a model that already has adapters of the same rank.
///
/// # Errors
/// Returns an error if the file cannot be read, or has adapters of another model or rank.
pub fn load_adapters(model: Model, file: &Path) -> Result<Model, Box<dyn Error>> {
    Ok(model.try_load_record(ModuleRecord::load(file)?.allow_partial(true))?)
}
