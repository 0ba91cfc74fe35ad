//! Random models in Hugging Face folders, and other helpers of the tests.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType};
use half::{bf16, f16};
use marlin_format::checkpoint::compressed_tensors::{self, QuantizationConfig};
use marlin_format::checkpoint::{CheckpointWriter, Dtype, TensorSpec};
use marlin_format::{QuantSpec, quantize_rtn};
use marlin_testing::repository_file;
use rand::RngExt;
use rand::rngs::StdRng;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::{
    Architecture, LanguageModel, Model, ModelConfig, ModelError, OpenOptions, QuantizeOptions,
    QuantizeReport, quantize_folder,
};

pub(crate) use marlin_testing::{relative_error, rng, with_fields};

/// Tensors of a checkpoint by name: shape and values, row-major.
pub(crate) type Weights = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A model of two layers whose sizes are no powers of two.
pub(crate) fn config() -> ModelConfig {
    config_with(json!({}))
}

/// Returns the config of [`config`], with `fields` set.
pub(crate) fn config_with(fields: Value) -> ModelConfig {
    serde_json::from_value(config_json(fields)).unwrap()
}

pub(crate) fn config_json(fields: Value) -> Value {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 71, "hidden_size": 36, "intermediate_size": 52,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 96,
        "eos_token_id": 2,
    });
    for (name, value) in fields.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

/// Returns a `config.json` of an architecture like [`config_of`], without experts.
pub(crate) fn json_of(architecture: Architecture, fields: Value) -> Value {
    let json = config_json(json!({ "architectures": [architecture.class()], "head_dim": 10 }));
    with_fields(json, &fields)
}

/// Returns a config of an architecture: the config of [`config`] with a `head_dim` of 10, and with
/// `fields` set. A mixture has five experts, and a Qwen 3 has them in its first layer alone.
pub(crate) fn config_of(architecture: Architecture, fields: Value) -> ModelConfig {
    let mut json = json_of(architecture, json!({}));
    let experts = json!({
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "norm_topk_prob": architecture == Architecture::Qwen3Moe,
        "mlp_only_layers": if architecture == Architecture::Qwen3Moe { vec![1] } else { Vec::new() },
    });
    json.as_object_mut()
        .unwrap()
        .extend(experts.as_object().unwrap().clone());
    json.as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    serde_json::from_value(json).unwrap()
}

/// Returns random weights by their names in Hugging Face's files. Their magnitudes give attention
/// distinct maxima and keep the residual stream in range.
pub(crate) fn random_weights(config: &ModelConfig, rng: &mut StdRng) -> Weights {
    let mut weights = Weights::new();
    let mut add = |name: String, shape: Vec<usize>, centre: f32, spread: f32| {
        let values = (0..shape.iter().product())
            .map(|_| centre + spread * (2.0 * rng.random::<f32>() - 1.0))
            .collect();
        weights.insert(name, (shape, values));
    };
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let (query, key_value) = (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    );
    let output_bias = config.attention_bias
        && ![
            Architecture::Qwen2,
            Architecture::Qwen2Moe,
            Architecture::SeedOss,
        ]
        .contains(&config.architecture);
    let mut projections = vec![("self_attn.o_proj", hidden, query, output_bias)];
    let mut mlp = vec![("mlp.down_proj", hidden, intermediate, config.mlp_bias)];
    if config.architecture == Architecture::Phi3 {
        projections.push(("self_attn.qkv_proj", query + 2 * key_value, hidden, false));
        mlp.push(("mlp.gate_up_proj", 2 * intermediate, hidden, false));
    } else {
        projections.extend([
            ("self_attn.q_proj", query, hidden, config.attention_bias),
            ("self_attn.k_proj", key_value, hidden, config.attention_bias),
            ("self_attn.v_proj", key_value, hidden, config.attention_bias),
        ]);
        mlp.extend([
            ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
            ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
        ]);
    }
    add(
        "model.embed_tokens.weight".into(),
        vec![config.vocab_size, hidden],
        0.0,
        1.0,
    );
    for layer in 0..config.num_hidden_layers {
        let of_experts = expert_layers(config, layer);
        let mlp = if of_experts.is_empty() { &mlp[..] } else { &[] };
        let shared = projections
            .iter()
            .chain(mlp)
            .map(|&(name, n, k, bias)| (name.to_string(), n, k, bias));
        for (name, n, k, bias) in shared.chain(of_experts) {
            add(
                format!("model.layers.{layer}.{name}.weight"),
                vec![n, k],
                0.0,
                2.0 / (k as f32).sqrt(),
            );
            if bias {
                add(
                    format!("model.layers.{layer}.{name}.bias"),
                    vec![n],
                    0.0,
                    0.5,
                );
            }
        }
        add(
            format!("model.layers.{layer}.input_layernorm.weight"),
            vec![hidden],
            1.0,
            0.5,
        );
        add(
            format!("model.layers.{layer}.post_attention_layernorm.weight"),
            vec![hidden],
            1.0,
            0.5,
        );
        if config.architecture == Architecture::GptOss {
            let sinks = format!("model.layers.{layer}.self_attn.sinks");
            add(sinks, vec![config.num_attention_heads], 0.5, 2.0);
        }
        if [Architecture::Qwen3, Architecture::Qwen3Moe].contains(&config.architecture) {
            add(
                format!("model.layers.{layer}.self_attn.q_norm.weight"),
                vec![config.head_dim],
                1.5,
                0.5,
            );
            add(
                format!("model.layers.{layer}.self_attn.k_norm.weight"),
                vec![config.head_dim],
                1.5,
                0.5,
            );
        }
    }
    add("model.norm.weight".into(), vec![hidden], 1.0, 0.5);
    if !config.tie_word_embeddings {
        add(
            "lm_head.weight".into(),
            vec![config.vocab_size, hidden],
            0.0,
            2.0 / (hidden as f32).sqrt(),
        );
    }
    weights
}

/// Returns the layers of a layer's experts: name, N, K and whether there is a bias. None for a
/// layer without experts.
fn expert_layers(config: &ModelConfig, layer: usize) -> Vec<(String, usize, usize, bool)> {
    let Some(experts) = config.experts_of(layer) else {
        return Vec::new();
    };
    let (hidden, intermediate) = (config.hidden_size, experts.intermediate_size);
    let (block, [gate, up, down]) = match config.architecture {
        Architecture::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
        _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
    };
    let (router, bias) = match config.architecture {
        Architecture::GptOss => ("router", true),
        _ => ("gate", false),
    };
    let mut layers = vec![(format!("{block}.{router}"), experts.count, hidden, bias)];
    for expert in 0..experts.count {
        let name = |layer: &str| format!("{block}.experts.{expert}.{layer}");
        layers.extend([
            (name(gate), intermediate, hidden, bias),
            (name(up), intermediate, hidden, bias),
            (name(down), hidden, intermediate, bias),
        ]);
    }
    if let Some(intermediate) = experts.shared_intermediate_size {
        layers.extend([
            ("mlp.shared_expert_gate".into(), 1, hidden, false),
            (
                "mlp.shared_expert.gate_proj".into(),
                intermediate,
                hidden,
                false,
            ),
            (
                "mlp.shared_expert.up_proj".into(),
                intermediate,
                hidden,
                false,
            ),
            (
                "mlp.shared_expert.down_proj".into(),
                hidden,
                intermediate,
                false,
            ),
        ]);
    }
    layers
}

/// Returns the bytes of values in a file of `dtype`: F16, BF16 or otherwise F32.
pub(crate) fn bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values
            .iter()
            .flat_map(|&value| f16::from_f32(value).to_le_bytes())
            .collect(),
        Dtype::BF16 => values
            .iter()
            .flat_map(|&value| bf16::from_f32(value).to_le_bytes())
            .collect(),
        _ => values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
    }
}

/// Creates a temporary folder. Returns it with the path in it for a checkpoint.
pub(crate) fn temporary() -> (tempfile::TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("model");
    (parent, dir)
}

pub(crate) fn write_folder(dir: &Path, config: &ModelConfig, weights: &Weights, dtype: Dtype) {
    let mut writer = CheckpointWriter::create(dir).unwrap();
    writer
        .write_file("config.json", config.to_json().to_string().as_bytes())
        .unwrap();
    writer
        .declare(
            weights
                .iter()
                .map(|(name, (shape, _))| TensorSpec::new(name.as_str(), dtype, shape.as_slice())),
        )
        .unwrap();
    for (name, (_, values)) in weights {
        writer.write_tensor(name, &bytes(values, dtype)).unwrap();
    }
    writer.finish().unwrap();
}

/// Writes a folder whose layers are rounded to the specs that `spec_of` returns for their names,
/// and float where it returns none. Returns the weights with those of these layers dequantised.
pub(crate) fn write_quantized(
    dir: &Path,
    config: &ModelConfig,
    weights: &Weights,
    spec_of: impl Fn(&str) -> Option<QuantSpec>,
) -> Weights {
    let (mut dequantized, mut tensors) = (weights.clone(), Vec::new());
    let mut specs: BTreeMap<String, (QuantSpec, Vec<String>)> = BTreeMap::new();
    let mut ignore = Vec::new();
    for (name, (shape, values)) in weights {
        let layer = name.strip_suffix(".weight").unwrap_or(name);
        let (Some(spec), &[n, k]) = (spec_of(layer), &shape[..]) else {
            ignore.push(layer.to_string());
            tensors.push((
                TensorSpec::new(name.as_str(), Dtype::F32, shape.as_slice()),
                bytes(values, Dtype::F32),
            ));
            continue;
        };
        let transposed: Vec<f32> = (0..k * n).map(|i| values[i % n * k + i / n]).collect();
        let plain = quantize_rtn(&transposed, k, n, &spec).unwrap();
        let rounded = plain.dequantize();
        let rounded = (0..n * k).map(|i| rounded[i % k * n + i / k]).collect();
        dequantized.insert(name.clone(), (shape.clone(), rounded));
        let layers = specs.entry(spec.to_string());
        let (_, layers) = layers.or_insert_with(|| (spec, Vec::new()));
        layers.push(layer.into());
        let of_layer = compressed_tensors::tensors_of(layer, &plain);
        tensors.extend(
            of_layer
                .into_iter()
                .map(|tensor| (tensor.spec, tensor.bytes)),
        );
    }
    let mut specs = specs.into_values();
    let (common, _) = specs.next().expect("a quantised layer");
    let quantization = QuantizationConfig::new(common, ignore).unwrap();
    let quantization = specs.fold(quantization, |config, (spec, layers)| {
        config.with_layers(spec, false, layers)
    });
    let mut json = config.to_json();
    json["quantization_config"] = quantization.to_json();
    let mut writer = CheckpointWriter::create(dir).unwrap();
    writer
        .write_file("config.json", json.to_string().as_bytes())
        .unwrap();
    writer
        .declare(tensors.iter().map(|(spec, _)| spec.clone()))
        .unwrap();
    for (spec, bytes) in &tensors {
        writer.write_tensor(&spec.name, bytes).unwrap();
    }
    writer.finish().unwrap();
    dequantized
}

/// Writes a folder like [`write_folder`], in f32, with `shards` files and an index.
/// Writes a folder with random weights.
pub(crate) fn random_folder(
    config: &ModelConfig,
    dtype: Dtype,
    rng: &mut StdRng,
) -> (tempfile::TempDir, PathBuf) {
    let (parent, dir) = temporary();
    write_folder(&dir, config, &random_weights(config, rng), dtype);
    (parent, dir)
}

/// Quantises a folder to the end.
pub(crate) fn quantize_with(
    source: &Path,
    target: &Path,
    spec: &QuantSpec,
    options: &QuantizeOptions,
) -> Result<QuantizeReport, ModelError> {
    quantize_folder(source, target, spec, options, |_| ControlFlow::Continue(()))
}

pub(crate) fn write_sharded(dir: &Path, config: &ModelConfig, weights: &Weights, shards: usize) {
    std::fs::create_dir(dir).unwrap();
    std::fs::write(dir.join("config.json"), config.to_json().to_string()).unwrap();
    let names: Vec<&String> = weights.keys().collect();
    let mut map = serde_json::Map::new();
    for (index, names) in names.chunks(names.len().div_ceil(shards)).enumerate() {
        let file = format!("model-{:05}-of-{shards:05}.safetensors", index + 1);
        let data: Vec<_> = names
            .iter()
            .map(|name| {
                (
                    *name,
                    &weights[*name].0,
                    bytes(&weights[*name].1, Dtype::F32),
                )
            })
            .collect();
        let views = data.iter().map(|(name, shape, data)| {
            (
                *name,
                TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap(),
            )
        });
        std::fs::write(
            dir.join(&file),
            safetensors::serialize(views, None).unwrap(),
        )
        .unwrap();
        map.extend(
            names
                .iter()
                .map(|name| (name.to_string(), file.clone().into())),
        );
    }
    std::fs::write(
        dir.join("model.safetensors.index.json"),
        json!({ "weight_map": map }).to_string(),
    )
    .unwrap();
}

pub(crate) fn options() -> OpenOptions {
    OpenOptions {
        dtype: Some(FloatDType::F32),
        max_len: None,
        with_tokenizer: false,
        ..OpenOptions::default()
    }
}

pub(crate) fn open(dir: &Path) -> LanguageModel {
    LanguageModel::open(dir, &Device::flex(), &options()).unwrap()
}

pub(crate) fn random_tokens(count: usize, vocab: usize, rng: &mut StdRng) -> Vec<u32> {
    (0..count)
        .map(|_| rng.random_range(0..vocab as u32))
        .collect()
}

/// Checks that a quantised model computes the same as the float model with the values of its
/// weights.
pub(crate) fn check_dequantized(model: &Model, tokens: &[u32]) {
    let mut float = model.clone();
    float.dequantize();
    let [found, expected] = [model, &float].map(|model| super::model::full(model, tokens, 1));
    let error = relative_error(&found, &expected);
    assert!(error < 1e-5, "{error}");
}

/// Returns a `tokenizer.json` of byte-level BPE with the bytes 0..=255 as tokens, then `<s>` 256
/// and `</s>` 257. It starts texts with `<s>`.
pub(crate) fn byte_level_tokenizer() -> Value {
    let path = repository_file("crates/marlin-text/tests/byte_level.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Returns the median of the relative errors of the tokens' logits [tokens, vocab]. A token whose
/// router has two experts of nearly the same score may have another one after rounding.
pub(crate) fn median_error(found: &[f32], expected: &[f64], vocab: usize) -> f64 {
    let tokens = found.chunks_exact(vocab).zip(expected.chunks_exact(vocab));
    let mut errors: Vec<f64> = tokens
        .map(|(found, expected)| relative_error(found, expected))
        .collect();
    errors.sort_by(f64::total_cmp);
    errors[errors.len() / 2]
}
