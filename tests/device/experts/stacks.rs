//! `QuantExperts` from the stacked weights of a Burn model.

use super::router;
use crate::layer::values;
use crate::setup::{Named, trial};
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, Distribution, Tensor};
use burn_marlin::Error;
use burn_marlin::experts::{ExpertPaths, QuantExperts, RouterScores};
use libtest_mimic::Trial;
use marlin_format::{GroupSize, QuantSpec};

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(
        device,
        "experts::stacked_weights_of_a_model_are_found_by_their_paths",
        found,
    ));
}

/// A model with the weights of a mixture twice: gates and ups in one parameter, and in two.
#[derive(Module, Debug)]
struct Model {
    blocks: Vec<Block>,
    norm: Param<Tensor<1>>,
}

#[derive(Module, Debug)]
struct Block {
    gate_up: Param<Tensor<3>>,
    gate: Param<Tensor<3>>,
    up: Param<Tensor<3>>,
    down: Param<Tensor<3>>,
}

fn found(device: &Device) {
    let random = |shape: [usize; 3]| Tensor::<3>::random(shape, Distribution::Default, device);
    let (gate, up, down) = (
        random([4, 64, 96]),
        random([4, 64, 96]),
        random([4, 96, 64]),
    );
    let gate_up = Tensor::cat(vec![gate.clone(), up.clone()], 2);
    let param = |tensor: &Tensor<3>| Param::initialized(ParamId::new(), tensor.clone());
    let model = Model {
        blocks: vec![Block {
            gate_up: param(&gate_up),
            gate: param(&gate),
            up: param(&up),
            down: param(&down),
        }],
        norm: Param::initialized(ParamId::new(), Tensor::ones([64], device)),
    };
    let (router, spec) = (
        router(4, 2, RouterScores::Softmax, true),
        QuantSpec::int4(GroupSize::G32),
    );
    let of = |paths| QuantExperts::from_model(&model, router, paths, &spec);
    let expected = QuantExperts::quantize(router, gate_up, down, &spec)
        .unwrap_or_else(|error| panic!("{error}"));
    let (x, logits) = (
        Tensor::<2>::random([3, 64], Distribution::Default, device),
        Tensor::<2>::random([3, 4], Distribution::Default, device),
    );
    let outputs = |layer: &QuantExperts| values(layer.forward(x.clone(), logits.clone()));
    let down = "blocks.0.down";
    for paths in [
        ExpertPaths::Joined {
            gate_up: "blocks.0.gate_up",
            down,
        },
        ExpertPaths::Separate {
            gate: "blocks.0.gate",
            up: "blocks.0.up",
            down,
        },
    ] {
        let layer = of(paths).unwrap_or_else(|error| panic!("{paths:?}: {error}"));
        assert_eq!(outputs(&layer), outputs(&expected), "{paths:?}");
    }

    let refused = |paths| match of(paths) {
        Ok(_) => panic!("{paths:?}: not refused"),
        Err(error) => error,
    };
    let missing = refused(ExpertPaths::Joined {
        gate_up: "blocks.0.gate_up",
        down: "norm",
    });
    let all = ["gate_up", "gate", "up", "down"].map(|name| format!("blocks.0.{name}"));
    assert!(
        matches!(&missing, Error::NoStack { path, found } if path == "norm" && *found == all),
        "{missing}"
    );
    let unlike = refused(ExpertPaths::Separate {
        gate: "blocks.0.gate",
        up: down,
        down,
    });
    assert!(
        unlike
            .to_string()
            .contains("the weight of ups of a mixture is [4, 96, 64]"),
        "{unlike}"
    );
}
