//! Compilation of a pass's kernels before the pass runs, on all cores.
//!
//! CubeCL compiles a kernel on the thread of its device when the kernel is first launched there, so
//! kernels are compiled one after the other. [`compile`] runs each operation of a pass once on one
//! of several servers of the same card. Each server has its own thread, and the results of the
//! operations are discarded. The compiled kernels are then in CubeCL's cache on disk, from which
//! the device loads them.

#[cfg(feature = "cuda")]
mod servers;

use crate::kernels::attention::AttentionShape;
use burn::tensor::Device;
use burn_marlin::experts::Router;
use marlin_format::WeightDescriptor;
#[cfg(feature = "cuda")]
use marlin_kernels::additional_server;
use marlin_kernels::{Epilogue, Prologue};

/// The properties of a pass that determine its kernels.
#[derive(Debug, Clone, PartialEq)]
pub struct PassShape {
    /// The shapes of the pass's attention, one for each kind of layer.
    pub attention: Vec<AttentionShape>,
    /// The number of rows for which the lm_head computes logits: the rows of a step, or the last
    /// rows of prompts.
    pub last_rows: usize,
    /// The matmuls of the layers.
    pub layers: Vec<LinearShape>,
    /// The layers of quantised experts.
    pub experts: Vec<ExpertsShape>,
    /// The matmul of the lm_head, [hidden, vocab].
    pub head: LinearShape,
}

/// A linear layer, with the prologue and the epilogue of its matmul.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearShape {
    /// The weight of the layer.
    pub weight: LinearWeight,
    /// True if the layer has a bias.
    pub bias: bool,
    /// The operation on the activations before the matmul.
    pub prologue: Prologue,
    /// The operation on the outputs after the matmul.
    pub epilogue: Epilogue,
}

/// A layer of quantised experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsShape {
    /// How experts are chosen and weighted.
    pub router: Router,
    /// The weights of gates and ups side by side, and of down.
    pub weights: [WeightDescriptor; 2],
    /// True if both weights have biases.
    pub has_biases: bool,
    /// What is computed from gates and ups.
    pub epilogue: Epilogue,
}

/// The weight of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LinearWeight {
    /// A float weight [K, N] in the dtype of the activations, the transpose of a contiguous [N, K].
    Float([usize; 2]),
    /// A quantised weight.
    Quantized(WeightDescriptor),
}

impl LinearWeight {
    /// Returns the dimensions [K, N] of the weight.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Float(dims) => *dims,
            Self::Quantized(descriptor) => [descriptor.k, descriptor.n],
        }
    }
}

/// The numbers of operations that were run so that their kernels are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompiledAhead {
    /// The number of all operations, of which those with the same kernels count once; 0 on a device
    /// that is not a CUDA device.
    pub operations: usize,
    /// The number of operations that could not run. Their kernels are compiled when they are first
    /// launched.
    pub failed: usize,
}

/// Returns true if [`compile`] compiles kernels for a device: a CUDA device.
#[cfg_attr(
    not(feature = "cuda"),
    allow(
        unused_variables,
        reason = "other runtimes compile on the thread that launches"
    )
)]
pub fn is_supported(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    if let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() {
        return additional_server(&device.client(), 0).is_some();
    }
    false
}

/// Compiles the kernels of passes for a CUDA device into CubeCL's cache on disk, and waits until
/// the compilation is complete. On other devices the function does nothing.
///
/// Meanwhile, the card's memory holds the operands, weights included, of as many operations at a
/// time as the machine has cores.
#[cfg_attr(
    not(feature = "cuda"),
    allow(
        unused_variables,
        reason = "other runtimes compile on the thread that launches"
    )
)]
pub fn compile(device: &Device, passes: &[PassShape]) -> CompiledAhead {
    #[cfg(feature = "cuda")]
    if let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() {
        return servers::compile(device, passes);
    }
    CompiledAhead::default()
}
