//! The op on an autodiff device: gradients to the activations and to a LoRA adapter, none to the packed weight.
//!
//! A float weight with an adapter is marked as memory bound, whatever strategy the device has: the backward pass makes it again, one layer at a
//! time, and between the passes there is none. Of a weight without one the graph keeps what the forward pass made: Burn makes again only what
//! depends on a tracked tensor.

use super::{OptionalFloat, OptionalInt, W4A16Backend, W4A16Weight};
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, binary, unary};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
use marlin_kernels::WeightLayout;

/// What the backward pass keeps: the packed weight, never a float copy.
#[derive(Debug)]
struct Linear;

impl<B: W4A16Backend> Backward<B, 1> for Linear {
    type State = W4A16Weight<B>;

    /// dx = dy W^T, with the weight dequantised for the moment of the product.
    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let weight = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let (k, n) = (weight.k, weight.n);
            let mut shape = grad.shape();
            let rows = shape.num_elements() / n;
            let dtype = grad.dtype();
            let transposed = B::float_transpose(B::w4a16_dequantize(weight, dtype.into()));
            let grad = B::float_matmul(B::float_reshape(grad, Shape::new([rows, n])), transposed);
            if let Some(last) = shape.rank().checked_sub(1) {
                shape[last] = k;
            }
            B::float_reshape(grad, shape)
        });
    }
}

/// A float weight with an adapter: a function of the adapter's two factors.
#[derive(Debug)]
struct DequantizeAdapted;

impl<B: W4A16Backend> Backward<B, 2> for DequantizeAdapted {
    /// Both factors, of a low rank, and the scale.
    type State = (FloatTensor<B>, FloatTensor<B>, f64);

    /// da = scale * dW b^T, db = scale * a^T dW.
    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let (a, b, scale) = ops.state;
        let of_a = |grad| B::float_mul_scalar(B::float_matmul(grad, B::float_transpose(b)), scale.into());
        let of_b = |grad| B::float_mul_scalar(B::float_matmul(B::float_transpose(a), grad), scale.into());
        binary::<B, _, _>(ops.parents, ops.node, grads, of_a, of_b);
    }
}

/// Makes the weight of [`DequantizeAdapted`] again.
#[derive(Debug)]
struct DequantizeAdaptedAgain<B: W4A16Backend> {
    weight: W4A16Weight<B>,
    a: NodeId,
    b: NodeId,
    scale: f64,
    dtype: FloatDType,
}

impl<B: W4A16Backend> RetroForward for DequantizeAdaptedAgain<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        let [a, b] = [self.a, self.b].map(|factor| states.get_state::<FloatTensor<B>>(&factor));
        states.save(out, B::w4a16_dequantize_adapted(self.weight.clone(), a, b, self.scale, self.dtype));
    }
}

impl<B: Backend + W4A16Backend, C: CheckpointStrategy> W4A16Backend for Autodiff<B, C> {
    fn w4a16_linear(x: FloatTensor<Self>, weight: W4A16Weight<Self>, bias: OptionalFloat<Self>) -> FloatTensor<Self> {
        let weight = inner::<B, C>(weight);
        // A bias may be trained: it is added by an operation that has its own gradient.
        let (x, node) = x.into_parts();
        let y = match Linear.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(weight.clone(), B::w4a16_linear(x, weight, OptionalFloat::Absent)),
            OpsKind::UnTracked(prep) => prep.finish(B::w4a16_linear(x, weight, OptionalFloat::Absent)),
        };
        match bias.into_option() {
            Some(bias) => {
                let leading = y.shape().rank() - 1;
                let shape = std::iter::repeat_n(1, leading).chain([bias.shape()[0]]).collect::<Vec<_>>();
                Self::float_add(y, Self::float_reshape(bias, Shape::from(shape)))
            }
            None => y,
        }
    }

    fn w4a16_dequantize(weight: W4A16Weight<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        <Self as AutodiffBackend>::from_inner(B::w4a16_dequantize(inner::<B, C>(weight), dtype))
    }

    fn w4a16_dequantize_adapted(
        weight: W4A16Weight<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let weight = inner::<B, C>(weight);
        let again = DequantizeAdaptedAgain { weight: weight.clone(), a: a.node().id(), b: b.node().id(), scale, dtype };
        let factors = [a.node(), b.node()];
        let prep = DequantizeAdapted.prepare::<BalancedCheckpointing>(factors).memory_bound().retro_forward(again).parents([&a, &b]);
        let (a, b) = (a.into_primitive(), b.into_primitive());
        let output = B::w4a16_dequantize_adapted(weight, a.clone(), b.clone(), scale, dtype);
        match prep.stateful() {
            OpsKind::Tracked(prep) => prep.finish((a, b, scale), output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }

    fn w4a16_relayout(weight: W4A16Weight<Self>, layout: WeightLayout) -> W4A16Weight<Self> {
        let weight = B::w4a16_relayout(inner::<B, C>(weight), layout);
        W4A16Weight {
            words: weight.words,
            scales: <Self as AutodiffBackend>::from_inner(weight.scales),
            zero_points: weight.zero_points.into_option().into(),
            row_permutation: weight.row_permutation.into_option().into(),
            k: weight.k,
            n: weight.n,
            spec: weight.spec,
            layout: weight.layout,
        }
    }
}

/// The weight without its autodiff context: the scales are constants.
fn inner<B: Backend, C: CheckpointStrategy>(weight: W4A16Weight<Autodiff<B, C>>) -> W4A16Weight<B> {
    let int = |tensor: OptionalInt<Autodiff<B, C>>| OptionalInt::from(tensor.into_option());
    W4A16Weight {
        words: weight.words,
        scales: <Autodiff<B, C> as AutodiffBackend>::inner(weight.scales),
        zero_points: int(weight.zero_points),
        row_permutation: int(weight.row_permutation),
        k: weight.k,
        n: weight.n,
        spec: weight.spec,
        layout: weight.layout,
    }
}
