//! Calibration-based quantisers.
//!
//! A layer computes `x W` with `x` [tokens, K] and `W` [K, N]. A quantiser minimises the error of
//! this product over calibration data, `|x (W - Q)|²`, which depends on the data only through the
//! [`Hessian`] `xᵀ x` [K, K].
//!
//! | quantiser | what it does |
//! |---|---|
//! | [`round_with_clipping`] | rounds to nearest, with the scale of each group chosen among [`SHRINKS`] shrunken ranges by squared error; needs no data |
//! | [`gptq`] | GPTQ (arXiv 2210.17323) as the Marlin paper modifies it (section 3.5): rows are rounded one after the other, and later rows compensate for the error of each; ranges are chosen by the error that remains after that |
//!
//! [`awq_scales`] finds the scales of AWQ (arXiv 2306.00978), which enlarge the weights of large
//! inputs before one of these quantisers runs, so that these weights are rounded more exactly.
//!
//! Both quantisers can prune to 2:4: [`round_with_clipping`] by magnitude, [`gptq`] as SparseGPT
//! does (arXiv 2301.00774). Both produce a [`PlainWeight`](marlin_format::PlainWeight), which can
//! be converted to every file format and device layout. [`Rounding`] and [`GptqOptions`] make them
//! available through one trait, [`Quantizer`].
//!
//! [`calibrate`] quantises the linear layers of a model one after the other, each with its inputs
//! from the quantised layers before it; a [`BlockRunner`] runs the model. [`GptqCalibrator`] does
//! this for any Burn model, with the inputs of the layers on some batches.
//!
//! ```
//! use marlin_format::{GroupSize, QuantSpec};
//! use marlin_quant::{GptqOptions, Hessian, gptq};
//!
//! let (k, n, tokens) = (32, 4, 100);
//! let wave = |i: usize| (i as f32 * 0.37).sin();
//! let weight: Vec<f32> = (0..k * n).map(wave).collect();
//! let activations: Vec<f32> = (0..tokens * k).map(|i| wave(i * i)).collect();
//! let mut hessian = Hessian::new(k);
//! hessian.add(&activations)?;
//! let quantized = gptq(&weight, n, &hessian, &QuantSpec::int4(GroupSize::G32), &GptqOptions::default())?;
//! assert_eq!((quantized.weight.k(), quantized.weight.n()), (k, n));
//! # Ok::<(), marlin_quant::QuantError>(())
//! ```
//!
//! # Features
#![doc = document_features::document_features!()]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod awq;
mod calibration;
mod calibrator;
mod clipping;
#[cfg(feature = "cubecl-runtime")]
mod device;
mod error;
mod factor;
mod gptq;
mod grid;
mod hessian;
mod loss;
mod product;
mod quantizer;
#[cfg(test)]
mod tests;

pub use awq::awq_scales;
pub use calibration::{
    BlockRunner, CalibratedLayer, FloatActivations, GroupLayer, LayerError, LayerGroup,
    LayerInputs, calibrate,
};
pub use calibrator::{CalibrationError, CalibrationReport, GptqCalibrator};
pub use clipping::round_with_clipping;
pub use error::QuantError;
pub use gptq::{Gptq, GptqOptions, RowOrder, gptq, gptq_beside};
pub use grid::SHRINKS;
pub use hessian::{Hessian, HessianSums};
pub use loss::LayerLoss;
pub use quantizer::{Quantized, Quantizer, Rounding};
