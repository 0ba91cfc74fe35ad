//! The hidden states of calibration samples, between the parts of blocks.

use burn::tensor::{Device, Tensor};
use burn_marlin::device::is_host;
use burn_marlin::host::{HostTensor, ReadError};

use crate::ModelError;
use crate::model;

/// The bytes of the samples' hidden states that stay on a device while
/// [`quantize_folder`](crate::quantize_folder) calibrates. For a model with 4,096 features in 16
/// bits this is enough for 229,000 tokens.
///
/// The default samples, 128 of 2,048 tokens, have 4.3 GB of hidden states in both models together.
/// Of these, 2.4 GB are on the host, which should need no more than 4 GB in total. A block reads
/// each hidden state on the host four times and writes it twice.
pub const HIDDEN_STATES_ON_DEVICE: usize = 7 << 28;

/// The hidden states [samples, seq, hidden] of a batch of samples, on the device, or in host memory
/// until they are used.
pub(super) enum Hidden {
    OnDevice(Tensor<3>),
    OnHost(HostTensor<3>),
}

impl Hidden {
    /// Keeps hidden states on the device if they take no more than `budget` bytes, and then
    /// subtracts their size from `budget`; otherwise moves them to the host.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn new(states: Tensor<3>, budget: &mut usize) -> Result<Self, ReadError> {
        let bytes = states.shape().num_elements() * states.dtype().size();
        match budget.checked_sub(bytes) {
            Some(rest) => {
                *budget = rest;
                Ok(Self::OnDevice(states))
            }
            None => Ok(Self::OnHost(HostTensor::start(states)?)),
        }
    }

    /// Returns the hidden states on the device.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn get(&mut self, device: &Device) -> Result<Tensor<3>, ReadError> {
        match self {
            Self::OnDevice(states) => Ok(states.clone()),
            Self::OnHost(states) => states.to_device(device),
        }
    }

    /// Replaces the hidden states. On the host the new ones are complete after
    /// [`arrive`](Self::arrive), and until then the device has no room for further ones.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn set(&mut self, states: Tensor<3>) -> Result<(), ReadError> {
        match self {
            Self::OnDevice(before) => *before = states,
            Self::OnHost(before) => *before = HostTensor::start(states)?,
        }
        Ok(())
    }

    /// Waits until the hidden states are in their final place.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn arrive(&mut self) -> Result<(), ReadError> {
        match self {
            Self::OnDevice(_) => Ok(()),
            Self::OnHost(states) => states.wait(),
        }
    }
}

#[cfg(test)]
thread_local! {
    /// The bytes that a device has room for in a test. Without it all hidden states of a test stay
    /// on the device.
    pub(crate) static BUDGET: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

/// Returns the bytes of hidden states that stay on a device for each of two models whose hidden
/// states take `bytes` each: the budget of the first model, and the rest for the second. On a CPU
/// all stay on the device, which is the host itself.
pub(super) fn budgets(device: &Device, bytes: usize) -> [usize; 2] {
    #[cfg(test)]
    if let Some(budget) = BUDGET.get() {
        return [budget, budget.saturating_sub(bytes)];
    }
    if is_host(device) {
        return [usize::MAX; 2];
    }
    [
        HIDDEN_STATES_ON_DEVICE,
        HIDDEN_STATES_ON_DEVICE.saturating_sub(bytes),
    ]
}

/// A batch of samples of one length.
pub(super) struct SampleBatch {
    pub(super) tokens: usize,
    /// The hidden states after the quantised layers.
    pub(super) quantized: Hidden,
    /// The hidden states after the float layers, if the quantiser is calibration-based.
    pub(super) float: Option<Hidden>,
    /// The tokens as rows of prompts, on devices with flash attention.
    pub(super) rows: Option<model::PassBatch>,
}

impl SampleBatch {
    pub(super) fn quantized(&mut self) -> Option<&mut Hidden> {
        Some(&mut self.quantized)
    }

    pub(super) fn float(&mut self) -> Option<&mut Hidden> {
        self.float.as_mut()
    }
}

/// Returns the error of hidden states that the device did not return, in a block or a layer.
pub(super) fn unread(at: &str, error: &ReadError) -> ModelError {
    ModelError::HiddenStates {
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
        // The budget is enough for one batch of f32, and not for another.
        let mut budget = 200;
        for (dtype, stays) in [(DType::F32, true), (DType::F32, false), (DType::F16, false)] {
            let (first, second) = (states(dtype), states(dtype));
            let mut hidden = Hidden::new(first.clone(), &mut budget).unwrap();
            assert_eq!(matches!(hidden, Hidden::OnDevice(_)), stays);
            assert_eq!(
                (hidden.get(&device).unwrap().to_data(), budget),
                (first.to_data(), 8)
            );
            hidden.set(second.clone()).unwrap();
            assert_eq!(hidden.get(&device).unwrap().to_data(), second.to_data());
            assert_eq!(matches!(hidden, Hidden::OnDevice(_)), stays);
        }
    }
}
