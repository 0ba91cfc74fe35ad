//! The hidden states of the samples of a calibration, between the parts of blocks that they pass.

use burn::tensor::{Bytes, Device, Tensor, TensorData};
use burn_marlin::device::target;
use cubecl::bytes::Reader;
use marlin_kernels::Runtime;
use rayon::prelude::*;

/// Bytes of hidden states that stay on a device. For a model with 4,096 features in 16 bits they are those of 164,000 tokens.
const DEVICE_BYTES: usize = 5 << 28;

/// Bytes that a thread copies at a time.
const COPY_BYTES: usize = 1 << 20;

/// Hidden states [samples, seq, hidden] of a batch of samples, on the device or in host memory until they are looked at.
pub(super) enum Hidden {
    OnDevice(Tensor<3>),
    /// Bytes that uploads share: none copies them before.
    OnHost(TensorData),
}

impl Hidden {
    /// On the device if they take no more than its `room`, from which they are taken then.
    ///
    /// # Errors
    /// What the device says where it fails.
    pub(super) fn new(states: Tensor<3>, room: &mut usize) -> Result<Self, String> {
        let bytes = states.shape().num_elements() * states.dtype().size();
        match room.checked_sub(bytes) {
            Some(rest) => {
                *room = rest;
                Ok(Self::OnDevice(states))
            }
            None => Ok(Self::OnHost(to_host(states)?)),
        }
    }

    /// The hidden states on the device.
    pub(super) fn get(&self, device: &Device) -> Tensor<3> {
        match self {
            Self::OnDevice(states) => states.clone(),
            Self::OnHost(data) => Tensor::from_data(data.clone(), (device, data.dtype())),
        }
    }

    /// Puts others in their place.
    ///
    /// # Errors
    /// What the device says where it fails.
    pub(super) fn set(&mut self, states: Tensor<3>) -> Result<(), String> {
        match self {
            Self::OnDevice(before) => *before = states,
            Self::OnHost(before) => *before = to_host(states)?,
        }
        Ok(())
    }
}

/// Bytes that a device has room for, of hidden states that take `bytes` for each of two models: those of the first, and what is left then for the second. The host
/// has no other place to keep them.
pub(super) fn rooms(device: &Device, bytes: usize) -> [usize; 2] {
    match target(device).runtime {
        Runtime::Flex | Runtime::Cpu => [usize::MAX; 2],
        _ => [DEVICE_BYTES, DEVICE_BYTES.saturating_sub(bytes)],
    }
}

/// Hidden states in memory of the host. What the device's runtime reads them into is its own, and keeps the tensor.
fn to_host(states: Tensor<3>) -> Result<TensorData, String> {
    let dtype = states.dtype();
    let data = states.try_into_data().map_err(|error| error.to_string())?;
    let read = data.bytes().read(Reader::new()).map_err(|error| error.to_string())?;
    let mut bytes = vec![0; read.len()];
    bytes.par_chunks_mut(COPY_BYTES).zip(read.par_chunks(COPY_BYTES)).for_each(|(to, from)| to.copy_from_slice(from));
    let shared = Bytes::from_bytes_vec(bytes).shared();
    Ok(TensorData::from_bytes(shared, data.shape().clone(), dtype))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{DType, Distribution};

    #[test]
    fn hidden_states_stay_where_there_is_room_and_are_the_same() {
        let device = Device::flex();
        let states = |dtype: DType| Tensor::<3>::random([2, 3, 8], Distribution::Default, (&device, dtype));
        // Room for a batch of f32, and not for another.
        let mut room = 200;
        for (dtype, stays) in [(DType::F32, true), (DType::F32, false), (DType::F16, false)] {
            let (first, second) = (states(dtype), states(dtype));
            let mut hidden = Hidden::new(first.clone(), &mut room).unwrap();
            assert_eq!(matches!(hidden, Hidden::OnDevice(_)), stays);
            assert_eq!((hidden.get(&device).to_data(), room), (first.to_data(), 8));
            hidden.set(second.clone()).unwrap();
            assert_eq!(hidden.get(&device).to_data(), second.to_data());
            assert_eq!(matches!(hidden, Hidden::OnDevice(_)), stays);
        }
    }
}
