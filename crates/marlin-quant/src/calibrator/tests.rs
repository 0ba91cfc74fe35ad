//! Tests of GPTQ on Burn modules, on Flex.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use burn_marlin::convert::{ConvertError, Outcome, SkipReason};
use burn_marlin::{GroupSize, QuantSpec, WeightQuantizer};
use marlin_format::Sparsity;
use marlin_testing::expect_measured;
use rand::rngs::StdRng;

use super::{CalibrationError, GptqCalibrator};
use crate::tests::{activations, mean, random, rng};
use crate::{GptqOptions, HessianSums, QuantError, gptq_beside};

const SPEC: QuantSpec = QuantSpec::int4(GroupSize::G32);

/// A model of three layers: the second runs twice, and the third does not run.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    unused: Linear,
}

impl Net {
    fn new(rng: &mut StdRng) -> Self {
        Self::on(&Device::flex(), rng)
    }

    fn on(device: &Device, rng: &mut StdRng) -> Self {
        let layer = |k, n, layout| LinearConfig::new(k, n).with_layout(layout).init(device);
        let net = Self {
            first: layer(96, 64, LinearLayout::Row),
            second: layer(64, 64, LinearLayout::Col),
            unused: layer(64, 32, LinearLayout::Row),
        };
        net.map(&mut Fresh(rng))
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = relu(self.first.forward(x));
        self.second.forward(relu(self.second.forward(hidden)))
    }
}

/// A mapper that initialises a model's matrices with values from a generator.
struct Fresh<'a>(&'a mut StdRng);

impl ModuleMapper for Fresh<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let shape = tensor.shape();
            if D < 2 {
                return tensor;
            }
            let data = TensorData::new(random(shape.num_elements(), self.0), shape.clone());
            Tensor::from_data(data, &tensor.device()) / (shape[0] as f32).sqrt()
        })
    }
}

fn batches(count: usize, [tokens, k]: [usize; 2], rng: &mut StdRng) -> Vec<Tensor<2>> {
    let data = activations(count * tokens, k, rng);
    data.chunks(tokens * k)
        .map(|batch| {
            Tensor::from_data(
                TensorData::new(batch.to_vec(), [tokens, k]),
                &Device::flex(),
            )
        })
        .collect()
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.try_into_vec_as::<f32>().unwrap()
}

/// Returns the relative error of outputs.
fn error<const D: usize>(found: Tensor<D>, expected: Tensor<D>) -> f32 {
    let norm = |tensor: Tensor<D>| values(tensor.square().sum())[0].sqrt();
    norm(found - expected.clone()) / norm(expected)
}

#[test]
fn layers_see_the_inputs_that_quantised_layers_give() {
    let (mut rng, device) = (rng(), Device::flex());
    let (model, batches) = (Net::new(&mut rng), batches(3, [120, 96], &mut rng));
    let calibrator = GptqCalibrator::new(WeightQuantizer::new(SPEC));
    let run = |model: &Net, batch: Tensor<2>, device: &Device| {
        drop(model.forward(batch.to_device(device)))
    };
    let (found, report) = calibrator
        .quantize(model.clone(), batches.clone(), run)
        .unwrap();
    let layers: Vec<(&str, usize, bool)> = report
        .layers
        .iter()
        .map(|loss| (loss.layer.as_str(), loss.tokens, loss.fell_back))
        .collect();
    assert_eq!(
        layers,
        [
            ("first.weight", 360, false),
            ("second.weight", 720, false),
            ("unused.weight", 0, true)
        ]
    );
    assert_eq!(report.conversion.quantized(), 3);

    // The expected result, from separate calls of the quantiser.
    let gptq = |layer: &Linear, sums: &HessianSums| {
        let [_, n] = layer.weight.dims();
        gptq_beside(
            &values(layer.weight.val()),
            n,
            sums,
            &SPEC,
            &GptqOptions::default(),
        )
        .unwrap()
        .weight
        .dequantize()
    };
    let mut sums = HessianSums::new(96, &device);
    batches
        .iter()
        .for_each(|batch| sums.add_beside(batch.clone(), batch.clone()).unwrap());
    assert_eq!(values(found.first.weight.val()), gptq(&model.first, &sums));
    let mut sums = HessianSums::new(64, &device);
    // The first calls of all batches come before the second calls, whose inputs are computed with
    // the float layer.
    let first = batches
        .iter()
        .map(|batch| [&found, &model].map(|net| relu(net.first.forward(batch.clone()))));
    let calls: Vec<[Tensor<2>; 2]> = first.collect();
    let second = calls.iter().map(|call| {
        call.clone()
            .map(|hidden| relu(model.second.forward(hidden)))
    });
    for [x, float] in calls.iter().cloned().chain(second) {
        sums.add_beside(x, float).unwrap();
    }
    let expected = gptq(&model.second, &sums);
    let found = values(found.second.weight.val());
    let same = found.iter().zip(&expected).filter(|(a, b)| a == b).count();
    assert!(
        same * 100 >= 99 * expected.len(),
        "{same} of {}",
        expected.len()
    );
}

#[test]
fn a_transformer_is_nearer_than_by_rounding() {
    let mut rng = rng();
    let model = TransformerEncoderConfig::new(64, 128, 4, 2)
        .with_norm_first(true)
        .init(&Device::flex())
        .map(&mut Fresh(&mut rng));
    let shape = [4, 30, 64];
    let batches: Vec<Tensor<3>> = batches(4, [120, 64], &mut rng)
        .into_iter()
        .map(|batch| batch.reshape(shape))
        .collect();
    let forward = |model: &TransformerEncoder, batch: Tensor<3>| {
        model.forward(TransformerEncoderInput::new(batch))
    };
    let mut ratios = Vec::new();
    for sparsity in [Sparsity::Dense, Sparsity::TwoFour] {
        let conversion = WeightQuantizer::new(SPEC).exclude("layers.1.pwff.linear_outer");
        let conversion = if sparsity == Sparsity::TwoFour {
            conversion.sparse24()
        } else {
            conversion
        };
        let (rounded, _) = conversion.quantize(model.clone()).unwrap();
        let calibrator = GptqCalibrator::new(conversion);
        let (found, report) = calibrator
            .quantize(model.clone(), batches.clone(), |model, batch, device| {
                drop(forward(model, batch.to_device(device)))
            })
            .unwrap();
        assert_eq!(report.layers.len(), 11);
        assert!(
            report
                .layers
                .iter()
                .all(|loss| loss.tokens == 480 && !loss.fell_back),
            "{:?}",
            report.layers
        );
        let formats = report
            .conversion
            .layers
            .iter()
            .filter_map(|layer| match &layer.outcome {
                Outcome::Quantized { format, .. } => Some(format.sparsity),
                Outcome::Skipped(SkipReason::Excluded { .. } | SkipReason::NotLinear) => None,
                Outcome::Skipped(reason) => panic!("{}: {reason}", layer.path),
            });
        assert_eq!(formats.collect::<Vec<_>>(), [sparsity; 11]);
        let of = |other: &TransformerEncoder| {
            error(
                forward(other, batches[0].clone()),
                forward(&model, batches[0].clone()),
            )
        };
        let (before, after) = (of(&rounded), of(&found));
        println!("{sparsity}: {before} rounded, {after} by GPTQ");
        ratios.push(f64::from(after / before));
    }
    expect_measured("GPTQ to rounding", mean(&ratios), 0.205..=0.286);
}

#[test]
fn layers_of_one_weight_stay_that() {
    let mut rng = rng();
    let mut model = Net::new(&mut rng);
    model.unused = model.second.clone();
    let calibrator = GptqCalibrator::new(WeightQuantizer::new(SPEC));
    let (found, report) = calibrator
        .quantize(
            model,
            batches(2, [100, 96], &mut rng),
            |model, batch, device| {
                let hidden = model.forward(batch.to_device(device));
                drop(model.unused.forward(hidden));
            },
        )
        .unwrap();
    assert_eq!(
        report
            .layers
            .iter()
            .map(|loss| loss.tokens)
            .collect::<Vec<_>>(),
        [200, 600]
    );
    assert_eq!(
        values(found.second.weight.val()),
        values(found.unused.weight.val())
    );
    assert!(
        report
            .conversion
            .layers
            .iter()
            .any(|layer| matches!(&layer.outcome, Outcome::Quantized { shared_with: Some(path), .. } if path == "second.weight"))
    );
}

#[test]
fn models_that_cannot_be_recorded_come_back() {
    let mut rng = rng();
    let (model, batches) = (Net::new(&mut rng), batches(1, [130, 96], &mut rng));
    let calibrator = GptqCalibrator::new(WeightQuantizer::new(SPEC));
    let weight = values(model.first.weight.val());
    let reads = |model: &Net, batch: Tensor<2>, device: &Device| {
        drop(values(model.forward(batch.to_device(device))))
    };
    let ConvertError { model, error } = calibrator
        .quantize(model, batches.clone(), reads)
        .unwrap_err();
    assert!(matches!(error, CalibrationError::Record { .. }), "{error}");
    assert_eq!(values(model.first.weight.val()), weight);

    let overflows = |model: &Net, batch: Tensor<2>, device: &Device| {
        drop(model.forward(batch.to_device(device) * f32::MAX))
    };
    let ConvertError { model, error } = calibrator
        .quantize(model, batches.clone(), overflows)
        .unwrap_err();
    let CalibrationError::Layer {
        layer,
        source: QuantError::NonFiniteBatch { batch: 0 },
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(layer, "first.weight");

    let strict = GptqCalibrator::new(WeightQuantizer::new(SPEC).strict().exclude("nothing"));
    let ConvertError { model, error } = strict.quantize(model, batches.clone(), reads).unwrap_err();
    assert!(
        matches!(
            error,
            CalibrationError::Convert(burn_marlin::Error::Strict { .. })
        ),
        "{error}"
    );

    drop(model);
    let model = Net::on(&Device::flex().autodiff(), &mut rng);
    let run = |model: &Net, batch: Tensor<2>, device: &Device| {
        drop(model.forward(batch.to_device(device)))
    };
    let ConvertError { error, .. } = calibrator.quantize(model, batches, run).unwrap_err();
    assert!(matches!(error, CalibrationError::Record { .. }), "{error}");
}
