use burn::module::Module;

use super::ProjectionGroup;

/// SwiGLU (arXiv 2002.05202): `down(silu(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct SwiGlu {
    /// The gate and up projections, [hidden, intermediate] each.
    pub gate_up_proj: ProjectionGroup,
    /// [intermediate, hidden].
    pub down_proj: ProjectionGroup,
}
