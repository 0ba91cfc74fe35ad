//! Repacking on the device from the plain to the tile layout and back, compared with the packing on
//! the host.

use crate::kernels::{buffer, bytes, client, must, values, words};
use crate::setup::{Named, computes, trial};
use burn::tensor::Device;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use libtest_mimic::Trial;
use marlin_format::layout::PlainLayout;
use marlin_format::{ScaleDtype, WeightLayout, WeightTensor, WeightTensors};
use marlin_kernels::tile::row_length;
use marlin_kernels::{KernelError, repack};
use marlin_tests::{Case, Operands, cases, plain_bytes};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    if device.name == "flex" {
        return;
    }
    tests.push(trial(
        device,
        "repack::weights_are_as_the_host_packs_them_and_come_back",
        move |device| weights(device, seed),
    ));
    tests.push(trial(
        device,
        "repack::activations_follow_the_stored_rows",
        move |device| activations(device, seed),
    ));
    tests.push(trial(device, "repack::wrong_lengths_are_refused", refusals));
}

/// A buffer of `elements` elements, filled with the byte 0xa5.
struct Poisoned {
    handle: Handle,
    elements: usize,
}

impl Poisoned {
    fn new(client: &Client, elements: usize, bytes_each: usize) -> Self {
        Self {
            handle: client.create_from_slice(&vec![0xa5; elements * bytes_each]),
            elements,
        }
    }

    fn arg(&self) -> BufferArg {
        // SAFETY: the buffer was made for these elements.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.elements) }
    }

    fn read(&self, client: &Client) -> Vec<u8> {
        client
            .read_one(self.handle.clone())
            .unwrap_or_else(|error| panic!("{error}"))
            .to_vec()
    }
}

/// Checks every shape and format; the rows of activations do not matter.
fn weights(device: &Device, seed: u64) {
    let client = client(device);
    let mut ran = 0;
    // The tile layout is for tensor cores, which do not support scales in f32.
    let takes = |case: &&Case| {
        case.spec.scales.dtype != ScaleDtype::F32 && computes(device, case.problem().scales)
    };
    for case in cases().iter().filter(takes) {
        let (problem, operands) = (
            case.problem(),
            Operands::random(&Case { m: 1, ..*case }, seed),
        );
        let weight = &operands.weight;
        let (tile, plain) = (WeightLayout::Tile, WeightLayout::Plain);

        let tiles = WeightTensors {
            row_permutation: None,
            ..operands.tiles().clone()
        };
        let rows = plain_bytes(weight);
        for (role, expected) in tiles.iter() {
            let (Some(source), each) = (
                rows.get(role),
                if role == WeightTensor::Scales { 2 } else { 4 },
            ) else {
                continue;
            };
            let found = Poisoned::new(&client, expected.len() / each, each);
            let from = buffer(&client, source, source.len() / each);
            must(
                case,
                repack::tensor(&client, &problem, role, tile, from, found.arg()),
            );
            assert!(
                found.read(&client) == *expected,
                "{case}, seed {seed}: {role}"
            );
            let back = Poisoned::new(&client, source.len() / each, each);
            let in_tiles = problem.in_layout(tile);
            must(
                case,
                repack::tensor(&client, &in_tiles, role, plain, found.arg(), back.arg()),
            );
            assert!(
                back.read(&client) == *source,
                "{case}, seed {seed}: {role} and back"
            );
        }
        ran += 1;
    }
    assert!(ran > 0, "no case has scales that this device supports");
}

fn activations(device: &Device, seed: u64) {
    let client = client(device);
    for case in cases()
        .iter()
        .filter(|case| computes(device, case.activations))
        .filter(|case| case.m <= 65)
    {
        let operands = Operands::random(case, seed);
        let k_padded = row_length(case.k);
        let each = bytes(&[0.0], case.activations).len();
        let found = Poisoned::new(&client, case.m * k_padded, each);
        let x = buffer(
            &client,
            &bytes(&operands.x, case.activations),
            operands.x.len(),
        );
        let rows = operands.weight.row_permutation();
        let device_rows = rows.map(|rows| words(&client, rows.iter().copied()));
        repack::arrange(&client, &case.problem(), x, device_rows, found.arg())
            .unwrap_or_else(|error| panic!("{case}: {error}"));
        let expected: Vec<f64> = operands
            .x
            .chunks(case.k)
            .flat_map(|x| {
                (0..k_padded).map(|i| {
                    if i < case.k {
                        f64::from(x[rows.map_or(i, |rows| rows[i] as usize)])
                    } else {
                        0.0
                    }
                })
            })
            .collect();
        assert!(
            values(&found.read(&client), case.activations) == expected,
            "{case}, seed {seed}"
        );
    }
}

fn refusals(device: &Device) {
    let client = client(device);
    let Some(case) = cases().into_iter().find(|case| !case.permuted) else {
        panic!("the list has no case in order")
    };
    let problem = case.problem();
    let (words_of, scales_of) = (WeightTensor::Qweight, WeightTensor::Scales);
    let short = Poisoned::new(&client, problem.weight.tiles().words() - 1, 4);
    let plain = || {
        words(
            &client,
            std::iter::repeat_n(0, PlainLayout::new(case.k, case.n, case.spec.value).words()),
        )
    };
    let result = repack::tensor(
        &client,
        &problem,
        words_of,
        WeightLayout::Tile,
        plain(),
        short.arg(),
    );
    assert!(
        matches!(
            result,
            Err(KernelError::BufferLength {
                operand: "qweight",
                ..
            })
        ),
        "{result:?}"
    );
    let result = repack::tensor(
        &client,
        &problem,
        words_of,
        WeightLayout::Plain,
        short.arg(),
        plain(),
    );
    assert!(
        matches!(
            result,
            Err(KernelError::BufferLength {
                operand: "qweight",
                ..
            })
        ),
        "{result:?}"
    );
    let result = repack::tensor(
        &client,
        &problem,
        scales_of,
        WeightLayout::Tile,
        plain(),
        short.arg(),
    );
    assert!(
        matches!(
            result,
            Err(KernelError::BufferLength {
                operand: "scales",
                ..
            })
        ),
        "{result:?}"
    );
    let symmetric = case.spec.with_zero_point(marlin_format::ZeroPoint::None);
    let mut without = problem;
    without.weight.format.spec = symmetric;
    let result = repack::tensor(
        &client,
        &without,
        WeightTensor::ZeroPoints,
        WeightLayout::Tile,
        plain(),
        plain(),
    );
    assert!(
        matches!(
            result,
            Err(KernelError::Presence {
                operand: "zero_points",
                found: "present",
                ..
            })
        ),
        "{result:?}"
    );
}
