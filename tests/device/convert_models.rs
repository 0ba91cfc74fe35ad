//! Conversion of models of several structures: the converted weights, and the operations of Burn on
//! converted models.

mod other_types;
mod round_trips;
mod shared_ids;

use crate::convert::convert;
use crate::models::{Shared, Tried};
use crate::setup::{Named, slow_on_cpu_runtime, trial};
use burn::module::{Module, Param};
use burn::nn::transformer::TransformerEncoder;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_marlin::convert::{Outcome, SkipReason};
use burn_marlin::{GroupSize, QuantSpec, Report, WeightQuantizer};
use libtest_mimic::Trial;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(
        device,
        "models::round_trips_of_linear_layers",
        round_trips::of_linear_layers,
    ));
    // CubeCL's CPU runtime compiles Burn's attention and gates for a minute and a half.
    tests.push(slow_on_cpu_runtime(
        device,
        "models::round_trips_of_burns_modules",
        round_trips::of_burns_modules,
    ));
    tests.push(trial(
        device,
        "models::clones_that_were_loaded_apart",
        shared_ids::loaded_apart,
    ));
    tests.push(trial(
        device,
        "models::a_tied_head_leaves_the_embedding",
        shared_ids::tied,
    ));
    tests.push(trial(
        device,
        "models::patterns_hold_for_layers_that_share_an_id",
        shared_ids::excluded_twin,
    ));
    tests.push(trial(
        device,
        "models::another_type_named_linear_is_left",
        other_types::other_linear,
    ));
    tests.push(trial(
        device,
        "models::a_parameter_elsewhere_with_a_weights_id_changes_nothing",
        other_types::id_elsewhere,
    ));
    tests.push(trial(device, "models::specs_by_pattern", specs));
    tests.push(trial(
        device,
        "models::a_layer_without_features_is_left",
        no_features,
    ));
    tests.push(trial(device, "models::strict", other_types::strict));
    tests.push(trial(device, "models::reports", reports));
}

const GROUP: GroupSize = GroupSize::G32;

fn burn_error(found: &[f64], expected: &[f64]) -> f64 {
    marlin_testing::relative_error(found, expected)
}

fn shared_layers(report: &Report) -> usize {
    report
        .layers
        .iter()
        .filter(|layer| {
            matches!(
                layer.outcome,
                Outcome::Quantized {
                    shared_with: Some(_),
                    ..
                }
            )
        })
        .count()
}

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Linear>,
}

fn random(shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::random(shape, Distribution::Normal(0.0, 0.1), device)
}

pub fn outcome<'a>(report: &'a Report, path: &str) -> &'a Outcome {
    let layer = report.layers.iter().find(|layer| layer.path == path);
    &layer
        .unwrap_or_else(|| panic!("{path} is not in\n{report:#}"))
        .outcome
}

fn specs(device: &Device) {
    let stack = Stack {
        layers: [64, 96, 100, 128]
            .map(|k| LinearConfig::new(k, 8).init(device))
            .to_vec(),
    };
    let spec_of =
        |report: &Report, layer: usize| match outcome(report, &format!("layers.{layer}.weight")) {
            Outcome::Quantized { format, .. } => Some(format.spec),
            Outcome::Skipped(_) => None,
        };
    let (int4, int8) = (
        QuantSpec::int4(GroupSize::G128),
        QuantSpec::int8(GroupSize::G64),
    );
    let quantizer = WeightQuantizer::new(int4)
        .with_spec(r"layers\.0", int8)
        .with_spec("layers", int4);
    let (_, report) = quantizer
        .quantize(stack)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        [0, 1, 2, 3].map(|layer| spec_of(&report, layer)),
        [int8, int4, int4, int4].map(Some)
    );
}

fn no_features(device: &Device) {
    let weight = Param::from_tensor(Tensor::zeros([0, 8], device));
    let stack = Stack {
        layers: vec![
            LinearConfig::new(64, 8).init(device),
            Linear { weight, bias: None },
        ],
    };
    let (_, report) = convert(stack, GROUP);
    assert!(
        matches!(
            outcome(&report, "layers.1.weight"),
            Outcome::Skipped(SkipReason::Shape { .. })
        ),
        "{report:#}"
    );
    assert_eq!((report.quantized(), report.skipped()), (1, 1), "{report}");
}

fn reports(device: &Device) {
    let (_, report) = convert(TransformerEncoder::new(device), GROUP);
    let [before, after] = report.converted_bytes();
    let values: usize = report
        .linear()
        .map(|layer| layer.shape.iter().product::<usize>())
        .sum();
    assert_eq!(before, values * 4);
    assert!(
        after > values / 2 && after < before,
        "{after} bytes of {values} values"
    );
    let [whole, left] = report.total_bytes();
    assert_eq!(
        whole - left,
        before - after,
        "what is not converted counts the same before and after"
    );
    // The short report has two lines of totals, and one line for each projection of a layer.
    assert_eq!(report.to_string().lines().count(), 2 + 6, "short: {report}");
    assert!(
        report
            .to_string()
            .contains("2 x layers.0..1.mha.query.weight"),
        "{report}"
    );
    assert_eq!(
        format!("{report:#}")
            .lines()
            .filter(|line| line.contains("layers."))
            .count(),
        12,
        "{report:#}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&report.to_json()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(json["quantized"], 12);
    assert_eq!(json["bytes_after"], left);
    assert_eq!(
        json["layers"].as_array().map(Vec::len),
        Some(report.layers.len())
    );
    assert_eq!(json["layers"][0]["spec"]["group"], 32);

    // A shared parameter counts once.
    let (_, report) = convert(Shared::new(device), GROUP);
    let [before, _] = report.converted_bytes();
    assert_eq!(before, 64 * 64 * 4, "{report:#}");
}
