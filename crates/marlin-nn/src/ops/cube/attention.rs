//! The launches of the attention of a step and of prompts.

use super::in_place;
use crate::kernels::attention::{
    self, AttentionArgs, AttentionPlan, AttentionShape, AttentionTarget,
};
use crate::kernels::flash::{self, FlashArgs};
use crate::kernels::{self, E4m3CacheArgs, RopeCacheArgs};
use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use burn_marlin::backend::cube::{buffer, empty};
use marlin_kernels::{KernelError, Target};

/// The operands of attention.
pub(super) struct AttentionTensors {
    pub qkv: CubeTensor,
    pub rows: CubeTensor,
    pub keys: CubeTensor,
    pub values: CubeTensor,
    /// Keys and values in the dtype of activations, if the cache has another format.
    pub workspace: Option<(CubeTensor, CubeTensor)>,
    /// The page table, if the cache has pages.
    pub pages: Option<CubeTensor>,
    pub cos: CubeTensor,
    pub sin: CubeTensor,
    /// The weights of the RMSNorms of query heads and of key heads.
    pub norms: [Option<CubeTensor>; 2],
    /// The scores of heads without a position.
    pub sinks: Option<CubeTensor>,
}

impl AttentionTensors {
    /// Returns the attention of a step.
    pub fn step(
        &self,
        arrival_counters: CubeTensor,
        shape: &AttentionShape,
    ) -> Result<CubeTensor, KernelError> {
        let cache = [&self.keys, &self.values];
        self.attend(self.qkv.clone(), cache, arrival_counters, shape)
    }

    /// Returns the attention of prompts, computed on tensor cores if [`flash::takes`] returns true,
    /// otherwise row by row. With a cache in another format than the activations, keys and values
    /// go through the workspace, and are read as the cache has them.
    pub fn prompt(
        &self,
        tiles: CubeTensor,
        shape: &AttentionShape,
    ) -> Result<CubeTensor, KernelError> {
        let client = &self.qkv.client;
        let (cached, shape) = (shape, &shape.in_activations());
        let (keys, values) = match &self.workspace {
            Some((keys, values)) => (keys, values),
            None => (&self.keys, &self.values),
        };
        let queries = empty(
            &self.qkv,
            Shape::new([shape.rows, shape.heads * shape.cache.head_dim]),
            self.qkv.dtype,
        );
        let [q_norm, k_norm] = self.norms.clone().map(|norm| norm.map(buffer));
        let args = RopeCacheArgs {
            qkv: buffer(self.qkv.clone()),
            state: buffer(self.rows.clone()),
            cos: buffer(self.cos.clone()),
            sin: buffer(self.sin.clone()),
            q_norm,
            k_norm,
            queries: buffer(queries.clone()),
            keys: in_place(keys),
            values: in_place(values),
            pages: self.pages.clone().map(buffer),
        };
        kernels::rope_cache(client, shape, args)?;
        if let Some((keys, values)) = &self.workspace {
            let args = || E4m3CacheArgs {
                state: buffer(self.rows.clone()),
                tiles: buffer(tiles.clone()),
                keys: in_place(&self.keys),
                values: in_place(&self.values),
                wide_keys: in_place(keys),
                wide_values: in_place(values),
                pages: self.pages.clone().map(buffer),
            };
            kernels::store_codes(client, cached, args())?;
            kernels::widen_codes(client, cached, args())?;
        }
        if !flash::takes(&Target::of(client), shape.dtype, shape.cache.head_dim) {
            // Rows of prompts take no arrival_counters.
            return self.attend(queries, [keys, values], tiles, shape);
        }
        let out = empty(&queries, queries.shape(), queries.dtype);
        let args = FlashArgs {
            queries: buffer(queries),
            state: buffer(self.rows.clone()),
            tiles: buffer(tiles),
            keys: in_place(keys),
            values: in_place(values),
            pages: self.pages.clone().map(buffer),
            sinks: self.sinks.clone().map(buffer),
            out: buffer(out.clone()),
        };
        flash::flash(client, shape, args)?;
        Ok(out)
    }

    fn attend(
        &self,
        qkv: CubeTensor,
        [keys, values]: [&CubeTensor; 2],
        arrival_counters: CubeTensor,
        shape: &AttentionShape,
    ) -> Result<CubeTensor, KernelError> {
        let client = self.qkv.client.clone();
        let plan = AttentionPlan::new(shape, &AttentionTarget::of(&client))?;
        let out = empty(
            &qkv,
            Shape::new([shape.rows, shape.heads * shape.cache.head_dim]),
            qkv.dtype,
        );
        let partials = empty(&qkv, Shape::new([plan.partials().max(1)]), DType::F32);
        let [q_norm, k_norm] = self.norms.clone().map(|norm| norm.map(buffer));
        let args = AttentionArgs {
            qkv: buffer(qkv),
            state: buffer(self.rows.clone()),
            keys: in_place(keys),
            values: in_place(values),
            pages: self.pages.clone().map(buffer),
            cos: buffer(self.cos.clone()),
            sin: buffer(self.sin.clone()),
            q_norm,
            k_norm,
            sinks: self.sinks.clone().map(buffer),
            out: buffer(out.clone()),
            partials: buffer(partials),
            arrival_counters: in_place(&arrival_counters),
        };
        attention::attention(&client, shape, args)?;
        Ok(out)
    }
}
