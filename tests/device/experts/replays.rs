//! Recorded layers of experts whose routing differs in each replay.

use super::router;
use burn::tensor::{Device, Distribution, FloatDType, Tensor, capture};
use burn_marlin::experts::{QuantExperts, RouterScores};
use marlin_format::{GroupSize, QuantSpec, WeightFormat};
use marlin_kernels::ActivationDtype;
use marlin_nn::kernels::{SequenceState, SequenceStatus};
use marlin_nn::{embed, linear, words, write_rows};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The number of embeddings.
const TOKENS: u32 = 64;

/// Replays three layers on the embeddings of other tokens each time, and compares the outputs with
/// those of the same layers that are not recorded: few rows, and tiles of rows.
pub fn follow_the_routing(device: &Device, seed: u64) {
    let random = |shape: [usize; 2]| {
        Tensor::<2>::random(shape, Distribution::Default, device).cast(FloatDType::F16)
    };
    let router = router(16, 4, RouterScores::Softmax, true);
    let spec: WeightFormat = QuantSpec::int4(GroupSize::G64).into();
    let layers: Vec<(QuantExperts, Tensor<2>)> = (0..3)
        .map(|_| {
            let dtype = ActivationDtype::F16;
            let experts = QuantExperts::random(router, 256, 128, spec, dtype, device)
                .unwrap_or_else(|error| panic!("{error}"));
            (experts, random([16, 256]).transpose())
        })
        .collect();
    let table = random([TOKENS as usize, 256]);
    let bits = |out: Tensor<2>| {
        out.cast(FloatDType::F32)
            .try_into_vec_as::<f32>()
            .unwrap_or_else(|error| panic!("{error}"))
    };
    let mut rng = StdRng::seed_from_u64(seed);
    for rows in [2, 40, 300] {
        let mut state = words([rows, SequenceState::WORDS], device);
        let mut choose = |state: &mut _| {
            let tokens: Vec<SequenceState> = (0..rows)
                .map(|_| SequenceState {
                    token: rng.random_range(0..TOKENS),
                    status: SequenceStatus::At(0),
                    ..SequenceState::IDLE
                })
                .collect();
            write_rows(state, 0, &tokens);
        };
        let pass = |state: &_| {
            layers
                .iter()
                .fold(embed(table.clone(), state), |x, (experts, router)| {
                    let logits = linear(x.clone(), router.clone(), None);
                    x.clone() + experts.forward(x, logits)
                })
        };
        choose(&mut state);
        // The words of the shared buffer are written in place.
        let shared = state.clone();
        let mut graph = capture(device, || pass(&shared));
        assert!(graph.is_hardware(), "the driver records a graph");
        let mut outputs: Vec<Vec<f32>> = Vec::new();
        for replay in 0..20 {
            choose(&mut state);
            let expected = bits(pass(&state));
            // SAFETY: the layers, the embeddings and the rows that the pass reads are alive.
            let found = bits(unsafe { graph.replay() }.clone());
            assert!(
                found == expected,
                "{rows} rows, replay {replay} gives other outputs, seed {seed}"
            );
            assert!(
                !outputs.contains(&found),
                "{rows} rows, replay {replay} repeats an earlier one, seed {seed}"
            );
            outputs.push(found);
        }
    }
}
