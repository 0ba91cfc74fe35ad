//! Tensors that are kept on the host, and tensors with dedicated memory.

use crate::setup::{Named, computes, float_dtype, trial};
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_marlin::device::with_dedicated_memory;
use burn_marlin::host::HostTensor;
use libtest_mimic::Trial;
use marlin_kernels::ActivationDtype;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(
        device,
        "host::tensors_come_back_as_they_were",
        tensors_come_back,
    ));
    tests.push(trial(
        device,
        "host::tensors_apart_are_changed_in_place",
        tensors_apart,
    ));
}

/// Checks tensors of sizes that runtimes pad and of sizes that they do not pad, views, and tensors
/// whose computation has not run yet.
fn tensors_come_back(device: &Device) {
    let dtypes = [
        ActivationDtype::F32,
        ActivationDtype::F16,
        ActivationDtype::BF16,
    ];
    for dtype in dtypes
        .into_iter()
        .filter(|&dtype| computes(device, dtype))
        .map(|dtype| DType::from(float_dtype(dtype)))
    {
        for shape in [[1, 1, 1], [3, 5, 7], [2, 64, 256], [1, 300, 1000]] {
            let random = || Tensor::<3>::random(shape, Distribution::Default, (device, dtype));
            let (first, second) = (random(), random());
            let results = [first.clone(), first.clone() + second, first.swap_dims(0, 2)];
            for tensor in results {
                let expected = tensor.to_data();
                let mut waiting =
                    HostTensor::start(tensor).unwrap_or_else(|error| panic!("{error}"));
                // Work that is queued on the device meanwhile does not change the tensor.
                drop(random() * 2.0);
                for _ in 0..2 {
                    let found = waiting
                        .to_device(device)
                        .unwrap_or_else(|error| panic!("{error}"));
                    assert_eq!(found.dtype(), dtype);
                    // The tensor shares the bytes of the host.
                    drop(found.clone() + 1.0);
                    assert_eq!(found.to_data(), expected, "{dtype:?} {shape:?}");
                }
                waiting.wait().unwrap_or_else(|error| panic!("{error}"));
            }
        }
    }
}

fn tensors_apart(device: &Device) {
    // The work that was queued before has not run yet.
    let before = Tensor::<2>::ones([300, 500], device) * 3.0;
    let mut tensor = with_dedicated_memory(device, || Tensor::<2>::zeros([300, 500], device));
    for start in (0..300).step_by(100) {
        let rows = before.clone().slice([start..start + 100, 0..500]);
        let changed = tensor.clone().slice([start..start + 100, 0..500]) + rows;
        tensor = tensor.slice_assign([start..start + 100, 0..500], changed);
    }
    assert_eq!(tensor.to_data(), before.to_data());
}
