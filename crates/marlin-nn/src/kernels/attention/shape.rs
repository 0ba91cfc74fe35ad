//! The shape of an attention, and its checks.

use crate::MAX_PASS_ROWS;
use crate::cache::{CacheFormat, CacheShape, Pages};
use marlin_kernels::problem::expect_at_most;
use marlin_kernels::{ActivationDtype, KernelError};
use std::fmt;
#[cfg(feature = "cubecl-runtime")]
use {
    crate::cache::write::expect_table,
    crate::kernels::SequenceState,
    cubecl::prelude::BufferArg,
    marlin_kernels::problem::{expect_length, expect_presence},
};

/// The number of elements of a vector: 16 bytes of a 16-bit type.
pub(super) const VECTOR: usize = 8;
/// The maximum number of features of a head.
pub(super) const MAX_HEAD_DIM: usize = 512;

/// The kind of rows that a launch processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionPass {
    /// A decode step. The launch writes the key and value of each row's token to the cache, and
    /// attends to the positions up to the token's. No two rows have the same slot.
    Step,
    /// Tokens of prompts, several of a sequence. Their queries are normalised and rotated, and
    /// their keys and values are in the cache ([`rope_cache`](crate::kernels::rope_cache())). The
    /// launch attends to the positions up to each row's own.
    Prompt,
}

/// The shape of the attention of a pass. A model and its cache determine every field except `rows`
/// and `pass`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// The number of tokens of the launch: one of each sequence in a step, any number of each
    /// prompt.
    pub rows: usize,
    /// The kind of the rows.
    pub pass: AttentionPass,
    /// The number of query heads.
    pub heads: usize,
    /// The number of features of a head that rotary embedding applies to: even, at most `head_dim`;
    /// 0 for none.
    pub rotary_dim: usize,
    /// The cache. Its number of heads divides `heads`, and its `head_dim` is a multiple of 8, up to
    /// 512.
    pub cache: CacheShape,
    /// The number of positions of the tables of cosines and sines: at least the cache's `max_len`.
    pub max_positions: usize,
    /// The length of the sliding window, the token's own position included; at least 1.
    pub window: Option<usize>,
    /// True if each query head has a score that counts in its softmax without a position.
    pub has_sinks: bool,
    /// The epsilon of the RMSNorms of query heads and key heads, if the model has such norms.
    pub norm_epsilon: Option<f32>,
    /// The dtype of the activations and of the cache.
    pub dtype: ActivationDtype,
}

impl AttentionShape {
    /// Checks that the dimensions are valid. The lengths of buffers do not show whether they are.
    ///
    /// # Errors
    /// Returns an error if a dimension is 0 or violates the condition in its field's documentation,
    /// or if the kernel cannot address all elements.
    pub fn check(&self) -> Result<(), KernelError> {
        let Self {
            rows,
            heads,
            rotary_dim,
            cache,
            max_positions,
            dtype,
            ..
        } = *self;
        let CacheShape {
            slots,
            kv_heads,
            max_len,
            head_dim,
            pages,
            format,
        } = cache;
        let refuse = |reason| {
            Err(KernelError::Shape {
                problem: self.to_string(),
                reason,
            })
        };
        if [heads, kv_heads, head_dim, slots, max_len].contains(&0) || cache.dims().contains(&0) {
            return refuse("a dimension is 0");
        }
        if pages.is_some_and(|pages| !pages.has_valid_size()) {
            return refuse("the positions of a page must be a power of two, at least 16");
        }
        if !heads.is_multiple_of(kv_heads) {
            return refuse("the heads of keys must divide the query heads");
        }
        if !head_dim.is_multiple_of(VECTOR) || head_dim > MAX_HEAD_DIM {
            return refuse("head_dim must be a multiple of 8, at most 512");
        }
        if format == CacheFormat::E4m3 && dtype == ActivationDtype::F32 {
            return refuse("a cache in e4m3 needs activations in f16 or bf16");
        }
        if !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
            return refuse("rotary_dim must be even, at most head_dim");
        }
        if rotary_dim > 0 && max_positions < max_len {
            return refuse("the tables of cosines and sines must reach max_len");
        }
        if self.window == Some(0) {
            return refuse("a window holds at least the token itself");
        }
        if rows > MAX_PASS_ROWS || heads > MAX_PASS_ROWS {
            return refuse("at most 65535 rows and heads");
        }
        // Only the cache may have 2^31 elements or more.
        let [page_count, _, page_size, _] = cache.dims();
        let largest = [
            rows.saturating_mul(self.qkv_columns()),
            page_size.saturating_mul(head_dim),
            max_positions.saturating_mul(rotary_dim / 2),
            page_count.saturating_mul(kv_heads),
            cache
                .table_dims()
                .map_or(1, |[slots, columns]| slots.saturating_mul(columns)),
            self.window.unwrap_or(1),
        ];
        expect_at_most(
            self,
            largest.into_iter().max().unwrap_or(0),
            i32::MAX as usize,
        )?;
        expect_at_most(
            self,
            self.cache_elements(),
            isize::MAX as usize / size_of::<f32>(),
        )
    }

    /// Returns the number of features of the qkv projection's output.
    pub fn qkv_columns(&self) -> usize {
        (self.heads + 2 * self.cache.kv_heads) * self.cache.head_dim
    }

    /// Checks the buffer lengths of the rows of a launch, of the caches of keys and of values, and
    /// of the page table.
    #[cfg(feature = "cubecl-runtime")]
    pub(in crate::kernels) fn expect_cache(
        &self,
        state: &BufferArg,
        keys: &BufferArg,
        values: &BufferArg,
        table: &Option<BufferArg>,
    ) -> Result<(), KernelError> {
        expect_table(self, &self.cache, table)?;
        expect_length(self, "state", self.rows * SequenceState::WORDS, state.len())?;
        expect_length(self, "keys", self.cache_elements(), keys.len())?;
        expect_length(self, "values", self.cache_elements(), values.len())
    }

    /// Checks the buffer lengths of the tables of cosines and sines, and of the weights of the
    /// norms of query heads and key heads.
    #[cfg(feature = "cubecl-runtime")]
    pub(in crate::kernels) fn expect_parameters(
        &self,
        [cos, sin]: [&BufferArg; 2],
        [q_norm, k_norm]: [&Option<BufferArg>; 2],
    ) -> Result<(), KernelError> {
        let table = self.max_positions * (self.rotary_dim / 2);
        expect_length(self, "cosines", table, cos.len())?;
        expect_length(self, "sines", table, sin.len())?;
        for (operand, found) in [("norm of q", q_norm), ("norm of k", k_norm)] {
            expect_presence(self, operand, self.norm_epsilon.is_some(), found.is_some())?;
            if let Some(weight) = found {
                expect_length(self, operand, self.cache.head_dim, weight.len())?;
            }
        }
        Ok(())
    }

    /// Checks the presence and the length of the scores of heads without a position.
    #[cfg(feature = "cubecl-runtime")]
    pub(in crate::kernels) fn expect_sinks(
        &self,
        sinks: &Option<BufferArg>,
    ) -> Result<(), KernelError> {
        expect_presence(self, "sinks", self.has_sinks, sinks.is_some())?;
        match sinks {
            Some(sinks) => expect_length(self, "sinks", self.heads, sinks.len()),
            None => Ok(()),
        }
    }

    /// Returns the number of elements of the cache of keys, which is also that of the cache of
    /// values.
    pub fn cache_elements(&self) -> usize {
        self.cache.elements()
    }

    /// Returns the number of vectors of [`VECTOR`] values of the cache of keys, with those of
    /// scales.
    #[cfg(feature = "cubecl-runtime")]
    pub(super) fn cache_vectors(&self) -> usize {
        match self.cache.format {
            CacheFormat::Activations => self.cache_elements() / VECTOR,
            CacheFormat::E4m3 => self.cache_elements() / (VECTOR / 2),
        }
    }

    /// Returns the shape with a cache in the dtype of activations.
    pub fn in_activations(&self) -> Self {
        Self {
            cache: self.cache.in_activations(),
            ..*self
        }
    }

    /// Returns the number of features of a row of the attention's input: queries, keys and values
    /// in a step, only queries for prompts.
    pub fn columns(&self) -> usize {
        if self.pass == AttentionPass::Step {
            self.qkv_columns()
        } else {
            self.heads * self.cache.head_dim
        }
    }

    /// Returns the maximum number of positions that a row reads from the cache.
    pub(super) fn longest(&self) -> usize {
        let own = usize::from(self.pass == AttentionPass::Prompt);
        let max_len = self.cache.max_len;
        (max_len - 1).min(self.window.unwrap_or(max_len) - 1) + own
    }
}

impl fmt::Display for AttentionShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rows,
            heads,
            rotary_dim,
            cache,
            dtype,
            ..
        } = self;
        let CacheShape {
            slots,
            kv_heads,
            max_len,
            head_dim,
            pages,
            format,
        } = cache;
        write!(
            f,
            "attention of {rows} rows, {heads} heads, {kv_heads} kv heads of {head_dim} ({rotary_dim} rotary), "
        )?;
        write!(f, "{slots} slots of {max_len} positions, ")?;
        if let Some(Pages { count, size }) = pages {
            write!(f, "{count} pages of {size}, ")?;
        }
        if *format == CacheFormat::E4m3 {
            write!(f, "e4m3, ")?;
        }
        write!(f, "{dtype}")
    }
}
