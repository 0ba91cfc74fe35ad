//! Weights in the tile layout: the padding of their scales, dequantisation, and f32 activations.

use super::{check, tensor, values};
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_marlin::backend::{OptionalFloat, QuantBackend, QuantTensors};
use marlin_format::{PlainWeight, Scales, WeightLayout};
use marlin_kernels::ActivationDtype;
use marlin_tests::{Case, Operands, cases};

/// Checks a weight in the tile layout when dequantised, and with activations in f32, which tensor
/// cores do not support.
pub(super) fn tile_layout(device: &Device, seed: u64) {
    let takes = |case: &&Case| case.activations == ActivationDtype::F32 && case.m <= 65;
    for case in cases().iter().filter(takes) {
        let operands = Operands::random(case, seed);
        let (plain, descriptor) = (
            plain_weight(&operands.weight, device),
            operands.weight.descriptor(),
        );
        let tile = Dispatch::quant_repack(
            plain.clone(),
            descriptor,
            descriptor.in_layout(WeightLayout::Tile),
        );
        // Padding must be zeros, so that padded products are zero.
        let layout = descriptor.tile_scales();
        let scales = Scales::F32(operands.weight.scales().to_f32());
        let padded = layout
            .pack(&scales)
            .unwrap_or_else(|error| panic!("{case}: {error}"))
            .to_f32();
        let found = values(Tensor::<2>::from_dispatch(tile.scales.clone()));
        assert!(
            found == padded.into_iter().map(f64::from).collect::<Vec<_>>(),
            "{case}, seed {seed}: scales in tiles"
        );
        let (tile, descriptor) = (
            QuantTensors {
                row_permutation: plain.row_permutation,
                ..tile
            },
            descriptor.in_layout(WeightLayout::Tile),
        );
        let dense = Tensor::<2>::from_dispatch(Dispatch::quant_dequantize(
            tile.clone(),
            descriptor,
            FloatDType::F32,
        ));
        assert_eq!(dense.dims(), [case.k, case.n], "{case}");
        let expected: Vec<f64> = operands
            .weight
            .dequantize()
            .into_iter()
            .map(f64::from)
            .collect();
        assert!(
            values(dense) == expected,
            "{case}, seed {seed}: dequantised"
        );
        let x = tensor(&operands.x, [case.m, case.k], case.activations, device).into_dispatch();
        let bias = tensor(&operands.bias, [case.n], case.activations, device).into_dispatch();
        let y = Tensor::<2>::from_dispatch(Dispatch::quant_linear(
            x,
            tile,
            descriptor,
            OptionalFloat::Present(bias),
        ));
        check(case, seed, &values(y), &operands);
    }
}

/// Creates the tensors of a weight in the plain layout, with scales in f32.
fn plain_weight(weight: &PlainWeight, device: &Device) -> QuantTensors<Dispatch> {
    let shapes = weight.descriptor().tensors();
    let int = |words: &[u32], shape: [usize; 2]| {
        let words: Vec<i32> = words.iter().map(|&word| word as i32).collect();
        Tensor::<2, Int>::from_data(TensorData::new(words, shape), (device, DType::I32))
    };
    let zeros = weight.zero_point_words().zip(shapes.zero_points);
    let rows = weight
        .row_permutation()
        .map(|rows| int(rows, [1, rows.len()]).reshape([rows.len()]));
    QuantTensors {
        qweight: int(weight.qweight(), shapes.qweight.matrix_shape()).into_dispatch(),
        metadata: weight
            .metadata()
            .zip(shapes.metadata)
            .map(|(words, shape)| int(words, shape.matrix_shape()).into_dispatch())
            .into(),
        scales: tensor(
            &weight.scales().to_f32(),
            shapes.scales.matrix_shape(),
            ActivationDtype::F32,
            device,
        )
        .into_dispatch(),
        zero_points: zeros
            .map(|(words, shape)| int(&words, shape.matrix_shape()).into_dispatch())
            .into(),
        row_permutation: rows.map(Tensor::<1, Int>::into_dispatch).into(),
    }
}
