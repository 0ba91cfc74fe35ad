//! The Llama-style decoder in Burn: one definition for all architectures, with float or quantised
//! weights.

mod attention;
mod block;
mod cache;
mod experts;
mod group;
mod load;
mod norm;
mod plans;
mod products;
mod projection;
mod prompt;
mod rope;
mod source;
mod split;
mod step;
mod swiglu;

use burn::module::Module;
use burn::nn::{Embedding, Linear};
use burn::tensor::{Device, FloatDType, Int, StreamId, Tensor};
use burn_marlin::{QuantLinear, QuantSpec, QuantizedWeight};
use marlin_format::{WeightFormat, WeightValue};
use marlin_nn as decode;

pub use attention::Attention;
pub use block::{Block, FeedForward, Mixer, Residual};
pub use cache::KvCache;
pub(crate) use cache::{CachePosition, KeyValues};
pub use experts::{DenseExperts, Experts, Mixture, SharedExpert};
pub use group::ProjectionGroup;
pub(crate) use load::load_block;
pub use norm::RmsNorm;
pub use plans::LayerPlan;
pub(crate) use products::ModelTensor;
pub use projection::Projection;
pub(crate) use prompt::Span;
pub use rope::Rope;
use source::RandomWeights;
pub(crate) use source::{WeightSource, finished, loaded};
pub(crate) use step::PassBatch;
pub use swiglu::SwiGlu;

use crate::architectures::Architecture;
use crate::config::ModelConfig;
use crate::parallel::{Parallel, Shard};

/// A Llama-style decoder, which maps token ids to logits.
///
/// Activations have the dtype of the embedding: f32, f16 or bf16. Norms and softmax are computed in
/// f32.
///
/// A model whose [`Projection`]s are all dense consists of Burn's own `Linear` layers. Such a model
/// can be trained, saved with [`save_float`](crate::save_float), and quantised in one call with
/// `burn_marlin::WeightQuantizer`.
///
/// # Several devices
/// A model that is [opened](crate::LanguageModel::open_on) or [created](Self::random_on) on several
/// devices is split over them. It has the part of the first device; the parts of the others belong
/// to threads of their own, which do what this model does, and end with its last clone. Such a
/// model cannot be trained, moved or saved, and a block of it alone has the outputs of its part.
/// After a failure of a device its logits are NaN, and [`failure`](Self::failure) has the cause.
#[derive(Module, Debug)]
pub struct Model {
    /// The embedding, [vocab, hidden]; also the output head if `lm_head` is `None`.
    pub embed_tokens: Embedding,
    /// The transformer blocks.
    pub layers: Vec<Block>,
    /// The norm before the output head.
    pub norm: RmsNorm,
    /// The output head, [hidden, vocab]; `None` if the embedding is the head.
    pub lm_head: Option<Projection>,
    rope: Rope,
    #[module(skip)]
    config: ModelConfig,
    #[module(skip)]
    stream: StreamId,
    /// The other ranks, of a model that is split over several devices.
    #[module(skip)]
    parallel: Option<Parallel>,
}

impl Model {
    /// Creates a model with random weights in the device's float dtype, for training.
    ///
    /// Weights are normally distributed with a standard deviation of 0.02; norms are 1, and biases
    /// are 0. The model supports `max_position_embeddings` positions.
    ///
    /// # Panics
    /// Panics if [`ModelConfig::validate`] refuses the config.
    pub fn new(config: &ModelConfig, device: &Device) -> Self {
        let model = Self::random(
            config,
            config.max_position_embeddings,
            device.settings().float_dtype,
            None,
            device,
        );
        model.unwrap_or_else(|error| {
            panic!("float weights have no format that could be wrong: {error}")
        })
    }

    /// Creates a model with random weights on the device for `max_len` positions, for timing.
    ///
    /// If `format` is given, the projections of the blocks are in this 4-bit or 8-bit format. All
    /// other weights are in `dtype`. Of gpt-oss, MXFP4 is the format of the experts alone, as in
    /// its published files.
    ///
    /// # Errors
    /// Returns an error if a layer has no features, or too many.
    ///
    /// # Panics
    /// Panics if [`ModelConfig::validate`] refuses the config.
    pub fn random(
        config: &ModelConfig,
        max_len: usize,
        dtype: FloatDType,
        format: Option<WeightFormat>,
        device: &Device,
    ) -> Result<Self, burn_marlin::Error> {
        if let Err(error) = config.validate() {
            panic!("not the configuration of a model: {error}");
        }
        Self::random_part(&Shard::whole(config), max_len, dtype, format, device)
    }

    /// Creates the part of a rank of a model with random weights; see [`random`](Self::random).
    pub(crate) fn random_part(
        shard: &Shard,
        max_len: usize,
        dtype: FloatDType,
        format: Option<WeightFormat>,
        device: &Device,
    ) -> Result<Self, burn_marlin::Error> {
        let mut weights = RandomWeights {
            device,
            dtype: dtype.into(),
            format,
            experts_only: quantizes_experts_only(shard.config(), format),
        };
        Self::assemble(shard, max_len, device, &mut weights)
    }

    /// Rounds a float output head to the nearest values of a 4-bit or 8-bit format, on the host.
    ///
    /// A head that is tied to the embedding gets its own weight, and the embedding is unchanged. A
    /// head that is already quantised is unchanged.
    ///
    /// Of a model on several devices, each device rounds its part, also of the model's clones.
    ///
    /// # Errors
    /// Returns an error if a value is not finite, or if a device fails.
    pub fn quantize_head(&mut self, spec: &QuantSpec) -> Result<(), burn_marlin::Error> {
        self.quantize_heads_of_ranks(spec)?;
        self.quantize_own_head(spec)
    }

    /// Rounds the float output head of this rank; see [`quantize_head`](Self::quantize_head).
    pub(crate) fn quantize_own_head(&mut self, spec: &QuantSpec) -> Result<(), burn_marlin::Error> {
        let (weight, bias) = match &self.lm_head {
            Some(Projection::Quant(_)) => return Ok(()),
            Some(Projection::Dense(Linear { weight, bias })) => {
                (weight.val(), bias.as_ref().map(|bias| bias.val()))
            }
            None => (self.embed_tokens.weight.val().transpose(), None),
        };
        self.lm_head = Some(Projection::Quant(QuantLinear::new(
            QuantizedWeight::quantize(weight, spec)?,
            bias,
        )?));
        Ok(())
    }

    /// Converts every quantised weight to a float weight with the same values in the dtype of
    /// activations, for training and for [`save_float`](crate::save_float). The zeros of a 2:4
    /// weight are kept; adapters are dropped. Of a model on several devices, each device converts
    /// its part, also of the model's clones.
    pub fn dequantize(&mut self) {
        self.dequantize_ranks();
        self.dequantize_own();
    }

    /// Converts the weights of this rank; see [`dequantize`](Self::dequantize).
    fn dequantize_own(&mut self) {
        let dtype = self.dtype();
        for (index, block) in self.layers.iter_mut().enumerate() {
            for shape in self.config.block(index).projections() {
                block
                    .group_mut(shape.kind)
                    .projections_mut()
                    .iter_mut()
                    .for_each(|projection| projection.dequantize(dtype));
            }
            if let FeedForward::Experts(mixture) = &mut block.feed_forward {
                mixture.router.dequantize(dtype);
                if let Some(shared) = &mut mixture.shared {
                    shared.gate.dequantize(dtype);
                }
                mixture.experts.dequantize(dtype);
            }
        }
        self.lm_head
            .iter_mut()
            .for_each(|head| head.dequantize(dtype));
    }

    /// Returns the config that the model was built from. Of a model on several devices, this is the
    /// config of the first device's part: its numbers of heads and of features of the feed-forward
    /// networks, and an output head that is not tied.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the number of positions that the model supports: the longest sequence of
    /// [`forward_full`](Self::forward_full), and the longest useful cache.
    pub fn max_len(&self) -> usize {
        self.rope.length()
    }

    /// Returns the dtype of activations.
    pub fn dtype(&self) -> FloatDType {
        FloatDType::from(self.embed_tokens.weight.val().dtype())
    }

    /// Returns the device that holds the model.
    pub fn device(&self) -> Device {
        self.embed_tokens.weight.lazy_device()
    }

    /// Returns true if a pass reads nothing from the device, so that a graph can be recorded of it:
    /// the device has kernels for the model's quantised experts, if it has any, and the model is
    /// not split over devices, whose sums go through the host.
    pub(crate) fn is_recordable(&self) -> bool {
        if self.is_split() {
            return false;
        }
        let (device, dtype) = (self.device(), self.dtype());
        self.layers
            .iter()
            .filter_map(Block::mixture)
            .all(|mixture| match &mixture.experts {
                Experts::Dense(_) => true,
                Experts::Quant(experts) => experts.has_kernels(&device, dtype),
            })
    }

    /// Returns the stream of the device on which the weights were created: the stream of the thread
    /// that opened or created the model.
    pub(crate) fn stream(&self) -> StreamId {
        self.stream
    }

    /// Creates an empty cache for `slots` sequences of [`max_len`](Self::max_len) positions.
    pub fn new_cache(&self, slots: usize) -> KvCache {
        self.cache_of(slots, self.max_len())
    }

    /// Returns the logits [batch, seq, vocab] of tokens [batch, seq] that follow the positions in
    /// the cache, and appends the tokens' keys and values to the cache.
    ///
    /// # Panics
    /// Panics if `seq` more positions do not fit the cache or [`max_len`](Self::max_len), or if the
    /// cache has fewer than `batch` slots or is for a model of other sizes. The cache of a model on
    /// several devices must be one of [`new_cache`](Self::new_cache).
    pub fn forward(&self, tokens: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<3> {
        self.logits_after(tokens, cache, false)
    }

    /// Returns the logits [batch, vocab] of the last of tokens [batch, seq] that follow the
    /// positions in the cache, and appends the keys and values of all tokens to the cache.
    ///
    /// # Panics
    /// See [`forward`](Self::forward).
    pub fn forward_last(&self, tokens: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2> {
        let batch = tokens.dims()[0];
        self.logits_after(tokens, cache, true)
            .reshape([batch, self.config.vocab_size])
    }

    /// Returns the logits [batch, seq, vocab] of whole sequences [batch, seq] without a cache, for
    /// training and for perplexity.
    ///
    /// # Panics
    /// Panics if `seq` is above [`max_len`](Self::max_len).
    pub fn forward_full(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.logits_of_all(tokens)
    }

    /// Returns the embeddings [batch, seq, hidden] of tokens [batch, seq]: the hidden states before
    /// the first block.
    pub fn embed(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        if !tokens.device().is_autodiff() {
            return self.embed_tokens.forward(tokens);
        }
        // The gradient of Burn's embedding visits all tokens in one thread per column; the gradient
        // of a gather is a parallel scatter.
        let ([batch, seq], features) = (tokens.dims(), self.config.hidden_size);
        let rows = tokens
            .reshape([batch * seq, 1])
            .expand([batch * seq, features]);
        self.embed_tokens
            .weight
            .val()
            .gather(0, rows)
            .reshape([batch, seq, features])
    }

    /// Returns the rotary tables, for [`Block::forward_full`].
    pub fn rope(&self) -> &Rope {
        &self.rope
    }

    /// Writes the keys and values of tokens [1, seq] to a slot of a cache, which already has the
    /// keys and values of all positions before.
    ///
    /// # Panics
    /// Panics if the tokens do not fit the cache or the model.
    pub(crate) fn prefill(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut KvCache,
        position: CachePosition,
    ) {
        self.hidden(tokens, Some((cache, position)));
    }

    /// Returns the hidden states [batch, seq, hidden] after the last norm, of tokens [batch, seq].
    /// If a cache is given, writes the keys and values to the cache.
    pub(crate) fn hidden(
        &self,
        tokens: Tensor<2, Int>,
        mut cache: Option<(&mut KvCache, CachePosition)>,
    ) -> Tensor<3> {
        let [_, seq] = tokens.dims();
        let start = cache.as_ref().map_or(0, |(_, position)| position.start);
        let room = cache
            .as_ref()
            .map_or(usize::MAX, |(cache, _)| cache.max_len())
            .min(self.max_len());
        assert!(
            start + seq <= room,
            "{seq} tokens after {start} do not fit the {room} positions of the model and its cache"
        );

        let device = tokens.device();
        let embedded = self.embed(tokens);
        let window = self.config.sliding_window.map(|window| window.size);
        let span = Span::new(
            &self.rope,
            start,
            seq,
            window,
            FloatDType::from(embedded.dtype()),
            &device,
        );
        let mut stream = self.residual(embedded);
        for (index, layer) in self.layers.iter().enumerate() {
            let cache = cache
                .as_mut()
                .map(|(cache, position)| (cache.layer(index), *position));
            stream = layer.forward(stream, |attention, qkv| {
                attention.forward_prompt(qkv, &span, cache)
            });
        }
        stream.norm(&self.norm)
    }

    /// Returns the logits [.., vocab] of hidden states [.., hidden] after the last norm.
    pub fn head<const D: usize>(&self, hidden: Tensor<D>) -> Tensor<D> {
        self.logits_of_hidden(hidden)
    }

    /// Returns the logits [.., vocab] of hidden states [.., hidden] after the last norm, of which
    /// each rank computes its part in this call.
    pub(crate) fn logits<const D: usize>(&self, hidden: Tensor<D>) -> Tensor<D> {
        let logits = match &self.lm_head {
            Some(head) => head.forward(hidden),
            None => decode::linear(hidden, self.embed_tokens.weight.val().transpose(), None),
        };
        match self.communicator() {
            Some(ranks) => ranks.gather(logits, self.config.vocab_size),
            None => logits,
        }
    }
}

/// Returns true if a format is that of the experts alone.
pub(crate) fn quantizes_experts_only(config: &ModelConfig, format: Option<WeightFormat>) -> bool {
    config.architecture == Architecture::GptOss
        && format.is_some_and(|format| format.spec.value == WeightValue::E2m1)
}
