//! Checkpoints that `W4A16::export` writes and `W4A16::load` reads.

use crate::convert::convert_to;
use crate::convert_models::outcome;
use crate::layer::values;
use crate::models::Mlp;
use crate::setup::{Named, trial};
use burn::module::{Lora, Module};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::store::KeyRemapper;
use burn::tensor::{Device, Distribution, Tensor};
use burn_marlin::convert::{LoadError, Outcome};
use burn_marlin::{ActivationDtype, GroupSize, QuantLinear, QuantSpec, W4A16};
use libtest_mimic::Trial;
use std::path::PathBuf;
use tempfile::TempDir;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(device, "checkpoints::an_exported_model_loads_into_a_float_one", exported));
    tests.push(trial(device, "checkpoints::an_exported_quant_linear_loads_into_one", exported_layer));
}

fn fresh(device: &Device) -> Mlp {
    Mlp::new([128, 96, 64], LinearLayout::Row, true, device)
}

fn batch(device: &Device) -> Tensor<2> {
    Tensor::random([3, 128], Distribution::Normal(0.0, 1.0), device)
}

/// A folder that a model is exported to.
fn folder<M: Module>(model: &M) -> (TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let dir = parent.path().join("exported");
    W4A16::export(model, &dir, &KeyRemapper::new()).unwrap_or_else(|error| panic!("{error}"));
    (parent, dir)
}

fn exported(device: &Device) {
    let x = batch(device);
    // The second layer's 96 rows are one group of 64 and an incomplete group.
    let asymmetric = [GroupSize::Channel, GroupSize::G64].map(|group| QuantSpec::int4(group).with_zero_points());
    for spec in [QuantSpec::int4(GroupSize::G32), QuantSpec::int8(GroupSize::G32)].into_iter().chain(asymmetric) {
        let (converted, _) = convert_to(spec, fresh(device));
        let (_parent, dir) = folder(&converted);
        let (loaded, report) = W4A16::load(fresh(device), &dir, &KeyRemapper::new()).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((report.quantized(), report.unused.len()), (2, 0), "{report}");
        assert!(values(loaded.forward(x.clone())) == values(converted.forward(x.clone())), "{spec}: the weights are the file's");
    }
}

/// A layer that is quantised in the model's own type, between others.
#[derive(Module, Debug)]
struct Written {
    first: Linear,
    layer: QuantLinear,
}

impl Written {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layer.forward(self.first.forward(x))
    }
}

fn exported_layer(device: &Device) {
    let (int4, int8) = (QuantSpec::int4(GroupSize::G32), QuantSpec::int8(GroupSize::G64).with_zero_points());
    for (spec, bias) in [(int4, true), (int8, false)] {
        let fresh = || {
            let linear = |n, bias| LinearConfig::new(if n == 96 { 128 } else { 96 }, n).with_bias(bias).init(device);
            let layer = QuantLinear::from_linear(&linear(40, bias), &spec).unwrap_or_else(|error| panic!("{error}"));
            Written { first: linear(96, true), layer }
        };
        let (model, x) = (fresh(), batch(device));
        let expected = values(model.forward(x.clone()));
        let (_parent, dir) = folder(&model);
        let load = |model| W4A16::load(model, &dir, &KeyRemapper::new());
        // Into one with other values, and into one that has none and was made for another format.
        let unloaded = QuantLinear::unloaded([96, 40], bias, int4, ActivationDtype::F32, device).unwrap_or_else(|error| panic!("{error}"));
        for into in [fresh(), Written { layer: unloaded, ..fresh() }] {
            let (loaded, report) = load(into).unwrap_or_else(|error| panic!("{error}"));
            assert!(matches!(outcome(&report, "layer.weight"), Outcome::Quantized { format, .. } if format.spec == spec), "{report:#}");
            assert!(report.unused.is_empty(), "{report}");
            assert_eq!(loaded.layer.weight().to_plain().ok(), model.layer.weight().to_plain().ok(), "{spec}");
            assert!(values(loaded.forward(x.clone())) == expected, "{spec}");
        }
        let refused = |model, expected: &str| {
            let error = load(model).err().unwrap_or_else(|| panic!("not refused: {expected}"));
            assert!(error.to_string().contains(expected), "{error}");
            error
        };
        let narrow = QuantLinear::unloaded([96, 32], bias, spec, ActivationDtype::F32, device).unwrap_or_else(|error| panic!("{error}"));
        assert!(matches!(refused(Written { layer: narrow, ..fresh() }, "layer.weight"), LoadError::Shape { .. }));
        let adapted = Written { layer: fresh().layer.apply_lora(Lora::new(2, 4.0)), ..fresh() };
        assert!(matches!(refused(adapted, "layer.weight"), LoadError::Reparameterized { .. }));
        // A float layer in the file is no quantised weight.
        #[derive(Module, Debug)]
        struct Float {
            first: Linear,
            layer: Linear,
        }
        let (_parent, dir) = folder(&Float { first: fresh().first, layer: LinearConfig::new(96, 40).with_bias(bias).init(device) });
        let error = W4A16::load(fresh(), &dir, &KeyRemapper::new()).err().unwrap_or_else(|| panic!("a float layer was loaded"));
        assert!(matches!(&error, LoadError::NotQuantized { path, .. } if path == "layer.weight"), "{error}");
    }
}
