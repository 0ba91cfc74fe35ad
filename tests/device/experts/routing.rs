//! The tables of routings.

use super::host::HostRouting;
use super::{ROUTERS, logits, read, read_words, routed};
use crate::kernels::values;
use crate::marlin::Bench;
use marlin_kernels::ActivationDtype;
use marlin_kernels::experts::{Router, RouterScores};
use marlin_testing::random_values;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// The relative error of a router's weights in f32.
const WEIGHT_ERROR: f64 = 5e-6;

/// Checks the tables of routings, whole, against the host's; for a few tokens and for many, and
/// with blocks of several sizes.
pub fn routing(bench: &Bench, router: Router, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    for (i, tokens) in [1, 2, 3, 16, 33, 300, 1100].into_iter().enumerate() {
        for (dtype, block_rows) in [
            (ActivationDtype::F16, 8),
            (ActivationDtype::BF16, 32),
            (ActivationDtype::F32, 16),
        ] {
            let logits = logits(&router, tokens, dtype, seed + i as u64);
            let correction = random_values(router.experts, 0.5, &mut rng);
            let correction = (router.scores == RouterScores::Sigmoid).then_some(&correction[..]);
            let factor = 1.5;
            let found = routed(
                bench, router, block_rows, &logits, dtype, correction, factor,
            );
            let mut expected = HostRouting::new(&router, &logits, correction, factor, block_rows);
            let case = format!("{router:?}, {tokens} tokens in {dtype}, seed {seed}");
            let experts = read_words(bench, &found.experts);
            // Sums of a sigmoid and a correction are rounded in f32, and experts of nearly equal
            // sums may be chosen in another order.
            if correction.is_some() {
                expected.assert_near(&experts, &case);
                expected.choose(experts.clone(), block_rows);
            }
            assert_eq!(experts, expected.experts, "{case}");
            assert_eq!(read_words(bench, &found.places), expected.places, "{case}");
            assert_eq!(read_words(bench, &found.tokens), expected.tokens, "{case}");
            let blocks = read_words(bench, &found.row_blocks);
            let count = expected.blocks.len();
            assert_eq!(blocks[0] as usize, count, "{case}");
            assert!(count <= found.most_blocks(), "{case}");
            let found_blocks: Vec<[u32; 3]> = (1..=count)
                .map(|block| [0, 1, 2].map(|i| blocks[4 * block + i]))
                .collect();
            assert_eq!(found_blocks, expected.blocks, "{case}");
            let weights = values(&read(bench, &found.weights), ActivationDtype::F32);
            for (row, (found, expected)) in weights.iter().zip(&expected.weights).enumerate() {
                assert!(
                    (found - expected).abs() <= WEIGHT_ERROR * expected.abs().max(1e-3),
                    "{case}, row {row}: {found}, not {expected}"
                );
            }
        }
    }
}

/// Checks that a NaN or an infinity among a token's logits makes the token's weights NaN and leaves
/// those of other tokens, and that all tables have valid numbers.
pub fn not_finite(bench: &Bench, seed: u64) {
    for (_, router) in ROUTERS {
        let dtype = ActivationDtype::F16;
        let mut of_token = logits(&router, 5, dtype, seed);
        let experts = router.experts;
        of_token[experts] = f32::NAN;
        of_token[3 * experts..4 * experts].fill(f32::NAN);
        of_token[4 * experts] = f32::INFINITY;
        let found = routed(bench, router, 8, &of_token, dtype, None, 1.0);
        let weights = values(&read(bench, &found.weights), ActivationDtype::F32);
        for (token, weights) in weights.chunks_exact(router.top_k).enumerate() {
            let is_nan = matches!(token, 1 | 3 | 4);
            assert!(
                weights.iter().all(|weight| weight.is_nan() == is_nan),
                "{router:?}, token {token}, seed {seed}: {weights:?}"
            );
        }
        for expert in read_words(bench, &found.experts) {
            assert!(
                (expert as usize) < experts,
                "{router:?}, seed {seed}: expert {expert}"
            );
        }
        let mut places = read_words(bench, &found.places);
        places.sort_unstable();
        let rows: Vec<u32> = (0..found.rows() as u32).collect();
        assert_eq!(places, rows, "{router:?}, seed {seed}");
    }
}
