//! A Burn model in float and in 4 bits: [`compare`] converts the model with one call, and measures
//! it before and after the conversion.

mod error;
mod model;

use std::time::{Duration, Instant};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_marlin::device::free_memory;
use burn_marlin::fusion::{FusionCount, fusion_count};
use burn_marlin::{QuantSpec, Report, WeightQuantizer};

pub use error::CompareError;
pub use model::{CLASSES, HEAD_FEATURES, Model};

/// The size of the model to convert, and the format of the converted weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// The number of features of a row; a multiple of [`HEAD_FEATURES`].
    pub hidden: usize,
    /// The number of layers of the encoder.
    pub layers: usize,
    /// The number of rows of activations of a forward pass.
    pub rows: usize,
    /// The dtype of activations and of float weights.
    pub dtype: FloatDType,
    /// The format of the converted weights.
    pub spec: QuantSpec,
    /// The number of timed forward passes.
    pub runs: usize,
}

impl Options {
    /// Checks that a device can hold and run the model.
    ///
    /// # Errors
    /// Returns [`CompareError::Hidden`], [`CompareError::Zero`], [`CompareError::Dtype`] or
    /// [`CompareError::TooLarge`].
    pub fn check(&self, device: &Device) -> Result<(), CompareError> {
        let Self {
            hidden,
            layers,
            rows,
            dtype,
            runs,
            ..
        } = *self;
        if hidden == 0 || !hidden.is_multiple_of(HEAD_FEATURES) {
            return Err(CompareError::Hidden { found: hidden });
        }
        if let Some((option, _)) = [("layers", layers), ("rows", rows), ("runs", runs)]
            .into_iter()
            .find(|&(_, value)| value == 0)
        {
            return Err(CompareError::Zero { option });
        }
        if !device.supports_dtype(dtype) {
            return Err(CompareError::Dtype { dtype });
        }
        match (self.needed_bytes(), free_memory(device)) {
            (needed, Some(free)) if needed > free => Err(CompareError::TooLarge {
                hidden,
                layers,
                rows,
                needed,
                free,
            }),
            _ => Ok(()),
        }
    }

    /// Estimates the bytes of the float weights and of one layer's activations, all in f32, because
    /// weights are drawn in f32.
    fn needed_bytes(&self) -> usize {
        let product = |factors: &[usize]| {
            factors
                .iter()
                .copied()
                .fold(size_of::<f32>(), usize::saturating_mul)
        };
        // An encoder layer has four matrices of hidden x hidden, and two of hidden x 4 hidden.
        let weights = product(&[12, self.layers, self.hidden, self.hidden])
            .saturating_add(product(&[self.hidden, CLASSES]));
        // The activations are the attention scores and their softmax, and the rows before, in and
        // after the feed-forward network.
        let scores = product(&[2, self.hidden / HEAD_FEATURES, self.rows, self.rows]);
        weights
            .saturating_add(scores)
            .saturating_add(product(&[16, self.rows, self.hidden]))
    }
}

/// A model's output and the time it takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// The output [1, rows, CLASSES], row by row.
    pub output: Vec<f32>,
    /// The median time of a forward pass, including the wait for the device.
    pub time: Duration,
    /// The number of uses of packed weights in one forward pass; 0 on devices without fusion.
    pub uses: FusionCount,
}

/// A model before and after its conversion.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// The outcome of the conversion for every layer, with the bytes before and after.
    pub report: Report,
    /// The float model.
    pub before: Run,
    /// The converted model.
    pub after: Run,
}

impl Comparison {
    /// Returns the norm of the difference of the two outputs, divided by the norm of the float
    /// output.
    pub fn relative_error(&self) -> f64 {
        let squares = |values: &mut dyn Iterator<Item = f32>| {
            values.map(|value| f64::from(value).powi(2)).sum::<f64>()
        };
        let (before, after) = (&self.before.output, &self.after.output);
        let distance = squares(
            &mut before
                .iter()
                .zip(after)
                .map(|(before, after)| after - before),
        );
        (distance / squares(&mut before.iter().copied())).sqrt()
    }
}

/// Creates a float model, runs it, converts it, and runs the converted model on the same input.
///
/// # Errors
/// Returns the errors of [`Options::check`], [`CompareError::Marlin`] if the conversion fails, and
/// [`CompareError::Run`] if the device fails.
pub fn compare(options: &Options, device: &Device) -> Result<Comparison, CompareError> {
    options.check(device)?;
    device.seed(1);
    let model = Model::new(options.hidden, options.layers, device).map(&mut Cast(options.dtype));
    let x = Tensor::<3>::random(
        [1, options.rows, options.hidden],
        Distribution::Normal(0.0, 1.0),
        device,
    )
    .cast(options.dtype);
    let before = run(&model, &x, options.runs, device)?;

    let (model, report) = WeightQuantizer::new(options.spec)
        .quantize(model)
        .map_err(burn_marlin::Error::from)?;

    let after = run(&model, &x, options.runs, device)?;
    Ok(Comparison {
        report,
        before,
        after,
    })
}

/// Casts every float parameter to a dtype.
struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let dtype = self.0;
        param.map(|tensor| tensor.cast(dtype))
    }
}

fn run(model: &Model, x: &Tensor<3>, runs: usize, device: &Device) -> Result<Run, CompareError> {
    fn failed(error: impl ToString) -> CompareError {
        CompareError::Run {
            reason: error.to_string(),
        }
    }
    // Earlier operations that are still queued must not be counted. The counted pass also compiles
    // kernels.
    device.sync().map_err(failed)?;
    let start = fusion_count();
    let output = model
        .forward(x.clone())
        .cast(FloatDType::F32)
        .try_into_vec_as::<f32>()
        .map_err(failed)?;
    let end = fusion_count();
    let uses = FusionCount {
        fused: end.fused - start.fused,
        dequantized: end.dequantized - start.dequantized,
    };

    let forward = || {
        let start = Instant::now();
        let y = model.forward(x.clone());
        device.sync().map_err(failed)?;
        let time = start.elapsed();
        drop(y);
        Ok(time)
    };
    // This pass is not timed. Without the cast to f32 it is fused differently, and may compile
    // other kernels.
    forward()?;
    let mut times = (0..runs)
        .map(|_| forward())
        .collect::<Result<Vec<_>, CompareError>>()?;
    times.sort_unstable();
    Ok(Run {
        output,
        time: times[runs / 2],
        uses,
    })
}
