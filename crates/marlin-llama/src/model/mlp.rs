use burn::module::Module;
use burn::tensor::Tensor;
use marlin_decode as decode;

use super::{Projection, ProjectionGroup};

/// SwiGLU (arXiv 2002.05202): `down(silu(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct Mlp {
    /// Gate and up, [hidden, intermediate] each.
    pub gate_up_proj: ProjectionGroup,
    /// [intermediate, hidden].
    pub down_proj: Projection,
}

impl Mlp {
    /// [.., hidden] to the same shape.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.down_proj
            .forward(decode::silu_mul(self.gate_up_proj.forward_joined(x)))
    }
}
