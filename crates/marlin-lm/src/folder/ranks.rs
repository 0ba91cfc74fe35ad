//! Loading the parts of all ranks of a model.

use std::sync::mpsc::Receiver;
use std::thread;

use burn::tensor::{Device, FloatDType};
use burn_marlin::device::device_name;
use marlin_format::QuantSpec;

use super::OpenProgress;
use super::reader::{HostProjection, LayerReader};
use super::weights::FileWeights;
use crate::ModelError;
use crate::config::ModelConfig;
use crate::model::Model;
use crate::parallel::{ParallelError, Shard, panic_message};

/// What the ranks of a model are loaded from, and to.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankLoading<'a> {
    pub(super) reader: LayerReader<'a>,
    /// The part of each rank.
    pub(super) shards: &'a [Shard],
    /// The device of each rank.
    pub(super) devices: &'a [Device],
    pub(super) dtype: FloatDType,
    pub(super) max_len: usize,
    /// The format that a float output head is rounded to.
    pub(super) head: Option<&'a QuantSpec>,
}

/// The projections of a rank that a thread reads ahead.
type ReadAhead = Receiver<Result<HostProjection, ModelError>>;

impl RankLoading<'_> {
    /// Loads the part of every rank: rank 0 on this thread, the others on threads of their own, so
    /// that each has a stream of its own. Reports the progress of rank 0.
    ///
    /// # Errors
    /// The error of the first rank that has one of its own.
    pub(super) fn load(
        &self,
        config: &ModelConfig,
        on_progress: &mut dyn FnMut(OpenProgress<'_>),
    ) -> Result<Vec<Model>, ModelError> {
        let parts: Vec<Result<Model, ModelError>> = thread::scope(|scope| {
            let ahead = self.reader.read_ahead(scope, self.shards);
            let mut ahead = ahead.into_iter().zip(self.shards).zip(self.devices);
            let first = ahead.next();
            let others: Vec<_> = ahead
                .map(|((ahead, shard), device)| {
                    let load = move || {
                        self.load_rank(ahead, shard, device, None, &mut |_: OpenProgress<'_>| {})
                    };
                    (shard, device, scope.spawn(load))
                })
                .collect();
            let first = first.map(|((ahead, shard), device)| {
                self.load_rank(ahead, shard, device, Some(config), on_progress)
            });
            let others = others.into_iter().map(|(shard, device, thread)| {
                thread.join().unwrap_or_else(|payload| {
                    Err(ModelError::Parallel(ParallelError::Panicked {
                        rank: shard.rank(),
                        device: device_name(device),
                        reason: panic_message(&*payload),
                    }))
                })
            });
            first.into_iter().chain(others).collect()
        });
        let is_stopped = |part: &Result<Model, ModelError>| {
            matches!(
                part,
                Err(ModelError::Parallel(ParallelError::Stopped { .. }))
            )
        };
        let (stopped, others): (Vec<_>, Vec<_>) = parts.into_iter().partition(is_stopped);
        // A rank that was stopped follows the error of another.
        others.into_iter().chain(stopped).collect()
    }

    /// Loads the part of a rank. With the config of the whole model, refuses tensors that no rank
    /// reads.
    fn load_rank(
        &self,
        ahead: ReadAhead,
        shard: &Shard,
        device: &Device,
        config: Option<&ModelConfig>,
        on_progress: &mut dyn FnMut(OpenProgress<'_>),
    ) -> Result<Model, ModelError> {
        let source = FileWeights::new(self.reader, self.dtype, device, on_progress);
        let mut source = source.with_read_ahead(shard.rank(), ahead);
        let mut model = Model::assemble(shard, self.max_len, device, &mut source)?;
        if let Some(config) = config {
            source.refuse_surplus(config)?;
        }
        if let Some(spec) = self.head {
            let quantized = model.quantize_own_head(spec);
            quantized.map_err(|source| ModelError::Layer {
                layer: "lm_head".into(),
                source,
            })?;
        }
        Ok(model)
    }
}
