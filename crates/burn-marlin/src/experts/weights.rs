//! The weights of experts in terms of Burn's operations, without a read to the host.

use super::{Router, RouterScores};
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{FloatDType, Int, Tensor};

/// Returns the weight of each expert for each token [tokens, experts] in f32, from a router's
/// logits [tokens, experts]: 0 for the experts that the router does not choose. Of experts with
/// equal scores, the one with the smaller number is chosen.
///
/// Nothing is read to the host, and gradients flow to the logits of the chosen experts. A layer
/// with [`QuantExperts`](super::QuantExperts) does not need this: it is for layers whose experts
/// all compute all tokens.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_marlin::experts::{Router, RouterScores, dense_weights};
///
/// let router = Router { experts: 3, top_k: 2, scores: RouterScores::Softmax, normalises: true };
/// let logits = Tensor::<2>::from_floats([[0.0, 1.0, 1.0]], &Device::flex());
/// let weights = dense_weights(&router, logits).into_data();
/// assert_eq!(weights.to_vec::<f32>(), Ok(vec![0.0, 0.5, 0.5]));
/// ```
pub fn dense_weights(router: &Router, logits: Tensor<2>) -> Tensor<2> {
    let (device, [tokens, experts]) = (logits.device(), logits.dims());
    let logits = logits.cast(FloatDType::F32);
    let scores = match router.scores {
        RouterScores::Softmax => softmax(logits.clone(), 1),
        RouterScores::Sigmoid => sigmoid(logits.clone()),
    };
    let numbers = Tensor::<1, Int>::arange(0..experts as i64, &device)
        .reshape([1, experts])
        .expand([tokens, experts]);
    // Zero for finite logits, NaN for others.
    let finite = (logits * 0.0).sum_dim(1);
    let every = [tokens, experts];
    // In each round the first of the best experts that are left is chosen.
    let best_first = scores.clone().detach();
    let mut chosen = numbers.clone().not_equal(numbers.clone());
    for _ in 0..router.top_k {
        // Scores are above -1.
        let left = best_first.clone().mask_fill(chosen.clone(), -1.0);
        let is_best = left.clone().equal(left.max_dim(1).expand(every));
        let first = numbers
            .clone()
            .mask_fill(is_best.bool_not(), experts as i64)
            .min_dim(1);
        chosen = chosen.bool_or(numbers.clone().equal(first.expand(every)));
    }
    let weights = scores.mask_fill(chosen.bool_not(), 0.0) + finite;
    if router.normalises {
        weights.clone() / weights.sum_dim(1)
    } else {
        weights
    }
}
