//! The hidden states of the samples of a calibration, between the parts of blocks that they pass.

use burn::tensor::{Device, Tensor};
use burn_marlin::device::target;
use burn_marlin::host::{HostTensor, ReadError};
use marlin_kernels::Runtime;

use crate::LlamaError;
use crate::model;

/// Bytes of the samples' hidden states that stay on a device while
/// [`quantize_folder`](crate::quantize_folder) looks at data. For a model with 4,096 features in 16
/// bits they are those of 229,000 tokens.
///
/// The samples that quantisers are given by default, 128 of 2,048 tokens, have 4.3 GB of them in
/// both models: 2.4 GB are on the host then, which is to need no more than 4 GB for all. A block
/// looks at each of these four times and writes it twice.
pub const HIDDEN_STATES_ON_DEVICE: usize = 7 << 28;

/// Hidden states [samples, seq, hidden] of a batch of samples, on the device or in memory of the
/// host until they are looked at.
pub(super) enum Hidden {
    OnDevice(Tensor<3>),
    OnHost(HostTensor<3>),
}

impl Hidden {
    /// On the device if they take no more than its `room`, from which they are taken then.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn new(states: Tensor<3>, room: &mut usize) -> Result<Self, ReadError> {
        let bytes = states.shape().num_elements() * states.dtype().size();
        match room.checked_sub(bytes) {
            Some(rest) => {
                *room = rest;
                Ok(Self::OnDevice(states))
            }
            None => Ok(Self::OnHost(HostTensor::start(states)?)),
        }
    }

    /// The hidden states on the device.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn get(&mut self, device: &Device) -> Result<Tensor<3>, ReadError> {
        match self {
            Self::OnDevice(states) => Ok(states.clone()),
            Self::OnHost(states) => states.to_device(device),
        }
    }

    /// Puts others in their place. On the host they are there after [`arrive`](Self::arrive), and
    /// the device has no place for others until then.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn set(&mut self, states: Tensor<3>) -> Result<(), ReadError> {
        match self {
            Self::OnDevice(before) => *before = states,
            Self::OnHost(before) => *before = HostTensor::start(states)?,
        }
        Ok(())
    }

    /// Waits until they are where they stay.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn arrive(&mut self) -> Result<(), ReadError> {
        match self {
            Self::OnDevice(_) => Ok(()),
            Self::OnHost(states) => states.wait(),
        }
    }
}

#[cfg(test)]
thread_local! {
    /// Bytes that a device has room for in a test, on which all are on the device otherwise.
    pub(crate) static ROOM: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

/// Bytes that a device has room for, of hidden states that take `bytes` for each of two models:
/// those of the first, and what is left then for the second. The host has no other place to keep
/// them.
pub(super) fn rooms(device: &Device, bytes: usize) -> [usize; 2] {
    #[cfg(test)]
    if let Some(room) = ROOM.get() {
        return [room, room.saturating_sub(bytes)];
    }
    match target(device).runtime {
        Runtime::Flex | Runtime::Cpu => [usize::MAX; 2],
        _ => [
            HIDDEN_STATES_ON_DEVICE,
            HIDDEN_STATES_ON_DEVICE.saturating_sub(bytes),
        ],
    }
}

/// Samples of one length.
pub(super) struct Batch {
    pub(super) tokens: usize,
    /// Their hidden states as the quantised layers have left them.
    pub(super) quantized: Hidden,
    /// As the float layers have, where the quantiser looks at data.
    pub(super) float: Option<Hidden>,
    /// Its tokens as rows of prompts, on devices with flash attention.
    pub(super) rows: Option<model::Batch>,
}

impl Batch {
    pub(super) fn quantized(&mut self) -> Option<&mut Hidden> {
        Some(&mut self.quantized)
    }

    pub(super) fn float(&mut self) -> Option<&mut Hidden> {
        self.float.as_mut()
    }
}

/// The error of hidden states that the device did not return, in a block or a layer.
pub(super) fn unread(at: &str, error: &ReadError) -> LlamaError {
    LlamaError::HiddenStates {
        block: at.into(),
        reason: error.reason.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{DType, Distribution};

    #[test]
    fn hidden_states_stay_where_there_is_room_and_are_the_same() {
        let device = Device::flex();
        let states =
            |dtype: DType| Tensor::<3>::random([2, 3, 8], Distribution::Default, (&device, dtype));
        // Room for a batch of f32, and not for another.
        let mut room = 200;
        for (dtype, stays) in [(DType::F32, true), (DType::F32, false), (DType::F16, false)] {
            let (first, second) = (states(dtype), states(dtype));
            let mut hidden = Hidden::new(first.clone(), &mut room).unwrap();
            assert_eq!(matches!(hidden, Hidden::OnDevice(_)), stays);
            assert_eq!(
                (hidden.get(&device).unwrap().to_data(), room),
                (first.to_data(), 8)
            );
            hidden.set(second.clone()).unwrap();
            assert_eq!(hidden.get(&device).unwrap().to_data(), second.to_data());
            assert_eq!(matches!(hidden, Hidden::OnDevice(_)), stays);
        }
    }
}
