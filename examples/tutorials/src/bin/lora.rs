//! Fine-tunes a Llama folder in 4 bits: only LoRA adapters are trained.

use std::error::Error;
use std::sync::Arc;

use burn::module::{Lora, Module, ParamGroup};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData, activation};
use burn_marlin::{GroupSize, QuantSpec, WeightQuantizer};
use marlin_lm::{LanguageModel, Model, OpenOptions, perplexity};

const STEPS: usize = 20;
/// Sequences of a step.
const BATCH: usize = 4;
/// Tokens of a sequence.
const SEQ: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    // Once, before the first tensor.
    burn_marlin::install()?;
    let text = std::fs::read_to_string("text.txt")?;
    let (model, tokens) = open("model", &text)?;
    let before = perplexity(&model, &tokens, SEQ, |_| {})?.perplexity;

    let model = train(model, &tokens)?;
    let after = perplexity(&model, &tokens, SEQ, |_| {})?.perplexity;
    println!("perplexity of the text: {before:.2} before, {after:.2} after");

    // The record has the adapters alone.
    let adapters = ParamGroup::from_predicate(".lora.");
    model.into_record_group(adapters).save("adapters.bpk")?;

    // To use them: the same model, made the same way, and the record.
    let (model, _) = open("model", &text)?;
    let record = ModuleRecord::load("adapters.bpk")?.allow_partial(true);
    let model = model.try_load_record(record)?;
    let again = perplexity(&model, &tokens, SEQ, |_| {})?.perplexity;
    println!("with the adapters loaded from the file: {again:.2}");
    Ok(())
}

/// Opens a float folder, converts the model to 4 bits, and attaches adapters, which
/// change nothing until they are trained. Returns the model and the tokens of a text.
fn open(folder: &str, text: &str) -> Result<(Model, Vec<u32>), Box<dyn Error>> {
    // Gradients can leave the range of f16.
    let options = OpenOptions {
        dtype: Some(FloatDType::F32),
        ..OpenOptions::default()
    };
    let llama = LanguageModel::open(folder, &Device::flex(), &options)?;
    let tokens = llama.tokenizer()?.encode(text)?;
    let model = Arc::unwrap_or_clone(llama.model);

    let quantizer = WeightQuantizer::new(QuantSpec::int4(GroupSize::G128));
    let (model, report) = quantizer.quantize(model)?;
    println!("{} layers in 4 bits", report.quantized());
    // Rank 8, alpha 16. All other parameters are frozen.
    Ok((model.apply_lora(Lora::new(8, 16.0)), tokens))
}

/// Trains the adapters to predict the next token of the text.
fn train(model: Model, tokens: &[u32]) -> Result<Model, Box<dyn Error>> {
    let mut model = model.train();
    let device = model.device().autodiff();
    let mut optimizer = AdamWConfig::new().init();
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    let windows = tokens
        .len()
        .checked_sub(SEQ)
        .ok_or("the text is too short")?;
    for step in 0..STEPS {
        // [BATCH, SEQ + 1]: each row is a part of the text.
        let rows = (0..BATCH).flat_map(|row| {
            let start = (step * BATCH + row) * SEQ % windows;
            &tokens[start..start + SEQ + 1]
        });
        let data = TensorData::new(rows.copied().collect(), [BATCH, SEQ + 1]);
        let rows = Tensor::<2, Int>::from_data(data, &device);
        let inputs = rows.clone().slice([0..BATCH, 0..SEQ]);
        let targets = rows.slice([0..BATCH, 1..SEQ + 1]).reshape([BATCH, SEQ, 1]);

        let log_likelihoods = activation::log_softmax(model.forward_full(inputs), 2);
        let loss = log_likelihoods.gather(2, targets).mean().neg();
        if step % 5 == 0 {
            println!("step {step}: loss {:.3}", loss.clone().into_scalar::<f32>());
        }
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
    }
    Ok(model.valid())
}
