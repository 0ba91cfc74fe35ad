//! Models with random weights over several devices.

use std::thread;

use burn::module::Module;
use burn::tensor::{Device, FloatDType};
use marlin_format::WeightFormat;

use super::{
    DEFAULT_TIMEOUT, ParallelError, RowGroups, Shard, check_devices, connect, panic_message,
};
use crate::ModelError;
use crate::config::ModelConfig;
use crate::model::{Model, Projection, quantizes_experts_only};

impl Model {
    /// Creates a model with random weights that is split over devices, for timing; see
    /// [`random`](Self::random). With one device the model is whole.
    ///
    /// # Errors
    /// [`ModelError::Parallel`] if the model cannot be split over these devices, and
    /// [`ModelError::Layer`] if a layer has no features, or too many.
    ///
    /// # Panics
    /// Panics if [`ModelConfig::validate`] refuses the config.
    pub fn random_on(
        config: &ModelConfig,
        max_len: usize,
        dtype: FloatDType,
        format: Option<WeightFormat>,
        devices: &[Device],
    ) -> Result<Self, ModelError> {
        if let Err(error) = config.validate() {
            panic!("not the configuration of a model: {error}");
        }
        check_devices(devices)?;
        let experts_only = quantizes_experts_only(config, format);
        let groups = RowGroups::of(
            config,
            |_| false,
            |layer| {
                let format = format.filter(|_| !experts_only || layer.stack.is_some());
                Ok::<_, ParallelError>(format.map(|format| format.spec.scales.group))
            },
        )?;
        let shards = Shard::all(config, devices.len(), &groups)?;
        let part = |shard: &Shard, device: &Device| {
            let made = Self::random_part(shard, max_len, dtype, format, device);
            made.map_err(|source| ModelError::Layer {
                layer: "model".into(),
                source,
            })
        };
        // Each thread has a stream of its own.
        let parts: Vec<Result<Self, ModelError>> = thread::scope(|scope| {
            let of_rank = |(shard, device)| scope.spawn(move || part(shard, device));
            let others: Vec<_> = shards.iter().zip(devices).skip(1).map(of_rank).collect();
            let first = shards.iter().zip(devices).take(1);
            let first: Vec<_> = first.map(|(shard, device)| part(shard, device)).collect();
            let others = others.into_iter().enumerate().map(|(index, thread)| {
                thread.join().unwrap_or_else(|payload| {
                    let rank = index + 1;
                    Err(ParallelError::Panicked {
                        rank,
                        device: burn_marlin::device::device_name(&devices[rank]),
                        reason: panic_message(&*payload),
                    }
                    .into())
                })
            });
            first.into_iter().chain(others).collect()
        });
        let mut models = parts.into_iter().collect::<Result<Vec<Self>, _>>()?;
        if let Some((first, others)) = models.split_first_mut() {
            others.iter_mut().for_each(|model| model.take_common(first));
        }
        Ok(connect(models, DEFAULT_TIMEOUT)?)
    }

    /// Takes from the model of rank 0 what all ranks have in common: the embedding, the routers and
    /// the gates of shared experts.
    fn take_common(&mut self, first: &Self) {
        let device = self.device();
        self.embed_tokens = first.embed_tokens.clone().to_device(&device);
        for (block, first) in self.layers.iter_mut().zip(&first.layers) {
            let (Some(mixture), Some(first)) = (block.mixture_mut(), first.mixture()) else {
                continue;
            };
            let on_device = |projection: &Projection| projection.clone().to_device(&device);
            mixture.router = on_device(&first.router);
            if let (Some(shared), Some(first)) = (&mut mixture.shared, &first.shared) {
                shared.gate = on_device(&first.gate);
            }
        }
    }
}
