//! The outputs of converted models, compared with those of the dequantised model and of the float
//! model.

use super::{SAME_WEIGHTS, cast, close, convert, convert_to, dense, floats, on_flex, widths};
use crate::layer::values;
use crate::models::Mlp;
use crate::setup::computes;
use burn::module::Module;
use burn::nn::LinearLayout;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use burn_marlin::convert::{LayerReport, Outcome};
use burn_marlin::fusion::fusion_count;
use burn_marlin::{GroupSize, QuantLinear, ScaleDtype, WeightQuantizer};
use marlin_testing::relative_error;
use marlin_tests::runs_on_tensor_cores;

/// Returns true if the device uses Burn's fusion.
fn fuses(device: &Device) -> bool {
    *device != Device::flex()
}

pub(super) fn mlp_equals_layers(device: &Device) {
    for ((spec, rounding), bias) in widths(GroupSize::G32)
        .into_iter()
        .chain(floats())
        .flat_map(|width| [true, false].map(|bias| (width.clone(), bias)))
    {
        let float = Mlp::new([128, 96, 64], LinearLayout::Row, bias, device);
        let layers = [&float.up, &float.down].map(|linear| {
            QuantLinear::from_linear(linear, &spec).unwrap_or_else(|error| panic!("{error}"))
        });
        let (model, report) = convert_to(spec, float.clone());
        assert_eq!((report.quantized(), report.skipped()), (2, 0), "{report}");
        assert_eq!(
            format!("{report:#}").matches(&spec.to_string()).count(),
            2,
            "{report:#}"
        );
        let reference = dense(&model);
        for shape in [
            [1, 1, 128],
            [1, 5, 128],
            [4, 1, 128],
            [3, 7, 128],
            [2, 33, 128],
        ] {
            let x = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), device);
            device.sync().unwrap_or_else(|error| panic!("{error:?}"));
            let before = fusion_count();
            let y = values(model.forward(x.clone()));
            let after = fusion_count();
            if fuses(device) {
                assert_eq!(
                    after.fused - before.fused,
                    2,
                    "both matmuls of {shape:?} read the packed weight"
                );
                assert_eq!(
                    after.dequantized, before.dequantized,
                    "no weight of {shape:?} was dequantised"
                );
            }
            close(
                &y,
                &values(reference.forward(on_flex(&x))),
                SAME_WEIGHTS,
                "against the dequantised model",
            );
            let by_layers = layers[1].forward(model.relu.forward(layers[0].forward(x.clone())));
            close(&y, &values(by_layers), 1e-5, "against QuantLinear");
            let float = values(float.forward(x));
            let error = relative_error(&y, &float);
            assert!(
                rounding.contains(&error),
                "{spec}: against the float model: {error:e}, which is no error of its bits"
            );
        }
    }
}

pub(super) fn mlp_in_column_layout(device: &Device) {
    let float = Mlp::new([64, 96, 32], LinearLayout::Col, true, device);
    let (model, report) = convert(float, GroupSize::G32);
    assert_eq!(report.quantized(), 2, "{report}");
    assert_eq!(report.layers[0].shape, [64, 96]);
    let x = Tensor::<2>::random([5, 64], Distribution::Normal(0.0, 1.0), device);
    close(
        &values(model.forward(x.clone())),
        &values(dense(&model).forward(on_flex(&x))),
        SAME_WEIGHTS,
        "column layout",
    );
}

pub(super) fn mlp_of_odd_sizes(device: &Device) {
    // Up to K = 4, the words of both widths have the same shape, which fusion cannot distinguish.
    let sizes = [
        (GroupSize::Channel, [37, 51, 3]),
        (GroupSize::Channel, [3, 4, 5]),
        (GroupSize::G32, [37, 100, 3]),
        (GroupSize::G64, [37, 100, 3]),
    ];
    for (spec, sizes) in sizes
        .into_iter()
        .flat_map(|(group, sizes)| widths(group).map(|(spec, _)| (spec, sizes)))
    {
        let (model, report) = convert_to(spec, Mlp::new(sizes, LinearLayout::Row, true, device));
        assert_eq!(report.quantized(), 2, "{report}");
        let x = Tensor::<2>::random([9, sizes[0]], Distribution::Normal(0.0, 1.0), device);
        close(
            &values(model.forward(x.clone())),
            &values(dense(&model).forward(on_flex(&x))),
            SAME_WEIGHTS,
            &format!("{spec}, {sizes:?}"),
        );
        let shown = format!("{model}");
        let [input, output] = [
            format!("d_input: {}", sizes[0]),
            format!("d_output: {}", sizes[1]),
        ];
        assert!(
            shown.contains(&input) && shown.contains(&output),
            "Display shows the true sizes: {shown}"
        );
    }
}

pub(super) fn transformer(device: &Device) {
    let float: TransformerEncoder = TransformerEncoderConfig::new(64, 128, 4, 2)
        .with_dropout(0.0)
        .init(device);
    let (model, report) = convert(float.clone(), GroupSize::G32);
    assert_eq!(report.quantized(), 12, "{report}");
    let reference = dense(&model);
    for [batch, seq] in [[1, 1], [1, 7], [5, 1], [5, 3], [2, 32]] {
        let x = Tensor::<3>::random([batch, seq, 64], Distribution::Normal(0.0, 1.0), device);
        device.sync().unwrap_or_else(|error| panic!("{error:?}"));
        let before = fusion_count();
        let y = values(model.forward(TransformerEncoderInput::new(x.clone())));
        let after = fusion_count();
        if fuses(device) {
            assert_eq!(
                (
                    after.fused - before.fused,
                    after.dequantized - before.dequantized
                ),
                (12, 0),
                "x = [{batch}, {seq}, 64]"
            );
        }
        close(
            &y,
            &values(reference.forward(TransformerEncoderInput::new(on_flex(&x)))),
            1e-3,
            "against the dequantised model",
        );
        let float = values(float.forward(TransformerEncoderInput::new(x)));
        let error = relative_error(&y, &float);
        assert!(
            error > 1e-3 && error < 0.25,
            "against the float model: {error:e}"
        );
    }
}

pub(super) fn half_precision(device: &Device) {
    for (dtype, scales, limit) in [
        (FloatDType::F16, ScaleDtype::F16, 3e-3),
        (FloatDType::BF16, ScaleDtype::BF16, 2e-2),
    ] {
        if !computes(device, scales.into()) {
            continue;
        }
        // The second sizes are not multiples of a tile, and their K is not a multiple of eight.
        let formats = [
            ([128, 96, 64], GroupSize::G32),
            ([100, 76, 33], GroupSize::Channel),
            ([100, 76, 33], GroupSize::G32),
        ]
        .into_iter()
        .flat_map(|(sizes, group)| {
            widths(group).map(|(spec, _)| (sizes, spec.with_scale_dtype(scales)))
        });
        for (sizes, spec) in formats {
            let float = cast(Mlp::new(sizes, LinearLayout::Row, true, device), dtype);
            let (model, report) = WeightQuantizer::new(spec)
                .quantize(float)
                .unwrap_or_else(|error| panic!("{error}"));
            let on_tensor_cores = |layer: &LayerReport| match &layer.outcome {
                Outcome::Quantized { plan, .. } => runs_on_tensor_cores(plan),
                Outcome::Skipped(_) => false,
            };
            // Every card from Ampere on has tensor cores; tests run only on such cards.
            let expected = *device == Device::cuda(0);
            assert!(
                report
                    .layers
                    .iter()
                    .all(|layer| on_tensor_cores(layer) == expected),
                "{report}"
            );
            let reference =
                cast(model.clone().materialize(), FloatDType::F32).to_device(&Device::flex());
            for rows in [1, 5, 40] {
                let x =
                    Tensor::<2>::random([rows, sizes[0]], Distribution::Normal(0.0, 1.0), device)
                        .cast(dtype);
                device.sync().unwrap_or_else(|error| panic!("{error:?}"));
                let before = fusion_count();
                let y = model.forward(x.clone());
                assert_eq!(y.dtype(), DType::from(dtype));
                let y = values(y);
                let after = fusion_count();
                if fuses(device) {
                    assert_eq!(
                        (
                            after.fused - before.fused,
                            after.dequantized - before.dequantized
                        ),
                        (2, 0),
                        "{rows} rows, {spec}"
                    );
                }
                close(
                    &y,
                    &values(reference.forward(on_flex(&x.cast(FloatDType::F32)))),
                    limit,
                    "half precision",
                );
            }
        }
    }
}
