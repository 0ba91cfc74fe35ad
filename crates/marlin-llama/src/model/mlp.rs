use burn::module::Module;
use burn::tensor::{Tensor, activation};

use super::Projection;

/// SwiGLU (arXiv 2002.05202): `down(silu(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct Mlp {
    /// [hidden, intermediate].
    pub gate_proj: Projection,
    /// [hidden, intermediate].
    pub up_proj: Projection,
    /// [intermediate, hidden].
    pub down_proj: Projection,
}

impl Mlp {
    /// [batch, seq, hidden] to the same shape.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let gate = activation::silu(self.gate_proj.forward(x.clone()));
        self.down_proj.forward(gate * self.up_proj.forward(x))
    }
}
