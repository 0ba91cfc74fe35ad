//! Tests of whole models against the logits of Hugging Face's `transformers` in `tests/golden`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use safetensors::SafeTensors;
use serde_json::Value;

use super::model::full;
use super::support::*;
use crate::tokens::token_tensor;
use crate::{
    Architecture, Engine, GenerationConfig, LanguageModel, Model, ModelConfig, OpenOptions,
    RequestParams, RopeScaling, StepOutput, StopReason,
};

/// The largest relative error in f32, from the rounding of both implementations. A missing sliding
/// window or norm gives an error above 0.01.
const TOLERANCE: f64 = 1e-5;

/// Returns the largest relative error. If the packer rounds dequantised weights to
/// `dequantized_in`, which this project does not do, the error may be four unit roundoffs of that
/// dtype.
fn tolerance(dequantized_in: Option<&str>) -> f64 {
    match dequantized_in {
        Some("float16") => 4.0 / 2048.0,
        Some("bfloat16") => 4.0 / 256.0,
        _ => TOLERANCE,
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

/// A folder of `tests/golden` with the logits that transformers computes from it.
pub(super) struct GoldenLogits {
    pub(super) name: String,
    pub(super) dir: PathBuf,
    pub(super) config: ModelConfig,
    tokens: Vec<u32>,
    logits: Vec<f64>,
    tolerance: f64,
}

impl GoldenLogits {
    /// Returns every folder with logits of a model of this crate.
    pub(super) fn all() -> Vec<Self> {
        let index: Value =
            serde_json::from_slice(&std::fs::read(golden().join("index.json")).unwrap()).unwrap();
        // The folders in Marlin's and the 2:4 formats have single layers, whose sizes no tiny model
        // has. The BERT model is for the tests of `burn_marlin`.
        let is_model = |entry: &&Value| {
            entry["logits"] == true && entry["architecture"] != "BertForSequenceClassification"
        };
        let entries = index.as_array().unwrap().iter().filter(is_model);
        entries.map(Self::read).collect()
    }

    fn read(entry: &Value) -> Self {
        let name = entry["name"].as_str().unwrap();
        let dir = golden().join(name);
        let config = ModelConfig::read(&dir.join("config.json")).unwrap();
        let bytes = std::fs::read(golden().join(entry["expected"].as_str().unwrap())).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let ids = expected.tensor("input_ids").unwrap();
        let tokens: Vec<u32> = ids
            .data()
            .as_chunks::<8>()
            .0
            .iter()
            .map(|&bytes| i64::from_le_bytes(bytes) as u32)
            .collect();
        let logits = expected.tensor("logits").unwrap();
        assert_eq!(logits.shape(), [1, tokens.len(), config.vocab_size]);
        let logits = logits
            .data()
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&bytes| f32::from_le_bytes(bytes).into())
            .collect();
        Self {
            name: name.into(),
            dir,
            config,
            tokens,
            logits,
            tolerance: tolerance(entry["dequantized_in"].as_str()),
        }
    }

    /// Returns the options to open the folder with.
    pub(super) fn options(&self) -> OpenOptions {
        // The texts are shorter than LongRoPE's original context: `transformers` uses the short
        // factors.
        let max_len = match &self.config.rope_scaling {
            Some(RopeScaling::LongRope(scaling)) => Some(scaling.original_max_position_embeddings),
            _ => None,
        };
        OpenOptions {
            max_len,
            ..options()
        }
    }

    /// Checks the logits of a model that was opened from the folder, all at once and through the
    /// cache.
    pub(super) fn check(&self, model: &Model) {
        let (name, tokens) = (&self.name, &self.tokens);
        for (how, found) in [
            ("all at once", full(model, tokens, 1)),
            ("through the cache", through_cache(model, tokens)),
        ] {
            let error = relative_error(&found, &self.logits);
            println!("{name}, {how}: relative error {error:.1e}");
            assert!(error < self.tolerance, "{name}, {how}: {error}");
        }
    }
}

#[test]
fn logits_are_those_of_transformers() {
    let mut architectures = Vec::new();
    for golden in GoldenLogits::all() {
        let opened = LanguageModel::open(&golden.dir, &Device::flex(), &golden.options());
        golden.check(&opened.unwrap().model);
        architectures.push(golden.config.architecture);
    }
    assert!(
        Architecture::ALL
            .iter()
            .all(|architecture| architectures.contains(architecture)),
        "{architectures:?}"
    );
}

/// Returns the logits of all tokens, of which the model gets one or several at a time.
fn through_cache(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let mut cache = model.new_cache(1);
    let (mut logits, mut rest) = (Vec::new(), tokens);
    for seq in [5, 1, 1, 3, 1, 70].into_iter().cycle() {
        let (chunk, after) = rest.split_at(seq.min(rest.len()));
        if chunk.is_empty() {
            break;
        }
        let chunk = token_tensor(chunk, [1, chunk.len()], &model.device());
        logits.extend(
            model
                .forward(chunk, &mut cache)
                .try_into_vec_as::<f32>()
                .unwrap(),
        );
        rest = after;
    }
    logits
}

/// Reads `generation.json` and opens its model.
fn generation() -> (Value, LanguageModel) {
    let generation: Value =
        serde_json::from_slice(&std::fs::read(golden().join("generation.json")).unwrap()).unwrap();
    let model = golden().join(generation["model"].as_str().unwrap());
    (generation, open(&model))
}

/// Returns the prompt of a case, and its request parameters as read from a
/// `generation_config.json`.
fn options_of(
    case: &Value,
    llama: &LanguageModel,
    max_new_tokens: usize,
) -> (Vec<u32>, RequestParams) {
    let prompt = serde_json::from_value(case["prompt"].clone()).unwrap();
    let mut config = case["config"].clone();
    // If the case has no stop token, an empty list keeps the stop token of the model's config from
    // applying.
    config["eos_token_id"] = config
        .get("eos_token_id")
        .cloned()
        .unwrap_or_else(|| Value::Array(Vec::new()));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("generation_config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    let GenerationConfig {
        sampling,
        suppression,
        eos_token_ids,
    } = GenerationConfig::read(&path, llama.model.config()).unwrap();
    (
        prompt,
        RequestParams {
            sampling,
            suppression,
            seed: 1,
            stop_tokens: eos_token_ids,
            max_new_tokens,
            ..RequestParams::default()
        },
    )
}

#[test]
fn generation_configs_generate_what_they_do_in_transformers() {
    let (generation, llama) = generation();
    let (cases, new_tokens) = (
        generation["cases"].as_array().unwrap(),
        generation["new_tokens"].as_u64().unwrap() as usize,
    );
    // All cases run in one engine, each with its own parameters.
    let mut engine = Engine::new(llama.model.clone(), cases.len()).unwrap();
    for (slot, case) in cases.iter().enumerate() {
        let (prompt, options) = options_of(case, &llama, new_tokens);
        assert_eq!(engine.add_request(&prompt, &options).unwrap(), slot);
    }
    let mut found = vec![(Vec::new(), false); cases.len()];
    while engine.sequences() > 0 {
        for StepOutput { slot, token, end } in engine.step().unwrap() {
            found[slot].0.extend(token);
            found[slot].1 |= matches!(end, Some(Ok(StopReason::StopToken(_))));
        }
    }
    for (case, (tokens, stops)) in cases.iter().zip(found) {
        assert_eq!(
            (serde_json::json!(tokens), stops),
            (case["tokens"].clone(), case["stops"] == true),
            "{case}"
        );
    }
}

#[test]
fn sampling_keeps_the_tokens_that_transformers_keeps() {
    let (generation, llama) = generation();
    for case in generation["samplings"].as_array().unwrap() {
        let mut config = case["config"].clone();
        config["do_sample"] = true.into();
        let case =
            serde_json::json!({ "prompt": case["prompt"], "config": config, "kept": case["kept"] });
        let (prompt, options) = options_of(&case, &llama, 1);
        let mut drawn = BTreeSet::new();
        let mut engine = Engine::new(llama.model.clone(), 100).unwrap();
        for seeds in [0..100, 100..200] {
            for seed in seeds {
                engine
                    .add_request(
                        &prompt,
                        &RequestParams {
                            seed,
                            ..options.clone()
                        },
                    )
                    .unwrap();
            }
            while engine.sequences() > 0 {
                drawn.extend(
                    engine
                        .step()
                        .unwrap()
                        .into_iter()
                        .filter_map(|decoded| decoded.token),
                );
            }
        }
        let kept: BTreeSet<u32> = serde_json::from_value(case["kept"].clone()).unwrap();
        assert!(drawn.is_subset(&kept), "{case}: drew {drawn:?}");
        // 200 draws miss a token of this probability with a chance of 4 in 100,000; the seeds are
        // fixed.
        let logits = full(&llama.model, &prompt, 1);
        let last = &logits[logits.len() - llama.model.config().vocab_size..];
        let weight = |token: u32| (last[token as usize] / options.sampling.temperature).exp();
        let total: f32 = kept.iter().map(|&token| weight(token)).sum();
        let likely: BTreeSet<u32> = kept
            .iter()
            .copied()
            .filter(|&token| weight(token) > 0.05 * total)
            .collect();
        assert!(drawn.is_superset(&likely), "{case}: drew {drawn:?}");
    }
}
