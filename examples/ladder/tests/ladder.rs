//! Steps 1 to 3 on CubeCL's CPU runtime, steps 4 and 5 lane by lane on the host, and the errors of
//! every step.

mod lanes;

use cubecl::client::Client;
use cubecl::cpu::CpuDevice;
use ladder::data::{Buffers, Data, TOLERANCE};
use ladder::{LadderError, STEPS, Step, problem};
use marlin_format::{GroupSize, QuantSpec, WeightDescriptor, WeightFormat};
use marlin_kernels::{ActivationDtype, KernelError, QuantProblem, Runtime};

/// The numbers of rows of activations around the edge of a block of eight.
const ROWS: [usize; 5] = [1, 2, 7, 8, 9];
/// The shapes [K, N] at the edges of words, of groups, and of the tiles of steps 2 and 3.
const SHAPES: [[usize; 2]; 9] = [
    [1, 1],
    [7, 9],
    [129, 33],
    [200, 65],
    [8, 8],
    [128, 32],
    [136, 40],
    [264, 24],
    [1000, 8],
];

fn cpu() -> Client {
    cubecl::Device::from(CpuDevice).client()
}

fn portable() -> impl Iterator<Item = Step> {
    STEPS.into_iter().filter(|step| !step.needs_cuda())
}

#[test]
fn portable_steps_agree_with_f64() -> Result<(), LadderError> {
    let client = cpu();
    for [k, n] in SHAPES {
        let data = Data::random(9, k, n, 1)?;
        for step in portable().filter(|step| step.check(&problem(1, k, n)).is_ok()) {
            let buffers = Buffers::new(&client, &data, &[step], 1)?;
            // A barrier of the CPU runtime is slow if a block has more threads than there are
            // cores.
            let rows = if k > 128 { vec![1, 9] } else { ROWS.to_vec() };
            for m in rows {
                let found = buffers.run(&client, &step, &problem(m, k, n))?;
                let error = data.relative_error(&found);
                assert_eq!(found.len(), m * n);
                assert!(
                    error <= TOLERANCE,
                    "step {}, M = {m}, K = {k}, N = {n}: relative error {error:e}",
                    step.number
                );
            }
        }
    }
    Ok(())
}

#[test]
fn every_portable_step_runs_shapes_that_its_tiles_do_not_divide() {
    for step in portable() {
        let taken = SHAPES
            .iter()
            .filter(|[k, n]| {
                step.check(&problem(1, *k, *n)).is_ok() && (k % 64 != 0 || n % 32 != 0)
            })
            .count();
        assert!(
            taken >= 4,
            "step {} takes only {taken} of the shapes",
            step.number
        );
    }
}

#[test]
fn tensor_core_fragments_agree_with_f64() -> Result<(), LadderError> {
    // K has three groups, of which the last has one chunk. The rows fill one tile, or two tiles
    // with padding.
    for m in [1, 9] {
        let data = Data::random(m, 320, 128, 2)?;
        for (name, found) in [
            ("step 4", lanes::step_4(&data)?),
            ("step 5", lanes::step_5(&data)?),
        ] {
            let error = data.relative_error(&found);
            assert!(
                error <= TOLERANCE,
                "{name}, M = {m}: relative error {error:e}"
            );
        }
    }
    Ok(())
}

#[test]
fn lengths_are_refused_with_the_numbers() {
    let refusal = |number: usize, m, k, n| match STEPS[number - 1].check(&problem(m, k, n)) {
        Ok(()) => panic!("step {number} takes M = {m}, K = {k}, N = {n}"),
        Err(error) => error.to_string(),
    };
    for number in [2, 3, 6] {
        assert_eq!(
            refusal(number, 1, 12, 64),
            format!("step {number} takes K in multiples of 8, not K = 12")
        );
    }
    for number in [2, 3] {
        assert_eq!(
            refusal(number, 1, 64, 12),
            format!("step {number} takes N in multiples of 8, not N = 12")
        );
    }
    for number in [4, 5] {
        assert_eq!(
            refusal(number, 1, 200, 64),
            format!("step {number} takes K in multiples of 64, not K = 200")
        );
        assert_eq!(
            refusal(number, 1, 256, 72),
            format!("step {number} takes N in multiples of 64, not N = 72")
        );
        assert_eq!(
            refusal(number, 1, 128, 64),
            format!("step {number} takes K from 192 to 2147483647, not K = 128")
        );
    }
    for number in 1..=6 {
        assert_eq!(
            refusal(number, 0, 256, 64),
            format!("step {number} takes M from 1 to 65535, not M = 0")
        );
        assert_eq!(
            refusal(number, 65_536, 256, 64),
            format!("step {number} takes M from 1 to 65535, not M = 65536")
        );
        assert!(
            refusal(number, 1, 1 << 17, 1 << 17).contains("17179869184"),
            "step {number}"
        );
    }
}

#[test]
fn other_formats_are_refused() {
    let good = problem(1, 256, 64);
    let of = |format: WeightFormat| QuantProblem {
        weight: WeightDescriptor {
            format,
            ..good.weight
        },
        ..good
    };
    let spec = |spec| of(WeightFormat::dense(spec));
    for other in [
        spec(QuantSpec::int4(GroupSize::G64)),
        spec(QuantSpec::int8(GroupSize::G128)),
        spec(QuantSpec::int4(GroupSize::G128).with_zero_points()),
        QuantProblem {
            activations: ActivationDtype::BF16,
            ..good
        },
        good.with_scales(ActivationDtype::F32),
        of(good.weight.format.with_permutation(true)),
    ] {
        for step in STEPS {
            let result = step.check(&other);
            assert!(
                matches!(result, Err(LadderError::Format { .. })),
                "step {}, {other}: {result:?}",
                step.number
            );
        }
    }
}

#[test]
fn wrong_buffers_and_devices_are_refused() -> Result<(), LadderError> {
    let client = cpu();
    let data = Data::random(2, 256, 64, 3)?;
    let buffers = Buffers::new(&client, &data, &STEPS, 1)?;
    let [one, two] = [1, 2].map(|m| problem(m, 256, 64));
    for step in portable() {
        let result = step.launch(&client, &one, buffers.args(&step, &two, 0, None));
        let refused = matches!(
            result,
            Err(LadderError::Kernel(KernelError::BufferLength {
                operand: "activations",
                expected: 256,
                found: 512,
                ..
            }))
        );
        assert!(refused, "step {}: {result:?}", step.number);
    }
    for step in STEPS.into_iter().filter(Step::needs_cuda) {
        let result = step.launch(&client, &one, buffers.args(&step, &one, 0, None));
        let refused = matches!(
            result,
            Err(LadderError::NeedsCuda {
                runtime: Runtime::Cpu,
                ..
            })
        );
        assert!(refused, "step {}: {result:?}", step.number);
    }
    Ok(())
}

/// Checks the CUDA text for every card; `tests/sass` compiles it to machine code.
#[cfg(feature = "cuda")]
#[test]
fn every_step_becomes_cuda_text() -> Result<(), LadderError> {
    use ladder::source::source;
    use marlin_kernels::inspect::shared_limit;

    for capability in [80, 86, 90] {
        for (step, m, instruction) in [
            (1, 1, None),
            (2, 8, None),
            (3, 8, None),
            (4, 64, Some("mma.sync")),
            (5, 64, Some("cp.async.cg")),
        ] {
            let source = source(step, m, capability)?;
            assert!(
                source.text.contains(&source.entry),
                "step {step}: no {}",
                source.entry
            );
            assert!(
                instruction.is_none_or(|name| source.text.contains(name)),
                "step {step}: no {instruction:?}"
            );
            let limit = shared_limit(capability);
            assert!(
                source.shared_bytes <= limit,
                "step {step}: {} bytes of shared memory of {limit}",
                source.shared_bytes
            );
        }
    }
    assert!(matches!(
        source(6, 1, 90),
        Err(LadderError::Compile { step: 6, .. })
    ));
    Ok(())
}
