//! The sizes of a model, from its config alone.

use burn::tensor::{DType, FloatDType};
use marlin_format::{ScaleDtype, TensorDtype, WeightDescriptor, WeightFormat};

use super::ModelConfig;
use crate::architectures::{MixerShape, ProjectionShape};

/// The numbers of weights and bytes of a model whose projections have one format.
///
/// Numbers that overflow are `usize::MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelSizes {
    /// The number of weights of the projections of all blocks, without biases.
    pub projection_weights: usize,
    /// The bytes of these projections: values, metadata of 2:4 weights, scales and biases.
    pub projection_bytes: usize,
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
        self.step_bytes().saturating_add(self.embedding_bytes)
    }

    /// Returns the bytes of weights that a decode step reads: all but the embedding, of which a
    /// step reads one row for each sequence.
    pub fn step_bytes(&self) -> usize {
        self.projection_bytes
            .saturating_add(self.head_bytes)
            .saturating_add(self.norm_bytes)
    }
}

impl ModelConfig {
    /// Returns the sizes of the model if all projections have `format`, and the other tensors have
    /// `dtype`; with `None` the projections have `dtype`, too.
    pub fn sizes(&self, format: Option<WeightFormat>, dtype: FloatDType) -> ModelSizes {
        let float = DType::from(dtype).size();
        let layers = self.num_hidden_layers;
        // Blocks differ in their windows alone.
        let block = self.block(0);
        let MixerShape::Attention(attention) = &block.mixer;
        let head_norms = attention
            .head_norms
            .map_or(0, |norms| norms.len() * self.head_dim);
        let sum = |size: &dyn Fn(&ProjectionShape) -> usize| {
            let block = block
                .projections()
                .into_iter()
                .fold(0, |sum: usize, projection| {
                    sum.saturating_add(size(projection))
                });
            block.saturating_mul(layers)
        };
        let table = self.vocab_size.saturating_mul(self.hidden_size);
        ModelSizes {
            projection_weights: sum(&|projection| projection.k.saturating_mul(projection.n())),
            projection_bytes: sum(&|projection| projection_bytes(projection, format, float)),
            head_weights: table,
            head_bytes: table.saturating_mul(float),
            embedding_bytes: match self.tie_word_embeddings {
                true => 0,
                false => table.saturating_mul(float),
            },
            norm_bytes: (2 * self.hidden_size + head_norms)
                .saturating_mul(layers)
                .saturating_add(self.hidden_size)
                .saturating_mul(float),
        }
    }

    /// Returns the shapes [K, N] of the matmuls of a block: queries, keys and values together, the
    /// output of attention, gate and up together, and down.
    pub fn matmuls(&self) -> [[usize; 2]; 4] {
        self.block(0)
            .projections()
            .map(|projection| [projection.k, projection.n()])
    }
}

/// Returns the bytes of a projection; `float` is the size of an element of float tensors.
fn projection_bytes(
    projection: &ProjectionShape,
    format: Option<WeightFormat>,
    float: usize,
) -> usize {
    let (k, n) = (projection.k, projection.n());
    let weight = match format {
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
    };
    let biases = if projection.bias { n * float } else { 0 };
    weight.saturating_add(biases)
}

#[cfg(test)]
mod tests {
    use marlin_format::checkpoint::Checkpoint;
    use marlin_format::{GroupSize, QuantSpec, Sparsity};
    use marlin_testing::repository_file;

    use super::*;
    use crate::Architecture;
    use crate::folder::float_dtype;

    #[test]
    fn sizes_are_those_of_the_files_of_every_architecture() {
        let golden = repository_file("tests/golden");
        let mut found = Vec::new();
        for entry in golden.read_dir().unwrap() {
            let dir = entry.unwrap().path();
            let name = dir.file_name().unwrap().to_string_lossy().into_owned();
            if !name.starts_with("arch-") {
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
            assert_eq!(sizes.step_bytes(), step, "{format}");
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
