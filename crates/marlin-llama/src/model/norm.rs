use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Tensor};

/// Root mean square norm: `x / sqrt(mean(x^2) + epsilon) * weight`, over the last dimension.
///
/// The normalisation is done in f32 and rounded to the activations' dtype before the weight is applied, as Hugging Face's Llama does; Burn's
/// own `RmsNorm` divides in the activations' dtype.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// `[hidden]`.
    pub weight: Param<Tensor<1>>,
    /// Added to the mean square.
    pub epsilon: f64,
}

impl RmsNorm {
    /// [.., hidden] to the same shape and dtype.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let dtype = FloatDType::from(x.dtype());
        let x = x.cast(FloatDType::F32);
        let rms = (x.clone().square().mean_dim(D - 1) + self.epsilon).sqrt();
        (x / rms).cast(dtype) * self.weight.val().unsqueeze()
    }
}
