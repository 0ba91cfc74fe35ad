//! Random operands on the device.

use crate::shapes::Shape;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use half::{bf16, f16};
use marlin_format::QuantSpec;
use marlin_format::layout::{ScaleLayout, ZeroLayout};
use marlin_kernels::ActivationDtype;
use marlin_kernels::marlin::{self, WeightArgs};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// More than four times the second-level cache of an H200 (60 MB), so that no call finds its weight there.
const WEIGHT_BYTES: usize = 240_000_000;

/// One copy of a weight.
struct WeightCopy {
    words: Handle,
    scales: Handle,
    zero_points: Option<Handle>,
}

/// As many copies of a weight as the cache cannot hold.
pub struct Weights {
    copies: Vec<WeightCopy>,
    words: usize,
    scales: usize,
    zero_points: usize,
}

impl Weights {
    pub fn random(client: &Client, shape: &Shape, spec: QuantSpec, dtype: ActivationDtype) -> Self {
        let layout = marlin::layout(shape.k, shape.n);
        let (words, scales) = (layout.words(), ScaleLayout::new(&layout, spec.group).len());
        let zero_points = ZeroLayout::new(&layout, spec.group).words();
        let mut rng = SmallRng::seed_from_u64(1);
        let (word_bytes, zero_bytes) = (random_bytes(4 * words), random_bytes(4 * zero_points));
        let scale_bytes = bytes(scales, dtype, || rng.random_range(0.002..0.02));
        let copy = |_| WeightCopy {
            words: client.create_from_slice(&word_bytes),
            scales: client.create_from_slice(&scale_bytes),
            zero_points: spec.zero_points.then(|| client.create_from_slice(&zero_bytes)),
        };
        let copies = WEIGHT_BYTES.div_ceil(word_bytes.len()).max(1);
        Self { copies: (0..copies).map(copy).collect(), words, scales, zero_points }
    }

    /// How many copies there are.
    pub fn copies(&self) -> usize {
        self.copies.len()
    }

    /// The weight of a call: copies take turns.
    pub fn of_call(&self, call: usize) -> WeightArgs {
        let WeightCopy { words, scales, zero_points } = &self.copies[call % self.copies.len()];
        WeightArgs {
            words: buffer(words, self.words),
            scales: buffer(scales, self.scales),
            zero_points: zero_points.as_ref().map(|zeros| buffer(zeros, self.zero_points)),
        }
    }
}

/// A natural row for each stored row [K]: any order.
pub fn row_permutation(client: &Client, k: usize) -> Handle {
    let mut rows: Vec<u32> = (0..k as u32).collect();
    rows.shuffle(&mut SmallRng::seed_from_u64(3));
    client.create_from_slice(&rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<u8>>())
}

/// Activations [M, K] of random values between -1 and 1.
pub fn activations(client: &Client, m: usize, k: usize, dtype: ActivationDtype) -> Handle {
    let mut rng = SmallRng::seed_from_u64(2);
    client.create_from_slice(&bytes(m * k, dtype, || rng.random_range(-1.0..1.0)))
}

/// A buffer of `elements` elements.
pub fn buffer(handle: &Handle, elements: usize) -> BufferArg {
    // SAFETY: every handle of this bench was made for the elements that it is given out with.
    unsafe { BufferArg::from_raw_parts(handle.clone(), elements) }
}

/// Random bits.
pub fn random_bytes(count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    SmallRng::seed_from_u64(1).fill(&mut bytes[..]);
    bytes
}

fn bytes(count: usize, dtype: ActivationDtype, mut value: impl FnMut() -> f32) -> Vec<u8> {
    let bits = |value: f32| if dtype == ActivationDtype::BF16 { bf16::from_f32(value).to_bits() } else { f16::from_f32(value).to_bits() };
    (0..count).flat_map(|_| bits(value()).to_le_bytes()).collect()
}
