//! Weights of the experts of a mixture: several matrices of one shape in one tensor each.

use super::tensors::{DeviceTensors, HostTensors};
use super::{QuantizedWeight, round_for_tensor_cores};
use crate::Error;
use crate::device::scale_dtype;
use burn::module::{Param, ParamId};
use burn::tensor::{Device, Int, Tensor};
use marlin_format::PlainWeight;
use marlin_kernels::ActivationDtype;

impl QuantizedWeight {
    /// Puts the matrices [K, N] of experts on a device, one below the other. A 2:4 matrix becomes
    /// dense. If some of the matrices have act-order, the others get a permutation that keeps their
    /// rows.
    ///
    /// # Errors
    /// [`Error::NoExperts`], and [`Error::ExpertFormats`] if the matrices differ in their shape or
    /// format.
    pub(crate) fn from_experts(
        experts: Vec<PlainWeight>,
        activations: ActivationDtype,
        device: &Device,
    ) -> Result<Self, Error> {
        let mut experts: Vec<PlainWeight> =
            experts.into_iter().map(PlainWeight::into_dense).collect();
        round_for_tensor_cores(&mut experts, activations, device);
        let count = experts.len();
        let permuted = experts
            .iter()
            .any(|expert| expert.row_permutation().is_some());
        let described = |expert: &PlainWeight| expert.descriptor().with_permutation(permuted);
        let first = experts.first().map(described).ok_or(Error::NoExperts)?;
        if let Some(expert) = experts.iter().position(|expert| described(expert) != first) {
            return Err(Error::ExpertFormats {
                expert,
                expected: first.to_string(),
                found: described(&experts[expert]).to_string(),
            });
        }
        let mut tensors = HostTensors::default();
        tensors.reserve(&first.with_experts(count));
        for expert in experts {
            tensors.push(expert, permuted);
        }
        let descriptor = first.with_experts(count);
        let dtype = scale_dtype(descriptor.spec().scales.dtype, device);
        let tensors = DeviceTensors::from_host(&descriptor, tensors, dtype, device);
        Ok(Self::new(tensors, descriptor, activations).laid_out())
    }

    /// Returns the number of matrices [K, N]: the experts of a mixture, 1 for other weights.
    pub fn experts(&self) -> usize {
        self.descriptor.experts
    }

    /// Returns the matrix of an expert as a weight of its own. On most devices it shares the memory
    /// of the weight of all experts.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub(crate) fn expert(&self, expert: usize) -> Self {
        let count = self.experts();
        assert!(expert < count, "expert {expert} of {count}");
        let one = self.descriptor.with_experts(1);
        let shapes = one.tensors().map(|_, tensor| tensor.matrix_shape());
        let rows = |count: usize| expert * count..(expert + 1) * count;
        let words = |tensor: &Param<Tensor<2, Int>>, [count, _]: [usize; 2]| {
            Param::initialized(ParamId::new(), tensor.val().slice_dim(0, rows(count)))
        };
        let tensors = &self.tensors;
        let scales = tensors.scales.val().slice_dim(0, rows(shapes.scales[0]));
        let tensors = DeviceTensors {
            qweight: words(&tensors.qweight, shapes.qweight),
            metadata: None,
            scales: Param::initialized(ParamId::new(), scales),
            zero_points: tensors
                .zero_points
                .as_ref()
                .zip(shapes.zero_points)
                .map(|(zeros, shape)| words(zeros, shape)),
            row_permutation: tensors.row_permutation.as_ref().map(|permutation| {
                let permutation = permutation.val().slice_dim(0, rows(one.k));
                Param::initialized(ParamId::new(), permutation)
            }),
        };
        Self::new(tensors, one, self.activations)
    }
}
