//! The matmul problems of the project, and the checks that every launch makes.

mod float;

pub use float::FloatProblem;

use crate::KernelError;
use marlin_format::{
    QuantSpec, ScaleDtype, Sparsity, WeightDescriptor, WeightLayout, WeightTensors,
};
use serde::{Deserialize, Serialize};
use std::fmt;
#[cfg(feature = "cubecl-runtime")]
use {
    crate::Target,
    cubecl::client::Client,
    cubecl::ir::features::TypeUsage,
    cubecl::ir::{ElemType, FloatKind},
};

/// The dtype of activations and output. Products accumulate in f32 whatever the dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ActivationDtype {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
}

impl ActivationDtype {
    /// Returns the name of the dtype: `f32`, `f16` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    /// Returns CubeCL's element type for the dtype.
    #[cfg(feature = "cubecl-runtime")]
    pub const fn elem(self) -> ElemType {
        ElemType::Float(match self {
            Self::F32 => FloatKind::F32,
            Self::F16 => FloatKind::F16,
            Self::BF16 => FloatKind::BF16,
        })
    }

    /// Checks that a device computes in this dtype, as Burn's `supports_dtype` does. Vulkan
    /// converts bf16, but has no arithmetic in it.
    ///
    /// # Errors
    /// Returns [`KernelError::Dtype`] if it does not.
    #[cfg(feature = "cubecl-runtime")]
    pub fn expect_on(self, client: &Client) -> Result<(), KernelError> {
        let needed = TypeUsage::Buffer
            | TypeUsage::Conversion
            | TypeUsage::Arithmetic
            | TypeUsage::DotProduct;
        if client
            .features()
            .type_usage(self.elem())
            .is_superset(needed)
        {
            return Ok(());
        }
        Err(KernelError::Dtype {
            runtime: Target::of(client).runtime,
            dtype: self.name(),
        })
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

/// The operation on the activations before the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Prologue {
    /// None: the activations are multiplied unchanged.
    #[default]
    None,
    /// The activations are added to the residual stream, and the RMSNorm (arXiv 1910.07467) of the
    /// sum is multiplied.
    AddRmsNorm,
}

/// The operation on the output after the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Epilogue {
    /// None: the output is the product with the bias, [M, N].
    #[default]
    None,
    /// SwiGLU (arXiv 2002.05202): the first half of the columns are gates, the second ups, and the
    /// output is `silu(gate) * up`, [M, N / 2].
    SwiGlu,
    /// The SwiGLU of gpt-oss, in the same layout: `gate * sigmoid(1.702 gate) * (up + 1)`, where
    /// gates are at most 7 and ups from -7 to 7.
    ClampedSwiGlu,
}

impl Epilogue {
    /// All epilogues.
    pub const ALL: [Self; 3] = [Self::None, Self::SwiGlu, Self::ClampedSwiGlu];

    /// The factor of gates in the sigmoid of [`Self::ClampedSwiGlu`].
    pub const CLAMPED_SLOPE: f32 = 1.702;
    /// The largest gate, and the largest magnitude of an up, of [`Self::ClampedSwiGlu`].
    pub const CLAMPED_LIMIT: f32 = 7.0;

    /// Returns the number of columns of the product from which one output is computed.
    pub const fn columns(self) -> usize {
        match self {
            Self::None => 1,
            Self::SwiGlu | Self::ClampedSwiGlu => 2,
        }
    }

    /// Returns true if an output is computed from a gate and an up.
    pub const fn is_gated(self) -> bool {
        self.columns() == 2
    }

    /// Returns the output of a gate and an up, on the host. Without an epilogue, it is the gate.
    pub fn gated(self, gate: f32, up: f32) -> f32 {
        match self {
            Self::None => gate,
            Self::SwiGlu => gate / (1.0 + (-gate).exp()) * up,
            Self::ClampedSwiGlu => {
                // Unlike `min`, `clamp` keeps NaN.
                let gate = gate.clamp(f32::MIN, Self::CLAMPED_LIMIT);
                let up = up.clamp(-Self::CLAMPED_LIMIT, Self::CLAMPED_LIMIT);
                gate / (1.0 + (-Self::CLAMPED_SLOPE * gate).exp()) * (up + 1.0)
            }
        }
    }
}

/// A matmul with a quantised weight: epilogue(prologue(activations [M, K]) times the weight [K, N],
/// plus a bias `[N]`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantProblem {
    /// The number of rows of activations, M: batch times sequence length. 1 to a few in decode,
    /// many in prefill.
    pub m: usize,
    /// The weight.
    pub weight: WeightDescriptor,
    /// Dtype of activations and output.
    pub activations: ActivationDtype,
    /// The dtype of the scales on the device: the dtype of the format if the device supports it,
    /// f32 otherwise.
    pub scales: ActivationDtype,
    /// The operation before the product.
    pub prologue: Prologue,
    /// The operation after the product.
    pub epilogue: Epilogue,
}

/// A matmul for which [`plan`](crate::plan) chooses a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Problem {
    /// A matmul with a quantised weight.
    Quant(QuantProblem),
    /// A matmul with a float weight.
    Float(FloatProblem),
}

impl From<QuantProblem> for Problem {
    fn from(problem: QuantProblem) -> Self {
        Self::Quant(problem)
    }
}

impl From<FloatProblem> for Problem {
    fn from(problem: FloatProblem) -> Self {
        Self::Float(problem)
    }
}

/// The maximum number of elements that the kernels' 32-bit indices can address.
pub const MAX_ELEMENTS: usize = QuantSpec::MAX_ELEMENTS;

impl QuantProblem {
    /// Creates the problem of `m` rows of activations in a dtype and a weight whose scales are held
    /// in the format's own dtype.
    pub fn new(m: usize, weight: WeightDescriptor, activations: ActivationDtype) -> Self {
        Self {
            m,
            weight,
            activations,
            scales: weight.spec().scales.dtype.into(),
            prologue: Prologue::None,
            epilogue: Epilogue::None,
        }
    }

    /// Returns the same problem with scales held in another dtype.
    pub fn with_scales(self, scales: ActivationDtype) -> Self {
        Self { scales, ..self }
    }

    /// Returns the same problem with another prologue.
    pub fn with_prologue(self, prologue: Prologue) -> Self {
        Self { prologue, ..self }
    }

    /// Returns the same problem with another epilogue.
    pub fn with_epilogue(self, epilogue: Epilogue) -> Self {
        Self { epilogue, ..self }
    }

    /// Returns the same problem with the weight in another layout.
    pub fn in_layout(self, layout: WeightLayout) -> Self {
        Self {
            weight: self.weight.in_layout(layout),
            ..self
        }
    }

    /// Returns the same problem with a weight of another sparsity.
    pub fn with_sparsity(self, sparsity: Sparsity) -> Self {
        Self {
            weight: self.weight.with_sparsity(sparsity),
            ..self
        }
    }

    /// Returns the number of input features, K.
    pub fn k(&self) -> usize {
        self.weight.k
    }

    /// Returns the number of columns of the weight, N.
    pub fn n(&self) -> usize {
        self.weight.n
    }

    /// Returns the number of output features: N, or N / 2 with SwiGLU.
    pub fn outputs(&self) -> usize {
        self.n() / self.epilogue.columns()
    }

    /// Returns true if tiles of `columns` columns can compute the epilogue. For SwiGLU the columns
    /// must fill whole tiles: gates fill half of each tile, and the corresponding ups the other
    /// half.
    pub(crate) fn divides_into(&self, columns: usize) -> bool {
        self.epilogue == Epilogue::None || self.n().is_multiple_of(columns)
    }

    /// Returns the quantisation of the weight.
    pub fn spec(&self) -> QuantSpec {
        self.weight.spec()
    }

    /// Checks the weight's shape and its buffers' lengths against its descriptor.
    pub(crate) fn expect_weight(&self, found: &WeightTensors<usize>) -> Result<(), KernelError> {
        self.weight.check()?;
        let expected = self.weight.tensors();
        for (tensor, found) in found.iter() {
            if let Some(expected) = expected.get(tensor) {
                expect_length(self, tensor.name(), expected.elements(), *found)?;
            }
        }
        expect_presence(
            self,
            "metadata",
            expected.metadata.is_some(),
            found.metadata.is_some(),
        )?;
        expect_presence(
            self,
            "zero_points",
            expected.zero_points.is_some(),
            found.zero_points.is_some(),
        )?;
        expect_presence(
            self,
            "row_permutation",
            expected.row_permutation.is_some(),
            found.row_permutation.is_some(),
        )
    }

    /// Checks that 32-bit indices can address every operand.
    pub(crate) fn expect_addressable(&self) -> Result<(), KernelError> {
        let (k, n) = (self.k(), self.n());
        // The tile layout pads K and N, so a very narrow weight has more words than values.
        let words = self.weight.tensors().qweight.elements();
        expect_at_most(
            self,
            self.m
                .saturating_mul(k.max(n))
                .max(k.saturating_mul(n))
                .max(words),
            MAX_ELEMENTS,
        )
    }

    /// Checks the lengths of output and bias.
    pub(crate) fn expect_outputs(
        &self,
        out: usize,
        bias: Option<usize>,
    ) -> Result<(), KernelError> {
        expect_length(self, "output", self.m * self.outputs(), out)?;
        bias.map_or(Ok(()), |bias| expect_length(self, "bias", self.n(), bias))
    }
}

/// Checks the length of a buffer, in elements.
///
/// # Errors
/// Returns [`KernelError::BufferLength`] if the check fails.
pub fn expect_length(
    problem: &impl fmt::Display,
    operand: &'static str,
    expected: usize,
    found: usize,
) -> Result<(), KernelError> {
    if found == expected {
        return Ok(());
    }
    Err(KernelError::BufferLength {
        operand,
        problem: problem.to_string(),
        expected,
        found,
    })
}

/// Checks that a buffer has at least `needed` elements.
///
/// # Errors
/// Returns [`KernelError::BufferLength`] if the check fails.
pub fn expect_at_least(
    problem: &impl fmt::Display,
    operand: &'static str,
    needed: usize,
    found: usize,
) -> Result<(), KernelError> {
    if found >= needed {
        Ok(())
    } else {
        expect_length(problem, operand, needed, found)
    }
}

/// Checks that the largest operand has no more elements than the kernels can address.
///
/// # Errors
/// Returns [`KernelError::TooLarge`] if it has more.
pub fn expect_at_most(
    problem: &impl fmt::Display,
    elements: usize,
    limit: usize,
) -> Result<(), KernelError> {
    if elements <= limit {
        return Ok(());
    }
    Err(KernelError::TooLarge {
        problem: problem.to_string(),
        elements,
        limit,
    })
}

/// Checks that an operand is given if, and only if, the problem has it.
///
/// # Errors
/// Returns [`KernelError::Presence`] if the check fails.
pub fn expect_presence(
    problem: &impl fmt::Display,
    operand: &'static str,
    expected: bool,
    found: bool,
) -> Result<(), KernelError> {
    if found == expected {
        return Ok(());
    }
    let found = if found { "present" } else { "missing" };
    Err(KernelError::Presence {
        operand,
        problem: problem.to_string(),
        found,
    })
}

impl fmt::Display for QuantProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            m,
            weight,
            activations,
            prologue,
            epilogue,
            ..
        } = self;
        write!(
            f,
            "M={m} N={} K={} {} {activations}",
            weight.n, weight.k, weight.format
        )?;
        if *prologue == Prologue::AddRmsNorm {
            f.write_str(" after a norm")?;
        }
        match epilogue {
            Epilogue::None => Ok(()),
            Epilogue::SwiGlu => f.write_str(" with SwiGLU"),
            Epilogue::ClampedSwiGlu => f.write_str(" with clamped SwiGLU"),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quant(problem) => problem.fmt(f),
            Self::Float(problem) => problem.fmt(f),
        }
    }
}
