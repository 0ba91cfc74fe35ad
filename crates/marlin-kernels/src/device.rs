//! The devices that kernels run on, as far as the choice and the launch of a kernel depend on them.

use crate::ActivationDtype;
use crate::tile::config::ATOM_K;
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::prelude::*;
use std::fmt;

/// The compute capability, 80 for 8.0, that brought `cp.async` and `mma.m16n8k16`.
pub const MIN_CAPABILITY: u32 = 80;

/// The compute capability that has `wgmma`: later cards do not.
pub const WGMMA_CAPABILITY: u32 = 90;

/// The runtime behind a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Runtime {
    /// CubeCL on NVIDIA's CUDA.
    Cuda,
    /// CubeCL on AMD's ROCm.
    Rocm,
    /// CubeCL on Vulkan, through wgpu.
    Vulkan,
    /// CubeCL on Apple's Metal.
    Metal,
    /// CubeCL on WebGPU, through wgpu.
    WebGpu,
    /// CubeCL's CPU runtime.
    Cpu,
    /// Burn's Flex backend: Rust on the CPU, no CubeCL.
    Flex,
    /// A CubeCL runtime that this version does not know by name.
    Other,
}

impl fmt::Display for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "CUDA",
            Self::Rocm => "ROCm",
            Self::Vulkan => "Vulkan",
            Self::Metal => "Metal",
            Self::WebGpu => "WebGPU",
            Self::Cpu => "CubeCL CPU",
            Self::Flex => "Flex",
            Self::Other => "this CubeCL runtime",
        })
    }
}

/// An NVIDIA card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Card {
    /// Compute capability, 80 for 8.0.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Most bytes of shared memory that a block may ask for.
    pub shared_limit: usize,
}

impl Card {
    /// The card behind a CubeCL client; `None` if that is no NVIDIA card.
    pub fn of(client: &Client) -> Option<Self> {
        if client.name() != "cuda" {
            return None;
        }
        let properties = client.properties();
        // CubeCL's CUDA runtime names the architecture that it compiles for: ptx_sm90.
        let capability = properties.identity.fingerprint.strip_prefix("ptx_sm")?.parse().ok()?;
        let multiprocessors = properties.hardware.num_streaming_multiprocessors? as usize;
        Some(Self { capability, multiprocessors, shared_limit: properties.hardware.max_shared_memory_size })
    }
}

/// The properties of a device that decide which kernel runs. Plain data, so that the choice is tested without a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    /// The runtime.
    pub runtime: Runtime,
    /// The NVIDIA card, on CUDA.
    pub card: Option<Card>,
}

impl Target {
    /// Burn's Flex backend.
    pub const FLEX: Self = Self { runtime: Runtime::Flex, card: None };

    /// The target behind a CubeCL client.
    pub fn of(client: &Client) -> Self {
        let runtime = match client.name() {
            "cuda" => Runtime::Cuda,
            "hip" => Runtime::Rocm,
            "wgpu<spirv>" => Runtime::Vulkan,
            "wgpu<msl>" | "metal" => Runtime::Metal,
            "wgpu<wgsl>" => Runtime::WebGpu,
            "cpu" => Runtime::Cpu,
            _ => Runtime::Other,
        };
        Self { runtime, card: Card::of(client) }
    }
}

/// The cubes and units of a kernel with one unit for each element.
pub fn elementwise(client: &Client, elements: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, elements);
    (calculate_cube_count_elemwise(client, elements, dim), dim)
}

/// A matrix [rows, columns] as the copy engine reads it for `wgmma`: a box is `box_rows` rows by 64 columns of 16 bits, 128 bytes a row, swizzled within them. `None` if
/// the buffer is an alias of another operand's.
pub fn swizzled_map(
    matrix: BufferArg,
    [rows, columns]: [usize; 2],
    box_rows: usize,
    dtype: ActivationDtype,
) -> Option<TensorMapArg<Tiled>> {
    let BufferArg::Handle { handle } = matrix else { return None };
    let tensor = TensorBinding { shape: [rows, columns].into(), strides: [columns, 1].into(), ..handle.into_tensor() };
    let boxes = TiledArgs { tile_size: [box_rows, ATOM_K].into() };
    Some(TensorMapArg::new(boxes, tensor.into_tensor_arg(), dtype.elem()).with_swizzle(TensorMapSwizzle::B128))
}

/// Values that a unit loads at a time: 16 bytes, or fewer where rows of `features` values are no multiple of that.
pub fn vector_size(client: &Client, features: usize, dtype: ActivationDtype) -> usize {
    let bytes = dtype.elem().size();
    let widest = (client.properties().hardware.load_width as usize / 8 / bytes).min(16 / bytes);
    (0..).map(|power| widest >> power).find(|&size| features.is_multiple_of(size.max(1))).unwrap_or(1).max(1)
}
