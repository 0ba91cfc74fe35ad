//! The devices that have the parts of a decode step as kernels or as Rust on the host.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_marlin::backend::activation_dtype;
use marlin_kernels::ActivationDtype;

/// Returns true if a device runs the parts of a step as kernels: a CubeCL runtime that has the
/// features they need, without autodiff. [`burn::tensor::Graph::is_hardware`] tells whether it also
/// records them as a graph.
pub fn has_kernels(device: &Device) -> bool {
    runs_kernels(device, ActivationDtype::F32)
}

/// Returns true if a device's attention takes rows of which several are of one sequence, as those
/// of prompts are, in activations of a dtype: one that [`has_kernels`].
pub fn takes_prompts(device: &Device, dtype: FloatDType) -> bool {
    activation_dtype(DType::from(dtype)).is_some_and(|dtype| runs_kernels(device, dtype))
}

/// The most rows of a pass that the kernels of attention take: their grids have a block for each
/// along a dimension of 16 bits.
pub const MAX_PASS_ROWS: usize = u16::MAX as usize;

/// Returns true if a device attends to prompts of any length on tensor cores
/// ([`flash`](crate::kernels::flash)), in activations of a dtype and with heads of `head_dim`
/// features. Where it only [`takes_prompts`], every row reads the positions before it by itself.
#[cfg_attr(
    not(feature = "cubecl-runtime"),
    allow(unused_variables, reason = "only CubeCL's runtimes run kernels")
)]
pub fn has_flash_attention(device: &Device, dtype: FloatDType, head_dim: usize) -> bool {
    #[cfg(feature = "cubecl-runtime")]
    if let (Some(dtype), Some(client)) = (
        activation_dtype(DType::from(dtype)),
        crate::ops::cube::client(device),
    ) {
        return runs_kernels(device, dtype)
            && crate::kernels::flash::takes(&client, dtype, head_dim);
    }
    false
}

/// As [`has_kernels`], for activations of a dtype.
#[cfg_attr(
    not(feature = "cubecl-runtime"),
    allow(unused_variables, reason = "only CubeCL's runtimes run kernels")
)]
fn runs_kernels(device: &Device, dtype: ActivationDtype) -> bool {
    #[cfg(feature = "cubecl-runtime")]
    if !device.is_autodiff()
        && let Some(client) = crate::ops::cube::client(device)
    {
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

/// Returns true if a device is Flex without autodiff, which has the parts of a step in Rust.
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

/// Returns true if the tensor's device has the parts of a step, as kernels or in Rust, for the
/// tensor's dtype.
pub(crate) fn takes<const D: usize>(x: &Tensor<D>) -> bool {
    let device = x.device();
    activation_dtype(x.dtype())
        .is_some_and(|dtype| is_flex(&device) || runs_kernels(&device, dtype))
}
