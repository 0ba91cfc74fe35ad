//! W4A16 and W8A16 matmul kernels, their launch, and the choice among them. This crate does not
//! depend on Burn.
//!
//! A [`Problem`] describes a matmul; [`plan`] chooses the [`Kernel`] and gives the reason, without
//! a device; [`launch`] runs the kernel. Each routine has a folder:
//!
//! | routine | runs on | for |
//! |---|---|---|
//! | [`matmul::mma_sync`] | CUDA from compute capability 8.0 on | weights of 4 or 8 bits, f16/bf16 activations, any M, N, K, group |
//! | [`matmul::wgmma`] | CUDA of compute capability 9.0 | the same |
//! | [`matmul::gemv`] | CUDA from compute capability 9.0 on | one row, with or without a norm before it |
//! | [`matmul::portable`] | every CubeCL runtime | weights of 4 or 8 bits, any M, N, K, group, f32/f16/bf16; no tensor cores |
//! | [`matmul::host`] | the CPU, without CubeCL | weights of 4 or 8 bits on Burn's Flex backend |
//! | [`experts`] | CUDA from compute capability 8.0 on; the CPU, without CubeCL | mixtures of experts: routing, matmuls of rows by their experts' matrices, weighted sums |
//! | [`matmul::lm_head`] | every CubeCL runtime | few rows with a float weight |
//! | [`repack`] | every CubeCL runtime | the conversion of weights between the [layouts](marlin_format::WeightLayout), and of activations into the order of the stored rows |
//!
//! [`tile`] holds the shared parts of the tensor-core routines, [`ptx`] their instructions.
//!
//! Without the feature `cubecl-runtime` the crate does not depend on CubeCL: it has
//! [`matmul::host`], [`plan`] and the types that describe a problem.
//!
//! # Features
#![doc = document_features::document_features!()]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(feature = "cubecl-runtime"),
    allow(dead_code, reason = "kernels in CubeCL use it")
)]

pub mod device;
mod error;
pub mod experts;
#[cfg(feature = "cubecl-runtime")]
pub mod fp8;
#[cfg(feature = "inspect")]
pub mod inspect;
#[cfg(feature = "cubecl-runtime")]
mod launch;
pub mod matmul;
#[cfg(feature = "cubecl-runtime")]
#[allow(
    missing_docs,
    reason = "CubeCL's macro makes an undocumented module beside each function"
)]
pub mod pdl;
mod plan;
#[cfg(feature = "cubecl-runtime")]
#[allow(
    missing_docs,
    reason = "CubeCL's macro makes an undocumented module beside each function"
)]
pub mod planes;
pub mod problem;
#[cfg(feature = "cubecl-runtime")]
#[allow(
    missing_docs,
    reason = "CubeCL's macro makes an undocumented module beside each function"
)]
pub mod ptx;
#[cfg(feature = "cubecl-runtime")]
pub mod repack;
pub mod tile;

#[cfg(feature = "cubecl-runtime")]
pub use device::additional_server;
pub use device::{Card, ClustersAtOnce, Runtime, Target};
pub use error::KernelError;
#[cfg(feature = "cubecl-runtime")]
pub use launch::{
    NormOperands, Operands, WeightBuffers, dequantize, elementwise, launch, swizzled_map,
    vector_size,
};
pub use plan::{
    EpilogueStage, Kernel, Plan, PrologueStage, Reason, device_layout, plan, plan_converted,
};
pub use problem::{ActivationDtype, Epilogue, FloatProblem, Problem, Prologue, QuantProblem};
