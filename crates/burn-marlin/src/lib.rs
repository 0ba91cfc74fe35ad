//! 4-bit and 8-bit weights for Burn: linear layers with weights in 4 bits and activations in 16
//! (W4A16), or with weights in 8 bits (W8A16).
//!
//! - [`WeightQuantizer`] turns an existing, unmodified Burn model into a W4A16 (or W8A16) model
//!   with one call, and reports the outcome for every layer.
//! - [`WeightQuantizer::load`] loads a published checkpoint (GPTQ, AWQ, compressed-tensors, Marlin)
//!   into such a model; [`WeightQuantizer::export`] writes one.
//! - [`QuantLinear`] is the layer for models that are written with it; [`QuantizedWeight`] is the
//!   quantised tensor type under both kinds of model.
//! - [`install`] registers the fusion provider, once at the start of the program, so that
//!   unmodified models never hold a float weight.
//!
//! Weights are integers of 4 bits ([`QuantSpec::int4`]) or 8 ([`QuantSpec::int8`]) with a scale per
//! group, or floats ([`QuantSpec::fp8`], [`QuantSpec::mxfp4`], [`QuantSpec::nvfp4`]). Activations
//! are in f16, bf16 or f32; products accumulate in f32.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_marlin::{GroupSize, QuantSpec, WeightQuantizer};
//!
//! burn_marlin::install()?; // once, before the first tensor
//! let device = Device::flex();
//! let model = LinearConfig::new(256, 64).init(&device); // any Burn module
//! let (model, report) = WeightQuantizer::new(QuantSpec::int4(GroupSize::G128)).quantize(model)?;
//! println!("{report}");
//! let y = model.forward(Tensor::<2>::random([1, 256], Distribution::Default, &device));
//! assert_eq!(y.dims(), [1, 64]);
//! # Ok::<(), burn_marlin::Error>(())
//! ```
//!
//! # Features
#![doc = document_features::document_features!()]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod backend;
pub mod convert;
mod count;
pub mod device;
mod error;
pub mod experts;
pub mod fusion;
pub mod host;
mod linear;
mod scheme;
mod weight;

pub use convert::{Report, WeightQuantizer};
pub use error::Error;
pub use fusion::install;
pub use linear::{QuantLinear, QuantLinearConfig};
pub use scheme::spec_of_scheme;
pub use weight::QuantizedWeight;

pub use marlin_format::{GroupSize, QuantSpec, ScaleDtype, ScaleSpec, WeightValue, ZeroPoint};
pub use marlin_kernels::ActivationDtype;
