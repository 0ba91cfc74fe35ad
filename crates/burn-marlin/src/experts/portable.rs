//! The layer of experts in terms of Burn's operations, for every device and for autodiff.

use super::{QuantExperts, RouterScores};
use burn::module::Param;
use burn::tensor::activation::{sigmoid, silu, softmax};
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use marlin_kernels::Epilogue;
use marlin_kernels::experts::host;

impl QuantExperts {
    /// Computes the layer for `x` [tokens, hidden] and logits [tokens, experts]. The logits are
    /// read to the host, which chooses the experts; each expert's rows are then multiplied by its
    /// matrices.
    ///
    /// # Panics
    /// Panics if the device fails while the logits are read, as Burn's own reads do.
    pub(super) fn forward_portable(&self, x: Tensor<2>, logits: Tensor<2>) -> Tensor<2> {
        let ([tokens, hidden], top_k) = (x.dims(), self.router.top_k);
        let dtype = FloatDType::from(x.dtype());
        let logits = logits.cast(FloatDType::F32);
        let experts = self.chosen(logits.clone());
        let parts: Vec<(Tensor<2>, Vec<usize>)> = (0..self.router.experts)
            .filter_map(|expert| {
                let of_expert = |row: &usize| experts[*row] as usize == expert;
                let rows: Vec<usize> = (0..experts.len()).filter(of_expert).collect();
                (!rows.is_empty()).then(|| (self.expert(expert, &x, &rows, dtype), rows))
            })
            .collect();
        if parts.is_empty() {
            return x;
        }
        let mut places = vec![0i32; experts.len()];
        let order = parts.iter().flat_map(|(_, rows)| rows);
        order
            .enumerate()
            .for_each(|(place, &row)| places[row] = place as i32);
        let outputs = Tensor::cat(parts.into_iter().map(|(outputs, _)| outputs).collect(), 0);
        let rows = outputs
            .select(0, indices(places, &x))
            .cast(FloatDType::F32)
            .reshape([tokens, top_k, hidden]);
        let chosen = experts.into_iter().map(|expert| expert as i32).collect();
        let chosen = indices(chosen, &x).reshape([tokens, top_k]);
        let weights = self.weights(logits, chosen).reshape([tokens, top_k, 1]);
        (rows * weights).sum_dim(1).squeeze_dim::<2>(1).cast(dtype)
    }

    /// Reads logits to the host, and returns the experts of each token [tokens, top_k].
    fn chosen(&self, logits: Tensor<2>) -> Vec<u32> {
        let values = |data: TensorData| {
            data.convert::<f32>()
                .try_into_vec::<f32>()
                .unwrap_or_else(|error| panic!("the values were converted to f32: {error:?}"))
        };
        let correction = self.correction.as_ref();
        let correction = correction.map(|correction| values(correction.val().into_data()));
        let logits = values(logits.into_data());
        host::route(&self.router, &logits, correction.as_deref(), 1.0)
            .unwrap_or_else(|error| panic!("the router was checked: {error}"))
            .experts
    }

    /// Returns the weights [tokens, top_k] of the chosen experts; NaN for a token with a logit that
    /// is not finite.
    fn weights(&self, logits: Tensor<2>, chosen: Tensor<2, Int>) -> Tensor<2> {
        // Zero for finite logits, NaN for others.
        let finite = (logits.clone() * 0.0).sum_dim(1);
        let scores = match self.router.scores {
            RouterScores::Softmax => softmax(logits, 1),
            RouterScores::Sigmoid => sigmoid(logits),
        };
        let mut weights = scores.gather(1, chosen) + finite;
        if self.router.normalises {
            weights = weights.clone() / weights.sum_dim(1);
        }
        weights * self.factor
    }

    /// Returns the outputs [rows, hidden] of an expert for some rows: each is one of a token's
    /// experts, and there are `top_k` of a token.
    fn expert(&self, expert: usize, x: &Tensor<2>, rows: &[usize], dtype: FloatDType) -> Tensor<2> {
        let top_k = self.router.top_k;
        let tokens = rows.iter().map(|row| (row / top_k) as i32).collect();
        let bias = |biases: &Option<Param<Tensor<2>>>| {
            let of_expert = biases.as_ref()?.val().slice_dim(0, expert..expert + 1);
            Some(of_expert.squeeze_dim::<1>(0).cast(dtype))
        };
        let x = x.clone().select(0, indices(tokens, x));
        let gate_up = self.gate_up.expert(expert);
        let [gate, up] = gate_up
            .matmul_bias(x, bias(&self.gate_up_bias))
            .cast(FloatDType::F32)
            .chunk(2, 1)
            .try_into()
            .unwrap_or_else(|_| panic!("gates and ups are two halves"));
        let gated = gated(self.epilogue, gate, up).cast(dtype);
        let down = self.down.expert(expert);
        down.matmul_bias(gated, bias(&self.down_bias))
    }
}

/// Returns the outputs of gates and ups, in their dtype. Without a gated epilogue, they are those
/// of SwiGLU.
pub fn gated<const D: usize>(epilogue: Epilogue, gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    if epilogue != Epilogue::ClampedSwiGlu {
        return silu(gate) * up;
    }
    // Some devices' `clamp` drops NaN.
    let at_most = |x: Tensor<D>| {
        let above = x.clone().greater_elem(Epilogue::CLAMPED_LIMIT);
        x.mask_fill(above, Epilogue::CLAMPED_LIMIT)
    };
    let gate = at_most(gate);
    let up = -at_most(-at_most(up));
    let slope = f64::from(Epilogue::CLAMPED_SLOPE);
    sigmoid(gate.clone() * slope) * gate * (up + 1.0)
}

/// Returns indices on the device of `like`.
fn indices(values: Vec<i32>, like: &Tensor<2>) -> Tensor<1, Int> {
    let length = values.len();
    Tensor::from_data(TensorData::new(values, [length]), &like.device())
}
