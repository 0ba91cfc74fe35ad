use std::array;

use burn::module::Module;
use burn::tensor::Tensor;
use marlin_kernels::Epilogue;

use super::{Projection, RmsNorm};

/// Projections of the same activations: q, k and v of attention, gate and up of an MLP, or one
/// projection alone.
///
/// One matmul with the outputs side by side if their formats allow it, otherwise one for each. The
/// outputs are the same either way.
#[derive(Module, Debug)]
pub struct ProjectionGroup {
    /// One, or as many as there are outputs.
    projections: Vec<Projection>,
    /// Features of each output.
    #[module(skip)]
    outputs: Vec<usize>,
    /// The operation on the outputs that is part of the matmul if it is one.
    #[module(skip)]
    epilogue: Epilogue,
}

impl ProjectionGroup {
    /// `projections` are one with all of `outputs` side by side, or one for each.
    pub(crate) fn new(
        projections: Vec<Projection>,
        outputs: Vec<usize>,
        epilogue: Epilogue,
    ) -> Self {
        Self {
            projections,
            outputs,
            epilogue,
        }
    }

    /// [.., K] to all outputs side by side, [.., sum of N].
    pub fn forward_joined<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self.projections.as_slice() {
            [joined] => joined.forward(x),
            projections => Tensor::cat(
                projections
                    .iter()
                    .map(|projection| projection.forward(x.clone()))
                    .collect(),
                D - 1,
            ),
        }
    }

    /// The epilogue of [`forward_joined`](Self::forward_joined) of the norm of `residual + x`, and
    /// that sum.
    pub fn forward_add_norm<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
        norm: &RmsNorm,
    ) -> (Tensor<D>, Tensor<D>) {
        match self.joined() {
            Some(joined) => joined.forward_add_norm(x, residual, norm, self.epilogue),
            None => {
                let (x, sum) = norm.forward_add(x, residual);
                (marlin_nn::apply(self.epilogue, self.forward_joined(x)), sum)
            }
        }
    }

    /// Outputs side by side [.., sum of N] to each output's [.., N].
    ///
    /// # Panics
    /// Panics if there are fewer outputs.
    pub fn split<const D: usize, const OUTPUTS: usize>(
        &self,
        joined: Tensor<D>,
    ) -> [Tensor<D>; OUTPUTS] {
        let mut end = 0;
        array::from_fn(|output| {
            let start = end;
            end += self.outputs[output];
            joined.clone().slice_dim(D - 1, start..end)
        })
    }

    /// The projection of all outputs, where they are one.
    pub fn joined(&self) -> Option<&Projection> {
        match self.projections.as_slice() {
            [joined] => Some(joined),
            _ => None,
        }
    }

    /// The projections: one, or one for each output.
    pub fn projections(&self) -> &[Projection] {
        &self.projections
    }

    /// The projections, to change them in place.
    pub(crate) fn projections_mut(&mut self) -> &mut [Projection] {
        &mut self.projections
    }

    /// Puts one projection with all outputs in the place of those there are.
    pub(crate) fn replace(&mut self, joined: Projection) {
        self.projections = vec![joined];
    }

    /// The operation on the outputs side by side that is part of the matmul if it is one.
    pub fn epilogue(&self) -> Epilogue {
        self.epilogue
    }

    /// Features of each output.
    pub fn outputs(&self) -> &[usize] {
        &self.outputs
    }
}
