//! The part of a model that one rank has.

use std::ops::Range;

use super::ParallelError;
use super::groups::{RowGroups, Width};
use super::split::{free_unit, ranges};
use crate::architectures::{
    AttentionShape, BlockShape, ExpertsPart, ExpertsShape, FeedForwardShape, LayerPart, LayerShape,
    MixerShape, ProjectionPart, ProjectionShape, SwiGluShape,
};
use crate::config::{ExpertsConfig, ModelConfig};

/// The largest number of devices that errors propose.
const MOST_FITTING: usize = 256;

/// The part of a model that one rank has: heads of attention, features between gate and up and down
/// of each feed-forward network, and tokens of the output head. The rank of a model on one device
/// has everything.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shard {
    whole: ModelConfig,
    /// The config of the part, which is that of a model of the rank's heads and features.
    config: ModelConfig,
    rank: usize,
    count: usize,
    query_heads: Range<usize>,
    kv_heads: Range<usize>,
    /// The features of the feed-forward networks without experts.
    dense: Range<usize>,
    /// The features of each expert.
    expert: Range<usize>,
    /// The features of the expert that all tokens have.
    shared: Range<usize>,
    vocab: Range<usize>,
}

impl Shard {
    /// Returns the shard that is the whole model.
    pub(crate) fn whole(config: &ModelConfig) -> Self {
        let experts = config.experts.as_ref();
        let shared = experts.and_then(|experts| experts.shared_intermediate_size);
        Self {
            whole: config.clone(),
            config: config.clone(),
            rank: 0,
            count: 1,
            query_heads: 0..config.num_attention_heads,
            kv_heads: 0..config.num_key_value_heads,
            dense: 0..config.intermediate_size,
            expert: 0..experts.map_or(0, |experts| experts.intermediate_size),
            shared: 0..shared.unwrap_or(0),
            vocab: 0..config.vocab_size,
        }
    }

    /// Splits a model over `count` ranks. `groups` are the groups of the layers whose rows of K are
    /// split.
    ///
    /// # Errors
    /// [`ParallelError::NoDevices`] for a `count` of 0, [`ParallelError::Heads`],
    /// [`ParallelError::KeyValueHeads`], [`ParallelError::Groups`] and [`ParallelError::Border`].
    pub(crate) fn all(
        config: &ModelConfig,
        count: usize,
        groups: &RowGroups,
    ) -> Result<Vec<Self>, ParallelError> {
        let whole = Self::whole(config);
        match count {
            0 => return Err(ParallelError::NoDevices),
            1 => return Ok(vec![whole]),
            _ => {}
        }
        let [heads, kv_heads] = [config.num_attention_heads, config.num_key_value_heads];
        check_heads(heads, kv_heads, count)?;
        let dense = groups.split(Width::Dense, whole.dense.len(), count)?;
        let expert = groups.split(Width::Expert, whole.expert.len(), count)?;
        let shared = groups.split(Width::Shared, whole.shared.len(), count)?;
        let unit = free_unit(config.vocab_size, count);
        let vocab = ranges(config.vocab_size, count, unit).ok_or(ParallelError::Groups {
            layer: "lm_head".into(),
            groups: config.vocab_size,
            rows: 1,
            count,
        })?;
        let of_rank = |rank: usize| {
            let of_heads = heads / count * rank..heads / count * (rank + 1);
            groups.check_output(of_heads.start * config.head_dim, rank, count)?;
            let first = rank * kv_heads / count;
            let kv_heads = first..first + config.rank_kv_heads(count);
            let [dense, expert, shared, vocab] =
                [&dense, &expert, &shared, &vocab].map(|ranges| ranges[rank].clone());
            Ok(Self {
                whole: config.clone(),
                config: ModelConfig {
                    num_attention_heads: of_heads.len(),
                    num_key_value_heads: kv_heads.len(),
                    intermediate_size: dense.len(),
                    experts: config.experts.as_ref().map(|experts| ExpertsConfig {
                        intermediate_size: expert.len(),
                        shared_intermediate_size: experts
                            .shared_intermediate_size
                            .map(|_| shared.len()),
                        ..experts.clone()
                    }),
                    tie_word_embeddings: false,
                    ..config.clone()
                },
                rank,
                count,
                query_heads: of_heads,
                kv_heads,
                dense,
                expert,
                shared,
                vocab,
            })
        };
        (0..count).map(of_rank).collect()
    }

    /// Returns the rank, from 0.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Returns true if the shard is the whole model.
    pub(crate) fn is_whole(&self) -> bool {
        self.count == 1
    }

    /// Returns the config of the rank's part: with its heads and features, and the vocabulary and
    /// the hidden size of the whole model.
    pub(crate) fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the number of query heads of the whole model, and those of the rank.
    pub(crate) fn query_heads(&self) -> (usize, Range<usize>) {
        (self.whole.num_attention_heads, self.query_heads.clone())
    }

    /// Returns the shape of block `index` of the rank, whose layers have their parts of the file.
    pub(crate) fn block(&self, index: usize) -> BlockShape {
        let mut block = self.config.block(index);
        if self.is_whole() {
            return block;
        }
        let whole = self.whole.block(index);
        let (MixerShape::Attention(attention), MixerShape::Attention(of_whole)) =
            (&mut block.mixer, &whole.mixer);
        self.set_attention(attention, of_whole);
        match (&mut block.feed_forward, &whole.feed_forward) {
            (FeedForwardShape::SwiGlu(mlp), FeedForwardShape::SwiGlu(of_whole)) => {
                self.set_mlp(mlp, of_whole, &self.dense);
            }
            (FeedForwardShape::Experts(experts), FeedForwardShape::Experts(of_whole)) => {
                self.set_experts(experts, of_whole);
            }
            // The layers that have experts are those of the whole model.
            _ => {}
        }
        block
    }

    /// Returns the output head of the rank; `None` if it is the whole embedding.
    pub(crate) fn head(&self) -> Option<LayerShape> {
        if self.is_whole() {
            return self.whole.head();
        }
        // A tied head is cut from the embedding, whose tensor it is read as.
        let head = self.whole.head().unwrap_or_else(|| LayerShape {
            name: "model.embed_tokens".into(),
            is_float: true,
            ..self.whole.untied_head()
        });
        let [hidden, _] = head.dims;
        Some(LayerShape {
            dims: [hidden, self.vocab.len()],
            part: Some(LayerPart {
                dims: head.dims,
                columns: vec![self.vocab.clone()],
                rows: 0..hidden,
            }),
            ..head
        })
    }

    /// Returns the layers that are read together, in the order in which a model is built: those of
    /// all blocks, then the output head. `contains` returns true for the names of layers that the
    /// checkpoint has.
    pub(crate) fn projections(
        &self,
        contains: impl Fn(&str) -> bool,
    ) -> impl Iterator<Item = Vec<LayerShape>> {
        let blocks = (0..self.whole.num_hidden_layers).flat_map(move |index| {
            self.block(index)
                .layers(&format!("model.layers.{index}"), &contains)
        });
        blocks.chain(self.head().map(|head| vec![head]))
    }

    /// Sets the parts of attention: the heads of the rank.
    fn set_attention(&self, attention: &mut AttentionShape, whole: &AttentionShape) {
        let features = |heads: &Range<usize>| {
            heads.start * self.whole.head_dim..heads.end * self.whole.head_dim
        };
        let (queries, values) = (features(&self.query_heads), features(&self.kv_heads));
        set_columns(
            &mut attention.qkv,
            &whole.qkv,
            vec![queries.clone(), values.clone(), values],
        );
        self.set_rows(&mut attention.output, &whole.output, queries);
    }

    /// Sets the parts of an MLP: the features of the rank.
    fn set_mlp(&self, mlp: &mut SwiGluShape, whole: &SwiGluShape, features: &Range<usize>) {
        let columns = vec![features.clone(), features.clone()];
        set_columns(&mut mlp.gate_up, &whole.gate_up, columns);
        self.set_rows(&mut mlp.down, &whole.down, features.clone());
    }

    /// Sets the parts of experts: the rank has some features of each of them.
    fn set_experts(&self, experts: &mut ExpertsShape, whole: &ExpertsShape) {
        experts.part = Some(ExpertsPart {
            intermediate: whole.intermediate,
            features: self.expert.clone(),
            has_down_biases: self.rank == 0,
        });
        if let (Some(shared), Some(of_whole)) = (&mut experts.shared, &whole.shared) {
            self.set_mlp(&mut shared.mlp, &of_whole.mlp, &self.shared);
        }
    }

    /// Sets the rows of K of a projection whose outputs are summed over the ranks. The first rank
    /// adds the bias.
    fn set_rows(&self, shape: &mut ProjectionShape, whole: &ProjectionShape, rows: Range<usize>) {
        shape.part = Some(ProjectionPart {
            k: whole.k,
            outputs: whole.outputs.clone(),
            columns: whole.outputs.iter().map(|&output| 0..output).collect(),
            rows,
        });
        shape.bias = whole.bias && self.rank == 0;
    }
}

/// Sets the output features of a projection, of each output.
fn set_columns(shape: &mut ProjectionShape, whole: &ProjectionShape, columns: Vec<Range<usize>>) {
    shape.part = Some(ProjectionPart {
        k: whole.k,
        outputs: whole.outputs.clone(),
        columns,
        rows: 0..whole.k,
    });
}

/// Checks that query heads can be split, and key and value heads split or repeated.
pub(crate) fn check_heads(
    heads: usize,
    kv_heads: usize,
    count: usize,
) -> Result<(), ParallelError> {
    if count == 0 {
        return Err(ParallelError::NoDevices);
    }
    let repeats = |count: usize| kv_heads.is_multiple_of(count) || count.is_multiple_of(kv_heads);
    let fitting = || {
        let counts = 1..=heads.min(MOST_FITTING);
        let of_heads = counts.filter(|&count| heads.is_multiple_of(count));
        of_heads.filter(|&count| repeats(count)).collect()
    };
    if !heads.is_multiple_of(count) {
        return Err(ParallelError::Heads {
            heads,
            count,
            fitting: fitting(),
        });
    }
    if !repeats(count) {
        return Err(ParallelError::KeyValueHeads {
            kv_heads,
            count,
            fitting: fitting(),
        });
    }
    Ok(())
}
