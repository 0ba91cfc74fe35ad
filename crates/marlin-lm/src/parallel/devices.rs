//! Checks of the devices that a model is split over.

use burn::tensor::Device;
use burn_marlin::device::{device_name, is_host, target};

use super::ParallelError;

/// Checks that a model can be split over devices: there is one, all are of the same kind, and no
/// card is given twice. A device whose memory is that of the host may be repeated.
///
/// # Errors
/// [`ParallelError::NoDevices`], [`ParallelError::OtherDevice`], [`ParallelError::SameDevice`].
pub(crate) fn check_devices(devices: &[Device]) -> Result<(), ParallelError> {
    let Some(first) = devices.first() else {
        return Err(ParallelError::NoDevices);
    };
    let kind = |device: &Device| (target(device), device_name(device));
    let expected = kind(first);
    for (rank, device) in devices.iter().enumerate().skip(1) {
        let found = kind(device);
        if found != expected {
            return Err(ParallelError::OtherDevice {
                rank,
                expected: expected.1,
                found: found.1,
            });
        }
    }
    same_device(devices, is_host(first))
}

/// Refuses a device that is given twice, unless it is one of the host.
fn same_device(devices: &[Device], is_host: bool) -> Result<(), ParallelError> {
    for (second, device) in devices.iter().enumerate() {
        let first = devices[..second].iter().position(|before| before == device);
        if let Some(first) = first.filter(|_| !is_host) {
            return Err(ParallelError::SameDevice {
                device: format!("{device:?}"),
                first,
                second,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_given_once_and_the_host_any_number_of_times() {
        let flex = vec![Device::flex(); 3];
        check_devices(&flex).unwrap();
        assert_eq!(check_devices(&[]), Err(ParallelError::NoDevices));
        // As of a card: no card is needed to compare devices.
        let found = same_device(&flex, false);
        assert!(
            matches!(
                found,
                Err(ParallelError::SameDevice {
                    first: 0,
                    second: 1,
                    ..
                })
            ),
            "{found:?}"
        );
    }
}
