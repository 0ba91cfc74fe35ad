//! Token ids on a device.

use burn::tensor::{Device, Int, Tensor, TensorData};

/// Returns token ids as an integer tensor of `shape` [batch, seq] on a device.
pub(crate) fn token_tensor(tokens: &[u32], shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(
        TensorData::new(
            tokens.iter().map(|&token| i64::from(token)).collect(),
            shape,
        ),
        device,
    )
}
