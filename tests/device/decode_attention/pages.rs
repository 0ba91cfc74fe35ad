//! Attention over a cache of pages, for steps and for prompts.

use super::checks::check;
use super::prompts::{Sequences, check_prompts};
use super::{dtypes, edges, shape};
use crate::kernels::client;
use burn::tensor::Device;
use marlin_kernels::ActivationDtype;
use marlin_nn::kernels::attention::{AttentionPass, AttentionShape};
use marlin_nn::{CacheShape, Pages};

/// Returns a shape whose cache has pages of `size` positions: as many as its slots can have, and
/// three more.
pub(super) fn with_pages(size: usize, shape: AttentionShape) -> AttentionShape {
    let count = shape.cache.slots * shape.cache.max_len.div_ceil(size) + 3;
    AttentionShape {
        cache: CacheShape {
            pages: Some(Pages { count, size }),
            ..shape.cache
        },
        ..shape
    }
}

const ALL: [ActivationDtype; 3] = [
    ActivationDtype::F16,
    ActivationDtype::BF16,
    ActivationDtype::F32,
];

/// Checks decode steps at positions around the edges of pages, tiles and splits.
pub(super) fn agree(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let mut dtypes = dtypes(device, &ALL);
    let max_len = if is_card { 2500 } else { 70 };
    let (head_dims, groups): (&[usize], &[usize]) = if is_card {
        (&[64, 80, 128], &[1, 4, 12])
    } else {
        (&[16], &[4])
    };
    for &head_dim in head_dims {
        for &group in groups {
            let dtype = dtypes.next().unwrap_or(ActivationDtype::F32);
            let rows = if is_card { 12 } else { 6 };
            let plain = shape(rows, [2 * group, 2], head_dim, max_len, dtype);
            check(&client, &with_pages(64, plain), &edges(max_len), seed);
        }
    }
    // Single rows, which are split into many parts.
    for (size, window, norm_epsilon) in [
        (16, None, Some(1e-6)),
        (32, Some(70), None),
        (64, Some(1), Some(1e-5)),
        (128, None, None),
    ] {
        let dtype = dtypes.next().unwrap_or(ActivationDtype::F32);
        let head_dim = if is_card { 128 } else { 16 };
        let shape = AttentionShape {
            window,
            has_sinks: window.is_some(),
            norm_epsilon,
            ..shape(1, [8, 2], head_dim, max_len, dtype)
        };
        for position in edges(max_len) {
            check(&client, &with_pages(size, shape), &[position], seed);
        }
    }
}

/// Checks prompts over pages, in both kernels that support prompts.
pub(super) fn prompts(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let mut dtypes = dtypes(device, &ALL);
    let sequences = Sequences::new(is_card);
    let (rows, max_len) = (sequences.rows, sequences.max_len);
    // Each case compiles its kernels: 12 s on a card.
    let cases: &[(usize, usize, Option<usize>)] = if is_card {
        &[
            (64, 16, None),
            (80, 32, Some(70)),
            (128, 64, None),
            (128, 128, Some(11)),
            (256, 64, None),
        ]
    } else {
        &[(16, 16, None), (16, 32, Some(7))]
    };
    for &(head_dim, size, window) in cases {
        let dtype = dtypes.next().unwrap_or(ActivationDtype::F32);
        let shape = AttentionShape {
            pass: AttentionPass::Prompt,
            window,
            has_sinks: window.is_some(),
            ..shape(rows, [4, 2], head_dim, max_len, dtype)
        };
        check_prompts(&client, &with_pages(size, shape), sequences.parts, seed);
    }
}
