use burn::module::Module;
use burn::tensor::{FloatDType, Tensor};
use marlin_nn as decode;

use super::prompt::Span;
use super::{Attention, Mixture, Projection, ProjectionGroup, RmsNorm, Rope, SwiGlu};
use crate::architectures::ProjectionKind;
use crate::parallel::Communicator;

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
#[allow(
    clippy::large_enum_variant,
    reason = "one for each block, and Burn derives no module of a box"
)]
pub enum FeedForward {
    /// A multilayer perceptron with SwiGLU.
    SwiGlu(SwiGlu),
    /// A mixture of experts.
    Experts(Mixture),
}

impl Block {
    /// Returns the attention of the block.
    pub fn attention(&self) -> &Attention {
        let Mixer::Attention(attention) = &self.mixer;
        attention
    }

    /// Returns the multilayer perceptron that all tokens have; `None` for a mixture without such an
    /// expert.
    pub fn mlp(&self) -> Option<&SwiGlu> {
        match &self.feed_forward {
            FeedForward::SwiGlu(mlp) => Some(mlp),
            FeedForward::Experts(mixture) => mixture.shared.as_ref().map(|shared| &shared.mlp),
        }
    }

    /// Returns the mixture of experts, if the block has one.
    pub fn mixture(&self) -> Option<&Mixture> {
        match &self.feed_forward {
            FeedForward::SwiGlu(_) => None,
            FeedForward::Experts(mixture) => Some(mixture),
        }
    }

    /// Returns the mixture of experts, if the block has one, mutably.
    pub(crate) fn mixture_mut(&mut self) -> Option<&mut Mixture> {
        match &mut self.feed_forward {
            FeedForward::SwiGlu(_) => None,
            FeedForward::Experts(mixture) => Some(mixture),
        }
    }

    /// The matmuls of a projection that the block's shape lists.
    pub(crate) fn group(&self, kind: ProjectionKind) -> &ProjectionGroup {
        let attention = self.attention();
        match kind {
            ProjectionKind::Qkv => &attention.qkv_proj,
            ProjectionKind::Output => &attention.o_proj,
            ProjectionKind::GateUp => &listed(self.mlp()).gate_up_proj,
            ProjectionKind::Down => &listed(self.mlp()).down_proj,
        }
    }

    /// The matmuls of a projection that the block's shape lists, mutably.
    pub(crate) fn group_mut(&mut self, kind: ProjectionKind) -> &mut ProjectionGroup {
        let Mixer::Attention(attention) = &mut self.mixer;
        let mlp = match &mut self.feed_forward {
            FeedForward::SwiGlu(mlp) => Some(mlp),
            FeedForward::Experts(mixture) => mixture.shared.as_mut().map(|shared| &mut shared.mlp),
        };
        match kind {
            ProjectionKind::Qkv => &mut attention.qkv_proj,
            ProjectionKind::Output => &mut attention.o_proj,
            ProjectionKind::GateUp => &mut listed(mlp).gate_up_proj,
            ProjectionKind::Down => &mut listed(mlp).down_proj,
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
            FeedForward::Experts(mixture) => {
                let (logits, x, stream) =
                    stream.project_beside(&self.feed_forward_norm, &mixture.router);
                stream.plus(mixture.forward(x, logits))
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

/// Unwraps the multilayer perceptron of a block whose shape lists its projections.
fn listed<M>(mlp: Option<M>) -> M {
    mlp.unwrap_or_else(|| panic!("the shape of the block lists no such projection"))
}

/// The residual stream, [.., hidden].
///
/// The output of the last attention or feed-forward network is added by the kernel of the next
/// norm. For one row on CUDA, the matmul after the norm runs in the same kernel.
///
/// In a model that is split over devices, outputs are summed over the ranks before they are added.
#[derive(Debug)]
pub struct Residual<const D: usize> {
    sum: Tensor<D>,
    /// The output that is not yet in `sum`.
    last: Option<Tensor<D>>,
    /// The ranks over which outputs are summed, of a split model.
    ranks: Option<Communicator>,
}

impl<const D: usize> Residual<D> {
    /// Creates a stream that begins with hidden states [.., hidden].
    pub fn new(hidden: Tensor<D>) -> Self {
        Self::over(hidden, None)
    }

    /// Creates a stream that begins with hidden states [.., hidden], and whose outputs are summed
    /// over ranks.
    pub(crate) fn over(hidden: Tensor<D>, ranks: Option<Communicator>) -> Self {
        Self {
            sum: hidden,
            last: None,
            ranks,
        }
    }

    /// Adds the output [.., hidden] of attention or an MLP to the stream.
    pub fn plus(self, output: Tensor<D>) -> Self {
        let ranks = self.ranks.clone();
        let output = match &ranks {
            Some(ranks) => ranks.sum(output),
            None => output,
        };
        Self {
            last: Some(output),
            sum: self.into_tensor(),
            ranks,
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
        (out, Self::over(sum, self.ranks))
    }

    /// Returns the projection of the normalised stream, the normalised stream, and the stream.
    pub fn project_beside(
        self,
        norm: &RmsNorm,
        projection: &Projection,
    ) -> (Tensor<D>, Tensor<D>, Self) {
        let (out, x, sum) = match self.last {
            Some(last) => projection.forward_with_norm(last, self.sum, norm),
            None => {
                let x = norm.forward(self.sum.clone());
                (projection.forward(x.clone()), x, self.sum)
            }
        };
        (out, x, Self::over(sum, self.ranks))
    }

    /// Returns the normalised stream, and the stream.
    pub fn normalize(self, norm: &RmsNorm) -> (Tensor<D>, Self) {
        let (x, sum) = match self.last {
            Some(last) => norm.forward_add(last, self.sum),
            None => (norm.forward(self.sum.clone()), self.sum),
        };
        (x, Self::over(sum, self.ranks))
    }

    /// Applies `rows`, which selects rows, to the sum and to the output that is not yet in the sum.
    pub(crate) fn map(self, rows: impl Fn(Tensor<D>) -> Tensor<D>) -> Self {
        Self {
            sum: rows(self.sum),
            last: self.last.map(rows),
            ranks: self.ranks,
        }
    }

    /// Returns the normalised stream, [.., hidden].
    pub fn norm(self, norm: &RmsNorm) -> Tensor<D> {
        self.normalize(norm).0
    }

    /// Returns the hidden states, [.., hidden].
    pub fn into_tensor(self) -> Tensor<D> {
        match self.last {
            Some(last) => self.sum + last,
            None => self.sum,
        }
    }
}
