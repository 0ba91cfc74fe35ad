use burn::module::Module;
use burn::tensor::Tensor;

use super::ProjectionGroup;

/// SwiGLU (arXiv 2002.05202): `down(silu(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct SwiGlu {
    /// The gate and up projections, [hidden, intermediate] each.
    pub gate_up_proj: ProjectionGroup,
    /// [intermediate, hidden].
    pub down_proj: ProjectionGroup,
}

impl SwiGlu {
    /// Maps activations [.., hidden] to [.., hidden].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let gate_up = self.gate_up_proj.forward_joined(x);
        let gated = marlin_nn::apply(self.gate_up_proj.epilogue(), gate_up);
        self.down_proj.forward_joined(gated)
    }
}
