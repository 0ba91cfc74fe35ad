//! `QuantExperts` on Burn's tensors.

use super::router;
use crate::layer::{tensor, values};
use crate::setup::{Named, computes, trial};
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Device, Tensor};
use burn_marlin::Error;
use burn_marlin::experts::{QuantExperts, Router, RouterScores};
use libtest_mimic::Trial;
use marlin_format::{GroupSize, PlainWeight, QuantSpec, ScaleDtype, Sparsity, WeightValue};
use marlin_kernels::experts::host;
use marlin_kernels::{ActivationDtype, Epilogue};
use marlin_testing::{random_values, relative_error};
use marlin_tests::{Case, Operands, gated, round, tolerance};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    tests.push(trial(
        device,
        "experts::a_layer_agrees_with_f64",
        move |device| agrees(device, seed),
    ));
    tests.push(trial(
        device,
        "experts::a_layer_survives_device_and_record",
        move |device| round_trips(device, seed),
    ));
    // CubeCL's CPU runtime compiles and times several matmuls for every shape of a backward pass.
    if device.name != "cpu" {
        tests.push(trial(
            device,
            "experts::gradients_of_a_layer_are_those_of_float_weights",
            move |device| gradients(device, seed),
        ));
    }
    if device.name == "flex" {
        tests.push(trial(
            device,
            "experts::weights_that_do_not_fit_are_refused",
            move |device| refusals(device, seed),
        ));
    }
}

/// A layer and its values in f64.
pub struct Layer {
    pub router: Router,
    pub hidden: usize,
    intermediate: usize,
    pub gate_up: Vec<Operands>,
    pub down: Vec<Operands>,
    pub correction: Option<Vec<f32>>,
    pub factor: f64,
    pub has_biases: bool,
    pub epilogue: Epilogue,
    pub activations: ActivationDtype,
}

impl Layer {
    pub fn random(
        router: Router,
        [hidden, intermediate]: [usize; 2],
        spec: QuantSpec,
        permuted: bool,
        activations: ActivationDtype,
        seed: u64,
    ) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut matrices = |k, n| {
            let case = Case {
                m: 1,
                k,
                n,
                spec,
                activations,
                permuted,
                sparsity: Sparsity::Dense,
            };
            let of_expert = |_| Operands::random(&case, rng.random());
            (0..router.experts).map(of_expert).collect()
        };
        let (gate_up, down) = (
            matrices(hidden, 2 * intermediate),
            matrices(intermediate, hidden),
        );
        let correction = (router.scores == RouterScores::Sigmoid)
            .then(|| random_values(router.experts, 0.5, &mut rng));
        Self {
            router,
            hidden,
            intermediate,
            gate_up,
            down,
            correction,
            factor: 1.5,
            has_biases: router.experts.is_multiple_of(2),
            epilogue: match spec.value {
                WeightValue::E2m1 => Epilogue::ClampedSwiGlu,
                _ => Epilogue::SwiGlu,
            },
            activations,
        }
    }

    /// Returns the layer on a device.
    fn on(&self, device: &Device) -> QuantExperts {
        let weights = |of: &[Operands]| -> Vec<PlainWeight> {
            of.iter().map(|operands| operands.weight.clone()).collect()
        };
        let (gate_up, down) = (weights(&self.gate_up), weights(&self.down));
        let layer = QuantExperts::new(self.router, gate_up, down, self.activations, device)
            .unwrap_or_else(|error| panic!("{error}"))
            .with_factor(self.factor);
        let layer = match self.epilogue {
            Epilogue::ClampedSwiGlu => layer.with_clamped_swiglu(),
            _ => layer,
        };
        let layer = match &self.correction {
            Some(values) => {
                let correction =
                    tensor(values, [self.router.experts], ActivationDtype::F32, device);
                layer.with_correction(correction)
            }
            None => Ok(layer),
        };
        let biases = |of: &[Operands], n| {
            let values: Vec<f32> = of.iter().flat_map(|of| &of.bias).copied().collect();
            tensor(&values, [self.router.experts, n], self.activations, device)
        };
        let gate_up = biases(&self.gate_up, 2 * self.intermediate);
        let down = biases(&self.down, self.hidden);
        layer
            .and_then(|layer| match self.has_biases {
                true => layer.with_biases(gate_up, down),
                false => Ok(layer),
            })
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns activations and logits of tokens.
    pub fn inputs(&self, tokens: usize, rng: &mut StdRng) -> [Vec<f32>; 2] {
        [self.hidden, self.router.experts].map(|width| {
            let mut value = |_| round(rng.random_range(-1.0..1.0), self.activations);
            (0..tokens * width).map(&mut value).collect()
        })
    }

    /// Returns the outputs of a token's row at an expert.
    fn expert(&self, expert: usize, x: &[f64]) -> Vec<f64> {
        let both = self.product(&self.gate_up[expert], x);
        let (gates, ups) = both.split_at(self.intermediate);
        let gated: Vec<f64> = gates
            .iter()
            .zip(ups)
            .map(|(&gate, &up)| gated(self.epilogue, gate, up).0)
            .collect();
        self.product(&self.down[expert], &gated)
    }

    fn product(&self, of: &Operands, x: &[f64]) -> Vec<f64> {
        let weight = of.weight.dequantize();
        let n = of.weight.n();
        (0..n)
            .map(|column| {
                let bias = if self.has_biases {
                    of.bias[column].into()
                } else {
                    0.0
                };
                let terms = x.iter().zip(weight[column..].iter().step_by(n));
                bias + terms.map(|(x, &weight)| x * f64::from(weight)).sum::<f64>()
            })
            .collect()
    }

    /// Returns the outputs in f64.
    pub fn expected(&self, x: &[f32], logits: &[f32]) -> Vec<f64> {
        let routing = host::route(
            &self.router,
            logits,
            self.correction.as_deref(),
            self.factor as f32,
        )
        .unwrap_or_else(|error| panic!("{error}"));
        let top_k = self.router.top_k;
        x.chunks_exact(self.hidden)
            .enumerate()
            .flat_map(|(token, x)| {
                let x: Vec<f64> = x.iter().map(|&x| x.into()).collect();
                let mut sum = vec![0.0; self.hidden];
                for choice in token * top_k..(token + 1) * top_k {
                    let weight = f64::from(routing.weights[choice]);
                    let outputs = self.expert(routing.experts[choice] as usize, &x);
                    sum.iter_mut()
                        .zip(outputs)
                        .for_each(|(sum, output)| *sum += weight * output);
                }
                sum
            })
            .collect()
    }
}

/// Three results are rounded one after the other: gated values, an expert's outputs and their sum.
pub fn layer_tolerance(dtype: ActivationDtype) -> f64 {
    3.0 * tolerance(dtype)
}

fn agrees(device: &Device, seed: u64) {
    let softmax = router(6, 2, RouterScores::Softmax, true);
    let (int4, g32) = (WeightValue::Int4, GroupSize::G32);
    let (f16, bf16) = (ScaleDtype::F16, ScaleDtype::BF16);
    let mut ran = 0;
    for (i, (router, spec, permuted, sizes)) in [
        (
            softmax,
            QuantSpec::new(int4, g32).with_zero_points(),
            false,
            [64, 96],
        ),
        (
            softmax,
            QuantSpec::new(int4, g32).with_scale_dtype(bf16),
            true,
            [128, 64],
        ),
        (
            router(7, 7, RouterScores::Softmax, false),
            QuantSpec::new(WeightValue::Int8, GroupSize::Channel).with_scale_dtype(f16),
            false,
            [200, 40],
        ),
        (
            router(8, 3, RouterScores::Sigmoid, true),
            QuantSpec::mxfp4().with_scale_dtype(bf16),
            false,
            [64, 64],
        ),
        (
            router(4, 1, RouterScores::Sigmoid, false),
            QuantSpec::new(int4, GroupSize::Channel).with_zero_points(),
            true,
            [72, 36],
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let halves = ActivationDtype::from(spec.scales.dtype);
        for activations in [ActivationDtype::F32, halves] {
            if !computes(device, activations) {
                continue;
            }
            let seed = seed.wrapping_add(i as u64);
            let layer = Layer::random(router, sizes, spec, permuted, activations, seed);
            let of_device = layer.on(device);
            let mut rng = StdRng::seed_from_u64(seed);
            for tokens in [1, 3, 50] {
                let [x, logits] = layer.inputs(tokens, &mut rng);
                let found = of_device.forward(
                    tensor(&x, [1, tokens, layer.hidden], activations, device),
                    tensor(&logits, [1, tokens, router.experts], activations, device),
                );
                assert_eq!(found.dims(), [1, tokens, layer.hidden]);
                let error = relative_error(&values(found), &layer.expected(&x, &logits));
                let format = of_device.descriptors()[0];
                assert!(
                    error <= layer_tolerance(activations),
                    "{format} in {activations}, {tokens} tokens, seed {seed}: relative error {error:e}"
                );
                ran += 1;
            }
        }
    }
    assert!(ran > 0, "no dtype that this device supports");
}

fn round_trips(device: &Device, seed: u64) {
    let spec = QuantSpec::int4(GroupSize::G32).with_zero_points();
    let router = router(6, 2, RouterScores::Softmax, true);
    let of = |seed| Layer::random(router, [64, 96], spec, true, ActivationDtype::F32, seed);
    let (layer, other, flex) = (of(seed), of(seed + 1), Device::flex());
    let [x, logits] = layer.inputs(5, &mut StdRng::seed_from_u64(seed));
    let outputs = |layer: &QuantExperts, device: &Device| {
        let input = |values, width| tensor(values, [5, width], ActivationDtype::F32, device);
        values(layer.forward(input(&x, 64), input(&logits, 6)))
    };
    let (of_device, expected) = (layer.on(device), layer.expected(&x, &logits));
    let record = of_device
        .clone()
        .into_record()
        .into_bytes()
        .and_then(ModuleRecord::from_bytes)
        .unwrap_or_else(|error| panic!("{error}"));
    let loaded = other
        .on(&flex)
        .try_load_record(record)
        .unwrap_or_else(|error| panic!("{error}"));
    let moved = of_device.clone().to_device(&flex).to_device(device);
    for (what, found) in [
        ("moved", outputs(&moved, device)),
        ("loaded", outputs(&loaded, &flex)),
    ] {
        let error = relative_error(&found, &expected);
        assert!(
            error <= layer_tolerance(ActivationDtype::F32),
            "{what}, seed {seed}: {error:e}"
        );
    }
    // A record with another number of experts is refused.
    let fewer = Layer::random(
        Router {
            experts: 5,
            ..router
        },
        [64, 96],
        spec,
        true,
        ActivationDtype::F32,
        seed,
    );
    let loaded = fewer.on(&flex).try_load_record(of_device.into_record());
    assert!(loaded.is_err(), "six experts were loaded as five");
}

/// Compares gradients with those of the weights in floats, of which all experts compute all tokens.
fn gradients(device: &Device, seed: u64) {
    let spec = QuantSpec::int4(GroupSize::G32);
    let router = router(6, 2, RouterScores::Softmax, true);
    let layer = Layer::random(router, [64, 96], spec, false, ActivationDtype::F32, seed);
    let [x, logits] = layer.inputs(5, &mut StdRng::seed_from_u64(seed));
    let device = &device.clone().autodiff();
    let input =
        |values, width| tensor(values, [5, width], ActivationDtype::F32, device).require_grad();
    let (of_device, x, logits) = (layer.on(device), input(&x, 64), input(&logits, 6));
    let of = |out: Tensor<2>| {
        let grads = (out.clone() * out).sum().backward();
        [&x, &logits].map(|input| {
            let grad = input.grad(&grads).unwrap_or_else(|| panic!("no gradient"));
            values(grad)
        })
    };
    let found = of(of_device.forward(x.clone(), logits.clone()));

    let chosen = {
        let order = logits.clone().detach().argsort_descending(1);
        let best = order.slice([0..5, 0..2]);
        let ones = Tensor::<2>::ones([5, 2], device);
        Tensor::<2>::zeros([5, 6], device).scatter(
            1,
            best,
            ones,
            burn::tensor::IndexingUpdateOp::Add,
        )
    };
    let powers = logits.clone().exp() * chosen;
    let weights = powers.clone() / powers.sum_dim(1) * layer.factor;
    let mut sum = Tensor::<2>::zeros([5, 64], device);
    for expert in 0..router.experts {
        let product = |of: &Operands, x: Tensor<2>| {
            let (k, n) = (of.weight.k(), of.weight.n());
            let weight = tensor::<2>(
                &of.weight.dequantize(),
                [k, n],
                ActivationDtype::F32,
                device,
            );
            let bias = tensor::<2>(&of.bias, [1, n], ActivationDtype::F32, device);
            x.matmul(weight) + bias
        };
        let both = product(&layer.gate_up[expert], x.clone());
        let (gate, up) = (both.clone().narrow(1, 0, 96), both.narrow(1, 96, 96));
        let gated = burn::tensor::activation::silu(gate) * up;
        let out = product(&layer.down[expert], gated);
        sum = sum + out * weights.clone().narrow(1, expert, 1);
    }
    for (found, expected) in found.iter().zip(of(sum)) {
        let error = relative_error(found, &expected);
        // CUDA's own matmuls may round to TF32.
        assert!(error <= 5e-3, "seed {seed}: relative error {error:e}");
    }
}

fn refusals(device: &Device, seed: u64) {
    let small = router(4, 2, RouterScores::Softmax, true);
    let spec = QuantSpec::int4(GroupSize::G32);
    let layer = Layer::random(small, [64, 96], spec, false, ActivationDtype::F32, seed);
    let weights = |of: &[Operands]| -> Vec<PlainWeight> {
        of.iter().map(|operands| operands.weight.clone()).collect()
    };
    let new = |router, gate_up, down| {
        QuantExperts::new(router, gate_up, down, ActivationDtype::F32, device)
    };
    let (gate_up, down) = (weights(&layer.gate_up), weights(&layer.down));
    let message = |result: Result<QuantExperts, Error>| match result {
        Ok(_) => panic!("weights that do not fit were taken"),
        Err(error) => error.to_string(),
    };
    let other = Layer::random(
        small,
        [64, 96],
        QuantSpec::int4(GroupSize::G64),
        false,
        ActivationDtype::F32,
        seed,
    );
    let mut mixed = gate_up.clone();
    mixed[2] = other.gate_up[2].weight.clone();
    for (result, part) in [
        (
            new(small, mixed, down.clone()),
            "expert 2 has a weight [64, 192] int4 g64",
        ),
        (
            new(small, gate_up.clone(), gate_up.clone()),
            "the weight of down of a mixture is [4, 64, 192], expected [4, 96, 64]",
        ),
        (
            new(small, gate_up[1..].to_vec(), down[1..].to_vec()),
            "the number of experts of a mixture is 3, expected 4",
        ),
        (new(small, Vec::new(), down.clone()), "at least one expert"),
        (
            new(
                router(4, 5, RouterScores::Softmax, true),
                gate_up.clone(),
                down.clone(),
            ),
            "5",
        ),
    ] {
        let message = message(result);
        assert!(message.contains(part), "{message}");
    }
    let bias = |n| Tensor::<2>::zeros([4, n], device);
    let taken = new(small, gate_up, down).and_then(|layer| layer.with_biases(bias(192), bias(63)));
    let message = message(taken);
    assert!(message.contains("expected [4, 64]"), "{message}");
}
