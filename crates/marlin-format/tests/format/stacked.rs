//! Tests of the MXFP4 experts of gpt-oss, against a reader that goes value by value.

use marlin_format::checkpoint::stacked::{self, StackRows};
use marlin_format::checkpoint::{
    CheckpointEntry, Dtype, LayerFormat, Quantization, TensorData, TensorSpec, entries, read_layer,
};
use marlin_format::{PlainWeight, WeightValue};
use rand::RngExt;

use crate::common::{checkpoint, message, rng};

const STACK: &str = "model.layers.0.mlp.experts.gate_up_proj";
const FORMAT: LayerFormat = LayerFormat::StackedMxFp4;

fn tensor(end: &str, shape: &[usize], bytes: Vec<u8>) -> TensorData {
    let spec = TensorSpec::new(format!("{STACK}{end}"), Dtype::U8, shape.to_vec());
    TensorData { spec, bytes }
}

fn published([experts, rows, groups]: [usize; 3]) -> Vec<TensorData> {
    let rng = &mut rng();
    let count = experts * rows * groups;
    let blocks = (0..16 * count).map(|_| rng.random()).collect();
    let scales = (0..count).map(|_| rng.random_range(100..130)).collect();
    vec![
        tensor("_blocks", &[experts, rows, groups, 16], blocks),
        tensor("_scales", &[experts, rows, groups], scales),
    ]
}

/// Returns the value of an input feature of a row, of all rows of all experts.
fn value(tensors: &[TensorData], row: usize, groups: usize, k: usize) -> f32 {
    let byte = tensors[0].bytes[16 * groups * row + k / 2];
    let scale = i32::from(tensors[1].bytes[groups * row + k / 32]) - 127;
    let code = byte >> (4 * (k % 2)) & 15;
    WeightValue::E2m1.decode(code) * f64::from(scale).exp2() as f32
}

fn expect(weight: &PlainWeight, tensors: &[TensorData], groups: usize, rows: &[usize]) {
    assert_eq!((weight.k(), weight.n()), (32 * groups, rows.len()));
    let found = weight.dequantize();
    for k in 0..weight.k() {
        for (column, &row) in rows.iter().enumerate() {
            let expected = value(tensors, row, groups, k);
            assert_eq!(found[k * rows.len() + column], expected, "[{k}, {column}]");
        }
    }
}

#[test]
fn experts_are_those_of_the_files() {
    for [experts, rows, groups] in [[1, 2, 1], [3, 6, 2], [5, 130, 9]] {
        let tensors = published([experts, rows, groups]);
        let (_folder, checkpoint) = checkpoint(&tensors);
        let all: Vec<usize> = (0..experts * rows).collect();
        let whole = read_layer(&checkpoint, STACK, &FORMAT).unwrap();
        expect(&whole, &tensors, groups, &all);
        for expert in 0..experts {
            for (first, step, count) in [(0, 2, rows / 2), (1, 2, rows / 2), (0, 1, rows)] {
                let of_layer = StackRows {
                    expert,
                    first,
                    step,
                    count,
                };
                let weight =
                    stacked::read_rows(&checkpoint, STACK, [experts, rows], &of_layer).unwrap();
                let of_expert = expert * rows..(expert + 1) * rows;
                let selected: Vec<usize> = of_expert.skip(first).step_by(step).collect();
                expect(&weight, &tensors, groups, &selected);
            }
        }
    }
}

#[test]
fn a_config_names_the_stacks_alone() {
    let config = br#"{ "quantization_config": { "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"] } }"#;
    let quantization = Quantization::from_config(config).unwrap().unwrap();
    assert_eq!(quantization.to_string(), "gpt-oss mxfp4 e2m1 g32");
    for layer in ["model.layers.3.mlp.experts.down_proj", STACK] {
        assert_eq!(quantization.layer(layer).unwrap(), FORMAT);
    }
    for layer in ["model.layers.3.self_attn.q_proj", "lm_head"] {
        assert_eq!(quantization.layer(layer).unwrap(), LayerFormat::Float);
    }
    let (_folder, checkpoint) = checkpoint(&published([2, 4, 1]));
    let found = entries(&checkpoint, Some(&quantization)).unwrap();
    let expected = CheckpointEntry::Layer {
        name: STACK.into(),
        format: FORMAT,
        tensors: vec![format!("{STACK}_blocks"), format!("{STACK}_scales")],
    };
    assert_eq!(found, [expected]);
}

#[test]
fn stacks_that_do_not_fit_are_refused() {
    let [blocks, scales] = <[TensorData; 2]>::try_from(published([2, 4, 3])).unwrap();
    let with = |tensors: Vec<TensorData>| {
        let (_folder, checkpoint) = checkpoint(&tensors);
        message(&read_layer(&checkpoint, STACK, &FORMAT).unwrap_err())
    };
    let reshaped = |of: &TensorData, shape: &[usize]| {
        let end = of.spec.name.strip_prefix(STACK).unwrap();
        tensor(end, shape, of.bytes.clone())
    };
    let nan = TensorData {
        bytes: vec![0xff; scales.bytes.len()],
        ..scales.clone()
    };
    let mut halves = reshaped(&blocks, &[2, 4, 3, 8]);
    halves.spec.dtype = Dtype::F16;
    for (tensors, expected) in [
        (vec![blocks.clone()], "gate_up_proj_scales"),
        (
            vec![reshaped(&blocks, &[2, 4, 48]), scales.clone()],
            "[experts, N, K/32, 16]",
        ),
        (
            vec![blocks.clone(), reshaped(&scales, &[2, 3, 4])],
            "[2, 4, 3]",
        ),
        (vec![blocks.clone(), nan], "NaN"),
        (vec![halves, scales.clone()], "U8"),
    ] {
        let message = with(tensors);
        assert!(message.contains(expected), "{message}");
    }
    let (_folder, checkpoint) = checkpoint(&[blocks, scales]);
    let rows = StackRows {
        expert: 0,
        first: 0,
        step: 1,
        count: 4,
    };
    let error = stacked::read_rows(&checkpoint, STACK, [3, 4], &rows).unwrap_err();
    let message = message(&error);
    assert!(message.contains("[3, 4, 3, 16]"), "{message}");
}
