use burn::module::Module;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::store::KeyRemapper;
use burn::tensor::{DType, Device, Tensor};
use burn_marlin::WeightQuantizer;
use burn_marlin::convert::{Outcome, SkipReason};
use load_published::Bert;
use marlin_format::checkpoint::{Checkpoint, Quantization, read_layer};

use crate::support::{Expected, config, edited, golden, model};
use marlin_testing::relative_error;

/// The largest relative error that f32 sums in another order may cause.
const TOLERANCE: f64 = 2e-6;

#[test]
fn a_published_bert_computes_what_transformers_computes() {
    let expected = Expected::read();
    let [before, _] = expected.errors(&model());
    assert!(before > 0.5, "random weights give the same: {before}");
    let (model, report) =
        WeightQuantizer::load(model(), golden(), &Bert::from_transformers().unwrap()).unwrap();
    let errors = expected.errors(&model);
    println!("relative errors of the hidden state and the logits: {errors:?}");
    assert!(errors.iter().all(|&error| error < TOLERANCE), "{errors:?}");

    assert_eq!(
        (report.quantized(), report.skipped(), report.layers.len()),
        (13, 1, 17),
        "{report}"
    );
    assert!(report.unused.is_empty(), "{report}");
    for layer in &report.layers {
        match &layer.outcome {
            Outcome::Quantized { format, .. } => {
                assert_eq!(format.to_string(), "int4 g32 f16", "{}", layer.path)
            }
            Outcome::Skipped(reason) => {
                let linear = layer.path == "classifier.weight";
                assert_eq!(
                    *reason,
                    if linear {
                        SkipReason::FloatInCheckpoint
                    } else {
                        SkipReason::NotLinear
                    },
                    "{}",
                    layer.path
                );
            }
        }
    }
}

#[test]
fn parameters_keep_the_dtype_of_the_model() {
    let expected = Expected::read();
    let half = model().map(&mut Half);
    let (half, _) =
        WeightQuantizer::load(half, golden(), &Bert::from_transformers().unwrap()).unwrap();
    let hidden = half.encode(expected.ids.clone(), expected.segments.clone());
    assert_eq!(hidden.dtype(), DType::F16);
    let error = relative_error(&hidden.try_into_vec_as::<f32>().unwrap(), &expected.hidden);
    // The model computes in f16, the reference in f32: activations are rounded about twenty times.
    assert!(error > 1e-5 && error < 5e-3, "{error}");
}

/// Casts every parameter to f16.
struct Half;

impl burn::module::ModuleMapper for Half {
    fn map_float<const D: usize>(
        &mut self,
        param: burn::module::Param<Tensor<D>>,
    ) -> burn::module::Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(burn::tensor::FloatDType::F16))
    }
}

/// A model of another structure, with two layers of the BERT.
#[derive(Module, Debug)]
struct Two {
    column: Linear,
    row: Linear,
}

#[test]
fn layers_go_where_the_key_map_says_and_the_rest_is_reported() {
    let keys = KeyRemapper::new()
        .add_pattern(r"^bert\.encoder\.layer\.1\.intermediate\.dense", "column")
        .unwrap()
        .add_pattern(r"^classifier", "row")
        .unwrap();
    let device = Device::flex();
    let name = "bert.encoder.layer.1.intermediate.dense";
    let checkpoint = Checkpoint::open(golden()).unwrap();
    let format = Quantization::read(&golden())
        .unwrap()
        .unwrap()
        .layer(name)
        .unwrap();
    let weight = read_layer(&checkpoint, name, &format).unwrap().dequantize();
    let classifier = checkpoint
        .tensor("classifier.weight")
        .unwrap()
        .to_f32()
        .unwrap();
    for layout in [LinearLayout::Row, LinearLayout::Col] {
        // Parameters are lazy in the first run and initialised in the second.
        for touched in [false, true] {
            let linear = |k, n| LinearConfig::new(k, n).with_layout(layout).init(&device);
            let model = Two {
                column: linear(64, 128),
                row: linear(64, 3),
            };
            if touched {
                assert_eq!(
                    (
                        model.column.weight.val().dims(),
                        model.row.weight.val().dims()
                    ),
                    ([64, 128], [64, 3])
                );
            }
            let (model, report) = WeightQuantizer::load(model, golden(), &keys).unwrap();
            assert_eq!(
                model.column.weight.val().try_into_vec_as::<f32>().unwrap(),
                weight,
                "{layout:?}"
            );
            let row = model.row.weight.val();
            assert_eq!(row.dims(), [64, 3]);
            assert_eq!(
                row.transpose().try_into_vec_as::<f32>().unwrap(),
                classifier,
                "{layout:?}"
            );
            // Unused are twelve layers with their biases, three embeddings, and five norms of two
            // tensors.
            assert_eq!(report.unused.len(), 12 + 12 + 3 + 10, "{:?}", report.unused);
            for unused in ["bert.pooler.dense", "bert.embeddings.LayerNorm.weight"] {
                assert!(
                    report.unused.iter().any(|name| name == unused),
                    "{:?}",
                    report.unused
                );
            }
        }
    }
}

#[test]
fn one_safetensors_file_is_opened_with_the_config_beside_it() {
    let file = golden().join("model.safetensors");
    let (model, report) = WeightQuantizer::load(
        config().init(&Device::flex()),
        file,
        &Bert::from_transformers().unwrap(),
    )
    .unwrap();
    assert_eq!(report.quantized(), 13);
    assert!(Expected::read().errors(&model)[0] < TOLERANCE);
}

#[test]
fn a_tensor_too_many_is_reported_and_changes_nothing() {
    let folder = edited(|tensors| {
        let bias = tensors["classifier.bias"].clone();
        tensors.insert("cls.predictions.bias".into(), bias);
    });
    let (model, report) =
        WeightQuantizer::load(model(), folder.path(), &Bert::from_transformers().unwrap()).unwrap();
    assert_eq!(report.unused, ["cls.predictions.bias"]);
    assert!(
        report.to_string().contains("cls.predictions.bias"),
        "{report}"
    );
    assert!(Expected::read().errors(&model)[1] < TOLERANCE);
}
