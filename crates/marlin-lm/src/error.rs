//! The errors of opening, saving, quantising and running a model.

mod io;

use std::path::PathBuf;

use burn::tensor::FloatDType;
use marlin_format::checkpoint::{CheckpointError, ConfigError};
use marlin_format::{FormatError, excerpt};
use marlin_quant::QuantError;
use marlin_text::TextError;

use crate::config::ModelConfigError;
use crate::parallel::ParallelError;
use crate::sampling::SamplingError;

/// A model that cannot be opened, saved, quantised or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file or folder that the operating system could not read or write.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A folder that contains a LoRA adapter instead of a model.
    #[error("{} is the folder of a LoRA adapter; open the model that it belongs to, or merge the two first", dir.display())]
    Adapter {
        /// The folder.
        dir: PathBuf,
    },
    /// A `config.json` that does not describe a model of this family.
    #[error("{}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: ModelConfigError,
    },
    /// A weight that cannot be quantised, or a quantised weight that does not fit.
    #[error("{layer}")]
    Layer {
        /// The layer's name in the checkpoint.
        layer: String,
        /// The cause.
        source: burn_marlin::Error,
    },
    /// Experts of which some are quantised and others are float: one kernel multiplies by all of
    /// them.
    #[error(
        "`{layer}`: some experts of this block are quantised and others are float; the experts of a block must have one format"
    )]
    MixedExperts {
        /// The name of the experts, or of the first layer that differs.
        layer: String,
    },
    /// An expert whose weight has another format than those of the other experts of its block.
    #[error(
        "`{layer}` has a weight {found}, and the first expert of its block {expected}; the experts of a block must have one format"
    )]
    OtherExpert {
        /// The layer of the expert.
        layer: String,
        /// The format of the first expert's weight.
        expected: String,
        /// The format of this expert's weight.
        found: String,
    },
    /// The gate and up projections of an expert, whose formats or orders of rows differ.
    #[error(
        "`{layer}` and the other projection of the same inputs have different formats or orders of rows; the gate and up projections of an expert are one matmul"
    )]
    NotJoined {
        /// The first of the layers.
        layer: String,
    },
    /// A weight that rounding to nearest cannot quantise as requested.
    #[error("{layer}")]
    Quantize {
        /// The layer's name in the checkpoint.
        layer: String,
        /// The cause.
        source: FormatError,
    },
    /// A weight that a calibration-based quantiser cannot quantise.
    #[error("{layer}")]
    Calibrate {
        /// The layer's name in the checkpoint; the name of the first layer if several have the same
        /// inputs.
        layer: String,
        /// The cause.
        source: QuantError,
    },
    /// Hidden states of calibration samples that the device did not return.
    #[error("the hidden states in {block} cannot be read from the device: {reason}")]
    HiddenStates {
        /// The name in the checkpoint of the block, of the layer whose inputs the hidden states
        /// are, or of the embedding.
        block: String,
        /// The error of the device.
        reason: String,
    },
    /// A run that was stopped.
    #[error("stopped; the same arguments go on with the blocks that are done")]
    Stopped,
    /// A folder left by a run with other arguments.
    #[error(
        "{} is of a run with another {argument}: {before}, now {now}; give the same arguments to go on with it, or remove it to begin anew",
        dir.display()
    )]
    OtherRun {
        /// The folder with the completed blocks.
        dir: PathBuf,
        /// The argument.
        argument: String,
        /// The value of the argument in the earlier run.
        before: String,
        /// The value of the argument in this run.
        now: String,
    },
    /// Too little text for the requested samples.
    #[error(
        "the calibration text has {found} samples of up to {max_len} tokens, {asked} were asked for; give more text, or ask for fewer or shorter samples"
    )]
    FewSamples {
        /// The number of requested samples.
        asked: usize,
        /// The number of samples in the texts.
        found: usize,
        /// The number of tokens of the longest sample.
        max_len: usize,
    },
    /// A sample without tokens, or with more tokens than the model has positions.
    #[error(
        "calibration sample {sample} has {tokens} tokens; a sample has from 1 to the model's {limit}"
    )]
    SampleLength {
        /// The index of the sample.
        sample: usize,
        /// The number of its tokens.
        tokens: usize,
        /// The number of positions that the model supports.
        limit: usize,
    },
    /// A line of a JSONL file that is not a document.
    #[error("{}, line {line}: {reason}", path.display())]
    CalibrationLine {
        /// The file.
        path: PathBuf,
        /// The line number, starting from 1.
        line: usize,
        /// The reason.
        reason: String,
    },
    /// A layer with a size that readers of GPTQ files do not support.
    #[error(
        "`{layer}` has K = {k}, N = {n}; readers of GPTQ files take multiples of {multiple}, whole words: write compressed-tensors, or exclude the layer"
    )]
    GptqShape {
        /// The layer's name in the checkpoint.
        layer: String,
        /// The number of values in a word.
        multiple: usize,
        /// The number of input features.
        k: usize,
        /// The number of output features.
        n: usize,
    },
    /// A layer with act-order over groups, in a format whose readers refuse it.
    #[error(
        "`{layer}` has {groups} groups, and compressed-tensors from 0.19 on and vLLM refuse act-order over groups: leave it out, as the default order takes \
         large inputs first without a permutation; or ask for one group a channel, or for the form GPTQ, which GPTQModel reads"
    )]
    ActOrderGroups {
        /// The layer's name in the checkpoint.
        layer: String,
        /// The number of groups along K.
        groups: usize,
    },
    /// An exclusion or override that matches no layer of the model.
    #[error(
        "`{}` of `{option}` matches no layer; layers are named as `model.layers.0.mlp.down_proj`, and `re:` begins a regular expression",
        excerpt(pattern)
    )]
    PatternOfNone {
        /// The option: `exclude` or `override`.
        option: &'static str,
        /// The pattern.
        pattern: String,
    },
    /// A quantised output head in a format of 2:4 layers.
    #[error(
        "the form marlin-24 holds 2:4 layers only, and the output head is not pruned; leave the head float, or write the compressed-tensors form"
    )]
    DenseHead,
    /// Weights that cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A `quantization_config` that this version does not read.
    #[error("{}", path.display())]
    QuantizationConfig {
        /// The `config.json` with the field.
        path: PathBuf,
        /// The cause.
        source: ConfigError,
    },
    /// A float dtype that checkpoints cannot be written in.
    #[error("checkpoints are written in f16, bf16 or f32, not {found:?}")]
    SaveDtype {
        /// The dtype asked for.
        found: FloatDType,
    },
    /// A quantised projection in a model that is saved as a float model.
    #[error("`{layer}` has a 4-bit weight; only a float model can be saved as one")]
    NotFloat {
        /// The layer's name in the checkpoint.
        layer: String,
    },
    /// A weight with a value that the dtype of the file cannot hold.
    #[error(
        "`{tensor}` holds {value} at element {index}, which {dtype:?} cannot; was training stable, or is bf16 needed?"
    )]
    NotRepresentable {
        /// The tensor's name in the checkpoint.
        tensor: String,
        /// The index in the tensor, row-major.
        index: usize,
        /// The value.
        value: f32,
        /// The dtype of the file.
        dtype: FloatDType,
    },
    /// A tensor that could not be read from the device.
    #[error("`{tensor}` cannot be read from the device: {reason}")]
    Read {
        /// The name of the tensor that was read.
        tensor: String,
        /// The error of the device.
        reason: String,
    },
    /// A tensor that could not be uploaded to the device.
    #[error("`{layer}` could not be put on the device: {reason}")]
    Upload {
        /// The name of the layer or tensor.
        layer: String,
        /// The error of the device.
        reason: String,
    },
    /// A file that is not valid JSON, or whose JSON has another form than expected.
    #[error("{} does not hold what it should", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The position and the cause.
        source: serde_json::Error,
    },
    /// A `generation_config.json` with invalid sampling options.
    #[error("{}", path.display())]
    GenerationConfig {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: SamplingError,
    },
    /// A quantised embedding, which is not supported.
    #[error("`{layer}` in {} is quantised; embeddings are read in floats: quantise the model without its Embedding", dir.display())]
    QuantizedEmbedding {
        /// The folder.
        dir: PathBuf,
        /// The embedding's name.
        layer: String,
    },
    /// Tensors of a folder that the model does not use.
    #[error("{} has {count} tensors that a model of its config does not have, the first of them `{tensor}`; is the architecture right?", dir.display())]
    SurplusTensors {
        /// The folder.
        dir: PathBuf,
        /// The number of such tensors.
        count: usize,
        /// The first tensor by name.
        tensor: String,
    },
    /// A dtype that the device does not compute in.
    #[error("the device does not compute in {dtype:?}; leave the dtype open, or ask for F32")]
    DeviceDtype {
        /// The dtype asked for.
        dtype: FloatDType,
    },
    /// A number of positions that is 0 or more than the model supports.
    #[error(
        "{asked} positions were asked for; the model takes from 1 to {limit} (max_position_embeddings, or YaRN's context)"
    )]
    MaxLen {
        /// The number of requested positions.
        asked: usize,
        /// The number of positions that the model supports.
        limit: usize,
    },
    /// A layer of an expert that is in a stack of all experts, and by itself.
    #[error("{} has `{layer}` twice: by itself and in `{stack}`; leave out one of them", dir.display())]
    ExpertTwice {
        /// The folder.
        dir: PathBuf,
        /// The name of the layer.
        layer: String,
        /// The name of the stack.
        stack: String,
    },
    /// A folder that is already quantised.
    #[error("{} is quantised already; quantise the float model it was made from", path.display())]
    AlreadyQuantized {
        /// The file that shows that the folder is quantised.
        path: PathBuf,
    },
    /// A model that cannot be found, downloaded or used by its name.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] marlin_hub::HubError),
    /// A chat template or a tokenizer that cannot be read or used.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A text for a model that was opened without a tokenizer.
    #[error("the model was opened without a tokenizer; texts need one")]
    NoTokenizer,
    /// A prompt without tokens.
    #[error("the prompt has no tokens; give it at least a word")]
    EmptyPrompt,
    /// A prompt that does not fit the cache.
    #[error(
        "the prompt has {tokens} tokens, the cache has room for {max}; shorten it, or open the model with a larger `max_len`"
    )]
    PromptTooLong {
        /// The number of tokens in the prompt.
        tokens: usize,
        /// Positions of the cache.
        max: usize,
    },
    /// A number of sequences that is 0 or more than the limit.
    #[error("{asked} sequences at once; there may be 1 to {max}")]
    TooManySequences {
        /// The number of requested sequences.
        asked: usize,
        /// The limit.
        max: usize,
    },
    /// A model that does not fit the device.
    #[error(
        "the weights take {weights} bytes and a cache of {positions} positions {cache}, the device has {free} free; open the model with a smaller \
         `max_len`, or on a device with more memory"
    )]
    TooLarge {
        /// The size of the weights while they are loaded, in bytes: the
        /// largest weight of a block's experts is there twice.
        weights: usize,
        /// The number of positions of the cache.
        positions: usize,
        /// The size of the cache and the rotary tables, in bytes.
        cache: usize,
        /// The free memory of the device, in bytes.
        free: usize,
    },
    /// A cache that does not fit the device.
    #[error(
        "the cache of {parts} times {positions} positions takes {needed} bytes, the device has {free} free; decode fewer sequences or with fewer pages, or open \
         the model with a smaller `max_len`"
    )]
    CacheTooLarge {
        /// The number of sequences, or of pages if the cache has pages.
        parts: usize,
        /// The number of positions of each sequence or page.
        positions: usize,
        /// The size of the cache, in bytes.
        needed: usize,
        /// The free memory of the device, in bytes.
        free: usize,
    },
    /// A KV cache in e4m3 on a device that does not support it.
    #[error(
        "a KV cache in e4m3 needs CUDA, compute capability 8.0, activations in f16 or bf16, and heads of 16 to 256 features, a multiple of 16"
    )]
    E4m3Cache,
    /// A model that cannot be split over several devices, or whose devices failed.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// A decode step that the device did not finish.
    #[error(transparent)]
    Step(#[from] marlin_nn::DecodeError),
    /// An error in the choice of the next token.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A perplexity window in which nothing would be predicted, or that is longer than the model
    /// supports.
    #[error(
        "a window of {window} tokens does not work; it must be from 2 to the model's {max_len} positions"
    )]
    Window {
        /// The number of tokens in a window.
        window: usize,
        /// The number of positions that the model supports.
        max_len: usize,
    },
    /// A text in which nothing would be predicted.
    #[error("the text has {tokens} tokens; perplexity needs at least 2")]
    TextTooShort {
        /// The number of tokens in the text.
        tokens: usize,
    },
    /// A token outside the vocabulary.
    #[error("token {token} at position {position} is not in the vocabulary of {vocab_size}")]
    Token {
        /// The token.
        token: u32,
        /// The position.
        position: usize,
        /// The number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// Models with different vocabularies.
    #[error(
        "a model has a vocabulary of {found} tokens, the reference one of {expected}; only models with the same tokens can be compared"
    )]
    Vocabulary {
        /// The number of tokens in the reference's vocabulary.
        expected: usize,
        /// The number of tokens in the other model's vocabulary.
        found: usize,
    },
    /// A log-likelihood that is not a number.
    #[error(
        "the log-likelihood of the token at position {position} is {value}; are the weights broken, or the activations too large for {dtype:?}?"
    )]
    LogLikelihood {
        /// The position in the text.
        position: usize,
        /// The computed value.
        value: f32,
        /// The dtype of the activations.
        dtype: FloatDType,
    },
}
