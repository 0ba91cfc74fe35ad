use burn::module::Module;
use burn::tensor::{Tensor, activation};

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
    /// [batch, seq, hidden] to the same shape.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [gate, up] = self.gate_up_proj.forward(x);
        self.down_proj.forward(activation::silu(gate) * up)
    }
}
