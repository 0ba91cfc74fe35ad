//! The buffers of decode attention on a device, and launches on these buffers.

use super::operands::Operands;
use crate::kernels::{bytes, values};
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use marlin_kernels::{ActivationDtype, KernelError};
use marlin_nn::kernels::attention::{
    AttentionArgs, AttentionPass, AttentionPlan, AttentionShape, AttentionTarget, attention,
};
use marlin_nn::kernels::flash::{FlashArgs, TILE_WORDS, flash, most_tiles, tiles};
use marlin_nn::kernels::{E4m3CacheArgs, RopeCacheArgs, SequenceState, rope_cache};

/// The buffers of a shape, which all launches share.
pub(super) struct Bench {
    pub(super) client: Client,
    pub(super) shape: AttentionShape,
    pub(super) buffers: [(Handle, usize); 15],
    pub(super) prompts: PromptKernel,
}

/// The attention kernel for the tokens of prompts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum PromptKernel {
    /// [`attention`], row by row.
    Rows,
    /// [`flash`].
    Flash,
}

// Positions in `Bench::buffers`.

pub(super) const QKV: usize = 0;
pub(super) const STATE: usize = 1;
pub(super) const KEYS: usize = 2;
pub(super) const VALUES: usize = 3;
pub(super) const OUT: usize = 8;
pub(super) const ARRIVAL_COUNTERS: usize = 10;
pub(super) const QUERIES: usize = 11;
const TILES: usize = 12;
pub(super) const PAGES: usize = 13;
const SINKS: usize = 14;

impl Bench {
    pub(super) fn new(client: &Client, shape: &AttentionShape, operands: &Operands) -> Self {
        let plan = AttentionPlan::new(shape, &AttentionTarget::of(client))
            .unwrap_or_else(|error| panic!("{error}"));
        let (dtype, outputs) = (shape.dtype, shape.rows * shape.heads * shape.cache.head_dim);
        let make = |bytes: Vec<u8>, length: usize| (client.create_from_slice(&bytes), length);
        let floats = |values: &[f32]| make(bytes(values, dtype), values.len());
        let table =
            |values: &[f32]| make(bytes(&padded(values), ActivationDtype::F32), values.len());
        let page_table = |pages: &[i32]| {
            let bytes = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
            make(bytes, pages.len())
        };
        let buffers = [
            floats(&operands.qkv),
            make(
                state_bytes(&operands.rows),
                operands.rows.len() * SequenceState::WORDS,
            ),
            floats(&operands.keys),
            floats(&operands.values),
            table(&operands.cos),
            table(&operands.sin),
            floats(&operands.norms[0]),
            floats(&operands.norms[1]),
            floats(&vec![f32::NAN; outputs]),
            make(
                bytes(&vec![f32::NAN; plan.partials()], ActivationDtype::F32),
                plan.partials(),
            ),
            make(
                vec![0; 4 * plan.arrival_counters()],
                plan.arrival_counters(),
            ),
            floats(&vec![f32::NAN; outputs]),
            make(
                tile_bytes(&operands.rows),
                most_tiles(shape.rows, shape.rows) * TILE_WORDS,
            ),
            page_table(&operands.used_pages(shape).unwrap_or(vec![0])),
            floats(&operands.sinks),
        ];
        Self {
            client: client.clone(),
            shape: *shape,
            buffers,
            prompts: PromptKernel::Rows,
        }
    }

    fn arg(&self, buffer: usize) -> BufferArg {
        let (handle, length) = &self.buffers[buffer];
        // SAFETY: the buffer was made for these elements.
        unsafe { BufferArg::from_raw_parts(handle.clone(), *length) }
    }

    fn norm(&self, buffer: usize) -> Option<BufferArg> {
        self.shape.norm_epsilon.map(|_| self.arg(buffer))
    }

    fn sinks(&self) -> Option<BufferArg> {
        self.shape.has_sinks.then(|| self.arg(SINKS))
    }

    fn pages(&self) -> Option<BufferArg> {
        self.shape.cache.pages.map(|_| self.arg(PAGES))
    }

    /// Returns the operands of [`attention`], where `qkv` is the index of its input buffer: the
    /// output of the qkv projection, or the queries.
    pub(super) fn args(&self, qkv: usize) -> AttentionArgs {
        AttentionArgs {
            qkv: self.arg(qkv),
            state: self.arg(STATE),
            keys: self.arg(KEYS),
            values: self.arg(VALUES),
            pages: self.pages(),
            cos: self.arg(4),
            sin: self.arg(5),
            q_norm: self.norm(6),
            k_norm: self.norm(7),
            sinks: self.sinks(),
            out: self.arg(OUT),
            partials: self.arg(9),
            arrival_counters: self.arg(ARRIVAL_COUNTERS),
        }
    }

    pub(super) fn write(&mut self, buffer: usize, bytes: &[u8]) {
        self.buffers[buffer].0 = self.client.create_from_slice(bytes);
    }

    /// Launches the kernel of a decode step, or the two kernels of a prompt pass.
    pub(super) fn launch(&self) {
        self.try_launch().unwrap_or_else(|error| panic!("{error}"));
    }

    pub(super) fn try_launch(&self) -> Result<(), KernelError> {
        if self.shape.pass == AttentionPass::Step {
            return attention(&self.client, &self.shape, self.args(QKV));
        }
        let args = RopeCacheArgs {
            qkv: self.arg(QKV),
            state: self.arg(STATE),
            cos: self.arg(4),
            sin: self.arg(5),
            q_norm: self.norm(6),
            k_norm: self.norm(7),
            queries: self.arg(QUERIES),
            keys: self.arg(KEYS),
            values: self.arg(VALUES),
            pages: self.pages(),
        };
        rope_cache(&self.client, &self.shape, args)?;
        if self.prompts == PromptKernel::Rows {
            return attention(&self.client, &self.shape, self.args(QUERIES));
        }
        flash(&self.client, &self.shape, self.flash_args())
    }

    pub(super) fn flash_args(&self) -> FlashArgs {
        FlashArgs {
            queries: self.arg(QUERIES),
            state: self.arg(STATE),
            tiles: self.arg(TILES),
            keys: self.arg(KEYS),
            values: self.arg(VALUES),
            pages: self.pages(),
            sinks: self.sinks(),
            out: self.arg(OUT),
        }
    }

    /// Returns the operands of the kernels between a cache in e4m3 and a workspace of keys and
    /// values.
    pub(super) fn e4m3_args(&self, workspace: &[(Handle, usize); 2]) -> E4m3CacheArgs {
        // SAFETY: the buffers were made for these elements.
        let [wide_keys, wide_values] = workspace
            .each_ref()
            .map(|(handle, length)| unsafe { BufferArg::from_raw_parts(handle.clone(), *length) });
        E4m3CacheArgs {
            state: self.arg(STATE),
            tiles: self.arg(TILES),
            keys: self.arg(KEYS),
            values: self.arg(VALUES),
            wide_keys,
            wide_values,
            pages: self.pages(),
        }
    }

    pub(super) fn read(&self, buffer: usize) -> Vec<u8> {
        self.client
            .read_one(self.buffers[buffer].0.clone())
            .unwrap_or_else(|error| panic!("{}: {error}", self.shape))
            .to_vec()
    }

    pub(super) fn floats(&self, buffer: usize) -> Vec<f64> {
        values(&self.read(buffer), self.shape.dtype)
    }
}

/// Returns a table with at least one element, because a buffer cannot be empty.
fn padded(values: &[f32]) -> Vec<f32> {
    if values.is_empty() {
        vec![0.0]
    } else {
        values.to_vec()
    }
}

pub(super) fn state_bytes(rows: &[SequenceState]) -> Vec<u8> {
    rows.iter()
        .flat_map(|row| row.to_words())
        .flat_map(i32::to_le_bytes)
        .collect()
}

fn tile_bytes(rows: &[SequenceState]) -> Vec<u8> {
    tiles(rows, most_tiles(rows.len(), rows.len()))
        .into_iter()
        .flat_map(i32::to_le_bytes)
        .collect()
}
