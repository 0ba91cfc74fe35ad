//! Attention for the tokens of prompts, several of each sequence, in the two kernels that support
//! prompts.

use super::bench::{Bench, PromptKernel};
use super::checks::{check_launch, check_repeats};
use super::operands::{Operands, row_at};
use super::{shape, with_slots};
use crate::kernels::client;
use crate::setup::computes;
use burn::tensor::Device;
use cubecl::client::Client;
use marlin_kernels::ActivationDtype;
use marlin_nn::kernels::attention::{AttentionPass, AttentionShape};
use marlin_nn::kernels::flash;

/// Sequences of a prompt pass: the first position and the number of tokens of each, which begin and
/// end around the edges of pages and tiles.
pub(super) struct Sequences {
    pub(super) parts: &'static [(usize, usize)],
    /// The number of rows of the pass, of which a few are idle.
    pub(super) rows: usize,
    /// The number of positions of the cache.
    pub(super) max_len: usize,
}

impl Sequences {
    pub(super) fn new(is_card: bool) -> Self {
        let (parts, max_len): (&[_], _) = if is_card {
            let parts = &[
                (0, 63),
                (0, 1),
                (64, 65),
                (500, 12),
                (0, 193),
                (127, 64),
                (31, 18),
            ];
            (parts, 600)
        } else {
            (&[(0, 9), (0, 1), (7, 5)], 40)
        };
        let used: usize = parts.iter().map(|(_, tokens)| tokens).sum();
        Self {
            parts,
            rows: used.next_power_of_two(),
            max_len,
        }
    }
}

/// Checks rows of several sequences, each from a first position on, among idle rows. A row attends
/// to the previous rows of its sequence.
pub(super) fn agree(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let sequences = Sequences::new(is_card);
    let (rows, max_len) = (sequences.rows, sequences.max_len);
    let head_dims: &[usize] = if is_card {
        &[64, 80, 96, 128, 256]
    } else {
        &[16]
    };
    let dtypes: &[ActivationDtype] = if is_card {
        &[
            ActivationDtype::F16,
            ActivationDtype::BF16,
            ActivationDtype::F32,
        ]
    } else {
        &[ActivationDtype::F16]
    };
    let mut dtypes = super::dtypes(device, dtypes);
    for (case, (&head_dim, group)) in head_dims
        .iter()
        .flat_map(|head_dim| [1, 4].map(|group| (head_dim, group)))
        .enumerate()
    {
        let dtype = dtypes.next().unwrap_or(ActivationDtype::F32);
        let plain = AttentionShape {
            pass: AttentionPass::Prompt,
            ..shape(rows, [group, 1], head_dim, max_len, dtype)
        };
        let normed = AttentionShape {
            norm_epsilon: Some(1e-6),
            window: Some(11),
            has_sinks: true,
            ..plain
        };
        let half_rotated = AttentionShape {
            rotary_dim: head_dim / 2,
            window: Some(70),
            ..plain
        };
        let unrotated = AttentionShape {
            rotary_dim: 0,
            has_sinks: true,
            norm_epsilon: Some(1e-5),
            ..shape(rows, [2 * group, 2], head_dim, max_len, dtype)
        };
        let unrotated = AttentionShape {
            pass: AttentionPass::Prompt,
            ..unrotated
        };
        check_prompts(
            &client,
            &[plain, normed, half_rotated, unrotated][case % 4],
            sequences.parts,
            seed,
        );
    }
}

pub(super) fn check_prompts(
    client: &Client,
    shape: &AttentionShape,
    sequences: &[(usize, usize)],
    seed: u64,
) {
    let operands = Operands::of_prompts(shape, sequences, seed);
    let kernels: &[PromptKernel] = match flash::takes(
        &marlin_kernels::Target::of(client),
        shape.dtype,
        shape.cache.head_dim,
    ) {
        true => &[PromptKernel::Rows, PromptKernel::Flash],
        false => &[PromptKernel::Rows],
    };
    for &prompts in kernels {
        check_launch(
            Bench {
                prompts,
                ..Bench::new(client, shape, &operands)
            },
            operands.clone(),
            seed,
        );
    }
}

/// Checks tokens far into sequences, in the last tile of positions and across its edges.
pub(super) fn long(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let half = if computes(device, ActivationDtype::F16) {
        ActivationDtype::F16
    } else {
        ActivationDtype::F32
    };
    let (max_len, sequences): (usize, &[(usize, usize)]) = if is_card {
        (131_072, &[(131_039, 33), (65_530, 20)])
    } else {
        (3_000, &[(2_991, 9)])
    };
    let rows = sequences.iter().map(|(_, tokens)| tokens).sum();
    let head_dim = if is_card { 128 } else { 16 };
    let plain = AttentionShape {
        pass: AttentionPass::Prompt,
        ..with_slots(
            sequences.len(),
            shape(rows, [2, 1], head_dim, max_len, half),
        )
    };
    for window in [None, Some(max_len / 3)] {
        check_prompts(
            &client,
            &AttentionShape {
                window,
                has_sinks: window.is_some(),
                ..plain
            },
            sequences,
            seed,
        );
    }
}

pub(super) fn repeats(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let half = if computes(device, ActivationDtype::F16) {
        ActivationDtype::F16
    } else {
        ActivationDtype::F32
    };
    let (tokens, head_dim) = if is_card { (700, 128) } else { (12, 16) };
    let shape = AttentionShape {
        pass: AttentionPass::Prompt,
        ..shape(tokens, [8, 2], head_dim, tokens + 9, half)
    };
    let mut operands = Operands::random(&shape, &vec![None; tokens], seed);
    operands.rows = (0..tokens)
        .map(|position| row_at(Some(position), 1))
        .collect();
    let prompts = if flash::takes(&marlin_kernels::Target::of(&client), shape.dtype, head_dim) {
        PromptKernel::Flash
    } else {
        PromptKernel::Rows
    };
    let bench = Bench {
        prompts,
        ..Bench::new(&client, &shape, &operands)
    };
    check_repeats(&bench, seed);
}
