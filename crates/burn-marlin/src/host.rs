//! Float tensors that wait in memory of the host.

#[cfg(feature = "cubecl-runtime")]
use crate::backend::cube::{Reading, start_reading};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
#[cfg(feature = "cubecl-runtime")]
use burn_cubecl::CubeBackend;
use cubecl::bytes::{Bytes, Reader};

/// A float tensor in memory of the host, on its way there at first.
///
/// On CUDA that memory is pinned, from CubeCL's pool of it: the device writes and reads it by
/// itself, at the rate of its bus. Other memory would cost a copy more each way.
pub struct HostTensor<const D: usize> {
    #[cfg(feature = "cubecl-runtime")]
    reading: Option<Reading>,
    /// Shared with the uploads of it. Empty until it is there.
    bytes: Bytes,
    shape: Shape,
    dtype: DType,
}

/// A tensor that the device did not return.
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
    /// Starts to copy a tensor to the host, after the work given to its device before. The device
    /// keeps the tensor until [`wait`](Self::wait).
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

    /// The tensor on a device. The host keeps it, too.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    ///
    /// # Panics
    /// Panics if the tensor was lost before.
    pub fn to_device(&mut self, device: &Device) -> Result<Tensor<D>, ReadError> {
        self.wait()?;
        let data = TensorData::from_bytes(self.bytes.clone(), self.shape.clone(), self.dtype);
        Ok(Tensor::from_data(data, (device, self.dtype)))
    }
}
