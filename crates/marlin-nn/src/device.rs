//! Functions that tell how a device runs the operations of a decode step: as kernels, in Rust on
//! the host, or as Burn's operations.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_marlin::backend::activation_dtype;
use marlin_kernels::ActivationDtype;

/// Returns true if a device runs the operations of a step as kernels. Such a device belongs to a
/// CubeCL runtime, has the features that the kernels need, and has no autodiff.
/// [`burn::tensor::Graph::is_hardware`] tells whether the device also records the kernels as a
/// graph.
pub fn has_kernels(device: &Device) -> bool {
    runs_kernels(device, ActivationDtype::F32)
}

/// Returns true if a device's attention supports several rows of one sequence, as prompts have, in
/// activations of a dtype. These devices run kernels in this dtype; see [`has_kernels`].
pub fn takes_prompts(device: &Device, dtype: FloatDType) -> bool {
    activation_dtype(DType::from(dtype)).is_some_and(|dtype| runs_kernels(device, dtype))
}

/// The maximum number of rows of a pass that the attention kernels support. Their grids have a
/// block for each row along a dimension of 16 bits.
pub const MAX_PASS_ROWS: usize = u16::MAX as usize;

/// Returns true if a device attends to prompts of any length on tensor cores
/// ([`flash`](crate::kernels::flash)), in activations of a dtype and with heads of `head_dim`
/// features. On a device that only [`takes_prompts`], each row of a prompt reads the preceding keys
/// and values separately.
#[cfg_attr(
    not(feature = "cubecl-runtime"),
    allow(unused_variables, reason = "only CubeCL's runtimes run kernels")
)]
pub fn has_flash_attention(device: &Device, dtype: FloatDType, head_dim: usize) -> bool {
    #[cfg(feature = "cubecl-runtime")]
    if let (Some(dtype), Some(client)) = (
        activation_dtype(DType::from(dtype)),
        burn_marlin::device::client(device),
    ) {
        return runs_kernels(device, dtype)
            && crate::kernels::flash::takes(&marlin_kernels::Target::of(&client), dtype, head_dim);
    }
    false
}

/// Returns true if a device runs the operations of a step as kernels, in activations of a dtype.
/// See [`has_kernels`].
#[cfg_attr(
    not(feature = "cubecl-runtime"),
    allow(unused_variables, reason = "only CubeCL's runtimes run kernels")
)]
fn runs_kernels(device: &Device, dtype: ActivationDtype) -> bool {
    #[cfg(feature = "cubecl-runtime")]
    if let Some(client) = burn_marlin::device::client(device) {
        return match crate::kernels::lacks(&client, dtype) {
            None => true,
            Some(reason) => {
                tracing::debug!(%dtype, reason, "a step runs in Burn's operations");
                false
            }
        };
    }
    false
}

/// Returns true if a device is Flex without autodiff, which runs the operations of a step in Rust.
#[cfg_attr(
    not(feature = "flex"),
    allow(
        unused_variables,
        reason = "the device can only be Flex with that feature"
    )
)]
pub(crate) fn is_flex(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    if matches!(device.as_dispatch(), burn::backend::DispatchDevice::Flex(_)) {
        return !device.is_autodiff();
    }
    false
}

/// Returns true if a tensor's device runs the operations of a step as kernels or in Rust, in the
/// tensor's dtype.
pub(crate) fn takes<const D: usize>(x: &Tensor<D>) -> bool {
    let device = x.device();
    activation_dtype(x.dtype())
        .is_some_and(|dtype| is_flex(&device) || runs_kernels(&device, dtype))
}
