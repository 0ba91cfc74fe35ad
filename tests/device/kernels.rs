//! The portable kernels, launched on raw buffers: every format, shapes at edges, outputs filled
//! with NaN.

use crate::setup::{Named, computes, trial};
use burn::backend::DispatchDevice;
use burn::tensor::Device;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use half::{bf16, f16};
use libtest_mimic::Trial;
use marlin_format::{FormatError, Sparsity, TensorDescriptor, WeightDescriptor, WeightTensors};
use marlin_kernels::{
    ActivationDtype, Kernel, KernelError, Operands as LaunchOperands, Plan, QuantProblem, Reason,
    Target, WeightBuffers, dequantize, launch, plan,
};
use marlin_testing::{relative_error, relative_error_of_terms};
use marlin_tests::{Case, Operands, cases, plain_bytes, tolerance};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    if device.name == "flex" {
        return;
    }
    tests.push(trial(
        device,
        "kernels::matmul_agrees_with_f64",
        move |device| matmul_agrees(device, seed),
    ));
    tests.push(trial(
        device,
        "kernels::dequantize_is_exact",
        move |device| dequantize_is_exact(device, seed),
    ));
    tests.push(trial(
        device,
        "kernels::the_same_inputs_give_the_same_bits",
        move |device| repeats(device, seed),
    ));
    tests.push(trial(
        device,
        "kernels::wrong_buffers_are_refused",
        move |device| refusals(device, seed),
    ));
}

pub fn client(device: &Device) -> Client {
    match device.as_dispatch() {
        DispatchDevice::Cube(device) => device.client(),
        _ => panic!("kernel tests need a CubeCL device"),
    }
}

/// Returns the value of a result, or fails the test with the case and the error.
pub fn must<T>(case: &Case, result: Result<T, impl std::fmt::Display>) -> T {
    result.unwrap_or_else(|error| panic!("{case}: {error}"))
}

/// Rounds values to a dtype, and returns their bytes.
pub fn bytes(values: &[f32], dtype: ActivationDtype) -> Vec<u8> {
    match dtype {
        ActivationDtype::F32 => values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
        ActivationDtype::F16 => values
            .iter()
            .flat_map(|&value| f16::from_f32(value).to_le_bytes())
            .collect(),
        ActivationDtype::BF16 => values
            .iter()
            .flat_map(|&value| bf16::from_f32(value).to_le_bytes())
            .collect(),
    }
}

/// Returns the values of bytes in a dtype.
pub fn values(bytes: &[u8], dtype: ActivationDtype) -> Vec<f64> {
    match dtype {
        ActivationDtype::F32 => bytes
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            .collect(),
        ActivationDtype::F16 => bytes
            .chunks_exact(2)
            .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f64())
            .collect(),
        ActivationDtype::BF16 => bytes
            .chunks_exact(2)
            .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64())
            .collect(),
    }
}

pub fn buffer(client: &Client, bytes: &[u8], elements: usize) -> BufferArg {
    // SAFETY: the buffer was made from as many bytes as `elements` of its dtype take.
    unsafe { BufferArg::from_raw_parts(client.create_from_slice(bytes), elements) }
}

/// A buffer that several launches read.
pub struct Uploaded {
    handle: Handle,
    elements: usize,
}

impl Uploaded {
    pub fn new(client: &Client, bytes: &[u8], elements: usize) -> Self {
        Self {
            handle: client.create_from_slice(bytes),
            elements,
        }
    }

    /// Returns the buffer as an argument of a launch.
    pub fn arg(&self) -> BufferArg {
        // SAFETY: the buffer was made from as many bytes as `elements` of its dtype take.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.elements) }
    }
}

pub fn words(client: &Client, words: impl Iterator<Item = u32>) -> BufferArg {
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    buffer(client, &bytes, bytes.len() / 4)
}

/// Creates the buffers of a weight's tensors.
pub fn weight_buffers(
    client: &Client,
    descriptor: &WeightDescriptor,
    tensors: WeightTensors<&Vec<u8>>,
) -> WeightBuffers {
    args(&uploaded_weight(client, descriptor, tensors))
}

/// Creates the buffers of a weight's tensors for several launches.
pub fn uploaded_weight(
    client: &Client,
    descriptor: &WeightDescriptor,
    tensors: WeightTensors<&Vec<u8>>,
) -> WeightTensors<Uploaded> {
    let elements = descriptor.tensors();
    tensors.map(|role, bytes| {
        let elements = elements.get(role).map_or(0, TensorDescriptor::elements);
        Uploaded::new(client, bytes, elements)
    })
}

/// Returns the buffers of a weight as arguments of a launch.
pub fn args(weight: &WeightTensors<Uploaded>) -> WeightBuffers {
    weight.as_ref().map(|_, tensor| tensor.arg())
}

/// Creates the buffers of a case's weight in the plain layout.
fn plain_buffers(client: &Client, operands: &Operands) -> WeightBuffers {
    weight_buffers(
        client,
        &operands.weight.descriptor(),
        plain_bytes(&operands.weight).as_ref(),
    )
}

/// Runs a case on an output filled with NaN, and returns the bytes of the output.
fn run(client: &Client, case: &Case, operands: &Operands) -> Vec<u8> {
    let problem = case.problem();
    let plan = plan(problem, &Target::of(client));
    assert!(
        matches!(plan.kernel, Kernel::Portable { .. }),
        "{case}: not a portable plan"
    );
    let poison =
        client.create_from_slice(&bytes(&vec![f32::NAN; case.m * case.n], case.activations));
    let launched = LaunchOperands {
        x: buffer(
            client,
            &bytes(&operands.x, case.activations),
            operands.x.len(),
        ),
        norm: None,
        weight: plain_buffers(client, operands),
        bias: Some(buffer(
            client,
            &bytes(&operands.bias, case.activations),
            case.n,
        )),
        // SAFETY: the buffer was made for M x N elements.
        out: unsafe { BufferArg::from_raw_parts(poison.clone(), case.m * case.n) },
    };
    launch(client, &problem, &plan, launched).unwrap_or_else(|error| panic!("{case}: {error}"));
    client
        .read_one(poison)
        .unwrap_or_else(|error| panic!("{case}: {error}"))
        .to_vec()
}

fn supported(device: &Device, case: &Case) -> bool {
    computes(device, case.activations) && computes(device, case.problem().scales)
}

fn matmul_agrees(device: &Device, seed: u64) {
    let client = client(device);
    let mut ran = 0;
    for case in cases().iter().filter(|case| supported(device, case)) {
        let operands = Operands::random(case, seed);
        let error = relative_error_of_terms(
            &values(&run(&client, case, &operands), case.activations),
            &operands.expected,
            &operands.magnitude,
        );
        assert!(
            error <= tolerance(case.activations),
            "{case}, seed {seed}: relative error {error:e}"
        );
        ran += 1;
    }
    assert!(ran > 0, "no case has dtypes that this device supports");
}

fn dequantize_is_exact(device: &Device, seed: u64) {
    let client = client(device);
    for case in cases()
        .iter()
        .filter(|case| case.activations == ActivationDtype::F32 && supported(device, case))
    {
        let operands = Operands::random(case, seed);
        let poison = client.create_from_slice(&bytes(
            &vec![f32::NAN; case.k * case.n],
            ActivationDtype::F32,
        ));
        // SAFETY: the buffer was made for K x N elements.
        let out = unsafe { BufferArg::from_raw_parts(poison.clone(), case.k * case.n) };
        dequantize(
            &client,
            &case.problem(),
            plain_buffers(&client, &operands),
            out,
        )
        .unwrap_or_else(|error| panic!("{case}: {error}"));
        let found = values(
            &client
                .read_one(poison)
                .unwrap_or_else(|error| panic!("{case}: {error}")),
            ActivationDtype::F32,
        );
        let expected: Vec<f64> = operands
            .weight
            .dequantize()
            .into_iter()
            .map(f64::from)
            .collect();
        assert!(
            found == expected,
            "{case}, seed {seed}: relative error {:e}",
            relative_error(&found, &expected)
        );
    }
}

fn repeats(device: &Device, seed: u64) {
    let client = client(device);
    for case in cases()
        .iter()
        .rev()
        .take(8)
        .filter(|case| supported(device, case))
    {
        let operands = Operands::random(case, seed);
        let first = run(&client, case, &operands);
        for _ in 0..5 {
            assert!(
                run(&client, case, &operands) == first,
                "{case}, seed {seed}: bits differ between runs"
            );
        }
    }
}

fn refusals(device: &Device, seed: u64) {
    let client = client(device);
    let Some(case) = cases().into_iter().find(|case| {
        !case.permuted && !case.spec.has_zero_points() && case.activations == ActivationDtype::F32
    }) else {
        panic!("the list has no plain case")
    };
    let operands = Operands::random(&case, seed);
    let args = |x: usize, out: usize| {
        let zeros = vec![0.0; x.max(out)];
        LaunchOperands {
            x: buffer(&client, &bytes(&zeros[..x], case.activations), x),
            norm: None,
            weight: plain_buffers(&client, &operands),
            bias: None,
            out: buffer(&client, &bytes(&zeros[..out], case.activations), out),
        }
    };
    let problem = case.problem();
    let one_row = Plan::product(
        Kernel::Portable { rows: 1 },
        Reason::NoTensorCores(Target::of(&client).runtime),
    );
    let run = |problem: &QuantProblem, plan: &Plan, operands: LaunchOperands| {
        launch(&client, problem, plan, operands)
    };
    let (x, out) = (case.m * case.k, case.m * case.n);
    let short_x = run(&problem, &one_row, args(x + 1, out));
    assert!(
        matches!(
            short_x,
            Err(KernelError::BufferLength {
                operand: "activations",
                ..
            })
        ),
        "{short_x:?}"
    );
    let short_out = run(&problem, &one_row, args(x, out + 1));
    assert!(
        matches!(
            short_out,
            Err(KernelError::BufferLength {
                operand: "output",
                ..
            })
        ),
        "{short_out:?}"
    );
    let mut permuted = problem;
    permuted.weight.format.permuted = true;
    let missing = run(&permuted, &one_row, args(x, out));
    assert!(
        matches!(
            missing,
            Err(KernelError::Presence {
                operand: "row_permutation",
                ..
            })
        ),
        "{missing:?}"
    );
    // A 2:4 weight cannot have act-order, and its K is a multiple of four.
    let sparse = run(
        &permuted.with_sparsity(Sparsity::TwoFour),
        &one_row,
        args(x, out),
    );
    assert_eq!(
        sparse,
        Err(KernelError::Format(FormatError::SparsePermuted))
    );
    let mut odd = problem.with_sparsity(Sparsity::TwoFour);
    odd.weight.k = 130;
    assert_eq!(
        run(&odd, &one_row, args(x, out)),
        Err(KernelError::Format(FormatError::SparseRows { k: 130 }))
    );
    let without_places = run(
        &problem.with_sparsity(Sparsity::TwoFour),
        &one_row,
        args(x, out),
    );
    assert!(
        without_places.is_err(),
        "dense words are not those of a 2:4 weight"
    );
    let large = run(
        &QuantProblem {
            m: u32::MAX as usize,
            ..problem
        },
        &one_row,
        args(x, out),
    );
    assert!(
        matches!(large, Err(KernelError::TooLarge { .. })),
        "{large:?}"
    );
    let host = Plan {
        kernel: Kernel::Host,
        reason: Reason::Flex,
        ..one_row
    };
    let elsewhere = run(&problem, &host, args(x, out));
    assert!(
        matches!(
            elsewhere,
            Err(KernelError::NotLaunchable {
                kernel: Kernel::Host,
                ..
            })
        ),
        "{elsewhere:?}"
    );
}
