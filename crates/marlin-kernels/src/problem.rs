use crate::KernelError;
use crate::marlin::Card;
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, FloatKind};
use marlin_format::layout::PlainLayout;
use marlin_format::{QuantSpec, ScaleDtype};
use std::fmt;

/// The dtype of activations and output. Products accumulate in f32 whatever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationDtype {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
}

impl ActivationDtype {
    /// The name as it is written everywhere: `f32`, `f16`, `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    /// CubeCL's name for it.
    pub const fn elem(self) -> ElemType {
        ElemType::Float(match self {
            Self::F32 => FloatKind::F32,
            Self::F16 => FloatKind::F16,
            Self::BF16 => FloatKind::BF16,
        })
    }

    /// Checks that a device computes in this dtype.
    pub(crate) fn expect_on(self, client: &Client) -> Result<(), KernelError> {
        if client.features().type_usage(self.elem()).contains(TypeUsage::Conversion) {
            return Ok(());
        }
        Err(KernelError::Dtype { runtime: Target::of(client).runtime, dtype: self.name() })
    }
}

impl From<ScaleDtype> for ActivationDtype {
    fn from(dtype: ScaleDtype) -> Self {
        match dtype {
            ScaleDtype::F16 => Self::F16,
            ScaleDtype::BF16 => Self::BF16,
            ScaleDtype::F32 => Self::F32,
        }
    }
}

impl fmt::Display for ActivationDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A matmul with a quantised weight: activations [M, K] times a weight [K, N] gives [M, N].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Rows of activations: batch times sequence. 1 to a few in decode, many in prefill.
    pub m: usize,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// How the weight is quantised.
    pub spec: QuantSpec,
    /// Dtype of activations and output.
    pub activations: ActivationDtype,
    /// Dtype in which the device holds the scales: the format's own where the device supports it, f32 otherwise.
    pub scales: ActivationDtype,
    /// Whether the weight's rows are permuted (act-order), so that activations are gathered.
    pub permuted: bool,
}

impl Problem {
    /// Elements of the largest operand as the kernels index it.
    fn largest_operand(&self) -> usize {
        let activations = self.m.saturating_mul(self.k.max(self.n));
        activations.max(self.k.saturating_mul(self.n))
    }
}

/// Lengths, in elements, of the buffers of a weight in the plain layout.
pub(crate) struct WeightLengths {
    pub words: usize,
    pub scales: usize,
    pub zero_points: Option<usize>,
    pub row_permutation: Option<usize>,
}

impl Problem {
    /// Checks the shape, and a weight's buffers against it and the format.
    pub(crate) fn expect_weight(&self, found: WeightLengths) -> Result<(), KernelError> {
        QuantSpec::check_shape(self.k, self.n)?;
        let layout = PlainLayout::new(self.k, self.n, self.spec.bits);
        let groups = self.spec.group.count(self.k);
        let zero_points = groups * self.n.div_ceil(self.spec.bits.per_word());
        self.expect_length("words", layout.words(), found.words)?;
        self.expect_length("scales", groups * self.n, found.scales)?;
        self.expect_optional("zero points", self.spec.zero_points.then_some(zero_points), found.zero_points)?;
        self.expect_optional("row permutation", self.permuted.then_some(self.k), found.row_permutation)
    }

    pub(crate) fn expect_length(&self, operand: &'static str, expected: usize, found: usize) -> Result<(), KernelError> {
        if found == expected {
            return Ok(());
        }
        Err(KernelError::BufferLength { operand, problem: self.to_string(), expected, found })
    }

    /// Checks that 32-bit indices reach every operand.
    pub(crate) fn expect_addressable(&self) -> Result<(), KernelError> {
        let (elements, limit) = (self.largest_operand(), u32::MAX as usize);
        if elements > limit { Err(KernelError::TooLarge { problem: self.to_string(), elements, limit }) } else { Ok(()) }
    }

    pub(crate) fn expect_at_least(&self, operand: &'static str, needed: usize, found: usize) -> Result<(), KernelError> {
        if found >= needed {
            Ok(())
        } else {
            Err(KernelError::BufferLength { operand, problem: self.to_string(), expected: needed, found })
        }
    }

    pub(crate) fn expect_optional(&self, operand: &'static str, expected: Option<usize>, found: Option<usize>) -> Result<(), KernelError> {
        match (expected, found) {
            (Some(expected), Some(found)) => self.expect_length(operand, expected, found),
            (None, None) => Ok(()),
            (_, found) => {
                let found = if found.is_some() { "present" } else { "missing" };
                Err(KernelError::Presence { operand, problem: self.to_string(), found })
            }
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "M={} N={} K={} {} {}", self.m, self.n, self.k, self.spec, self.activations)?;
        if self.permuted { f.write_str(" act-order") } else { Ok(()) }
    }
}

/// What runs kernels on a device.
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

/// What the choice of a kernel needs to know of a device. Plain data, so that the choice is tested without one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The runtime.
    pub runtime: Runtime,
    /// The device as it names itself.
    pub name: String,
    /// The NVIDIA card, on CUDA.
    pub card: Option<Card>,
}

impl Target {
    /// The target behind a CubeCL client.
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let runtime = match client.name() {
            "cuda" => Runtime::Cuda,
            "hip" => Runtime::Rocm,
            "wgpu<spirv>" => Runtime::Vulkan,
            "wgpu<msl>" | "metal" => Runtime::Metal,
            "wgpu<wgsl>" => Runtime::WebGpu,
            "cpu" => Runtime::Cpu,
            _ => Runtime::Other,
        };
        Self { runtime, name: properties.identity.name.clone(), card: Card::of(client) }
    }

    /// Burn's Flex backend.
    pub fn flex() -> Self {
        Self { runtime: Runtime::Flex, name: "Flex (CPU)".into(), card: None }
    }
}
