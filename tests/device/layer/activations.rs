//! Activations of every rank and at any address, and layers with a norm before the matmul.

use super::{check, layer, tensor, values};
use crate::setup::computes;
use burn::tensor::Device;
use burn_marlin::{GroupSize, QuantSpec};
use marlin_format::{ScaleDtype, Sparsity};
use marlin_kernels::{ActivationDtype, Epilogue};
use marlin_testing::relative_error_of_terms;
use marlin_tests::{Case, Operands, tolerance};

/// Checks one row, for which some cards have a separate kernel, and several rows. Some weights are
/// supported by that kernel, others are not.
pub(super) fn norm_in_front(device: &Device, seed: u64) {
    const EPSILON: f64 = 1e-5;
    for dtype in [
        ActivationDtype::F16,
        ActivationDtype::BF16,
        ActivationDtype::F32,
    ]
    .into_iter()
    .filter(|&dtype| computes(device, dtype))
    {
        let scales = if dtype == ActivationDtype::BF16 {
            ScaleDtype::BF16
        } else {
            ScaleDtype::F16
        };
        let (none, swiglu) = (Epilogue::None, Epilogue::SwiGlu);
        let clamped = Epilogue::ClampedSwiGlu;
        for (m, k, n, group, permuted, epilogue) in [
            (1, 1024, 65, GroupSize::G128, false, none),
            (3, 1024, 65, GroupSize::G128, false, none),
            (1, 1024, 65, GroupSize::G128, true, none),
            (1, 1000, 65, GroupSize::Channel, false, none),
            (1, 96, 65, GroupSize::G32, false, none),
            (1, 344, 65, GroupSize::G32, false, none),
            (1, 1096, 65, GroupSize::G128, false, none),
            // With SwiGLU, gates and ups fill tiles in some cases and end within a tile in others.
            (1, 1024, 256, GroupSize::G128, false, swiglu),
            (1, 1024, 66, GroupSize::G128, false, swiglu),
            (3, 1024, 256, GroupSize::G128, true, swiglu),
            (3, 1000, 256, GroupSize::Channel, false, swiglu),
            (20, 1024, 512, GroupSize::G64, false, swiglu),
            (3, 344, 66, GroupSize::G32, false, swiglu),
            (1, 1024, 256, GroupSize::G128, false, clamped),
            (3, 344, 66, GroupSize::G32, false, clamped),
        ] {
            let spec = QuantSpec::int4(group)
                .with_zero_points()
                .with_scale_dtype(scales);
            let case = Case {
                m,
                k,
                n,
                spec,
                activations: dtype,
                permuted,
                sparsity: Sparsity::Dense,
            };
            let mut operands = Operands::random(&case, seed);
            let random = |seed| tensor(&Operands::random(&case, seed).x, [m, k], dtype, device);
            let (x, residual, norm) = (
                random(seed),
                random(seed + 1),
                random(seed + 2).slice_dim(0, 0..1).reshape([k]),
            );
            let sum = values(x.clone() + residual.clone());
            let weights = values(norm.clone());
            let normalised = |row: &[f64]| {
                let root = (row.iter().map(|value| value * value).sum::<f64>() / k as f64
                    + EPSILON)
                    .sqrt();
                row.iter()
                    .zip(&weights)
                    .map(|(value, weight)| (value / root * weight) as f32)
                    .collect::<Vec<_>>()
            };
            operands.x = sum.chunks(k).flat_map(normalised).collect();
            operands.recompute(&case);
            let (y, found) = marlin_nn::norm_linear(
                &layer(&case, &operands, device),
                x,
                residual,
                norm,
                EPSILON,
                epilogue,
            );
            if epilogue.is_gated() {
                (operands.expected, operands.magnitude) = operands.gated(&case, epilogue);
            }
            check(&case, seed, &values(y), &operands);
            assert!(values(found) == sum, "{case}, seed {seed}: the sum differs");
        }
    }
}

pub(super) fn any_rank(device: &Device, seed: u64) {
    let spec = QuantSpec::int4(GroupSize::G32);
    let case = Case {
        m: 12,
        k: 64,
        n: 40,
        spec,
        activations: ActivationDtype::F32,
        permuted: false,
        sparsity: Sparsity::Dense,
    };
    let operands = Operands::random(&case, seed);
    let layer = layer(&case, &operands, device);
    let x = tensor(&operands.x, [12, 64], case.activations, device);
    let y3 = layer.forward(x.clone().reshape([3, 4, 64]));
    assert_eq!(y3.dims(), [3, 4, 40]);
    check(&case, seed, &values(y3), &operands);
    let y4 = layer.forward(x.clone().reshape([1, 2, 6, 64]));
    assert_eq!(y4.dims(), [1, 2, 6, 40]);
    check(&case, seed, &values(y4), &operands);
    let y1 = layer.forward(x.clone().slice([0..1, 0..64]).reshape([64]));
    assert_eq!(y1.dims(), [40]);
    let error = relative_error_of_terms(
        &values(y1),
        &operands.expected[..40],
        &operands.magnitude[..40],
    );
    assert!(
        error <= tolerance(case.activations),
        "rank 1: relative error {error:e}"
    );
    // The activations are a view: the kernel must not assume contiguous rows.
    let view = layer
        .forward(x.reshape([3, 4, 64]).swap_dims(0, 1))
        .swap_dims(0, 1);
    check(&case, seed, &values(view), &operands);
}

/// Checks rows that are a view into a tensor, at addresses that are not all multiples of 16.
pub(super) fn unaligned(device: &Device, seed: u64) {
    for activations in [ActivationDtype::F32, ActivationDtype::F16]
        .into_iter()
        .filter(|&dtype| computes(device, dtype))
    {
        let case = Case {
            m: 3,
            k: 64,
            n: 40,
            spec: QuantSpec::int4(GroupSize::G32),
            activations,
            permuted: false,
            sparsity: Sparsity::Dense,
        };
        let operands = Operands::random(&case, seed);
        let layer = layer(&case, &operands, device);
        for start in [1, 3, 8] {
            let padded: Vec<f32> = vec![f32::NAN; start]
                .into_iter()
                .chain(operands.x.iter().copied())
                .collect();
            let length = padded.len();
            let x = tensor(&padded, [length], activations, device)
                .slice(start..length)
                .reshape([case.m, case.k]);
            check(&case, seed, &values(layer.forward(x)), &operands);
        }
    }
}
