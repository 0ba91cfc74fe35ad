//! A mixture of experts of Burn's own tensors ([`FloatMixture`]), and the same with quantised
//! experts ([`QuantMixture`]).

mod error;

pub use error::MixtureError;

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_marlin::QuantSpec;
use burn_marlin::experts::{ExpertPaths, QuantExperts, Router, RouterScores};
use std::time::{Duration, Instant};

/// The sizes of a mixture.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Features of a token.
    pub hidden: usize,
    /// Features of a gate and an up of an expert.
    pub intermediate: usize,
    /// The number of experts.
    pub experts: usize,
    /// The number of experts of a token.
    pub top_k: usize,
}

impl Sizes {
    /// Returns the router: the softmax of the chosen logits.
    fn router(&self) -> Router {
        Router {
            experts: self.experts,
            top_k: self.top_k,
            scores: RouterScores::Softmax,
            normalises: true,
        }
    }
}

/// A mixture with float experts, as a user of Burn might write it: all experts compute all tokens,
/// and those that the router did not choose have a weight of 0.
#[derive(Module, Debug)]
pub struct FloatMixture {
    router: Linear,
    /// Gates and ups side by side, [experts, hidden, 2 x intermediate].
    gate_up: Param<Tensor<3>>,
    /// [experts, intermediate, hidden].
    down: Param<Tensor<3>>,
    #[module(skip)]
    top_k: usize,
}

impl FloatMixture {
    /// Creates a mixture of random weights.
    pub fn random(sizes: &Sizes, dtype: FloatDType, device: &Device) -> Self {
        let Sizes {
            hidden,
            intermediate,
            experts,
            top_k,
        } = *sizes;
        let random = |shape: [usize; 3]| {
            let bound = 1.0 / (shape[1] as f64).sqrt();
            let values = Tensor::<3>::random(shape, Distribution::Uniform(-bound, bound), device);
            Param::initialized(ParamId::new(), values.cast(dtype))
        };
        let router = LinearConfig::new(hidden, experts)
            .with_bias(false)
            .init(device);
        Self {
            router: Linear {
                weight: router.weight.map(|weight| weight.cast(dtype)),
                bias: None,
            },
            gate_up: random([experts, hidden, 2 * intermediate]),
            down: random([experts, intermediate, hidden]),
            top_k,
        }
    }

    /// Returns the weighted sums [tokens, hidden] of each token's experts.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let dtype = FloatDType::from(x.dtype());
        let [experts, hidden, both] = self.gate_up.val().dims();
        let tokens = x.dims()[0];
        let logits = self.router.forward(x.clone()).cast(FloatDType::F32);
        let (best, chosen) = logits.clone().topk_with_indices(self.top_k, 1);
        let weights = Tensor::<2>::zeros([tokens, experts], &x.device())
            .cast(FloatDType::F32)
            .scatter(
                1,
                chosen,
                softmax(best, 1),
                burn::tensor::IndexingUpdateOp::Add,
            );
        let x = x
            .reshape([1, tokens, hidden])
            .expand([experts, tokens, hidden]);
        let gate_up = x.matmul(self.gate_up.val());
        let (gate, up) = (
            gate_up.clone().narrow(2, 0, both / 2),
            gate_up.narrow(2, both / 2, both / 2),
        );
        let outputs = (silu(gate) * up).matmul(self.down.val());
        let weights = weights.transpose().reshape([experts, tokens, 1]);
        let sums = (outputs.cast(FloatDType::F32) * weights).sum_dim(0);
        sums.reshape([tokens, hidden]).cast(dtype)
    }

    /// Returns the bytes of the experts' weights.
    pub fn expert_bytes(&self) -> usize {
        [&self.gate_up, &self.down]
            .map(|weight| weight.val().shape().num_elements() * weight.val().dtype().size())
            .iter()
            .sum()
    }
}

/// The mixture with quantised experts: a token is multiplied by the experts that the router chose.
#[derive(Module, Debug)]
pub struct QuantMixture {
    router: Linear,
    experts: QuantExperts,
}

impl QuantMixture {
    /// Rounds the experts of a mixture; the router stays float.
    ///
    /// # Errors
    /// The errors of [`QuantExperts::from_model`].
    pub fn quantize(
        mixture: &FloatMixture,
        sizes: &Sizes,
        spec: &QuantSpec,
    ) -> Result<Self, MixtureError> {
        let paths = ExpertPaths::Joined {
            gate_up: "gate_up",
            down: "down",
        };
        Ok(Self {
            router: mixture.router.clone(),
            experts: QuantExperts::from_model(mixture, sizes.router(), paths, spec)?,
        })
    }

    /// Returns the weighted sums [tokens, hidden] of each token's experts.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.experts.forward(x.clone(), self.router.forward(x))
    }

    /// Returns the bytes of the experts' weights.
    pub fn expert_bytes(&self) -> usize {
        self.experts.size_bytes()
    }
}

/// The float mixture and the quantised one on the same tokens.
#[derive(Debug)]
pub struct Comparison {
    /// The bytes of the experts' weights, before and after.
    pub bytes: [usize; 2],
    /// The median time of a forward pass, before and after.
    pub times: [Duration; 2],
    /// The norm of the difference of the outputs, relative to that of the float outputs.
    pub relative_error: f64,
}

/// Runs a mixture of random weights with float and with quantised experts, `runs` times each.
///
/// # Errors
/// A [`MixtureError`] for sizes or a format that no kernel supports, and if the device fails.
pub fn compare(
    sizes: &Sizes,
    tokens: usize,
    spec: &QuantSpec,
    dtype: FloatDType,
    runs: usize,
    device: &Device,
) -> Result<Comparison, MixtureError> {
    if tokens == 0 || runs == 0 {
        return Err(MixtureError::Zero);
    }
    device.seed(1);
    let float = FloatMixture::random(sizes, dtype, device);
    let quant = QuantMixture::quantize(&float, sizes, spec)?;
    let x = Tensor::<2>::random([tokens, sizes.hidden], Distribution::Default, device).cast(dtype);
    let (before, before_time) = timed(|| float.forward(x.clone()), runs, device)?;
    let (after, after_time) = timed(|| quant.forward(x.clone()), runs, device)?;
    let norm =
        |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let difference = norm(&mut before.iter().zip(&after).map(|(a, b)| f64::from(a - b)));
    let size = norm(&mut before.iter().map(|&value| value.into()));
    Ok(Comparison {
        bytes: [float.expert_bytes(), quant.expert_bytes()],
        times: [before_time, after_time],
        relative_error: (difference / size).sqrt(),
    })
}

/// Returns the outputs of a forward pass, and the median time of `runs` more.
fn timed(
    forward: impl Fn() -> Tensor<2>,
    runs: usize,
    device: &Device,
) -> Result<(Vec<f32>, Duration), MixtureError> {
    let failed = |error: String| MixtureError::Run { reason: error };
    let outputs = forward().cast(FloatDType::F32).try_into_vec_as::<f32>();
    let outputs = outputs.map_err(|error| failed(error.to_string()))?;
    let mut times = Vec::with_capacity(runs);
    for _ in 0..runs {
        let start = Instant::now();
        drop(forward());
        device.sync().map_err(|error| failed(error.to_string()))?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok((outputs, times[runs / 2]))
}
