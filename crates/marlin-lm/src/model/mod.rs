//! The Llama-style decoder in Burn: one text for every architecture, for float and 4-bit weights.

mod attention;
mod block;
mod cache;
mod group;
mod load;
mod norm;
mod plans;
mod products;
mod projection;
mod prompt;
mod rope;
mod source;
mod step;
mod swiglu;

use burn::module::Module;
use burn::nn::{Embedding, Linear};
use burn::tensor::{Device, FloatDType, Int, StreamId, Tensor};
use burn_marlin::{QuantLinear, QuantSpec, QuantizedWeight};
use marlin_format::WeightFormat;
use marlin_nn as decode;

pub use attention::Attention;
pub use block::{Block, FeedForward, Mixer, Residual};
pub use cache::KvCache;
pub(crate) use cache::{CachePosition, KeyValues};
pub use group::ProjectionGroup;
pub(crate) use load::load_block;
pub use norm::RmsNorm;
pub use plans::LayerPlan;
pub(crate) use products::ModelTensor;
pub use projection::Projection;
pub(crate) use prompt::Span;
pub use rope::Rope;
use source::RandomWeights;
pub(crate) use source::{WeightSource, loaded};
pub(crate) use step::PassBatch;
pub use swiglu::SwiGlu;

use crate::architectures::ProjectionKind;
use crate::config::ModelConfig;

/// A Llama-style decoder: token ids in, logits out.
///
/// Activations have the dtype of the embedding: f32, f16 or bf16. Norms and softmax are computed in
/// f32.
///
/// With every [`Projection`] dense it is made of Burn's own `Linear` layers: it can be trained,
/// saved with [`save_float`](crate::save_float), and converted to 4-bit weights in one call with
/// `burn_marlin::WeightQuantizer`.
#[derive(Module, Debug)]
pub struct Model {
    /// [vocab, hidden]; the output head, too, where there is no `lm_head`.
    pub embed_tokens: Embedding,
    /// The transformer blocks.
    pub layers: Vec<Block>,
    /// The norm before the head.
    pub norm: RmsNorm,
    /// [hidden, vocab]; none if the embedding is the head.
    pub lm_head: Option<Projection>,
    rope: Rope,
    #[module(skip)]
    config: ModelConfig,
    #[module(skip)]
    stream: StreamId,
}

impl Model {
    /// A model with random weights, for training: normal with a standard deviation of 0.02, norms
    /// 1, biases 0, in the device's float dtype.
    ///
    /// It takes `max_position_embeddings` positions.
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

    /// A model with random weights for `max_len` positions, made on the device: for timing.
    /// Projections of the layers are in a 4-bit or 8-bit format where one is given, everything else
    /// is in `dtype`.
    ///
    /// # Errors
    /// A layer with no features, or too many.
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
        Self::assemble(
            config,
            max_len,
            device,
            &mut RandomWeights {
                device,
                dtype: dtype.into(),
                format,
            },
        )
    }

    /// Rounds a float head to the nearest values of a 4-bit or 8-bit format, on the host. A head
    /// that is tied to the embedding gets a weight of its own; the embedding stays as it is. One
    /// that is quantised already stays, too.
    ///
    /// # Errors
    /// Values that are not finite, or a device that fails.
    pub fn quantize_head(&mut self, spec: &QuantSpec) -> Result<(), burn_marlin::Error> {
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

    /// Makes every quantised weight a float one with the same values, in the dtype of activations:
    /// for training, and for [`save_float`](crate::save_float). The zeros of a 2:4 weight stay,
    /// adapters do not.
    pub fn dequantize(&mut self) {
        let dtype = self.dtype();
        for block in &mut self.layers {
            for kind in ProjectionKind::ALL {
                block
                    .group_mut(kind)
                    .projections_mut()
                    .iter_mut()
                    .for_each(|projection| projection.dequantize(dtype));
            }
        }
        self.lm_head
            .iter_mut()
            .for_each(|head| head.dequantize(dtype));
    }

    /// The config it was built from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Positions it takes: the longest sequence of [`forward_full`](Self::forward_full), and the
    /// longest useful cache.
    pub fn max_len(&self) -> usize {
        self.rope.length()
    }

    /// The dtype of its activations.
    pub fn dtype(&self) -> FloatDType {
        FloatDType::from(self.embed_tokens.weight.val().dtype())
    }

    /// The device that holds it.
    pub fn device(&self) -> Device {
        self.embed_tokens.weight.lazy_device()
    }

    /// The device's stream that the weights were made on: that of the thread which opened or made
    /// the model.
    pub(crate) fn stream(&self) -> StreamId {
        self.stream
    }

    /// An empty cache for `slots` sequences of [`max_len`](Self::max_len) positions.
    pub fn new_cache(&self, slots: usize) -> KvCache {
        KvCache::new(
            &self.config,
            slots,
            self.max_len(),
            self.dtype(),
            &self.device(),
        )
    }

    /// Logits [batch, seq, vocab] of tokens [batch, seq] that follow those in the cache; they are
    /// added to it.
    ///
    /// # Panics
    /// Panics if the cache has no room for `seq` more positions, has more room than
    /// [`max_len`](Self::max_len), or is for another batch or model.
    pub fn forward(&self, tokens: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<3> {
        self.head(self.hidden_after(tokens, cache))
    }

    /// The last position's logits [batch, vocab] of tokens [batch, seq] that follow those in the
    /// cache; they are added to it.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn forward_last(&self, tokens: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2> {
        let hidden = self.hidden_after(tokens, cache);
        let [batch, seq, features] = hidden.dims();
        let last = hidden.slice([0..batch, seq - 1..seq, 0..features]);
        self.head(last).reshape([batch, self.config.vocab_size])
    }

    /// Logits [batch, seq, vocab] of whole sequences [batch, seq], without a cache: for training
    /// and for perplexity.
    ///
    /// # Panics
    /// Panics if `seq` is above [`max_len`](Self::max_len).
    pub fn forward_full(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.head(self.hidden(tokens, None))
    }

    /// The embeddings [batch, seq, hidden] of tokens [batch, seq]: the hidden states before the
    /// first layer.
    pub fn embed(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        if !tokens.device().is_autodiff() {
            return self.embed_tokens.forward(tokens);
        }
        // The gradient of Burn's embedding walks all tokens in one thread a column; that of a
        // gather is a parallel scatter.
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

    /// The rotary tables, for [`Block::forward_full`].
    pub fn rope(&self) -> &Rope {
        &self.rope
    }

    /// Writes keys and values of tokens [1, seq] to a cache, whose slot has those of all positions
    /// before.
    ///
    /// # Panics
    /// Panics if they do not fit the cache or the model.
    pub(crate) fn prefill(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut KvCache,
        position: CachePosition,
    ) {
        self.hidden(tokens, Some((cache, position)));
    }

    /// The residual stream after the last norm of tokens [batch, seq] that follow those in the
    /// cache.
    fn hidden_after(&self, tokens: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<3> {
        let (seq, position) = (
            tokens.dims()[1],
            CachePosition {
                slot: 0,
                start: cache.len(),
            },
        );
        let hidden = self.hidden(tokens, Some((cache, position)));
        cache.advance(seq);
        hidden
    }

    /// The residual stream after the last norm, [batch, seq, hidden].
    fn hidden(
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
        let mut stream = Residual::new(embedded);
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

    /// Logits [.., vocab] of the residual stream after the last norm, [.., hidden].
    pub fn head<const D: usize>(&self, hidden: Tensor<D>) -> Tensor<D> {
        match &self.lm_head {
            Some(head) => head.forward(hidden),
            None => decode::linear(hidden, self.embed_tokens.weight.val().transpose(), None),
        }
    }
}
