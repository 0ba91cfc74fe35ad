//! Files that hold the experts of a block in tensors of three dimensions.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::Device;
use marlin_format::checkpoint::{Checkpoint, Dtype};
use marlin_format::{GroupSize, QuantSpec};
use marlin_testing::repository_file;
use serde_json::json;

use super::calibrate::{SPEC, assert_same_bytes, gptq, run, stop_after};
use super::model::{TOLERANCE, full};
use super::support::*;
use crate::architectures::StackShape;
use crate::{
    Architecture, LanguageModel, Method, ModelConfig, ModelError, QuantizeOptions, check_folder,
    quantize_folder,
};

/// Returns the weights with the matrices of experts in stacks, as an architecture has them.
pub(super) fn stacked(config: &ModelConfig, weights: &Weights) -> Weights {
    let mut stacked = weights.clone();
    for layer in 0..config.num_hidden_layers {
        let block = config.block(layer);
        let Some(shape) = block.experts() else {
            continue;
        };
        let name = format!("model.layers.{layer}");
        let experts: Vec<_> = shape.experts_of(&name).collect();
        let layers = [
            experts.iter().map(|expert| &expert.gate_up[..]).collect(),
            experts
                .iter()
                .map(|expert| std::slice::from_ref(&expert.down))
                .collect::<Vec<_>>(),
        ];
        for (stack, of_experts) in StackShape::NAMES.into_iter().zip(layers) {
            let [k, _] = of_experts[0][0].dims;
            let n: usize = of_experts[0].iter().map(|layer| layer.dims[1]).sum();
            let (mut values, mut biases) = (Vec::new(), Vec::new());
            for layers in &of_experts {
                let mut rows: Vec<Vec<f32>> = vec![Vec::new(); n];
                let mut bias = vec![0.0; n];
                let mut first = 0;
                for (index, layer) in layers.iter().enumerate() {
                    let (_, matrix) = stacked.remove(&format!("{}.weight", layer.name)).unwrap();
                    let of_layer = stacked.remove(&format!("{}.bias", layer.name));
                    for (row, line) in matrix.chunks(k).enumerate() {
                        let place = match shape.stack.alternates {
                            true => row * layers.len() + index,
                            false => first + row,
                        };
                        rows[place] = line.to_vec();
                        bias[place] = of_layer.as_ref().map_or(0.0, |(_, bias)| bias[row]);
                    }
                    first += layer.dims[1];
                }
                if shape.stack.has_k_first {
                    values.extend((0..k).flat_map(|k| rows.iter().map(move |row| row[k])));
                } else {
                    values.extend(rows.concat());
                }
                biases.extend(bias);
            }
            let matrix = match shape.stack.has_k_first {
                true => [k, n],
                false => [n, k],
            };
            let count = of_experts.len();
            let name = format!("{name}.{}.{stack}", shape.name);
            stacked.insert(name.clone(), ([&[count][..], &matrix].concat(), values));
            if shape.bias {
                stacked.insert(format!("{name}_bias"), (vec![count, n], biases));
            }
        }
    }
    stacked
}

const MIXTURES: [Architecture; 4] = [
    Architecture::Mixtral,
    Architecture::Qwen2Moe,
    Architecture::Qwen3Moe,
    Architecture::GptOss,
];

#[test]
fn stacked_experts_are_those_of_single_matrices() {
    let mut rng = rng();
    for architecture in MIXTURES {
        let config = config_of(architecture, json!({}));
        let weights = random_weights(&config, &mut rng);
        let ((_a, single), (_b, stack)) = (temporary(), temporary());
        write_folder(&single, &config, &weights, Dtype::F32);
        write_folder(&stack, &config, &stacked(&config, &weights), Dtype::F32);
        let faults = check_folder(&stack, &Device::flex(), &options(), |_, _, _| {});
        assert!(faults.is_empty(), "{architecture}: {faults:?}");
        let tokens = random_tokens(7, config.vocab_size, &mut rng);
        let [expected, found] = [single, stack].map(|dir| full(&open(&dir).model, &tokens, 1));
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        // The layouts of weights in memory, and so the orders of sums, may differ.
        let error = relative_error(&found, &expected);
        assert!(error < TOLERANCE, "{architecture}: {error}");
    }
}

#[test]
fn stacks_of_another_shape_are_named() {
    let config = config_of(Architecture::GptOss, json!({}));
    let weights = stacked(&config, &random_weights(&config, &mut rng()));
    let stack = "model.layers.1.mlp.experts.gate_up_proj";
    for (name, axis) in [(stack.to_string(), 2), (format!("{stack}_bias"), 0)] {
        let mut other = weights.clone();
        let (shape, values) = other.get_mut(&name).unwrap();
        shape[axis] -= 1;
        values.truncate(shape.iter().product());
        let (_parent, dir) = temporary();
        write_folder(&dir, &config, &other, Dtype::F32);
        let error = LanguageModel::open(&dir, &Device::flex(), &options()).unwrap_err();
        let faults = check_folder(&dir, &Device::flex(), &options(), |_, _, _| {});
        assert_eq!(faults.len(), 1, "{faults:?}");
        for error in [&error, &faults[0]] {
            let message = format!("{error:?}");
            assert!(message.contains(&name), "{message}");
        }
    }
}

/// A config of other experts than the file's: MXFP4 blocks do not fit.
#[test]
fn blocks_that_do_not_fit_the_config_are_refused() {
    let golden = repository_file("tests/golden/moe-gpt-oss-mxfp4");
    for (field, value, expected) in [
        ("num_local_experts", 4, "router"),
        ("intermediate_size", 64, "gate_up_proj"),
        ("hidden_size", 32, "embed_tokens"),
    ] {
        let (_parent, dir) = temporary();
        std::fs::create_dir_all(&dir).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(golden.join(file), dir.join(file)).unwrap();
        }
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config[field] = value.into();
        std::fs::write(&path, config.to_string()).unwrap();
        let error = LanguageModel::open(&dir, &Device::flex(), &options()).unwrap_err();
        let message = format!("{error:?}");
        assert!(message.contains(expected), "{field}: {message}");
        let faults = check_folder(&dir, &Device::flex(), &options(), |_, _, _| {});
        assert!(!faults.is_empty(), "{field}");
    }
}

#[test]
fn an_expert_in_a_stack_and_by_itself_is_named() {
    for architecture in MIXTURES {
        let config = config_of(architecture, json!({}));
        let weights = random_weights(&config, &mut rng());
        let layer = (0..config.num_hidden_layers)
            .find(|&layer| config.block(layer).experts().is_some())
            .unwrap();
        let block = config.block(layer);
        let shape = block.experts().unwrap();
        let expert = shape
            .experts_of(&format!("model.layers.{layer}"))
            .nth(2)
            .unwrap();
        let name = expert.down.name;
        let mut both = stacked(&config, &weights);
        let weight = format!("{name}.weight");
        both.insert(weight.clone(), weights[&weight].clone());
        let (_parent, dir) = temporary();
        write_folder(&dir, &config, &both, Dtype::F32);
        let error = LanguageModel::open(&dir, &Device::flex(), &options()).unwrap_err();
        let faults = check_folder(&dir, &Device::flex(), &options(), |_, _, _| {});
        for error in faults.iter().chain([&error]) {
            assert!(
                matches!(error, ModelError::ExpertTwice { layer, .. } if *layer == name),
                "{architecture}: {error}"
            );
        }
        assert_eq!(faults.len(), 1, "{architecture}: {faults:?}");
    }
}

/// Quantises a folder to `target` in groups of 32.
fn quantized(source: &Path, target: &Path, options: &QuantizeOptions) -> Result<(), ModelError> {
    let spec = QuantSpec::int4(GroupSize::G32);
    quantize_folder(
        source,
        target,
        &spec,
        options,
        |_| ControlFlow::Continue(()),
    )
    .map(drop)
}

/// Returns the names and bytes of all tensors of a folder.
fn tensors(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let names = checkpoint.names();
    names
        .map(|name| (name.into(), checkpoint.tensor(name).unwrap().bytes().into()))
        .collect()
}

#[test]
fn quantised_stacks_are_those_of_single_matrices() {
    let mut rng = rng();
    for architecture in MIXTURES {
        let config = config_of(architecture, json!({}));
        let weights = random_weights(&config, &mut rng);
        let ((_a, single), (_b, stack)) = (temporary(), temporary());
        write_folder(&single, &config, &weights, Dtype::F32);
        write_folder(&stack, &config, &stacked(&config, &weights), Dtype::F32);
        let experts_of = |tensors: &BTreeMap<String, Vec<u8>>, block: &str| {
            let is_of_expert = |name: &str| name.starts_with(block) && name.contains(".experts.");
            let experts = tensors.iter().filter(|(name, _)| is_of_expert(name));
            experts
                .map(|(name, bytes)| (name.clone(), bytes.clone()))
                .collect::<BTreeMap<_, _>>()
        };
        let (first, float_stack) = ("model.layers.0.", tensors(&stack));
        let options = QuantizeOptions {
            exclude: vec!["re:.*layers.0.*experts.*".into()],
            ..QuantizeOptions::default()
        };
        let [expected, mut found] = [single, stack].map(|source| {
            let (_parent, target) = temporary();
            quantized(&source, &target, &options).unwrap();
            let faults = check_folder(&target, &Device::flex(), &self::options(), |_, _, _| {});
            assert!(faults.is_empty(), "{architecture}: {faults:?}");
            tensors(&target)
        });
        // Float experts stay as they were, in one tensor or one by one; all else is the same.
        let kept = experts_of(&found, first);
        assert!(
            !kept.is_empty() && kept == experts_of(&float_stack, first),
            "{architecture}"
        );
        found.retain(|name, _| !kept.contains_key(name));
        found.extend(experts_of(&expected, first));
        assert!(expected == found, "{architecture}");
    }
}

#[test]
fn stacks_are_calibrated() {
    let mut rng = rng();
    let config = config_of(Architecture::GptOss, json!({ "num_hidden_layers": 1 }));
    let weights = random_weights(&config, &mut rng);
    let ((_a, source), (_b, target)) = (temporary(), temporary());
    write_folder(&source, &config, &stacked(&config, &weights), Dtype::F32);
    let samples: Vec<Vec<u32>> = (0..4)
        .map(|_| random_tokens(48, config.vocab_size, &mut rng))
        .collect();
    let mut options = gptq(&samples);
    if let Method::Gptq { calibration, .. } = &mut options.method {
        calibration.route_all = true;
    }
    let report = run(&source, &target, &options).unwrap();
    let of_experts = report
        .quantized
        .iter()
        .filter(|layer| layer.name.contains(".experts."));
    let losses: Vec<_> = of_experts
        .map(|layer| layer.loss.as_ref().unwrap())
        .collect();
    let experts = config.experts.as_ref().unwrap().count;
    assert_eq!(losses.len(), 3 * experts);
    for loss in losses {
        assert_eq!((loss.tokens, loss.fell_back), (4 * 48, false), "{loss:?}");
    }
    let faults = check_folder(&target, &Device::flex(), &self::options(), |_, _, _| {});
    assert!(faults.is_empty(), "{faults:?}");
}

/// Experts that stay float in one tensor are passed by a run, and by one that goes on.
#[test]
fn excluded_stacks_are_passed() {
    let mut rng = rng();
    let config = config_of(Architecture::GptOss, json!({}));
    let weights = random_weights(&config, &mut rng);
    let (_a, source) = temporary();
    write_folder(&source, &config, &stacked(&config, &weights), Dtype::F32);
    let samples: Vec<Vec<u32>> = (0..4)
        .map(|_| random_tokens(48, config.vocab_size, &mut rng))
        .collect();
    let options = QuantizeOptions {
        exclude: vec!["re:.*experts".into()],
        ..gptq(&samples)
    };
    let ((_b, whole), (_c, resumed)) = (temporary(), temporary());
    let report = run(&source, &whole, &options).unwrap();
    let blocks = config.num_hidden_layers;
    assert_eq!(report.quantized.len(), 4 * blocks);
    assert_eq!(
        report.excluded.len(),
        3 * blocks * config.experts.as_ref().unwrap().count
    );
    // After the first block.
    stop_after(5, &source, &resumed, &SPEC, &options);
    run(&source, &resumed, &options).unwrap();
    assert_same_bytes(&whole, &resumed);
    let faults = check_folder(&whole, &Device::flex(), &self::options(), |_, _, _| {});
    assert!(faults.is_empty(), "{faults:?}");
}

#[test]
fn packed_experts_are_not_quantised() {
    let packed = repository_file("tests/golden/moe-gpt-oss-mxfp4");
    let (_parent, target) = temporary();
    let error = quantized(&packed, &target, &QuantizeOptions::default()).unwrap_err();
    assert!(
        matches!(error, ModelError::AlreadyQuantized { .. }),
        "{error}"
    );
}
