//! Calibration-based quantisation, block by block: each block gets its inputs from the quantised
//! blocks before it.
//!
//! One block is on the device at a time, with as many of the samples' hidden states as have room.
//! The other hidden states are transferred batch by batch ([`Hidden`](super::hidden::Hidden)). The
//! projections of a block are quantised in the order in which they run: qkv, attention output, gate
//! and up, down. Each projection also gets its inputs from the quantised projections before it. For
//! each of the four projections all hidden states are read once. The outputs of two of the
//! projections are added to the hidden states of both models.

use std::thread::{self, JoinHandle};

use burn::tensor::{Device, FloatDType};
use marlin_format::checkpoint::{Checkpoint, TensorData as FileTensor, compressed_tensors};
use marlin_quant::{CalibratedLayer, LayerLoss};

use super::QuantizeOptions;
use super::block::BlockRun;
use super::plan::Plan;
use super::resume::Partial;
use super::scaling::Scales;
use super::walk::CalibrationWalk;
use crate::ModelError;
use crate::config::ModelConfig;
use crate::folder::{FileWeights, LayerReader, choose_dtype};
use crate::model::{Rope, load_block};
use crate::parallel::Shard;

/// The samples of a calibration-based quantiser, and the device and dtype in which the model runs
/// on them.
#[derive(Debug, Clone)]
pub struct Calibration {
    /// The tokens of each sample. Samples may have any length that the model supports;
    /// [`calibration_samples`](crate::calibration_samples) converts texts to samples.
    pub samples: Vec<Vec<u32>>,
    /// The device that runs the model and sums the second moments of its layers' inputs.
    pub device: Device,
    /// The dtype of activations. The default is the checkpoint's dtype if the device computes in
    /// it, otherwise f32.
    pub dtype: Option<FloatDType>,
    /// True to calibrate every expert of a mixture with all tokens, false with those that its
    /// router sends to it. An expert with fewer than 128 tokens is rounded.
    pub route_all: bool,
}

/// Checks that a model supports all samples.
pub(super) fn check_samples(config: &ModelConfig, samples: &[Vec<u32>]) -> Result<(), ModelError> {
    let limit = config.positions();
    for (index, sample) in samples.iter().enumerate() {
        if sample.is_empty() || sample.len() > limit {
            return Err(ModelError::SampleLength {
                sample: index,
                tokens: sample.len(),
                limit,
            });
        }
        if let Some((position, &token)) = sample
            .iter()
            .enumerate()
            .find(|&(_, &token)| token as usize >= config.vocab_size)
        {
            return Err(ModelError::Token {
                token,
                position,
                vocab_size: config.vocab_size,
            });
        }
    }
    Ok(())
}

/// Quantises all blocks that `partial` does not have yet. `on_tensor` is called with the name of
/// each layer that this run or an earlier run has quantised.
pub(super) fn calibrate(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    plans: &[Plan<'_>],
    options: &QuantizeOptions,
    calibration: &Calibration,
    partial: &Partial,
    on_tensor: &mut dyn FnMut(&str) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let Calibration {
        samples,
        device,
        dtype,
        ..
    } = calibration;
    let longest = samples.iter().map(Vec::len).max().unwrap_or(1);
    let dtype = choose_dtype(*dtype, checkpoint, device)?;
    let quantizer = options.method.quantizer(options.sparsity);
    let mut on_read = |_: crate::OpenProgress<'_>| {};
    let config_path = checkpoint.dir().join("config.json");
    let reader = LayerReader {
        checkpoint,
        config_path: &config_path,
        quantization: None,
    };
    let mut source = FileWeights::new(reader, dtype, device, &mut on_read);
    let mut walk = CalibrationWalk {
        config,
        plans,
        plans_by_name: plans.iter().map(|plan| (plan.layer(), plan)).collect(),
        quantizer: &*quantizer,
        awq: options.method.awq(),
        route_all: calibration.route_all,
        device,
        dtype,
        rope: Rope::new(config, longest, device),
        batches: Vec::new(),
        pending: None,
        saving: None,
    };
    walk.embed(samples, &mut source)?;
    let mut on_layer = |layer: &LayerLoss| {
        tracing::debug!(?layer, "quantised");
        on_tensor(&layer.layer)
    };
    let walked = (0..config.num_hidden_layers)
        .try_for_each(|block| walk.block(block, partial, &mut source, &mut on_layer));
    // The previous block is completed even if the run is stopped.
    walk.saved()?;
    walked?;
    // The hidden states and their memory are released before the target is written.
    walk.batches.clear();
    walk.pending = None;
    walk.release_memory("model.norm")
}

impl CalibrationWalk<'_> {
    /// Quantises block `index`, or reads its weights from `partial`, and propagates the hidden
    /// states through the block. `on_layer` is called for each layer that this run or an earlier
    /// run has quantised; its error ends the run.
    fn block(
        &mut self,
        index: usize,
        partial: &Partial,
        source: &mut FileWeights<'_>,
        on_layer: &mut dyn FnMut(&LayerLoss) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let block = load_block(&Shard::whole(self.config), source, index)?;
        let (name, shape) = (format!("model.layers.{index}"), self.config.block(index));
        if let Some((done, losses)) = partial.block(index)? {
            losses.iter().try_for_each(on_layer)?;
            let scales = Scales::read(&done, &name)?;
            self.release_memory(&name)?;
            return BlockRun::new(self, &name, shape, scales, block).resume(&done);
        }
        let scales = if self.awq {
            self.scales(&name, &shape, &block)?
        } else {
            Scales::default()
        };
        self.release_memory(&name)?;
        let quantizer = self.quantizer;
        let mut run = BlockRun::new(self, &name, shape, scales, block);
        marlin_quant::calibrate(&mut run, quantizer, on_layer)?;
        let (layers, scaled) = run.finish()?;
        let partial = partial.clone();
        self.saved()?;
        self.saving = Some(thread::spawn(move || save(layers, scaled, &partial, index)));
        Ok(())
    }

    /// Waits until the last block is written.
    fn saved(&mut self) -> Result<(), ModelError> {
        match self.saving.take().map(JoinHandle::join) {
            Some(Ok(saved)) => saved,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

/// Writes a block's weights and losses, and the tensors that AWQ has scaled.
fn save(
    layers: Vec<CalibratedLayer>,
    scaled: Vec<FileTensor>,
    partial: &Partial,
    index: usize,
) -> Result<(), ModelError> {
    let losses: Vec<LayerLoss> = layers.iter().map(|layer| layer.loss.clone()).collect();
    let quantized = layers
        .iter()
        .flat_map(|layer| compressed_tensors::tensors_of(&layer.loss.layer, &layer.weight));
    let tensors: Vec<FileTensor> = quantized.chain(scaled).collect();
    let mut writer = partial.writer(index, &losses)?;
    writer.declare(tensors.iter().map(|tensor| tensor.spec.clone()))?;
    for tensor in tensors {
        writer.write_tensor(&tensor.spec.name, &tensor.bytes)?;
    }
    Ok(writer.finish()?)
}
