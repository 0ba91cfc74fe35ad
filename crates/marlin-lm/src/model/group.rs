use std::array;

use burn::module::Module;
use burn::tensor::Tensor;
use marlin_kernels::Epilogue;

use super::{Projection, RmsNorm};

/// Projections of the same activations: q, k and v of attention, gate and up of an MLP, or one
/// projection alone.
///
/// The group is one matmul with all outputs side by side if the formats allow it, otherwise one
/// matmul for each output. The outputs are the same either way.
#[derive(Module, Debug)]
pub struct ProjectionGroup {
    /// The matmuls: one, or one for each output.
    projections: Vec<Projection>,
    /// The number of features of each output.
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

    /// Applies the projections to inputs [.., K], and returns all outputs side by side,
    /// [.., sum of N].
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

    /// Applies [`forward_joined`](Self::forward_joined) and then the epilogue to the norm of
    /// `residual + x`. Returns the output of the epilogue, and the sum `residual + x`.
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

    /// Splits outputs side by side, [.., sum of N], into one tensor [.., N] for each output.
    ///
    /// # Panics
    /// Panics if the group has fewer outputs than `OUTPUTS`.
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

    /// Returns the projection of all outputs, if there is only one.
    pub fn joined(&self) -> Option<&Projection> {
        match self.projections.as_slice() {
            [joined] => Some(joined),
            _ => None,
        }
    }

    /// Returns the projections: one, or one for each output.
    pub fn projections(&self) -> &[Projection] {
        &self.projections
    }

    /// Returns the projections, to be changed in place.
    pub(crate) fn projections_mut(&mut self) -> &mut [Projection] {
        &mut self.projections
    }

    /// Replaces the projections by one projection with all outputs.
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
