//! Random operands on the device.

use crate::shapes::Shape;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use half::{bf16, f16};
use marlin_format::layout::{MetadataLayout, scatter_bits};
use marlin_format::{WeightDescriptor, WeightFormat, WeightLayout, WeightTensor, WeightTensors};
use marlin_kernels::{ActivationDtype, WeightBuffers};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// The bytes of all copies of a weight: four times the second-level cache of an H200 (60 MB), so
/// that no call finds its weight in the cache.
const WEIGHT_BYTES: usize = 240_000_000;

/// Copies of a weight on the device, which together exceed the second-level cache.
pub struct Weights {
    copies: Vec<WeightTensors<(Handle, usize)>>,
}

impl Weights {
    /// Creates random weights of a shape in the tile layout.
    pub fn random(
        client: &Client,
        shape: &Shape,
        format: WeightFormat,
        dtype: ActivationDtype,
    ) -> Self {
        let weight = WeightDescriptor::plain(format, shape.k, shape.n);
        Self::of(client, &weight, dtype)
    }

    /// Creates random weights in the tile layout.
    pub fn of(client: &Client, weight: &WeightDescriptor, dtype: ActivationDtype) -> Self {
        let format = weight.format.with_permutation(false);
        let weight = WeightDescriptor { format, ..*weight };
        let tensors = weight.in_layout(WeightLayout::Tile).tensors();
        let mut rng = SmallRng::seed_from_u64(1);
        let host = tensors.map(|role, tensor| match role {
            WeightTensor::Scales => (
                bytes(tensor.elements(), dtype, || rng.random_range(0.002..0.02)),
                tensor.elements(),
            ),
            WeightTensor::Metadata => (
                random_metadata(&mut rng, 4 * tensor.elements()),
                tensor.elements(),
            ),
            WeightTensor::Qweight => {
                // The words are those of the tile layout, whose order of bits has NaN, too.
                let (value, mut bytes) = (format.spec.value, random_bytes(4 * tensor.elements()));
                for word in bytes.as_chunks_mut::<4>().0 {
                    let codes = u32::from_le_bytes(*word) & value.finite_mask();
                    *word = scatter_bits(codes, value).to_le_bytes();
                }
                (bytes, tensor.elements())
            }
            _ => (random_bytes(4 * tensor.elements()), tensor.elements()),
        });
        let copies = WEIGHT_BYTES.div_ceil(host.qweight.0.len()).max(1);
        let copy = |_| {
            host.as_ref()
                .map(|_, (bytes, elements)| (client.create_from_slice(bytes), *elements))
        };
        Self {
            copies: (0..copies).map(copy).collect(),
        }
    }

    /// Returns the number of copies.
    pub fn copies(&self) -> usize {
        self.copies.len()
    }

    /// Returns the weight of a call; calls use the copies in turn.
    pub fn of_call(&self, call: usize, row_permutation: Option<BufferArg>) -> WeightBuffers {
        let weight = self.copies[call % self.copies.len()]
            .as_ref()
            .map(|_, (handle, elements)| buffer(handle, *elements));
        WeightTensors {
            row_permutation,
            ..weight
        }
    }
}

/// Creates a random permutation of the rows of K.
pub fn row_permutation(client: &Client, k: usize) -> Handle {
    let mut rows: Vec<u32> = (0..k as u32).collect();
    rows.shuffle(&mut SmallRng::seed_from_u64(3));
    client.create_from_slice(
        &rows
            .iter()
            .flat_map(|row| row.to_le_bytes())
            .collect::<Vec<u8>>(),
    )
}

/// Creates activations [M, K] of random values from -1 to 1.
pub fn activations(client: &Client, m: usize, k: usize, dtype: ActivationDtype) -> Handle {
    let mut rng = SmallRng::seed_from_u64(2);
    client.create_from_slice(&bytes(m * k, dtype, || rng.random_range(-1.0..1.0)))
}

/// Returns a buffer of `elements` elements as an argument.
pub fn buffer(handle: &Handle, elements: usize) -> BufferArg {
    // SAFETY: callers pass the number of elements for which the handle's buffer was made.
    unsafe { BufferArg::from_raw_parts(handle.clone(), elements) }
}

/// Returns `count` random bytes.
pub fn random_bytes(count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    SmallRng::seed_from_u64(1).fill(&mut bytes[..]);
    bytes
}

/// Returns random bytes of metadata. Each byte has two nibbles, and each nibble names two rows in
/// ascending order. The product with other nibbles is undefined.
fn random_metadata(rng: &mut SmallRng, count: usize) -> Vec<u8> {
    let mut nibble = || MetadataLayout::NIBBLES[rng.random_range(0..MetadataLayout::NIBBLES.len())];
    (0..count).map(|_| nibble() | nibble() << 4).collect()
}

fn bytes(count: usize, dtype: ActivationDtype, mut value: impl FnMut() -> f32) -> Vec<u8> {
    let bits = |value: f32| {
        if dtype == ActivationDtype::BF16 {
            bf16::from_f32(value).to_bits()
        } else {
            f16::from_f32(value).to_bits()
        }
    };
    (0..count)
        .flat_map(|_| bits(value()).to_le_bytes())
        .collect()
}
