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
use rand::{RngExt, SeedableRng};

/// More than four times the second-level cache of an H200 (60 MB), so that no call finds its weight there.
const WEIGHT_BYTES: usize = 240_000_000;

/// As many copies of a weight as the cache cannot hold.
pub struct Weights {
    copies: Vec<[Option<Handle>; 3]>,
    lengths: [usize; 3],
}

impl Weights {
    pub fn random(client: &Client, shape: &Shape, spec: QuantSpec, dtype: ActivationDtype) -> Self {
        let layout = marlin::layout(shape.k, shape.n);
        let lengths = [layout.words(), ScaleLayout::new(&layout, spec.group).len(), ZeroLayout::new(&layout, spec.group).words()];
        let mut rng = SmallRng::seed_from_u64(1);
        let mut words = |count: usize| (0..count).flat_map(|_| rng.random::<u32>().to_le_bytes()).collect::<Vec<u8>>();
        let (weight, zeros) = (words(lengths[0]), words(lengths[2]));
        let scales = bytes(lengths[1], dtype, || rng.random_range(0.002..0.02));
        let copies = WEIGHT_BYTES.div_ceil(weight.len()).max(1);
        let upload = |bytes: &[u8]| Some(client.create_from_slice(bytes));
        let copy = |_| [upload(&weight), upload(&scales), spec.zero_points.then(|| client.create_from_slice(&zeros))];
        Self { copies: (0..copies).map(copy).collect(), lengths }
    }

    /// How many copies there are.
    pub fn copies(&self) -> usize {
        self.copies.len()
    }

    /// The weight of a call: copies take turns.
    pub fn of_call(&self, call: usize) -> WeightArgs {
        let copy = &self.copies[call % self.copies.len()];
        let part = |i: usize| copy[i].as_ref().map(|handle| buffer(handle, self.lengths[i]));
        WeightArgs { words: expect(part(0)), scales: expect(part(1)), zero_points: part(2) }
    }
}

/// Words and scales are in every copy.
fn expect(part: Option<BufferArg>) -> BufferArg {
    part.unwrap_or_else(|| unreachable!("a copy of a weight without words or scales"))
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

fn bytes(count: usize, dtype: ActivationDtype, mut value: impl FnMut() -> f32) -> Vec<u8> {
    let bits = |value: f32| if dtype == ActivationDtype::BF16 { bf16::from_f32(value).to_bits() } else { f16::from_f32(value).to_bits() };
    (0..count).flat_map(|_| bits(value()).to_le_bytes()).collect()
}
