use burn::module::Module;
use burn::tensor::{FloatDType, Tensor};
use marlin_decode as decode;
use marlin_kernels::Epilogue;

use super::prompt::Span;
use super::{Attention, Mlp, ProjectionGroup, RmsNorm, Rope};

/// One transformer block.
#[derive(Module, Debug)]
pub struct Layer {
    /// The norm before attention.
    pub input_layernorm: RmsNorm,
    /// Attention.
    pub self_attn: Attention,
    /// The norm before the MLP.
    pub post_attention_layernorm: RmsNorm,
    /// The MLP.
    pub mlp: Mlp,
}

impl Layer {
    /// The residual stream after this block, for prompts, decode steps and layers that run by
    /// themselves.
    ///
    /// `attend` takes the layer's attention from queries, keys and values side by side, [.., (heads
    /// + 2 * kv_heads) * head_dim], to [.., hidden]: it has the positions and the cache.
    pub fn forward<const D: usize>(
        &self,
        stream: Residual<D>,
        attend: impl FnOnce(&Attention, Tensor<D>) -> Tensor<D>,
    ) -> Residual<D> {
        let (qkv, stream) = stream.project(
            &self.input_layernorm,
            &self.self_attn.qkv_proj,
            Epilogue::None,
        );
        let stream = stream.plus(attend(&self.self_attn, qkv));
        let (gated, stream) = stream.project(
            &self.post_attention_layernorm,
            &self.mlp.gate_up_proj,
            Epilogue::SwiGlu,
        );
        stream.plus(self.mlp.down_proj.forward(gated))
    }

    /// Hidden states [batch, seq, hidden] of whole sequences to the same shape, without a cache:
    /// for quantisers, which run a layer by itself. `rope` is that of the model.
    ///
    /// # Panics
    /// Panics if `seq` is above [`Rope::length`].
    pub fn forward_full(&self, hidden: Tensor<3>, rope: &Rope) -> Tensor<3> {
        let span = Span::new(
            rope,
            0,
            hidden.dims()[1],
            self.self_attn.window,
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
/// The last output is not added until the next norm, which adds it in its own kernel; for one row
/// on CUDA that kernel is the matmul's, too.
#[derive(Debug)]
pub struct Residual<const D: usize> {
    sum: Tensor<D>,
    /// The output that is not yet in `sum`.
    last: Option<Tensor<D>>,
}

impl<const D: usize> Residual<D> {
    /// The stream that begins with hidden states [.., hidden].
    pub fn new(hidden: Tensor<D>) -> Self {
        Self {
            sum: hidden,
            last: None,
        }
    }

    /// The stream with the output [.., hidden] of attention or an MLP added.
    pub fn plus(self, output: Tensor<D>) -> Self {
        Self {
            last: Some(output),
            sum: self.into_tensor(),
        }
    }

    /// The projections of the normalised stream side by side, [.., sum of N], of those the
    /// epilogue, and the stream.
    pub fn project(
        self,
        norm: &RmsNorm,
        projections: &ProjectionGroup,
        epilogue: Epilogue,
    ) -> (Tensor<D>, Self) {
        let (out, sum) = match self.last {
            Some(last) => projections.forward_add_norm(last, self.sum, norm, epilogue),
            None => (
                decode::apply(
                    epilogue,
                    projections.forward_joined(norm.forward(self.sum.clone())),
                ),
                self.sum,
            ),
        };
        (out, Self::new(sum))
    }

    /// The stream of other rows: `rows` takes them from the sum and from the output that is not yet
    /// in it.
    pub(crate) fn map(self, rows: impl Fn(Tensor<D>) -> Tensor<D>) -> Self {
        Self {
            sum: rows(self.sum),
            last: self.last.map(rows),
        }
    }

    /// The normalised stream, [.., hidden].
    pub fn norm(self, norm: &RmsNorm) -> Tensor<D> {
        match self.last {
            Some(last) => norm.forward_add(last, self.sum).0,
            None => norm.forward(self.sum),
        }
    }

    /// The hidden states, [.., hidden].
    pub fn into_tensor(self) -> Tensor<D> {
        match self.last {
            Some(last) => self.sum + last,
            None => self.sum,
        }
    }
}
