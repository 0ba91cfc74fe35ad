//! Mixtures of experts on the CPU, for Burn's Flex backend.

use super::{Router, RouterScores};
use crate::matmul::host::{self, HostWeight};
use crate::problem::expect_length;
use crate::{KernelError, QuantProblem};
use marlin_format::WeightDescriptor;

/// The experts of tokens in host memory. A row is one token at one of its experts.
#[derive(Debug, Clone, PartialEq)]
pub struct HostRouting {
    /// The experts of each token [tokens, top_k], the best first.
    pub experts: Vec<u32>,
    /// Their weights [tokens, top_k]; NaN if a logit of the token is not finite.
    pub weights: Vec<f32>,
}

/// Chooses the experts of tokens from a router's logits [tokens, experts]. A `correction`
/// `[experts]` is added to the scores before experts are chosen ([`RouterScores::Sigmoid`]), and
/// the weights are multiplied by `factor`. Of experts with equal scores, the one with the smaller
/// number is chosen; a score that is not finite comes last.
///
/// # Errors
/// The errors of [`Router::check`], and an error for logits that are no whole number of tokens, or
/// a correction of another length.
pub fn route(
    router: &Router,
    logits: &[f32],
    correction: Option<&[f32]>,
    factor: f32,
) -> Result<HostRouting, KernelError> {
    router.check()?;
    let tokens = logits.len() / router.experts;
    let problem = format!("{tokens} tokens, {} experts", router.experts);
    expect_length(&problem, "logits", tokens * router.experts, logits.len())?;
    if let Some(correction) = correction {
        expect_length(&problem, "correction", router.experts, correction.len())?;
    }
    let rows = tokens * router.top_k;
    let mut routing = HostRouting {
        experts: Vec::with_capacity(rows),
        weights: Vec::with_capacity(rows),
    };
    for logits in logits.chunks_exact(router.experts) {
        let values = values(router, logits);
        let score = |expert: usize| {
            let score = match router.scores {
                RouterScores::Softmax => logits[expert],
                RouterScores::Sigmoid => {
                    values[expert] + correction.map_or(0.0, |correction| correction[expert])
                }
            };
            if score.is_finite() { score } else { f32::MIN }
        };
        let mut order: Vec<usize> = (0..router.experts).collect();
        // The sort is stable. The sum makes -0 and 0 equal.
        order.sort_by(|&a, &b| (score(b) + 0.0).total_cmp(&(score(a) + 0.0)));
        let chosen = &order[..router.top_k];
        let total = match router.normalises {
            true => chosen.iter().map(|&expert| values[expert]).sum(),
            false => 1.0,
        };
        let is_finite = logits.iter().all(|logit| logit.is_finite());
        let weight = |&expert: &usize| match is_finite {
            true => values[expert] / total * factor,
            false => f32::NAN,
        };
        routing.weights.extend(chosen.iter().map(weight));
        routing
            .experts
            .extend(chosen.iter().map(|&expert| expert as u32));
    }
    Ok(routing)
}

/// Returns the values by which a token's experts are weighted.
fn values(router: &Router, logits: &[f32]) -> Vec<f32> {
    match router.scores {
        RouterScores::Softmax => {
            let largest = logits.iter().copied().fold(f32::MIN, f32::max);
            let powers: Vec<f32> = logits.iter().map(|logit| (logit - largest).exp()).collect();
            let total: f32 = powers.iter().sum();
            powers.into_iter().map(|power| power / total).collect()
        }
        RouterScores::Sigmoid => logits
            .iter()
            .map(|logit| 1.0 / (1.0 + (-logit).exp()))
            .collect(),
    }
}

/// Multiplies each row of activations [rows, K] by the matrix of its expert, and adds the expert's
/// bias, of biases [experts, N]. Returns [rows, N]. `experts` has the expert of each row, and M of
/// the problem is the number of rows.
///
/// # Errors
/// An error for a buffer of the wrong length, an operand that does not fit the format, or an expert
/// that does not exist.
pub fn multiply(
    problem: &QuantProblem,
    x: &[f32],
    experts: &[u32],
    weight: HostWeight<'_>,
    bias: Option<&[f32]>,
) -> Result<Vec<f32>, KernelError> {
    let (rows, k, n, count) = (problem.m, problem.k(), problem.n(), problem.weight.experts);
    expect_length(problem, "activations", rows * k, x.len())?;
    expect_length(problem, "experts of rows", rows, experts.len())?;
    if let Some(bias) = bias {
        expect_length(problem, "bias", count * n, bias.len())?;
    }
    weight.check(problem)?;
    if let Some(expert) = experts.iter().find(|expert| **expert as usize >= count) {
        return Err(KernelError::Outside {
            what: "experts",
            problem: problem.to_string(),
            end: *expert as usize + 1,
            limit: count,
        });
    }
    let mut out = vec![0.0; rows * n];
    for expert in 0..count {
        let of_expert: Vec<usize> = (0..rows)
            .filter(|&row| experts[row] as usize == expert)
            .collect();
        if of_expert.is_empty() {
            continue;
        }
        let one = QuantProblem {
            m: of_expert.len(),
            weight: problem.weight.with_experts(1),
            ..*problem
        };
        let gathered: Vec<f32> = of_expert
            .iter()
            .flat_map(|row| &x[row * k..][..k])
            .copied()
            .collect();
        let products = host::matmul(
            &one,
            &gathered,
            of(&one.weight, expert, weight),
            bias.map(|bias| &bias[expert * n..][..n]),
        )?;
        for (row, products) in of_expert.into_iter().zip(products.chunks_exact(n)) {
            out[row * n..][..n].copy_from_slice(products);
        }
    }
    Ok(out)
}

/// Returns the matrix of an expert, whose descriptor is `one`.
fn of<'a>(one: &WeightDescriptor, expert: usize, weight: HostWeight<'a>) -> HostWeight<'a> {
    let each = one.tensors().map(|_, tensor| tensor.elements());
    let words = |of: &'a [u32], each: Option<usize>| {
        let each = each.unwrap_or_default();
        &of[expert * each..][..each]
    };
    HostWeight {
        words: words(weight.words, Some(each.qweight)),
        scales: weight
            .scales
            .slice(expert * each.scales..(expert + 1) * each.scales),
        zero_points: weight.zero_points.map(|of| words(of, each.zero_points)),
        row_permutation: weight
            .row_permutation
            .map(|of| words(of, each.row_permutation)),
    }
}

/// Adds the outputs of each token's experts [tokens x top_k, features], weighted by the router, in
/// the order of the experts' rank. Returns [tokens, features].
///
/// # Errors
/// An error for rows of the wrong length.
pub fn combine(
    routing: &HostRouting,
    top_k: usize,
    features: usize,
    rows: &[f32],
) -> Result<Vec<f32>, KernelError> {
    let tokens = routing.weights.len() / top_k.max(1);
    let problem = format!("{tokens} tokens of {features} features");
    let expected = routing.weights.len() * features;
    expect_length(&problem, "rows", expected, rows.len())?;
    let mut out = vec![0.0; tokens * features];
    let of_token = (top_k * features).max(1);
    for ((out, rows), weights) in out
        .chunks_exact_mut(features.max(1))
        .zip(rows.chunks_exact(of_token))
        .zip(routing.weights.chunks_exact(top_k.max(1)))
    {
        for (row, weight) in rows.chunks_exact(features.max(1)).zip(weights) {
            for (out, value) in out.iter_mut().zip(row) {
                *out += weight * value;
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn router(top_k: usize, scores: RouterScores, normalises: bool) -> Router {
        Router {
            experts: 4,
            top_k,
            scores,
            normalises,
        }
    }

    fn routed(router: Router, logits: [f32; 4], correction: Option<&[f32]>) -> HostRouting {
        route(&router, &logits, correction, 2.0).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn the_best_experts_are_chosen_and_weighted() {
        // exp of 0, ln 2, ln 4 and ln 8, of a sum of 15.
        let logits = [0.0f32, 2.0f32.ln(), 4.0f32.ln(), 8.0f32.ln()];
        for (normalises, weights) in [
            (true, [8.0 / 12.0, 4.0 / 12.0]),
            (false, [8.0 / 15.0, 4.0 / 15.0]),
        ] {
            let found = routed(router(2, RouterScores::Softmax, normalises), logits, None);
            assert_eq!(found.experts, [3, 2]);
            for (found, weight) in found.weights.iter().zip(weights) {
                assert!((found - 2.0 * weight).abs() < 1e-6, "{found}, {weight}");
            }
        }
        // The correction chooses, and does not weight.
        let correction = [0.0, 10.0, 0.0, 0.0];
        let found = routed(
            router(2, RouterScores::Sigmoid, false),
            logits,
            Some(&correction),
        );
        assert_eq!(found.experts, [1, 3]);
        assert!(
            (found.weights[0] - 2.0 * 2.0 / 3.0).abs() < 1e-6,
            "{found:?}"
        );
    }

    #[test]
    fn of_equal_scores_the_first_is_chosen_and_a_score_that_is_not_finite_comes_last() {
        let softmax = router(4, RouterScores::Softmax, true);
        let found = routed(softmax, [0.0, 1.0, -0.0, 1.0], None);
        assert_eq!(found.experts, [1, 3, 0, 2]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let found = routed(softmax, [bad, 1.0, 2.0, 0.0], None);
            assert_eq!(found.experts, [2, 1, 3, 0], "{bad}");
            assert!(found.weights.iter().all(|weight| weight.is_nan()), "{bad}");
        }
    }

    #[test]
    fn outputs_of_experts_are_added_with_their_weights() {
        let routing = HostRouting {
            experts: vec![0, 1, 1, 0],
            weights: vec![1.0, 2.0, 0.5, 0.0],
        };
        let rows = [1.0, 2.0, 10.0, 20.0, 4.0, 6.0, 9.0, 9.0];
        assert_eq!(
            combine(&routing, 2, 2, &rows),
            Ok(vec![21.0, 42.0, 2.0, 3.0])
        );
        assert!(combine(&routing, 2, 3, &rows).is_err());
    }

    #[test]
    fn wrong_routers_and_lengths_are_refused() {
        let many = router(5, RouterScores::Softmax, true);
        let expected = KernelError::Router {
            experts: 4,
            top_k: 5,
        };
        assert_eq!(route(&many, &[0.0; 4], None, 1.0), Err(expected));
        let one = router(1, RouterScores::Softmax, true);
        assert!(route(&one, &[0.0; 5], None, 1.0).is_err());
        assert!(route(&one, &[0.0; 4], Some(&[0.0]), 1.0).is_err());
    }
}
