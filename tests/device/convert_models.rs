//! Conversion of models of several structures: the converted weights, and everything that Burn does with converted models.

use crate::convert::{SAME_WEIGHTS, SAME_WEIGHTS_IN_BURN, close, convert, dense, reset};
use crate::layer::values;
use crate::models::{Containers, Mlp, Shared, Tied, Tried, with_same_id};
use crate::setup::{Named, is_cpu_runtime, trial};
use burn::module::{Module, Param, ParamId};
use burn::nn::transformer::{TransformerDecoder, TransformerEncoder};
use burn::nn::{Gru, Linear, LinearConfig, Lstm};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::{BurnToPyTorchAdapter, BurnpackStore, ModuleRecord, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore};
use burn::tensor::{Bytes, Device, Distribution, Tensor};
use burn_marlin::convert::{ConvertError, LeftReason, Outcome};
use burn_marlin::{Error, GroupSize, QuantSpec, QuantizedWeight, Report, W4A16};
use libtest_mimic::Trial;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(device, "models::round_trips", round_trips));
    tests.push(trial(device, "models::clones_that_were_loaded_apart", loaded_apart));
    tests.push(trial(device, "models::a_tied_head_leaves_the_embedding", tied));
    tests.push(trial(device, "models::patterns_hold_for_layers_that_share_an_id", excluded_twin));
    tests.push(trial(device, "models::another_type_named_linear_is_left", other_linear));
    tests.push(trial(device, "models::a_parameter_elsewhere_with_a_weights_id_changes_nothing", id_elsewhere));
    tests.push(trial(device, "models::specs_by_pattern", specs));
    tests.push(trial(device, "models::a_layer_without_features_is_left", no_features));
    tests.push(trial(device, "models::strict", strict));
    tests.push(trial(device, "models::reports", reports));
}

const GROUP: GroupSize = GroupSize::G32;

fn round_trips(device: &Device) {
    of_model::<Mlp>(device);
    of_model::<TransformerEncoder>(device);
    of_model::<TransformerDecoder>(device);
    of_model::<Lstm>(device);
    of_model::<Gru>(device);
    of_model::<Shared>(device);
    of_model::<Tied>(device);
    of_model::<Containers>(device);
}

/// Checks that a converted model gives the same output after clones, moves, records, files and a step of an optimiser.
fn of_model<T: Tried>(device: &Device) {
    let x = Tensor::<3>::random([2, 3, T::FEATURES], Distribution::Normal(0.0, 1.0), device);
    let float = T::new(device);
    let (parameters, unconverted) = (Module::num_params(&float), float.run(x.clone()));
    let (model, report) = convert(float, GROUP);
    let [linear, shared] = T::LINEAR;
    assert_eq!((report.quantized(), report.left()), (linear, 0), "{}: {report:#}", T::NAME);
    assert_eq!(shared_layers(&report), shared, "{}: {report:#}", T::NAME);
    let expected = model.run(x.clone());
    assert_eq!(Module::num_params(&model), parameters, "{}", T::NAME);

    let check_within = |limit: f64, what: &str, model: &T, x: Tensor<3>| {
        let name = format!("{}, {what}", T::NAME);
        close(&model.run(x), &expected, limit, &name);
    };
    let check = |what: &str, model: &T, x: Tensor<3>| check_within(SAME_WEIGHTS, what, model, x);
    let close_to_float = burn_error(&expected, &unconverted);
    assert!(close_to_float < 0.5, "{}: {close_to_float} off the float model", T::NAME);
    check("dense on Flex", &dense(&model), Tensor::from_data(x.to_data(), &Device::flex()));
    check("clone", &model.clone(), x.clone());
    check("fork", &model.clone().fork(device), x.clone());
    check("valid", &model.valid(), x.clone());
    let there = model.clone().to_device(&Device::flex());
    check("to Flex", &there, Tensor::from_data(x.to_data(), &Device::flex()));
    check("to Flex and back", &reset(there).to_device(device), x.clone());

    // Records and files, loaded into a model with other values.
    let target = || convert(T::new(device), GROUP).0;
    let bytes: Bytes = model.clone().into_record().into_bytes().unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
    let record = ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
    check("record", &target().load_record(record), x.clone());
    let mut store = BurnpackStore::from_bytes(None);
    model.save_into(&mut store).unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
    let bytes = store.get_bytes().unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
    let mut loaded = target();
    loaded.load_from(&mut BurnpackStore::from_bytes(Some(bytes))).unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
    check("burnpack", &loaded, x.clone());
    for adapter in [false, true] {
        let mut store = SafetensorsStore::from_bytes(None);
        if adapter {
            store = store.with_to_adapter(BurnToPyTorchAdapter);
        }
        model.save_into(&mut store).unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
        let bytes = store.get_bytes().unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
        let mut store = SafetensorsStore::from_bytes(Some(bytes));
        if adapter {
            store = store.with_from_adapter(PyTorchToBurnAdapter);
        }
        let mut loaded = target();
        loaded.load_from(&mut store).unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
        check(if adapter { "safetensors for PyTorch" } else { "safetensors" }, &loaded, x.clone());
    }

    // Training: the optimiser leaves the packed weights unchanged.
    let trained = Module::train(model);
    // CubeCL's CPU runtime would take minutes to compile and time Burn's matmuls for every shape of every model.
    if !is_cpu_runtime(device) {
        check_within(SAME_WEIGHTS_IN_BURN, "train", &trained, Tensor::from_data(x.to_data(), &device.clone().autodiff()));
    }
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.1).init();
    let stepped = optimizer.step(0.0, trained, GradientsParams::new());
    check("AdamW with weight decay", &stepped.valid(), x);
}

fn burn_error(found: &[f64], expected: &[f64]) -> f64 {
    marlin_tests::relative_error(found, expected, expected)
}

fn shared_layers(report: &Report) -> usize {
    report.layers.iter().filter(|layer| matches!(layer.outcome, Outcome::Quantized { shared_with: Some(_), .. })).count()
}

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Linear>,
}

fn random(shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::random(shape, Distribution::Normal(0.0, 0.1), device)
}

/// Converts clones of one layer after each was loaded with other values from a file, which has no ids; the fourth is a clone of the first.
fn loaded_apart(device: &Device) {
    let layer = LinearConfig::new(64, 64).with_bias(false).init(device);
    let source = Stack { layers: (0..4).map(|_| with_same_id(&layer, random([64, 64], device))).collect() };
    let mut store = SafetensorsStore::from_bytes(None);
    source.save_into(&mut store).unwrap_or_else(|error| panic!("{error}"));
    let bytes = store.get_bytes().unwrap_or_else(|error| panic!("{error}"));
    let mut stack = Stack { layers: vec![layer; 4] };
    stack.load_from(&mut SafetensorsStore::from_bytes(Some(bytes))).unwrap_or_else(|error| panic!("{error}"));
    stack.layers[3] = stack.layers[0].clone();
    let float: Vec<Vec<f64>> = stack.layers.iter().map(|layer| values(layer.weight.val())).collect();
    let (stack, report) = convert(stack, GROUP);
    assert_eq!((report.quantized(), shared_layers(&report)), (4, 1), "{report:#}");
    for (index, (layer, float)) in stack.layers.iter().zip(&float).enumerate() {
        let error = burn_error(&values(layer.weight.val()), float);
        assert!(error < 0.12, "layer {index} has another weight: {error}");
    }
}

fn tied(device: &Device) {
    let model = Tied::new(device);
    let [embedding, head] = [values(model.embedding.weight.val()), values(model.head.weight.val())];
    let (model, _) = convert(model, GROUP);
    assert!(values(model.embedding.weight.val()) == embedding, "the embedding stays as it is");
    assert!(burn_error(&values(model.head.weight.val()), &head) < 0.12);
}

fn excluded_twin(device: &Device) {
    let layer = LinearConfig::new(64, 64).init(device);
    let stack = Stack { layers: vec![layer.clone(), with_same_id(&layer, random([64, 64], device))] };
    let float: Vec<Vec<f64>> = stack.layers.iter().map(|layer| values(layer.weight.val())).collect();
    let (stack, report) =
        W4A16::new(QuantSpec::int4(GROUP)).exclude(r"layers\.0").quantize(stack).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((report.quantized(), report.left()), (1, 1), "{report:#}");
    assert!(values(stack.layers[0].weight.val()) == float[0], "the excluded layer is float");
    assert!(stack.layers[0].weight.reparameterization::<QuantizedWeight>().is_none());
    let error = burn_error(&values(stack.layers[1].weight.val()), &float[1]);
    assert!(error > 0.0 && error < 0.12, "the other one is rounded: {error}");
}

mod pytorch {
    use super::{Module, Param, Tensor};

    /// A user's own layer, whose weight is [N, K].
    #[derive(Module, Debug)]
    pub struct Linear {
        pub weight: Param<Tensor<2>>,
        pub bias: Option<Param<Tensor<1>>>,
    }
}

mod shown_otherwise {
    use super::{Module, Param, Tensor};
    use burn::module::{Content, ModuleDisplay};

    /// A user's own layer, which shows its sizes in place of its parameters, as Burn's `Linear` does.
    #[derive(Module, Debug)]
    #[module(custom_display)]
    pub struct Linear {
        pub weight: Param<Tensor<2>>,
    }

    impl ModuleDisplay for Linear {
        fn custom_content(&self, content: Content) -> Option<Content> {
            content.add("d_output", &self.weight.lazy_shape()[0]).optional()
        }
    }
}

#[derive(Module, Debug)]
struct Own {
    weight: Param<Tensor<2>>,
}

#[derive(Module, Debug)]
struct Mixed {
    burn: Linear,
    pytorch: pytorch::Linear,
    shown: shown_otherwise::Linear,
    own: Own,
}

fn mixed(device: &Device) -> Mixed {
    let square = || Param::initialized(ParamId::new(), random([64, 64], device));
    Mixed {
        burn: LinearConfig::new(64, 64).init(device),
        pytorch: pytorch::Linear { weight: square(), bias: None },
        shown: shown_otherwise::Linear { weight: square() },
        own: Own { weight: square() },
    }
}

pub fn outcome<'a>(report: &'a Report, path: &str) -> &'a Outcome {
    let layer = report.layers.iter().find(|layer| layer.path == path);
    &layer.unwrap_or_else(|| panic!("{path} is not in\n{report:#}")).outcome
}

fn other_linear(device: &Device) {
    let w4a16 = W4A16::new(QuantSpec::int4(GROUP));
    for converted in [w4a16.quantize(mixed(device)), w4a16.unloaded(mixed(device))] {
        let (_, report) = converted.unwrap_or_else(|error| panic!("{error}"));
        assert!(matches!(outcome(&report, "burn.weight"), Outcome::Quantized { .. }), "{report:#}");
        assert_eq!(*outcome(&report, "pytorch.weight"), Outcome::Left(LeftReason::OtherLinear));
        assert_eq!(*outcome(&report, "shown.weight"), Outcome::Left(LeftReason::OtherLinear));
        assert_eq!(*outcome(&report, "own.weight"), Outcome::Left(LeftReason::NotLinear));
        assert!(report.to_string().contains("also"), "the report says what to do: {report}");
    }
    let asked = w4a16.also::<Own>().also::<pytorch::Linear>();
    let (_, report) = asked.quantize(mixed(device)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.quantized(), 4, "{report:#}");
}

/// A head tied to a table of the user's own type, and an average of the weights of an encoder, kept under their ids.
#[derive(Module, Debug)]
struct Averaged {
    table: Own,
    head: Linear,
    encoder: TransformerEncoder,
    averages: Vec<Own>,
}

fn id_elsewhere(device: &Device) {
    let table = Own { weight: Param::initialized(ParamId::new(), random([32, 64], device)) };
    let head = Linear { weight: table.weight.clone().map(|weight| weight.transpose()), bias: None };
    let encoder = <TransformerEncoder as Tried>::new(device);
    let weights = encoder.layers.iter().flat_map(|layer| [&layer.mha.query, &layer.pwff.linear_inner]);
    let averages = weights.map(|layer| Own { weight: Param::initialized(layer.weight.id, layer.weight.val() * 0.5) }).collect();
    let model = Averaged { table, head, encoder, averages };
    let kept: Vec<Vec<f64>> = [&model.table].into_iter().chain(&model.averages).map(|own| values(own.weight.val())).collect();
    let (model, report) = W4A16::new(QuantSpec::int4(GROUP)).strict().quantize(model).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((report.quantized(), report.left()), (13, 0), "{report:#}");
    let after: Vec<Vec<f64>> = [&model.table].into_iter().chain(&model.averages).map(|own| values(own.weight.val())).collect();
    assert!(after == kept, "what is not linear stays float");
}

fn specs(device: &Device) {
    let stack = Stack { layers: [64, 96, 100, 128].map(|k| LinearConfig::new(k, 8).init(device)).to_vec() };
    let spec_of = |report: &Report, layer: usize| match outcome(report, &format!("layers.{layer}.weight")) {
        Outcome::Quantized { format, .. } => Some(format.spec),
        Outcome::Left(_) => None,
    };
    let (int4, int8) = (QuantSpec::int4(GroupSize::G128), QuantSpec::int8(GroupSize::G64));
    let w4a16 = W4A16::new(int4).with_spec(r"layers\.0", int8).with_spec("layers", int4);
    let (_, report) = w4a16.quantize(stack).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!([0, 1, 2, 3].map(|layer| spec_of(&report, layer)), [int8, int4, int4, int4].map(Some));
}

fn no_features(device: &Device) {
    let weight = Param::from_tensor(Tensor::zeros([0, 8], device));
    let stack = Stack { layers: vec![LinearConfig::new(64, 8).init(device), Linear { weight, bias: None }] };
    let (_, report) = convert(stack, GROUP);
    assert!(matches!(outcome(&report, "layers.1.weight"), Outcome::Left(LeftReason::Shape { .. })), "{report:#}");
    assert_eq!((report.quantized(), report.left()), (1, 1), "{report}");
}

fn strict(device: &Device) {
    let w4a16 = W4A16::new(QuantSpec::int4(GROUP)).exclude("shown").exclude("pytorch");
    assert!(w4a16.clone().strict().quantize(mixed(device)).is_ok(), "what was excluded may be left");
    let refused = |w4a16: W4A16, expected: &str| {
        let before = mixed(device);
        let weight = values(before.burn.weight.val());
        let ConvertError { model, error } = w4a16.strict().quantize(before).err().unwrap_or_else(|| panic!("not refused: {expected}"));
        assert!(matches!(error, Error::Strict { .. }) && error.to_string().contains(expected), "{error}");
        assert!(values(model.burn.weight.val()) == weight, "the model comes back as it was");
    };
    refused(W4A16::new(QuantSpec::int4(GROUP)), "pytorch.weight");
    refused(w4a16.clone().exclude("lm_head"), "`lm_head`");
    // It matches a parameter, but none that it could select: no linear layer.
    refused(w4a16.clone().with_spec("^own", QuantSpec::int8(GROUP)), "`^own`");
    refused(w4a16.clone().include("burn").include("^own"), "`^own`");
    let (_, report) = w4a16.exclude("lm_head").quantize(mixed(device)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.unmatched, ["lm_head"]);
    assert!(report.to_string().contains("`lm_head` matches nothing"), "{report}");
}

fn reports(device: &Device) {
    let (_, report) = convert(TransformerEncoder::new(device), GROUP);
    let [before, after] = report.converted_bytes();
    let values: usize = report.linear().map(|layer| layer.shape.iter().product::<usize>()).sum();
    assert_eq!(before, values * 4);
    assert!(after > values / 2 && after < before, "{after} bytes of {values} values");
    let [whole, left] = report.total_bytes();
    assert_eq!(whole - left, before - after, "what is not converted counts the same before and after");
    // Two lines of totals, and one for each projection of a layer.
    assert_eq!(report.to_string().lines().count(), 2 + 6, "short: {report}");
    assert!(report.to_string().contains("2 x layers.0..1.mha.query.weight"), "{report}");
    assert_eq!(format!("{report:#}").lines().filter(|line| line.contains("layers.")).count(), 12, "{report:#}");
    let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(json["quantized"], 12);
    assert_eq!(json["bytes_after"], left);
    assert_eq!(json["layers"].as_array().map(Vec::len), Some(report.layers.len()));
    assert_eq!(json["layers"][0]["spec"]["group"], 32);

    // A shared parameter counts once.
    let (_, report) = convert(Shared::new(device), GROUP);
    let [before, _] = report.converted_bytes();
    assert_eq!(before, 64 * 64 * 4, "{report:#}");
}
