//! Wrong operands, for which a launch returns an error, and a fault of the kernel.

use super::bench::{Bench, problem};
use crate::kernels::{buffer, must};
use burn::tensor::Device;
use cubecl::prelude::BufferArg;
use marlin_format::{GroupSize, QuantSpec, Sparsity, WeightTensors};
use marlin_kernels::tile::{self, Launch};
use marlin_kernels::{
    ActivationDtype, Epilogue, EpilogueStage, KernelError, Operands as LaunchOperands, Plan, launch,
};
use marlin_tests::{Case, Operands};

pub(super) fn refusals(device: &Device, seed: u64) {
    let bench = Bench::new(device);
    let spec = QuantSpec::int4(GroupSize::Channel);
    let case = Case {
        m: 3,
        k: 72,
        n: 40,
        spec,
        activations: ActivationDtype::F16,
        permuted: false,
        sparsity: Sparsity::Dense,
    };
    let operands = Operands::random(&case, seed);
    let planned =
        tile::plan(&problem(&case), &bench.card).unwrap_or_else(|| panic!("{case}: no plan"));
    let run = |case: &Case, outputs: usize| {
        let out = buffer(&bench.client, &vec![0; outputs * 2], outputs);
        let operands = bench.operands(
            &Case {
                n: 40,
                activations: ActivationDtype::F16,
                ..*case
            },
            &operands,
            out,
        );
        launch(
            &bench.client,
            &problem(case),
            &bench.plan(planned),
            operands,
        )
    };
    let short = run(&case, case.m * case.n - 1);
    assert!(
        matches!(
            short,
            Err(KernelError::BufferLength {
                operand: "output",
                ..
            })
        ),
        "{short:?}"
    );
    let wide = run(&Case { n: 128, ..case }, case.m * 128);
    assert!(
        matches!(
            wide,
            Err(KernelError::BufferLength {
                operand: "qweight",
                ..
            })
        ),
        "{wide:?}"
    );
    let gated = problem(&Case { n: 128, ..case }).with_epilogue(Epilogue::SwiGlu);
    for stage in [EpilogueStage::After, EpilogueStage::InKernel] {
        let narrow = Launch {
            tile: tile::Tile {
                warps_n: 1,
                ..planned.tile
            },
            ..planned
        };
        let plan = Plan {
            epilogue: stage,
            ..bench.plan(narrow)
        };
        let wide = Case { n: 128, ..case };
        let out = buffer(&bench.client, &vec![0; 3 * 64 * 2], 3 * 64);
        let refused = launch(
            &bench.client,
            &gated,
            &plan,
            bench.operands(&wide, &Operands::random(&wide, seed), out),
        );
        assert!(
            matches!(refused, Err(KernelError::Epilogue { .. })),
            "{refused:?}"
        );
    }
    let out = buffer(
        &bench.client,
        &vec![0; case.m * case.n * 2],
        case.m * case.n,
    );
    let empty = bench.plan(Launch {
        blocks: 0,
        ..planned
    });
    let none = launch(
        &bench.client,
        &problem(&case),
        &empty,
        bench.operands(&case, &operands, out),
    );
    assert!(matches!(none, Err(KernelError::Blocks { .. })), "{none:?}");
    let floats = run(
        &Case {
            activations: ActivationDtype::F32,
            ..case
        },
        case.m * case.n,
    );
    assert!(
        matches!(floats, Err(KernelError::DtypePair { .. })),
        "{floats:?}"
    );
}

/// Checks that a read past a buffer is an error: the weight declares 1 GiB, and its buffer has 16
/// bytes.
pub(super) fn fault(device: &Device) {
    let bench = Bench::new(device);
    let (k, n) = (65536, 32768);
    let case = Case {
        m: 1,
        k,
        n,
        spec: QuantSpec::int4(GroupSize::Channel),
        activations: ActivationDtype::F16,
        permuted: false,
        sparsity: Sparsity::Dense,
    };
    let planned =
        tile::plan(&problem(&case), &bench.card).unwrap_or_else(|| panic!("{case}: no plan"));
    let operands = LaunchOperands {
        x: buffer(&bench.client, &vec![0; k * 2], k),
        norm: None,
        weight: WeightTensors {
            // SAFETY: none. The kernel reads past the buffer, which is the fault that this test is
            // about.
            qweight: unsafe {
                BufferArg::from_raw_parts(
                    bench.client.empty(16),
                    problem(&case).weight.tensors().qweight.elements(),
                )
            },
            metadata: None,
            scales: buffer(&bench.client, &vec![0; n * 2], n),
            zero_points: None,
            row_permutation: None,
        },
        bias: None,
        out: buffer(&bench.client, &vec![0; n * 2], n),
    };
    must(
        &case,
        launch(
            &bench.client,
            &problem(&case),
            &bench.plan(planned),
            operands,
        ),
    );
    match cubecl::future::block_on(bench.client.sync()) {
        Ok(()) => panic!("{case}: a read of 1 GiB past a buffer of 16 bytes was no fault"),
        Err(error) => println!("{error}"),
    }
}
