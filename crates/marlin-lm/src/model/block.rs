use burn::module::Module;
use burn::tensor::{FloatDType, Tensor};
use marlin_nn as decode;

use super::prompt::Span;
use super::{Attention, ProjectionGroup, RmsNorm, Rope, SwiGlu};
use crate::architectures::ProjectionKind;

/// One transformer block.
#[derive(Module, Debug)]
pub struct Block {
    /// The norm before the mixer.
    pub mixer_norm: RmsNorm,
    /// The part that mixes positions.
    pub mixer: Mixer,
    /// The norm before the feed-forward network.
    pub feed_forward_norm: RmsNorm,
    /// The feed-forward network, which works on each position by itself.
    pub feed_forward: FeedForward,
}

/// The part of a block that mixes positions.
#[derive(Module, Debug)]
pub enum Mixer {
    /// Causal self-attention.
    Attention(Attention),
}

/// The part of a block that works on each position by itself.
#[derive(Module, Debug)]
pub enum FeedForward {
    /// A multilayer perceptron with SwiGLU.
    SwiGlu(SwiGlu),
}

impl Block {
    /// Returns the attention of the block.
    pub fn attention(&self) -> &Attention {
        let Mixer::Attention(attention) = &self.mixer;
        attention
    }

    /// Returns the multilayer perceptron of the block.
    pub fn mlp(&self) -> &SwiGlu {
        let FeedForward::SwiGlu(mlp) = &self.feed_forward;
        mlp
    }

    /// The matmuls of a projection.
    pub(crate) fn group(&self, kind: ProjectionKind) -> &ProjectionGroup {
        let (attention, mlp) = (self.attention(), self.mlp());
        match kind {
            ProjectionKind::Qkv => &attention.qkv_proj,
            ProjectionKind::Output => &attention.o_proj,
            ProjectionKind::GateUp => &mlp.gate_up_proj,
            ProjectionKind::Down => &mlp.down_proj,
        }
    }

    /// The matmuls of a projection, mutably.
    pub(crate) fn group_mut(&mut self, kind: ProjectionKind) -> &mut ProjectionGroup {
        let (Mixer::Attention(attention), FeedForward::SwiGlu(mlp)) =
            (&mut self.mixer, &mut self.feed_forward);
        match kind {
            ProjectionKind::Qkv => &mut attention.qkv_proj,
            ProjectionKind::Output => &mut attention.o_proj,
            ProjectionKind::GateUp => &mut mlp.gate_up_proj,
            ProjectionKind::Down => &mut mlp.down_proj,
        }
    }

    /// Returns the residual stream after this block, for prompts, decode steps and single blocks.
    ///
    /// `attend` computes the block's attention from queries, keys and values side by side,
    /// [.., (heads + 2 * kv_heads) * head_dim], and returns [.., hidden]. The closure supplies the
    /// positions and the cache.
    pub fn forward<const D: usize>(
        &self,
        stream: Residual<D>,
        attend: impl FnOnce(&Attention, Tensor<D>) -> Tensor<D>,
    ) -> Residual<D> {
        let stream = match &self.mixer {
            Mixer::Attention(attention) => {
                let (qkv, stream) = stream.project(&self.mixer_norm, &attention.qkv_proj);
                stream.plus(attend(attention, qkv))
            }
        };
        match &self.feed_forward {
            FeedForward::SwiGlu(mlp) => {
                let (gated, stream) = stream.project(&self.feed_forward_norm, &mlp.gate_up_proj);
                stream.plus(mlp.down_proj.forward_joined(gated))
            }
        }
    }

    /// Runs the block by itself on hidden states [batch, seq, hidden] of whole sequences, without a
    /// cache, and returns the hidden states after the block. `rope` holds the rotary tables of the
    /// model.
    ///
    /// # Panics
    /// Panics if `seq` is above [`Rope::length`].
    pub fn forward_full(&self, hidden: Tensor<3>, rope: &Rope) -> Tensor<3> {
        let span = Span::new(
            rope,
            0,
            hidden.dims()[1],
            self.attention().window,
            FloatDType::from(hidden.dtype()),
            &hidden.device(),
        );
        self.forward(Residual::new(hidden), |attention, qkv| {
            attention.forward_prompt(qkv, &span, None)
        })
        .into_tensor()
    }
}

/// The residual stream, [.., hidden].
///
/// The output of the last attention or feed-forward network is added by the kernel of the next
/// norm. For one row on CUDA, the matmul after the norm runs in the same kernel.
#[derive(Debug)]
pub struct Residual<const D: usize> {
    sum: Tensor<D>,
    /// The output that is not yet in `sum`.
    last: Option<Tensor<D>>,
}

impl<const D: usize> Residual<D> {
    /// Creates a stream that begins with hidden states [.., hidden].
    pub fn new(hidden: Tensor<D>) -> Self {
        Self {
            sum: hidden,
            last: None,
        }
    }

    /// Adds the output [.., hidden] of attention or an MLP to the stream.
    pub fn plus(self, output: Tensor<D>) -> Self {
        Self {
            last: Some(output),
            sum: self.into_tensor(),
        }
    }

    /// Returns the projections of the normalised stream after their epilogue, and the stream.
    pub fn project(self, norm: &RmsNorm, projections: &ProjectionGroup) -> (Tensor<D>, Self) {
        let (out, sum) = match self.last {
            Some(last) => projections.forward_add_norm(last, self.sum, norm),
            None => {
                let joined = projections.forward_joined(norm.forward(self.sum.clone()));
                (decode::apply(projections.epilogue(), joined), self.sum)
            }
        };
        (out, Self::new(sum))
    }

    /// Applies `rows`, which selects rows, to the sum and to the output that is not yet in the sum.
    pub(crate) fn map(self, rows: impl Fn(Tensor<D>) -> Tensor<D>) -> Self {
        Self {
            sum: rows(self.sum),
            last: self.last.map(rows),
        }
    }

    /// Returns the normalised stream, [.., hidden].
    pub fn norm(self, norm: &RmsNorm) -> Tensor<D> {
        match self.last {
            Some(last) => norm.forward_add(last, self.sum).0,
            None => norm.forward(self.sum),
        }
    }

    /// Returns the hidden states, [.., hidden].
    pub fn into_tensor(self) -> Tensor<D> {
        match self.last {
            Some(last) => self.sum + last,
            None => self.sum,
        }
    }
}
