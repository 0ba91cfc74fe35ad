//! The shape of an attention, and its checks.

use crate::MAX_PASS_ROWS;
use crate::cache::CacheShape;
use crate::kernels::Row;
use cubecl::prelude::BufferArg;
use marlin_kernels::problem::{expect_at_most, expect_length, expect_presence};
use marlin_kernels::{ActivationDtype, KernelError};
use std::fmt;

/// Elements of a vector: 16 bytes of a half-precision type.
pub(super) const VECTOR: usize = 8;
/// The most features of a head.
pub(super) const MAX_HEAD_DIM: usize = 512;

/// What a launch does with its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionPass {
    /// A decode step: writes the key and value of each row's token to the cache, and attends to the
    /// positions before it. No two rows have the same slot.
    Step,
    /// Tokens of prompts, several of a sequence: their queries are normalised and rotated, and
    /// their keys and values are in the cache ([`rope_cache`](crate::kernels::rope_cache())).
    /// Attends to the positions up to each row's own.
    Prompt,
}

/// The shape of a decode attention. A model and its cache determine everything but `rows` and
/// `pass`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Tokens of the launch: one of each sequence of a step, any of prompts.
    pub rows: usize,
    /// What the launch does with them.
    pub pass: AttentionPass,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values; a divisor of `heads`.
    pub kv_heads: usize,
    /// Features of a head: a multiple of 8, up to 512.
    pub head_dim: usize,
    /// Features of a head that rotary embedding applies to: even, at most `head_dim`; 0 for none.
    pub rotary_dim: usize,
    /// Sequences that the cache has room for.
    pub slots: usize,
    /// Positions of a slot.
    pub max_len: usize,
    /// Positions of the tables of cosines and sines: at least `max_len`.
    pub max_positions: usize,
    /// Length of the sliding window, the token's own position included; at least 1.
    pub window: Option<usize>,
    /// Epsilon of the RMSNorm of the heads of q and k, if the model has one.
    pub norm_epsilon: Option<f32>,
    /// Dtype of the activations and the cache.
    pub dtype: ActivationDtype,
}

impl AttentionShape {
    /// Checks that the dimensions are valid, which the lengths of buffers do not show.
    ///
    /// # Errors
    /// Returns an error if a dimension is 0 or violates the condition in its field's documentation,
    /// or if the kernel cannot address all elements.
    pub fn check(&self) -> Result<(), KernelError> {
        let Self {
            rows,
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            slots,
            max_len,
            max_positions,
            ..
        } = *self;
        let refuse = |reason| {
            Err(KernelError::Shape {
                problem: self.to_string(),
                reason,
            })
        };
        if [heads, kv_heads, head_dim, slots, max_len].contains(&0) {
            return refuse("a dimension is 0");
        }
        if !heads.is_multiple_of(kv_heads) {
            return refuse("the heads of keys must divide the query heads");
        }
        if !head_dim.is_multiple_of(VECTOR) || head_dim > MAX_HEAD_DIM {
            return refuse("head_dim must be a multiple of 8, at most 512");
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
        let largest = [
            rows.saturating_mul(self.qkv_columns()),
            max_len.saturating_mul(head_dim),
            max_positions.saturating_mul(rotary_dim / 2),
            slots.saturating_mul(kv_heads),
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

    /// Returns the features of the qkv projection's output.
    pub fn qkv_columns(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Checks the rows of a launch, and the caches of keys and of values.
    pub(in crate::kernels) fn expect_cache(
        &self,
        state: &BufferArg,
        keys: &BufferArg,
        values: &BufferArg,
    ) -> Result<(), KernelError> {
        expect_length(self, "state", self.rows * Row::WORDS, state.len())?;
        expect_length(self, "keys", self.cache_elements(), keys.len())?;
        expect_length(self, "values", self.cache_elements(), values.len())
    }

    /// Checks the tables of cosines and sines, and the weights of the norms of the heads of q and
    /// k.
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
                expect_length(self, operand, self.head_dim, weight.len())?;
            }
        }
        Ok(())
    }

    /// Returns the shape of the cache of keys, which is also that of the cache of values.
    pub fn cache(&self) -> CacheShape {
        CacheShape {
            slots: self.slots,
            kv_heads: self.kv_heads,
            max_len: self.max_len,
            head_dim: self.head_dim,
        }
    }

    /// Returns the number of elements of the cache of keys, which is also that of the cache of
    /// values.
    pub fn cache_elements(&self) -> usize {
        self.cache().elements()
    }

    /// Returns the features of a row's queries, and of those beside them: the keys and values of a
    /// step.
    pub fn columns(&self) -> usize {
        if self.pass == AttentionPass::Step {
            self.qkv_columns()
        } else {
            self.heads * self.head_dim
        }
    }

    /// Returns the most positions that a row reads from the cache.
    pub(super) fn longest(&self) -> usize {
        let own = usize::from(self.pass == AttentionPass::Prompt);
        (self.max_len - 1).min(self.window.unwrap_or(self.max_len) - 1) + own
    }
}

impl fmt::Display for AttentionShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rows,
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            slots,
            max_len,
            dtype,
            ..
        } = self;
        write!(
            f,
            "attention of {rows} rows, {heads} heads, {kv_heads} kv heads of {head_dim} ({rotary_dim} rotary), "
        )?;
        write!(f, "{slots} slots of {max_len} positions, {dtype}")
    }
}
