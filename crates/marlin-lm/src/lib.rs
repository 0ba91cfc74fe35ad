//! Llama-style decoders with 4-bit weights in Burn: Llama 2 and 3, Mistral, Qwen 2 and 3, Phi-3,
//! Seed-OSS.
//!
//! - [`LanguageModel::open`] opens a Hugging Face folder, float or quantised;
//!   [`LanguageModel::generate`] continues a prompt, [`LanguageModel::perplexity`] measures how
//!   well a text is predicted.
//! - [`ChatTemplate`] renders a conversation in the form that a model was trained on.
//! - [`quantize_folder`] quantises the projections of a float folder to 4 or 8 bits, by rounding,
//!   AWQ or GPTQ, and writes one of several [`FileFormat`]s. [`evaluate()`] compares quantised
//!   models with the float model.
//! - [`LanguageModel::open_on`] splits a model over several devices of one process.
//! - With the feature `hub`, [`LanguageModel::open`] also takes the name of a model on the Hugging
//!   Face hub.
//! - [`Model`] is the decoder as a Burn module, with float or quantised weights. A float model can
//!   be trained, and saved with [`save_float`].
//!
//! ```no_run
//! use std::ops::ControlFlow;
//!
//! use burn::tensor::Device;
//! use marlin_lm::{LanguageModel, OpenOptions};
//!
//! let llama = LanguageModel::open("path/to/Llama-3.2-1B-W4A16", &Device::flex(), &OpenOptions::default())?;
//! let generation = llama.generate("The capital of France is", &llama.default_options(64), |text| {
//!     print!("{text}");
//!     ControlFlow::Continue(())
//! })?;
//! println!("\n{} tokens in {:?}", generation.tokens.len(), generation.decode);
//! # Ok::<(), marlin_lm::ModelError>(())
//! ```
//!
//! # Features
#![doc = document_features::document_features!()]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod architectures;
mod biases;
mod config;
mod engine;
mod error;
mod evaluate;
mod folder;
mod generate;
pub mod model;
mod parallel;
mod perplexity;
mod quantize;
mod sampling;
mod save;
mod suppression;
mod tokens;

pub use architectures::Architecture;
pub use config::{
    ExpertsConfig, GenerationConfig, Llama3RopeScaling, LongRopeScaling, ModelConfig,
    ModelConfigError, ModelSizes, RopeScaling, SlidingWindow, WindowLayers, YarnRopeScaling,
};
pub use engine::{
    AllowedTokens, BatchEngine, BatchOutput, BatchStep, DecodeToken, Engine, MAX_SEQUENCES,
    PromptPart, RequestParams, StepOutput, StopReason,
};
pub use error::ModelError;
pub use evaluate::{Against, Evaluation, Evaluations, Mean, evaluate};
pub use folder::{LanguageModel, OpenOptions, OpenProgress, check_folder};
pub use generate::{GenerateOptions, Generation};
#[cfg(feature = "hub")]
pub use marlin_hub as hub;
pub use marlin_nn::ahead::CompiledAhead;
pub use marlin_nn::{CacheFormat, MAX_LOGPROBS, Pages, TokenLogprobs};
pub use marlin_quant::{LayerLoss, RowOrder};
#[cfg(feature = "sandbox")]
pub use marlin_text::init;
pub use marlin_text::{
    ChatTemplate, Failure as TextFailure, Message, TextError, TextStream, Tokenizer, harmony,
};
pub use model::{KvCache, Model, Projection, ProjectionGroup};
pub use parallel::ParallelError;
pub use perplexity::{Perplexity, PerplexityProgress, perplexity};
pub use quantize::{
    Calibration, FileFormat, HIDDEN_STATES_ON_DEVICE, Method, Override, OverrideError,
    QuantizeOptions, QuantizeProgress, QuantizeReport, QuantizedLayer, SampleOptions,
    calibration_samples, quantize_folder,
};
pub use sampling::{Sampling, SamplingError};
pub use save::save_float;
pub use suppression::Suppression;

#[cfg(test)]
mod tests;
