//! Tests of the projections that are joined to one matmul, and of those that stay separate.

use std::sync::Arc;

use marlin_format::checkpoint::compressed_tensors::{self, QuantizationConfig};
use marlin_format::checkpoint::{CheckpointWriter, Dtype, TensorSpec};
use marlin_format::{GroupSize, PlainParts, PlainWeight, QuantSpec, quantize_rtn};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde_json::json;

use super::model::full;
use super::support::*;
use crate::{Architecture, Model, ModelConfig, Projection};

const SPEC: QuantSpec = QuantSpec::int4(GroupSize::G32);

/// Returns a config whose sizes are multiples of the group size, 32.
fn config() -> ModelConfig {
    config_of(
        Architecture::Qwen2,
        json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }),
    )
}

/// Returns a model opened from a folder, and the same model in float. For a projection in f32,
/// `permutation` returns `None`; for a projection in 4 bits, it returns the row permutation, if
/// there is one.
fn opened(
    weights: &Weights,
    permutation: impl Fn(&str) -> Option<Option<Vec<u32>>>,
) -> (Arc<Model>, Arc<Model>) {
    let config = config();
    let mut dequantized = weights.clone();
    let (mut tensors, mut ignored) = (Vec::new(), vec!["lm_head".to_string()]);
    for (name, (shape, values)) in weights {
        let layer = name
            .strip_suffix(".weight")
            .filter(|layer| layer.ends_with("_proj"));
        let Some((layer, row_permutation)) =
            layer.and_then(|layer| Some((layer, permutation(layer)?)))
        else {
            ignored.extend(layer.map(String::from));
            tensors.push((
                TensorSpec::new(name.as_str(), Dtype::F32, shape.as_slice()),
                bytes(values, Dtype::F32),
            ));
            continue;
        };
        let &[n, k] = shape.as_slice() else {
            panic!("{name} {shape:?}")
        };
        let transposed: Vec<f32> = (0..k * n).map(|i| values[i % n * k + i / n]).collect();
        let parts = quantize_rtn(&transposed, k, n, &SPEC).unwrap().into_parts();
        let plain = PlainWeight::new(PlainParts {
            row_permutation,
            ..parts
        })
        .unwrap();
        let rounded = plain.dequantize();
        dequantized.insert(
            name.clone(),
            (
                shape.clone(),
                (0..n * k).map(|i| rounded[i % k * n + i / k]).collect(),
            ),
        );
        tensors.extend(
            compressed_tensors::tensors_of(layer, &plain)
                .into_iter()
                .map(|tensor| (tensor.spec, tensor.bytes)),
        );
    }
    let ((_a, dir), (_b, float)) = (temporary(), temporary());
    let mut json = config.to_json();
    json["quantization_config"] = QuantizationConfig::new(SPEC, ignored).unwrap().to_json();
    let mut writer = CheckpointWriter::create(&dir).unwrap();
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
    write_folder(&float, &config, &dequantized, Dtype::F32);
    (open(&dir).model, open(&float).model)
}

/// Asserts that both models give the same logits for random tokens.
fn assert_same(model: &Model, float: &Model, rng: &mut StdRng) {
    let tokens = random_tokens(9, 71, rng);
    let expected: Vec<f64> = full(float, &tokens, 1).into_iter().map(f64::from).collect();
    let error = relative_error(&full(model, &tokens, 1), &expected);
    assert!(error < 1e-4, "{error}");
}

/// Returns a random row order that moves rows between the groups of `SPEC`. An order that keeps
/// every row in its group would count as the natural order.
fn shuffled(k: usize, rng: &mut StdRng) -> Vec<u32> {
    let mut rows: Vec<u32> = (0..k as u32).collect();
    rows.shuffle(rng);
    rows
}

#[test]
fn float_layers_are_one_matmul() {
    let mut rng = rng();
    let (model, float) = opened(&random_weights(&config(), &mut rng), |_| None);
    let qkv = &model.layers[1].attention().qkv_proj;
    assert_eq!(qkv.outputs(), [64, 32, 32]);
    let Some(Projection::Dense(joined)) = qkv.joined() else {
        panic!("q, k and v are one")
    };
    assert_eq!(joined.weight.dims(), [64, 128]);
    assert_eq!(joined.bias.as_ref().unwrap().dims(), [128]);
    assert_same(&model, &float, &mut rng);
}

#[test]
fn act_order_layers_of_one_order_are_one_matmul() {
    let mut rng = rng();
    let weights = random_weights(&config(), &mut rng);
    // The orders are like those of GPTQ: q, k and v have the same inputs, and so have gate and up.
    let (attention, mlp, down) = (
        shuffled(64, &mut rng),
        shuffled(64, &mut rng),
        shuffled(96, &mut rng),
    );
    let (model, float) = opened(&weights, |layer| {
        Some(Some(match layer {
            layer if layer.ends_with("down_proj") => down.clone(),
            layer if layer.contains("mlp") => mlp.clone(),
            _ => attention.clone(),
        }))
    });
    for layer in &model.layers {
        for group in [
            &layer.attention().qkv_proj,
            &layer.mlp().unwrap().gate_up_proj,
        ] {
            let Some(Projection::Quant(joined)) = group.joined() else {
                panic!("one 4-bit matmul")
            };
            assert!(joined.weight().is_permuted());
        }
    }
    assert_same(&model, &float, &mut rng);
}

#[test]
fn layers_of_different_orders_stay_apart() {
    let mut rng = rng();
    let weights = random_weights(&config(), &mut rng);
    let order = shuffled(64, &mut rng);
    let (model, float) = opened(&weights, |layer| {
        Some((layer.ends_with("k_proj") || layer.ends_with("up_proj")).then(|| order.clone()))
    });
    for layer in &model.layers {
        assert!(
            layer.attention().qkv_proj.joined().is_none()
                && layer.mlp().unwrap().gate_up_proj.joined().is_none()
        );
        assert_eq!(
            (
                layer.attention().qkv_proj.projections().len(),
                layer.mlp().unwrap().gate_up_proj.projections().len()
            ),
            (3, 2)
        );
    }
    assert_same(&model, &float, &mut rng);
}

#[test]
fn float_and_quantised_layers_stay_apart() {
    let mut rng = rng();
    let weights = random_weights(&config(), &mut rng);
    let (model, float) = opened(&weights, |layer| {
        (!layer.ends_with("v_proj")).then_some(None)
    });
    let [q, k, v] = model.layers[0].attention().qkv_proj.projections() else {
        panic!("three projections")
    };
    assert!(matches!(
        (q, k, v),
        (
            Projection::Quant(_),
            Projection::Quant(_),
            Projection::Dense(_)
        )
    ));
    assert!(matches!(
        model.layers[0].mlp().unwrap().gate_up_proj.joined(),
        Some(Projection::Quant(_))
    ));
    let names: Vec<String> = model.projections().map(|(name, _)| name).collect();
    assert!(
        names.contains(&"model.layers.0.self_attn.v_proj".into())
            && names.contains(&"model.layers.1.mlp.gate_up_proj".into())
    );
    assert_same(&model, &float, &mut rng);
}
