//! The sizes of a model, from its config alone.

use std::collections::BTreeSet;

use burn::tensor::{DType, FloatDType};
use marlin_format::{ScaleDtype, Sparsity, TensorDtype, WeightDescriptor, WeightFormat};

use super::ModelConfig;
use crate::architectures::{BlockShape, MixerShape, ProjectionShape};
use crate::parallel::check_heads;

/// The numbers of weights and bytes of a model whose projections have one format.
///
/// Numbers that overflow are `usize::MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelSizes {
    /// The number of weights of the projections of all blocks and their experts, without biases and
    /// routers.
    pub projection_weights: usize,
    /// The bytes of these projections, with biases and routers: values, metadata of 2:4 weights and
    /// scales.
    pub projection_bytes: usize,
    /// The number of weights of the experts among them; 0 without experts.
    pub expert_weights: usize,
    /// The bytes of the experts, which are among the bytes of projections.
    pub expert_bytes: usize,
    /// The number of experts of a layer; 1 without experts.
    pub experts: usize,
    /// The number of experts of a token; 1 without experts.
    pub top_k: usize,
    /// The number of weights of the output head [vocab_size, hidden_size].
    pub head_weights: usize,
    /// The bytes of the output head.
    pub head_bytes: usize,
    /// The bytes of the embedding; 0 if the embedding is also the output head.
    pub embedding_bytes: usize,
    /// The bytes of all norms.
    pub norm_bytes: usize,
}

impl ModelSizes {
    /// Returns the bytes of all weights.
    pub fn bytes(&self) -> usize {
        [self.head_bytes, self.norm_bytes, self.embedding_bytes]
            .into_iter()
            .fold(self.projection_bytes, usize::saturating_add)
    }

    /// Returns the bytes of weights that each of `count` devices has of a model that is split over
    /// them: a share of the projections and of the output head, the whole embedding and all norms.
    pub fn rank_bytes(&self, count: usize) -> usize {
        if count <= 1 {
            return self.bytes();
        }
        // A tied embedding is there beside a share of the head.
        let embedding = match self.embedding_bytes {
            0 => self.head_bytes,
            bytes => bytes,
        };
        self.projection_bytes
            .saturating_add(self.head_bytes)
            .div_ceil(count)
            .saturating_add(embedding)
            .saturating_add(self.norm_bytes)
    }

    /// Returns the bytes of weights that a pass of `rows` rows reads: all but the embedding, of
    /// which it reads one row for each row, and the experts that no row has if each row chooses its
    /// experts at random.
    pub fn step_bytes(&self, rows: usize) -> usize {
        let others = 1.0 - self.top_k as f64 / self.experts.max(1) as f64;
        let unread = self.expert_bytes as f64 * others.max(0.0).powf(rows as f64);
        self.projection_bytes
            .saturating_sub(unread as usize)
            .saturating_add(self.head_bytes)
            .saturating_add(self.norm_bytes)
    }

    /// Returns the number of weights of the projections that a token is multiplied by.
    pub fn active_weights(&self) -> usize {
        let of_token = self.expert_weights / self.experts.max(1) * self.top_k;
        (self.projection_weights - self.expert_weights).saturating_add(of_token)
    }
}

impl ModelConfig {
    /// Returns the sizes of the model if all projections have `format`, and the other tensors have
    /// `dtype`; with `None` the projections have `dtype`, too.
    pub fn sizes(&self, format: Option<WeightFormat>, dtype: FloatDType) -> ModelSizes {
        let float = DType::from(dtype).size();
        let layers = self.num_hidden_layers;
        // Blocks differ in their windows, and in their experts.
        let block = self.block(0);
        let MixerShape::Attention(attention) = &block.mixer;
        let head_norms = attention
            .head_norms
            .map_or(0, |norms| norms.len() * self.head_dim);
        let sinks = attention.sinks.map_or(0, |_| self.num_attention_heads);
        let kinds: Vec<(LayerSizes, usize)> = self
            .kinds_of_blocks()
            .into_iter()
            .map(|(block, count)| (block_sizes(&block, format, float), count))
            .collect();
        let sum = |of: fn(&LayerSizes) -> usize| {
            let of_kind = |(sizes, count): &(LayerSizes, usize)| of(sizes).saturating_mul(*count);
            kinds.iter().map(of_kind).fold(0, usize::saturating_add)
        };
        let table = self.vocab_size.saturating_mul(self.hidden_size);
        ModelSizes {
            projection_weights: sum(|layer| layer.weights),
            projection_bytes: sum(|layer| layer.bytes),
            expert_weights: sum(|layer| layer.expert_weights),
            expert_bytes: sum(|layer| layer.expert_bytes),
            experts: self.experts.as_ref().map_or(1, |experts| experts.count),
            top_k: self.experts.as_ref().map_or(1, |experts| experts.top_k),
            head_weights: table,
            head_bytes: table.saturating_mul(float),
            embedding_bytes: match self.tie_word_embeddings {
                true => 0,
                false => table.saturating_mul(float),
            },
            norm_bytes: (2 * self.hidden_size + head_norms + sinks)
                .saturating_mul(layers)
                .saturating_add(self.hidden_size)
                .saturating_mul(float),
        }
    }

    /// Returns true if the attention heads of the model can be split over `count` devices.
    pub fn splits_over(&self, count: usize) -> bool {
        check_heads(self.num_attention_heads, self.num_key_value_heads, count).is_ok()
    }

    /// Returns the number of key and value heads of each rank of a model that is split over `count`
    /// devices. Where there are fewer heads than devices, several devices have the same head.
    pub fn rank_kv_heads(&self, count: usize) -> usize {
        (self.num_key_value_heads / count.max(1)).max(1)
    }

    /// Returns the distinct shapes [K, N] of the quantised matmuls: queries, keys and values
    /// together, the output of attention, gate and up together, and down, also of experts.
    pub fn matmuls(&self) -> Vec<[usize; 2]> {
        let mut matmuls = Vec::new();
        for (block, _) in self.kinds_of_blocks() {
            let projections = block
                .projections()
                .map(|projection| [projection.k, projection.n()]);
            let experts = block.experts().into_iter().flat_map(|experts| {
                let (hidden, intermediate) = (experts.hidden, experts.intermediate);
                [[hidden, 2 * intermediate], [intermediate, hidden]]
            });
            for matmul in projections.chain(experts) {
                if !matmuls.contains(&matmul) {
                    matmuls.push(matmul);
                }
            }
        }
        matmuls
    }

    /// Returns the shape of a block without experts and of one with experts, each with the number
    /// of its blocks, of those that there are.
    fn kinds_of_blocks(&self) -> Vec<(BlockShape, usize)> {
        let layers = self.num_hidden_layers;
        let Some(experts) = &self.experts else {
            return vec![(self.block(0), layers)];
        };
        let dense: BTreeSet<usize> = experts.dense_layers.iter().copied().collect();
        let excluded = dense
            .iter()
            .filter(|&layer| *layer < layers && (layer + 1).is_multiple_of(experts.sparse_step));
        let sparse = layers / experts.sparse_step.max(1) - excluded.count();
        [(false, layers - sparse), (true, sparse)]
            .into_iter()
            .filter_map(|(has_experts, count)| {
                let of_kind = first_layer(experts.sparse_step, &dense, layers, has_experts)?;
                Some((self.block(of_kind), count))
            })
            .collect()
    }
}

/// Returns the first of `layers` layers with or without experts: those of every `sparse_step`
/// layers that are not `dense`. A config may have any number of layers, so they are not visited one
/// by one.
fn first_layer(
    sparse_step: usize,
    dense: &BTreeSet<usize>,
    layers: usize,
    has_experts: bool,
) -> Option<usize> {
    let first = match (has_experts, sparse_step) {
        (_, 0) => None,
        (true, step) => (step - 1..layers)
            .step_by(step)
            .find(|layer| !dense.contains(layer)),
        (false, 1) => dense.first().copied(),
        (false, _) => Some(0),
    };
    first.filter(|&layer| layer < layers)
}

/// The sizes of the layers of a block.
#[derive(Debug, Clone, Copy, Default)]
struct LayerSizes {
    weights: usize,
    bytes: usize,
    expert_weights: usize,
    expert_bytes: usize,
}

/// Returns the sizes of the layers of a block: its projections, its experts and its router.
fn block_sizes(block: &BlockShape, format: Option<WeightFormat>, float: usize) -> LayerSizes {
    let mut sizes = LayerSizes::default();
    let add = |sum: &mut usize, more: usize| *sum = sum.saturating_add(more);
    for projection in block.projections() {
        add(
            &mut sizes.weights,
            projection.k.saturating_mul(projection.n()),
        );
        add(
            &mut sizes.bytes,
            projection_bytes(projection, format, float),
        );
    }
    if let Some(experts) = block.experts() {
        let (hidden, count) = (experts.hidden, experts.router.experts);
        // Experts are held dense.
        let format = format.map(|format| format.with_sparsity(Sparsity::Dense));
        let [gate, down] = [
            [hidden, experts.intermediate],
            [experts.intermediate, hidden],
        ]
        .map(|dims| weight_bytes(dims, format, float));
        let [of_expert_biases, of_router_biases] = match experts.bias {
            true => [2 * experts.intermediate + hidden, count],
            false => [0; 2],
        };
        let biases = of_expert_biases.saturating_mul(float);
        let of_expert = gate
            .saturating_mul(2)
            .saturating_add(down)
            .saturating_add(biases);
        let shared_gate = experts.shared.as_ref().map_or(0, |_| hidden);
        let routers = hidden
            .saturating_mul(count)
            .saturating_add(shared_gate)
            .saturating_add(of_router_biases);
        sizes.expert_weights = experts.expert_weights();
        sizes.expert_bytes = of_expert.saturating_mul(count);
        add(&mut sizes.weights, sizes.expert_weights);
        add(&mut sizes.bytes, sizes.expert_bytes);
        add(&mut sizes.bytes, routers.saturating_mul(float));
    }
    sizes
}

/// Returns the bytes of a projection; `float` is the size of an element of float tensors.
fn projection_bytes(
    projection: &ProjectionShape,
    format: Option<WeightFormat>,
    float: usize,
) -> usize {
    let n = projection.n();
    let biases = if projection.bias { n * float } else { 0 };
    weight_bytes([projection.k, n], format, float).saturating_add(biases)
}

/// Returns the bytes of a weight [K, N]; `float` is the size of an element of float tensors.
fn weight_bytes([k, n]: [usize; 2], format: Option<WeightFormat>, float: usize) -> usize {
    match format {
        None => k.saturating_mul(n).saturating_mul(float),
        Some(format) => WeightDescriptor::plain(format, k, n)
            .tensors()
            .iter()
            .map(|(_, tensor)| {
                let size = match tensor.dtype {
                    TensorDtype::Words => size_of::<u32>(),
                    TensorDtype::Scale(ScaleDtype::F16 | ScaleDtype::BF16) => 2,
                    TensorDtype::Scale(ScaleDtype::F32) => size_of::<f32>(),
                };
                tensor.elements().saturating_mul(size)
            })
            .fold(0, usize::saturating_add),
    }
}

#[cfg(test)]
mod tests {
    use marlin_format::checkpoint::Checkpoint;
    use marlin_format::{GroupSize, QuantSpec};
    use marlin_testing::GoldenFolder;

    use super::*;
    use crate::Architecture;
    use crate::folder::float_dtype;

    #[test]
    fn sizes_are_those_of_the_files_of_every_architecture() {
        let mut found = Vec::new();
        for golden in GoldenFolder::all() {
            let (name, dir) = (&golden.name, golden.dir());
            if !name.starts_with("arch-") && name != "moe-all" {
                continue;
            }
            let config = ModelConfig::read(&dir.join("config.json")).unwrap();
            let checkpoint = Checkpoint::open(&dir).unwrap();
            let embedding = checkpoint.info("model.embed_tokens.weight").unwrap();
            let sizes = config.sizes(None, float_dtype(embedding.dtype));
            assert_eq!(sizes.bytes(), checkpoint.size_bytes(), "{name}");
            found.push(config.architecture);
        }
        for architecture in Architecture::ALL {
            assert!(found.contains(&architecture), "{architecture}");
        }
    }

    #[test]
    fn sizes_of_llama_2_7b() {
        let config = ModelConfig::from_json(
            r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
            "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}"#,
        )
        .unwrap();
        // Four matrices [4096, 4096] and three [4096, 11008] in each of 32 blocks.
        let weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008);
        let (table, norms) = (32000 * 4096 * 2, (2 * 32 + 1) * 4096 * 2);
        let float = config.sizes(None, FloatDType::F16);
        assert_eq!(float.projection_weights, weights);
        assert_eq!(float.bytes(), 2 * weights + 2 * table + norms);
        let int4 = WeightFormat::dense(QuantSpec::int4(GroupSize::G128));
        // The weights that a decode step reads, as `benches/records` has them.
        let int8 = WeightFormat::dense(QuantSpec::int8(GroupSize::G128));
        for (format, step) in [
            (int4, 3_601_866_752),
            (int4.with_sparsity(Sparsity::TwoFour), 2_792_366_080),
            (int8, 6_839_869_440),
        ] {
            let sizes = config.sizes(Some(format), FloatDType::F16);
            assert_eq!(sizes.step_bytes(1), step, "{format}");
            assert_eq!(sizes.bytes(), step + table, "{format}");
        }
        assert_eq!(
            config.matmuls(),
            [[4096, 12288], [4096, 4096], [4096, 22016], [11008, 4096]]
        );
    }

    #[test]
    fn sizes_that_overflow_are_the_largest_number() {
        let json = format!(
            r#"{{"architectures": ["LlamaForCausalLM"], "vocab_size": {max}, "hidden_size": {max},
            "intermediate_size": {max}, "num_hidden_layers": {max}, "num_attention_heads": 1,
            "head_dim": 64}}"#,
            max = ModelConfig::MAX_SIZE
        );
        let config = ModelConfig::from_json(&json).unwrap();
        assert_eq!(config.sizes(None, FloatDType::F16).bytes(), usize::MAX);
    }
}
