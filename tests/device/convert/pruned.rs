//! Models that the conversion prunes to 2:4.

use super::{SAME_WEIGHTS, cast, close, dense, on_flex, widths};
use crate::convert_models::outcome;
use crate::layer::values;
use crate::models::Mlp;
use burn::module::Module;
use burn::nn::LinearLayout;
use burn::store::ModuleRecord;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_marlin::convert::{Outcome, SkipReason};
use burn_marlin::{GroupSize, QuantSpec, WeightQuantizer};
use marlin_format::{FormatError, Sparsity, check_two_four};

/// Checks models pruned to 2:4: their outputs, their records on the same device and on Flex, and a
/// move to Flex.
pub(super) fn pruned(device: &Device) {
    let dtype = if *device == Device::flex() {
        FloatDType::F32
    } else {
        FloatDType::F16
    };
    for (spec, _) in widths(GroupSize::G64) {
        let fresh = || {
            cast(
                Mlp::new([128, 64, 34], LinearLayout::Row, true, device),
                dtype,
            )
        };
        let float = fresh();
        let (model, report) = WeightQuantizer::new(spec)
            .sparse24()
            .quantize(float.clone())
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((report.quantized(), report.skipped()), (2, 0), "{report}");
        let formats = report
            .layers
            .iter()
            .filter_map(|layer| match &layer.outcome {
                Outcome::Quantized { format, .. } => Some(format.sparsity),
                Outcome::Skipped(_) => None,
            });
        assert!(
            formats
                .into_iter()
                .all(|sparsity| sparsity == Sparsity::TwoFour),
            "{report:#}"
        );
        let reference = cast(dense(&model), FloatDType::F32);
        for (name, linear) in [("up", &reference.up), ("down", &reference.down)] {
            let [k, n] = linear.weight.dims();
            let weight: Vec<f32> = values(linear.weight.val())
                .into_iter()
                .map(|value| value as f32)
                .collect();
            assert_eq!(check_two_four(&weight, k, n), Ok(()), "{name}");
        }
        let x = Tensor::<2>::random([3, 128], Distribution::Normal(0.0, 1.0), device).cast(dtype);
        let expected = values(model.forward(x.clone()));
        let limit = if dtype == FloatDType::F32 {
            SAME_WEIGHTS
        } else {
            3e-3
        };
        close(
            &expected,
            &values(reference.forward(on_flex(&x).cast(FloatDType::F32))),
            limit,
            "against the dequantised model",
        );

        let bytes = model
            .clone()
            .into_record()
            .into_bytes()
            .unwrap_or_else(|error| panic!("{error}"));
        let record =
            || ModuleRecord::from_bytes(bytes.clone()).unwrap_or_else(|error| panic!("{error}"));
        // A model made for another format takes the format of the record.
        let unloaded = |model: Mlp| {
            WeightQuantizer::new(spec)
                .unloaded(model)
                .unwrap_or_else(|error| panic!("{error}"))
                .0
        };
        let loaded = unloaded(fresh())
            .try_load_record(record())
            .unwrap_or_else(|error| panic!("{error}"));
        assert!(
            values(loaded.forward(x.clone())) == expected,
            "{spec}: a reloaded model gives the same bits"
        );
        let flex = Device::flex();
        let on_host = unloaded(cast(
            Mlp::new([128, 64, 34], LinearLayout::Row, true, &flex),
            dtype,
        ));
        let on_host = on_host
            .try_load_record(record())
            .unwrap_or_else(|error| panic!("{error}"));
        close(
            &values(on_host.forward(on_flex(&x).cast(dtype))),
            &expected,
            limit,
            "loaded on Flex",
        );
        let moved = model.to_device(&flex);
        close(
            &values(moved.forward(on_flex(&x).cast(dtype))),
            &expected,
            limit,
            "moved to Flex",
        );
    }
    // K = 66 is not a multiple of four, so the layer cannot be pruned.
    let (_, report) = WeightQuantizer::new(QuantSpec::int4(GroupSize::Channel))
        .sparse24()
        .quantize(Mlp::new([66, 64, 8], LinearLayout::Row, true, device))
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        outcome(&report, "up.weight"),
        &Outcome::Skipped(SkipReason::Shape {
            error: FormatError::SparseRows { k: 66 }
        }),
        "{report:#}"
    );
    assert!(
        matches!(outcome(&report, "down.weight"), Outcome::Quantized { .. }),
        "{report:#}"
    );
}
