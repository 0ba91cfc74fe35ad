//! Float tensors in host memory.

#[cfg(feature = "cubecl-runtime")]
use crate::backend::cube::{Reading, start_reading};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
#[cfg(feature = "cubecl-runtime")]
use burn_cubecl::CubeBackend;
use cubecl_environment::bytes::{Bytes, Reader};

/// A float tensor in host memory, or one that is being copied to host memory.
///
/// On CUDA, the memory is pinned and comes from CubeCL's pool. The device writes and reads pinned
/// memory directly, at the rate of its bus. Other memory would cost one more copy in each
/// direction.
pub struct HostTensor<const D: usize> {
    #[cfg(feature = "cubecl-runtime")]
    reading: Option<Reading>,
    /// The bytes of the tensor, shared with its uploads. Empty until the copy to the host is
    /// complete.
    bytes: Bytes,
    shape: Shape,
    dtype: DType,
}

/// The error for a tensor that cannot be read from the device.
#[derive(Debug, thiserror::Error)]
#[error("a tensor cannot be read from the device: {reason}")]
pub struct ReadError {
    /// The error of the device.
    pub reason: String,
}

fn unread(error: &impl ToString) -> ReadError {
    ReadError {
        reason: error.to_string(),
    }
}

impl<const D: usize> HostTensor<D> {
    /// Starts to copy a tensor to the host, after all work already submitted to its device. The
    /// tensor stays on the device until [`wait`](Self::wait) returns.
    ///
    /// # Errors
    /// The device failed.
    pub fn start(tensor: Tensor<D>) -> Result<Self, ReadError> {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        #[cfg(feature = "cubecl-runtime")]
        if let Ok(tensor) = tensor.clone().try_into_primitive::<burn::backend::Cube>() {
            let client = tensor.client.clone();
            let reading = start_reading(client.resolve_tensor_float::<CubeBackend>(tensor));
            return Ok(Self {
                reading: Some(reading),
                bytes: Bytes::from_bytes_vec(Vec::new()),
                shape,
                dtype,
            });
        }
        let data = tensor.try_into_data().map_err(|error| unread(&error))?;
        let bytes = data
            .bytes()
            .read(Reader::new())
            .map_err(|error| unread(&error))?
            .to_vec();
        Ok(Self {
            #[cfg(feature = "cubecl-runtime")]
            reading: None,
            bytes: Bytes::from_bytes_vec(bytes).shared(),
            shape,
            dtype,
        })
    }

    /// Waits until the tensor is on the host.
    ///
    /// # Errors
    /// The device failed, and the tensor is lost.
    pub fn wait(&mut self) -> Result<(), ReadError> {
        #[cfg(feature = "cubecl-runtime")]
        if let Some(reading) = self.reading.take() {
            self.bytes = reading.wait().map_err(|error| unread(&error))?.shared();
        }
        Ok(())
    }

    /// Copies the tensor to a device. The host keeps its copy.
    ///
    /// # Errors
    /// The errors of [`wait`](Self::wait).
    ///
    /// # Panics
    /// Panics if the tensor was lost in an earlier [`wait`](Self::wait).
    pub fn to_device(&mut self, device: &Device) -> Result<Tensor<D>, ReadError> {
        self.wait()?;
        let data = TensorData::from_bytes(self.bytes.clone(), self.shape.clone(), self.dtype);
        Ok(Tensor::from_data(data, (device, self.dtype)))
    }
}
