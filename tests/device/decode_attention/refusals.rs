//! Wrong operands, for which decode attention returns an error.

use super::bench::{Bench, KEYS, QKV, QUERIES, STATE, VALUES};
use super::operands::Operands;
use super::pages::with_pages;
use super::shape;
use crate::kernels::{buffer, client};
use burn::tensor::Device;
use marlin_kernels::{ActivationDtype, KernelError};
use marlin_nn::kernels::attention::{AttentionArgs, AttentionPass, AttentionShape, attention};
use marlin_nn::kernels::flash::flash;

pub(super) fn refusals(device: &Device, _: bool, seed: u64) {
    let client = client(device);
    let shape = shape(2, [4, 2], 16, 24, ActivationDtype::F32);
    let bench = Bench::new(&client, &shape, &Operands::random(&shape, &[Some(5)], seed));
    let short = || buffer(&client, &[0; 4], 1);
    let length = |shape: &AttentionShape, args: AttentionArgs, expected: &str| {
        let result = attention(&client, shape, args);
        assert!(
            matches!(&result, Err(KernelError::BufferLength { operand, .. }) if *operand == expected),
            "{expected}: {result:?}"
        );
    };
    length(
        &shape,
        AttentionArgs {
            qkv: short(),
            ..bench.args(QKV)
        },
        "qkv",
    );
    length(
        &shape,
        AttentionArgs {
            state: short(),
            ..bench.args(QKV)
        },
        "state",
    );
    length(
        &shape,
        AttentionArgs {
            keys: short(),
            ..bench.args(QKV)
        },
        "keys",
    );
    length(
        &shape,
        AttentionArgs {
            values: short(),
            ..bench.args(QKV)
        },
        "values",
    );
    length(
        &shape,
        AttentionArgs {
            cos: short(),
            ..bench.args(QKV)
        },
        "cosines",
    );
    length(
        &shape,
        AttentionArgs {
            sin: short(),
            ..bench.args(QKV)
        },
        "sines",
    );
    length(
        &shape,
        AttentionArgs {
            out: short(),
            ..bench.args(QKV)
        },
        "output",
    );
    let presence = |shape: &AttentionShape, args: AttentionArgs, expected: &str| {
        let result = attention(&client, shape, args);
        assert!(
            matches!(&result, Err(KernelError::Presence { operand, .. }) if *operand == expected),
            "{expected}: {result:?}"
        );
    };
    presence(
        &shape,
        AttentionArgs {
            q_norm: Some(short()),
            ..bench.args(QKV)
        },
        "norm of q",
    );
    let with_sinks = AttentionShape {
        has_sinks: true,
        ..shape
    };
    presence(&with_sinks, bench.args(QKV), "sinks");
    let normed = AttentionShape {
        norm_epsilon: Some(1e-6),
        ..shape
    };
    presence(&normed, bench.args(QKV), "norm of q");
    let result = attention(
        &client,
        &AttentionShape {
            rotary_dim: 5,
            ..shape
        },
        bench.args(QKV),
    );
    assert!(
        matches!(result, Err(KernelError::Shape { .. })),
        "{result:?}"
    );
    presence(
        &shape,
        AttentionArgs {
            pages: Some(short()),
            ..bench.args(QKV)
        },
        "page table",
    );
    let paged = with_pages(16, shape);
    let bench = Bench::new(&client, &paged, &Operands::random(&paged, &[Some(5)], seed));
    length(
        &paged,
        AttentionArgs {
            pages: Some(short()),
            ..bench.args(QKV)
        },
        "page table",
    );
    let bench = Bench::new(&client, &shape, &Operands::random(&shape, &[Some(5)], seed));
    // Tensor cores do not support f32.
    let result = flash(
        &client,
        &AttentionShape {
            pass: AttentionPass::Prompt,
            ..shape
        },
        bench.flash_args(),
    );
    assert!(
        matches!(result, Err(KernelError::Shape { .. })),
        "{result:?}"
    );
    for buffer in [QKV, STATE, KEYS, VALUES, QUERIES] {
        let mut bench = Bench::new(&client, &shape, &Operands::random(&shape, &[Some(5)], seed));
        bench.shape.pass = AttentionPass::Prompt;
        bench.buffers[buffer].1 -= 1;
        let result = bench.try_launch();
        assert!(
            matches!(result, Err(KernelError::BufferLength { .. })),
            "buffer {buffer}: {result:?}"
        );
    }
}
