//! Mixtures of experts.

use burn::module::{Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_marlin::experts::{QuantExperts, Router, dense_weights, gated};
use marlin_kernels::Epilogue;

use super::{Projection, SwiGlu, loaded};

/// The largest size of the outputs of all experts for some tokens, in bytes: more tokens of float
/// experts are computed in blocks.
const BLOCK_BYTES: usize = 1 << 28;

/// A feed-forward network whose router chooses some of many experts for each token.
#[derive(Module, Debug)]
pub struct Mixture {
    /// The router, [hidden, experts].
    pub router: Projection,
    /// The experts.
    pub experts: Experts,
    /// The expert that all tokens have, which Qwen 2's mixtures have.
    pub shared: Option<SharedExpert>,
}

/// The experts of a mixture.
#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one for each block, and Burn derives no module of a box"
)]
pub enum Experts {
    /// Float weights.
    Dense(DenseExperts),
    /// Quantised weights.
    Quant(QuantExperts),
}

/// Experts with float weights. All experts compute all tokens, and the outputs of those that the
/// router did not choose have a weight of 0: a reference, and the model that is trained and
/// quantised.
#[derive(Module, Debug)]
pub struct DenseExperts {
    /// The gate and up projections side by side, [experts, hidden, 2 x intermediate].
    pub gate_up: Param<Tensor<3>>,
    /// The down projections, [experts, intermediate, hidden].
    pub down: Param<Tensor<3>>,
    /// The biases of the gate and up projections, [experts, 2 x intermediate].
    pub gate_up_bias: Option<Param<Tensor<2>>>,
    /// The biases of the down projections, [experts, hidden].
    pub down_bias: Option<Param<Tensor<2>>>,
    /// How experts are chosen and weighted.
    #[module(skip)]
    pub router: Router,
    /// What is computed from gates and ups.
    #[module(skip)]
    pub epilogue: Epilogue,
}

/// An expert that all tokens have, weighted by the sigmoid of its gate.
#[derive(Module, Debug)]
pub struct SharedExpert {
    /// The gate, [hidden, 1].
    pub gate: Projection,
    /// The multilayer perceptron.
    pub mlp: SwiGlu,
}

impl Mixture {
    /// Returns the weighted sum [.., hidden] of each token's experts, for activations
    /// [.., hidden] and the router's logits [.., experts].
    pub fn forward<const D: usize>(&self, x: Tensor<D>, logits: Tensor<D>) -> Tensor<D> {
        let shared = self.shared.as_ref().map(|shared| shared.forward(x.clone()));
        let out = self.experts.forward(x, logits);
        match shared {
            Some(shared) => out + shared,
            None => out,
        }
    }
}

impl SharedExpert {
    fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let weight = sigmoid(self.gate.forward(x.clone()));
        self.mlp.forward(x) * weight
    }
}

impl Experts {
    /// Returns the weighted sum [.., hidden] of each token's experts, for activations [.., hidden]
    /// and the router's logits [.., experts].
    pub fn forward<const D: usize>(&self, x: Tensor<D>, logits: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Dense(experts) => experts.forward(x, logits),
            Self::Quant(experts) => experts.forward(x, logits),
        }
    }

    /// Returns how experts are chosen and weighted.
    pub fn router(&self) -> Router {
        match self {
            Self::Dense(experts) => experts.router,
            Self::Quant(experts) => experts.router(),
        }
    }

    /// Converts quantised weights to float weights in `dtype`.
    pub(crate) fn dequantize(&mut self, dtype: FloatDType) {
        if let Self::Quant(experts) = self {
            let [gate_up, down] = experts.dequantize(dtype).map(loaded);
            let [gate_up_bias, down_bias] = DenseExperts::biases(experts.biases());
            *self = Self::Dense(DenseExperts {
                gate_up,
                down,
                gate_up_bias,
                down_bias,
                router: experts.router(),
                epilogue: experts.epilogue(),
            });
        }
    }
}

impl DenseExperts {
    /// Returns biases as parameters.
    pub(crate) fn biases(biases: Option<[Tensor<2>; 2]>) -> [Option<Param<Tensor<2>>>; 2] {
        match biases {
            Some(biases) => biases.map(|bias| Some(loaded(bias))),
            None => [None, None],
        }
    }

    /// Returns the weighted sum [.., hidden] of each token's experts, for activations [.., hidden]
    /// and the router's logits [.., experts].
    pub fn forward<const D: usize>(&self, x: Tensor<D>, logits: Tensor<D>) -> Tensor<D> {
        let shape = x.dims();
        let [experts, hidden, both] = self.gate_up.val().dims();
        let dtype = FloatDType::from(x.dtype());
        let x = x.reshape([-1, hidden as i32]);
        let weights = dense_weights(&self.router, logits.reshape([-1, experts as i32]));
        let token_bytes = experts * (both + hidden) * DType::from(dtype).size();
        let most = (BLOCK_BYTES / token_bytes.max(1)).max(1);
        let tokens = x.dims()[0];
        if tokens == 0 {
            return x.reshape(shape);
        }
        let mut parts = Vec::new();
        for start in (0..tokens).step_by(most) {
            let rows = start..tokens.min(start + most);
            parts.push(self.block(
                x.clone().slice_dim(0, rows.clone()),
                weights.clone().slice_dim(0, rows),
            ));
        }
        Tensor::cat(parts, 0).reshape(shape)
    }

    /// Computes the tokens of a block, [tokens, hidden], with weights [tokens, experts] in f32.
    fn block(&self, x: Tensor<2>, weights: Tensor<2>) -> Tensor<2> {
        let dtype = FloatDType::from(x.dtype());
        let [experts, hidden, both] = self.gate_up.val().dims();
        let tokens = x.dims()[0];
        let x = x
            .reshape([1, tokens, hidden])
            .expand([experts, tokens, hidden]);
        let biased = |x: Tensor<3>, bias: &Option<Param<Tensor<2>>>| match bias {
            Some(bias) => x + bias.val().unsqueeze_dim(1),
            None => x,
        };
        let gate_up = biased(products(x, self.gate_up.val()), &self.gate_up_bias);
        let gate = gate_up.clone().narrow(2, 0, both / 2);
        let up = gate_up.narrow(2, both / 2, both / 2);
        let gated = gated(self.epilogue, gate, up);
        let outputs = biased(products(gated, self.down.val()), &self.down_bias);
        let weights = weights.transpose().reshape([experts, tokens, 1]);
        let sum = (outputs.cast(FloatDType::F32) * weights).sum_dim(0);
        sum.reshape([tokens, hidden]).cast(dtype)
    }
}

/// Multiplies rows [experts, tokens, K] by the matrices [experts, K, N] of their experts, without
/// autotuning: for some numbers of tokens, Burn's autotuned matmul fails in 16 bits on CUDA.
fn products(x: Tensor<3>, weight: Tensor<3>) -> Tensor<3> {
    marlin_nn::matmul(x.unsqueeze_dim(0), weight.unsqueeze_dim(0)).squeeze_dim(0)
}
