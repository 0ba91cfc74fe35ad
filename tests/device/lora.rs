//! LoRA adapters on 4-bit weights, attached with Burn's `apply_lora`.

use crate::convert::{SAME_WEIGHTS_IN_BURN, close, convert, dense, reset};
use crate::layer::values;
use crate::models::Mlp;
use crate::setup::{Named, trial};
use burn::module::{Lora, LoraAdapter, Module, ModuleVisitor, Param, ParamGroup, QLora, Quantizer};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_marlin::{GroupSize, QuantLinear, QuantSpec, QuantizedWeight};
use libtest_mimic::Trial;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    // CubeCL's CPU runtime takes minutes for a backward pass, because it compiles and times several
    // matmuls for every shape. It runs only the test that Flex does not run.
    if device.name != "flex" {
        tests.push(trial(
            device,
            "lora::no_float_weight_between_the_passes",
            memory,
        ));
    }
    if device.name == "cpu" {
        return;
    }
    tests.push(trial(device, "lora::trains_as_on_float_weights", as_float));
    tests.push(trial(device, "lora::paths_ids_and_records", paths));
    tests.push(trial(device, "lora::qlora_leaves_the_packed_weight", qlora));
    tests.push(trial(device, "lora::of_a_w4a16_linear", of_layer));
}

fn mlp(device: &Device) -> Mlp {
    Mlp::new([64, 96, 32], LinearLayout::Row, true, device)
}

fn weight_of(linear: &Linear) -> &QuantizedWeight {
    linear
        .weight
        .reparameterization()
        .unwrap_or_else(|| panic!("no quantised weight"))
}

fn adapter_of(linear: &Linear) -> LoraAdapter {
    weight_of(linear)
        .adapter()
        .unwrap_or_else(|| panic!("no adapter"))
        .clone()
}

/// Two layers with a smooth activation between them. The gradient of a ReLU jumps at 0, where
/// rounding decides the gradient. On CUDA, whose matmuls may round to TF32, one such value in a
/// step makes an error of 3e-2.
#[derive(Module, Debug)]
struct Smooth {
    up: Linear,
    down: Linear,
}

impl Smooth {
    fn new(device: &Device) -> Self {
        let Mlp { up, down, .. } = mlp(device);
        Self { up, down }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(self.up.forward(x).tanh())
    }
}

/// Checks the gradients of both factors and of the input against a float model with the same
/// weights and adapter, and that the loss falls.
fn as_float(device: &Device) {
    let tracked = device.clone().autodiff();
    let (model, _) = convert(Smooth::new(&tracked), GroupSize::G32);
    let mut model = model.apply_lora(Lora::new(4, 8.0));
    let float = dense(&model.clone().valid()).to_device(device);
    let x = Tensor::<2>::random([6, 64], Distribution::Normal(0.0, 1.0), device);
    close(
        &values(model.clone().valid().forward(x.clone())),
        &values(float.forward(x.clone())),
        SAME_WEIGHTS_IN_BURN,
        "an adapter that adds nothing yet",
    );

    // The reference is the layer in float: x W + scale (x a) b.
    let linear = |x: Tensor<2>, layer: &Linear, adapter: &LoraAdapter| {
        let bias = layer
            .bias
            .as_ref()
            .unwrap_or_else(|| panic!("a bias"))
            .val();
        let weight = Tensor::<2>::from_data(layer.weight.val().to_data(), &tracked);
        let bias = Tensor::<1>::from_data(bias.to_data(), &tracked);
        let added = x.clone().matmul(adapter.a.val()).matmul(adapter.b.val()) * adapter.scale;
        x.matmul(weight) + added + bias.unsqueeze()
    };
    let mut optimizer = AdamConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..8 {
        let input = || Tensor::<2>::from_data(x.to_data(), &tracked).require_grad();
        let (found_x, expected_x) = (input(), input());
        let [up, down] = [adapter_of(&model.up), adapter_of(&model.down)];
        let loss = (model.forward(found_x.clone()) - 1.0).powi_scalar(2).mean();
        let hidden = linear(expected_x.clone(), &float.up, &up).tanh();
        let expected = (linear(hidden, &float.down, &down) - 1.0)
            .powi_scalar(2)
            .mean();
        losses.push(loss.clone().into_scalar::<f32>());
        let (gradients, expected) = (loss.backward(), expected.backward());
        let pairs = [(
            found_x.grad(&gradients),
            expected_x.grad(&expected),
            "the input",
        )]
        .into_iter()
        .chain(
            [(&up, "up"), (&down, "down")]
                .into_iter()
                .flat_map(|(adapter, name)| {
                    [&adapter.a, &adapter.b].map(|factor| {
                        (
                            factor.val().grad(&gradients),
                            factor.val().grad(&expected),
                            name,
                        )
                    })
                }),
        );
        for (found, expected, what) in pairs {
            let found = found.unwrap_or_else(|| panic!("step {step}: no gradient reached {what}"));
            let expected =
                expected.unwrap_or_else(|| panic!("step {step}: no gradient by hand of {what}"));
            // In the first step, the factor b is 0, and so is the gradient of a.
            assert_eq!(found.dims(), expected.dims());
            let (found, expected) = (values(found), values(expected));
            if expected.iter().any(|value| *value != 0.0) {
                close(
                    &found,
                    &expected,
                    SAME_WEIGHTS_IN_BURN,
                    &format!("step {step}, gradient of {what}"),
                );
            } else {
                assert!(
                    found.iter().all(|value| *value == 0.0),
                    "step {step}, gradient of {what}"
                );
            }
        }
        let gradients = GradientsParams::from_grads(gradients, &model);
        assert_eq!(
            gradients.len(),
            4,
            "two factors of two adapters, nothing else"
        );
        model = optimizer.step(0.01, model, gradients);
    }
    assert!(
        losses[7] < 0.8 * losses[0],
        "the loss does not fall: {losses:?}"
    );
    let valid = model.valid();
    let merged = valid.clone().materialize();
    close(
        &values(valid.forward(x.clone())),
        &values(merged.forward(x)),
        SAME_WEIGHTS_IN_BURN,
        "merged",
    );
}

#[derive(Default)]
struct Paths {
    path: Vec<String>,
    floats: Vec<String>,
}

impl ModuleVisitor for Paths {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        self.floats.push(self.path.join("."));
    }
}

fn paths(device: &Device) {
    let lora = |group| Lora::new(2, 4.0).set_param_group(group);
    let (model, _) = convert(mlp(device), GroupSize::G32);
    // Adapters are selected by exact path and by id, as for a float weight.
    for group in [
        ParamGroup::from_path("up.weight"),
        ParamGroup::ids_from_module(model.up.clone()),
    ] {
        let adapted = model.clone().apply_lora(lora(group));
        assert!(
            weight_of(&adapted.up).adapter().is_some()
                && weight_of(&adapted.down).adapter().is_none()
        );
        let mut paths = Paths::default();
        adapted.visit(&mut paths);
        let factors: Vec<_> = paths
            .floats
            .into_iter()
            .filter(|path| path.contains("lora"))
            .collect();
        assert_eq!(
            factors,
            ["up.weight.lora.a", "up.weight.lora.b"],
            "where a float weight has them"
        );
    }
    // A record of the whole model and a record of only the adapters are loaded into models made the
    // same way.
    let all = || lora(ParamGroup::all());
    let adapted = model.clone().apply_lora(all());
    let x = Tensor::<2>::random([3, 64], Distribution::Normal(0.0, 1.0), device);
    let mut adapted = adapted;
    adapted = adapted.map(&mut Fill);
    let expected = values(adapted.forward(x.clone()));
    let bytes = adapted
        .clone()
        .into_record()
        .into_bytes()
        .unwrap_or_else(|error| panic!("{error}"));
    let record = ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{error}"));
    let target = reset(convert(mlp(device), GroupSize::G32).0.apply_lora(all()));
    close(
        &values(target.load_record(record).forward(x.clone())),
        &expected,
        1e-6,
        "a record with adapters",
    );
    let factors = ParamGroup::from_predicate("lora");
    let record = adapted.into_record_group(factors);
    assert_eq!(record.len(), 4);
    let target = model
        .apply_lora(all())
        .try_load_record(record.allow_partial(true))
        .unwrap_or_else(|error| panic!("{error}"));
    close(
        &values(target.forward(x)),
        &expected,
        1e-6,
        "a record of the adapters",
    );
}

/// Sets the factors of adapters to random values.
struct Fill;

impl burn::module::ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_factor = param.is_initialized() && D == 2 && param.dims().contains(&2);
        if is_factor {
            param.map(|factor| factor.random_like(Distribution::Normal(0.0, 0.1)))
        } else {
            param
        }
    }
}

fn qlora(device: &Device) {
    let (model, _) = convert(mlp(device), GroupSize::G32);
    let expected = weight_of(&model.up).to_plain().ok();
    let scheme = device
        .settings()
        .quantization
        .scheme
        .with_value(QuantValue::Q8S);
    let adapted = model.apply_qlora(QLora::new(
        Lora::new(2, 4.0),
        Quantizer::new(Calibration::MinMax, scheme),
    ));
    assert!(weight_of(&adapted.up).adapter().is_some());
    assert_eq!(
        weight_of(&adapted.up).to_plain().ok(),
        expected,
        "nothing is rounded again"
    );
    let found = values(adapted.up.weight.val());
    close(
        &found,
        &values(weight_of(&adapted.up).dequantize(FloatDType::F32)),
        1e-6,
        "val() is the packed weight",
    );
}

fn of_layer(device: &Device) {
    let tracked = device.clone().autodiff();
    let linear = LinearConfig::new(64, 48).init(&tracked);
    let layer = QuantLinear::from_linear(&linear, &QuantSpec::int4(GroupSize::G32))
        .unwrap_or_else(|error| panic!("{error}"));
    let plain = layer.clone();
    let mut layer = layer.apply_lora(Lora::new(4, 4.0));
    let x = Tensor::<2>::random([5, 64], Distribution::Normal(0.0, 1.0), &tracked);
    close(
        &values(layer.forward(x.clone())),
        &values(plain.forward(x.clone())),
        1e-6,
        "an adapter that adds nothing yet",
    );
    let mut optimizer = AdamConfig::new().init();
    for _ in 0..3 {
        let gradients = (layer.forward(x.clone()) - 1.0)
            .powi_scalar(2)
            .mean()
            .backward();
        let gradients = GradientsParams::from_grads(gradients, &layer);
        assert_eq!(gradients.len(), 2);
        layer = optimizer.step(0.01, layer, gradients);
    }
    let adapter = layer
        .weight()
        .adapter()
        .unwrap_or_else(|| panic!("no adapter"));
    let expected = plain.forward(x.clone()) + x.clone().matmul(adapter.delta());
    close(
        &values(layer.forward(x)),
        &values(expected),
        SAME_WEIGHTS_IN_BURN,
        "what the adapter adds",
    );
}

/// Checks that the graph of a forward pass holds no float weights: those of the eight layers would
/// take 8 MiB.
fn memory(device: &Device) {
    let tracked = device.clone().autodiff();
    let layers: Vec<Linear> = (0..8)
        .map(|_| LinearConfig::new(512, 512).with_bias(false).init(&tracked))
        .collect();
    let (layers, _) = convert(layers, GroupSize::G128);
    let layers = layers.apply_lora(Lora::new(2, 2.0));
    let in_use = || {
        device.sync().unwrap_or_else(|error| panic!("{error:?}"));
        device.memory_pool_usage().map_or_else(
            || panic!("the device does not say what it holds"),
            |usage| usage.bytes_in_use,
        )
    };
    let x = Tensor::<2>::random([2, 512], Distribution::Normal(0.0, 0.1), &tracked);
    let before = in_use();
    let y = layers.iter().fold(x, |x, layer| layer.forward(x));
    let loss = y.powi_scalar(2).mean();
    let _ = loss.clone().into_scalar::<f32>();
    let held = in_use().saturating_sub(before);
    assert!(
        held < 2 << 20,
        "{held} bytes are held for the backward pass"
    );
}
