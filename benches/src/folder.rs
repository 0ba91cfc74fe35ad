//! Writes a checkpoint folder of random weights in the shape of a known model, with a tokenizer of
//! as many tokens: for servers, when no large model is at hand.

use crate::BenchError;
use crate::decode::failed;
use crate::preset::Preset;
use crate::weights::Weights;
use clap::Args;
use half::f16;
use marlin_format::checkpoint::{CheckpointWriter, Dtype, TensorSpec};
use marlin_lm::ModelConfig;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Rows of K that share a scale.
const GROUP: usize = 128;
/// Values that one core draws at a time.
const PART: usize = 1 << 18;
/// The standard deviation of weights.
const DEVIATION: f32 = 0.02;
/// The six pairs of features of four that a nibble of 2:4 metadata can name, in ascending order:
/// the first in the low two bits.
const PAIRS: [u16; 6] = [0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110];
/// The tokenizer with the bytes as tokens 0 to 255, then `<s>` and `</s>`.
const BYTE_LEVEL: &str = include_str!("../../crates/marlin-text/tests/byte_level.json");

/// The arguments of the folder command.
#[derive(Args)]
pub struct FolderArgs {
    /// The model whose shape to write.
    #[arg(long, value_enum)]
    model: Preset,
    /// The format of the layers' weights: w4a16, w4a16-24 or f16.
    #[arg(long, value_enum)]
    weights: Weights,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Folder to write; must be empty or not exist.
    dir: PathBuf,
}

/// A tensor and how its values are drawn.
struct Tensor {
    spec: TensorSpec,
    name: String,
    values: Values,
    count: usize,
}

/// The values of a tensor.
#[derive(Clone, Copy)]
enum Values {
    /// Packed values, i32: eight nibbles from -7 to 7, so that their mean is 0.
    Words,
    /// 2:4 metadata, i16: four nibbles that each name two of four features.
    Metadata,
    /// Floats in f16 around 0.
    Floats,
    /// Scales in f16, for values of this standard deviation.
    Scales(f32),
    /// Ones in f16.
    Ones,
    /// The shape [N, K] of a weight, i64.
    Shape([usize; 2]),
}

/// Writes the folder.
pub fn run(args: &FolderArgs) -> Result<(), BenchError> {
    let config = args.model.config()?;
    let tensors = tensors(&config, args.weights)?;
    let mut writer = CheckpointWriter::create(&args.dir).map_err(failed)?;
    let mut file = |name: &str, contents: &Value| {
        let text = contents.to_string();
        writer.write_file(name, text.as_bytes()).map_err(failed)
    };
    file("config.json", &config_json(&config, args.weights))?;
    file("tokenizer.json", &tokenizer(config.vocab_size)?)?;
    file(
        "generation_config.json",
        &json!({ "bos_token_id": 256, "eos_token_id": 257 }),
    )?;
    let specs = tensors.iter().map(|tensor| tensor.spec.clone());
    writer.declare(specs).map_err(failed)?;
    let mut seeds = StdRng::seed_from_u64(args.seed);
    for tensor in &tensors {
        let bytes = tensor.values.draw(tensor.count, seeds.random());
        writer.write_tensor(&tensor.name, &bytes).map_err(failed)?;
    }
    writer.finish().map_err(failed)
}

/// Returns the tensors of a model of Llama's architecture.
fn tensors(config: &ModelConfig, weights: Weights) -> Result<Vec<Tensor>, BenchError> {
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let (query, key_value) = (config.query_size(), config.key_value_size());
    let mut tensors = Vec::new();
    let mut add = |name: String, dtype, shape: [usize; 2], values| {
        // A norm has one dimension, which stands first.
        let dims = if shape[1] == 0 {
            &shape[..1]
        } else {
            &shape[..]
        };
        tensors.push(Tensor {
            spec: TensorSpec::new(name.as_str(), dtype, dims),
            name,
            values,
            count: dims.iter().product(),
        });
    };
    let float = |name: &str| name.to_owned();
    add(
        float("model.embed_tokens.weight"),
        Dtype::F16,
        [config.vocab_size, hidden],
        Values::Floats,
    );
    for layer in 0..config.num_hidden_layers {
        for (name, n, k) in [
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key_value, hidden),
            ("self_attn.v_proj", key_value, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", intermediate, hidden),
            ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ] {
            let tensor = |role: &str| format!("model.layers.{layer}.{name}.{role}");
            // Values of 4 bits are from -7 to 7, and twice as often 0 as any other.
            let scales = Values::Scales(17.5f32.sqrt());
            match weights {
                Weights::F16 => add(tensor("weight"), Dtype::F16, [n, k], Values::Floats),
                Weights::W4a16 => {
                    add(
                        tensor("weight_packed"),
                        Dtype::I32,
                        [n, k / 8],
                        Values::Words,
                    );
                    add(tensor("weight_scale"), Dtype::F16, [n, k / GROUP], scales);
                    add(
                        tensor("weight_shape"),
                        Dtype::I64,
                        [2, 0],
                        Values::Shape([n, k]),
                    );
                }
                Weights::W4a16TwoFour => {
                    let rows = k / 32;
                    add(
                        tensor("weight_packed"),
                        Dtype::I32,
                        [rows, 2 * n],
                        Values::Words,
                    );
                    add(tensor("meta"), Dtype::I16, [rows, 2 * n], Values::Metadata);
                    add(tensor("scale_packed"), Dtype::F16, [k / GROUP, n], scales);
                }
                _ => {
                    return Err(BenchError::Model(
                        "a folder has weights of 4-bit integers or of f16".into(),
                    ));
                }
            }
        }
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            let name = format!("model.layers.{layer}.{norm}.weight");
            add(name, Dtype::F16, [hidden, 0], Values::Ones);
        }
    }
    add(
        float("model.norm.weight"),
        Dtype::F16,
        [hidden, 0],
        Values::Ones,
    );
    add(
        float("lm_head.weight"),
        Dtype::F16,
        [config.vocab_size, hidden],
        Values::Floats,
    );
    Ok(tensors)
}

impl Values {
    /// Draws `count` values, as little-endian bytes, on all cores: what is drawn depends on the
    /// seed alone.
    fn draw(self, count: usize, seed: u64) -> Vec<u8> {
        let parts = (0..count.div_ceil(PART)).into_par_iter().map(|part| {
            let mut rng = StdRng::seed_from_u64(seed.wrapping_add(part as u64));
            self.draw_part(PART.min(count - part * PART), &mut rng)
        });
        parts.collect::<Vec<_>>().concat()
    }

    /// Draws `count` values, as little-endian bytes.
    fn draw_part(self, count: usize, rng: &mut StdRng) -> Vec<u8> {
        let around = |value: f32, spread: f32, rng: &mut StdRng| {
            let value = value + rng.random_range(-spread..spread);
            f16::from_f32(value).to_le_bytes()
        };
        match self {
            Self::Words => {
                let mut bytes = vec![0; 4 * count];
                rng.fill_bytes(&mut bytes);
                for byte in &mut bytes {
                    // A nibble of 0 is -8, and one of 8 is 0.
                    let (low, high) = (*byte & 0x0f, *byte & 0xf0);
                    *byte |= u8::from(low == 0) << 3 | u8::from(high == 0) << 7;
                }
                bytes
            }
            Self::Metadata => (0..count)
                .flat_map(|_| {
                    let nibbles =
                        (0..4).map(|nibble| PAIRS[rng.random_range(0..6)] << (4 * nibble));
                    nibbles.sum::<u16>().to_le_bytes()
                })
                .collect(),
            // The standard deviation of uniform values is the spread over the root of three.
            Self::Floats => (0..count)
                .flat_map(|_| around(0.0, DEVIATION * 3f32.sqrt(), rng))
                .collect(),
            Self::Scales(deviation) => {
                let scale = DEVIATION / deviation;
                (0..count)
                    .flat_map(|_| around(scale, scale / 4.0, rng))
                    .collect()
            }
            Self::Ones => f16::ONE.to_le_bytes().repeat(count),
            Self::Shape(shape) => shape
                .iter()
                .flat_map(|&length| (length as i64).to_le_bytes())
                .collect(),
        }
    }
}

/// Returns the contents of `config.json`.
fn config_json(config: &ModelConfig, weights: Weights) -> Value {
    let mut json = config.to_json();
    json["eos_token_id"] = 257.into();
    let format = match weights {
        Weights::W4a16 => "pack-quantized",
        Weights::W4a16TwoFour => "marlin-24",
        _ => return json,
    };
    json["quantization_config"] = json!({
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": { "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": true,
                "strategy": "group", "group_size": GROUP,
            },
        }},
    });
    json
}

/// Returns a byte-level tokenizer with further tokens, ` w258` and so on, which no text has but a
/// model may choose.
fn tokenizer(vocab_size: usize) -> Result<Value, BenchError> {
    let mut tokenizer: Value = serde_json::from_str(BYTE_LEVEL).map_err(failed)?;
    let vocab = tokenizer["model"]["vocab"].as_object_mut();
    let vocab = vocab.ok_or_else(|| BenchError::Model("the tokenizer has no vocabulary".into()))?;
    for token in 258..vocab_size {
        vocab.insert(format!("\u{120}w{token}"), token.into());
    }
    Ok(tokenizer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use marlin_lm::{LanguageModel, OpenOptions};

    /// The shipped model's shape has 15 million parameters: about a second a format.
    #[test]
    fn folders_of_every_format_open_and_generate() {
        for weights in [Weights::W4a16, Weights::W4a16TwoFour, Weights::F16] {
            let parent = tempfile::tempdir().unwrap();
            let dir = parent.path().join("model");
            run(&FolderArgs {
                model: Preset::Shipped,
                weights,
                seed: 7,
                dir: dir.clone(),
            })
            .unwrap();
            let options = OpenOptions {
                with_tokenizer: true,
                ..OpenOptions::default()
            };
            let llama = LanguageModel::open(&dir, &Device::flex(), &options).unwrap();
            let options = llama.default_options(4);
            let generation =
                llama.generate("Hi", &options, |_| std::ops::ControlFlow::Continue(()));
            assert_eq!(generation.unwrap().prompt_tokens, 3);
        }
    }
}
