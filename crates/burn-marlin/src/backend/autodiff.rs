//! The operations on an autodiff device. Gradients flow to the activations and to a LoRA adapter,
//! never to the packed weight.
//!
//! A float weight with an adapter is marked as memory bound, whatever checkpointing strategy the
//! device has: the backward pass recomputes it, one layer at a time, and no float weight is kept
//! between the passes. For a weight without an adapter the graph keeps the forward pass's copy,
//! because Burn recomputes only tensors that depend on a tracked tensor.

use super::{OptionalFloat, OptionalInt, QuantBackend, QuantTensors};
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
use marlin_format::WeightDescriptor;

/// The product of activations with a weight. The backward pass uses the packed weight, not a float
/// copy kept from the forward pass.
#[derive(Debug)]
struct Linear;

impl<B: QuantBackend> Backward<B, 1> for Linear {
    type State = (QuantTensors<B>, WeightDescriptor);

    /// Computes dx = dy W^T; the weight is dequantised only for the product.
    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (weight, descriptor) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let WeightDescriptor { k, n, .. } = descriptor;
            let mut shape = grad.shape();
            let rows = shape.num_elements() / n;
            let dtype = grad.dtype();
            let transposed =
                B::float_transpose(B::quant_dequantize(weight, descriptor, dtype.into()));
            let grad = B::float_matmul(B::float_reshape(grad, Shape::new([rows, n])), transposed);
            if let Some(last) = shape.rank().checked_sub(1) {
                shape[last] = k;
            }
            B::float_reshape(grad, shape)
        });
    }
}

/// The dequantisation of a weight with an adapter, as a function of the adapter's two factors.
#[derive(Debug)]
struct DequantizeAdapted;

impl<B: QuantBackend> Backward<B, 2> for DequantizeAdapted {
    /// The adapter's two low-rank factors and its scale.
    type State = (FloatTensor<B>, FloatTensor<B>, f64);

    /// Computes da = scale * dW b^T and db = scale * a^T dW.
    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (a, b, scale) = ops.state;
        let of_a =
            |grad| B::float_mul_scalar(B::float_matmul(grad, B::float_transpose(b)), scale.into());
        let of_b =
            |grad| B::float_mul_scalar(B::float_matmul(B::float_transpose(a), grad), scale.into());
        binary::<B, _, _>(ops.parents, ops.node, grads, of_a, of_b);
    }
}

/// The recomputation of the float weight of [`DequantizeAdapted`] for the backward pass.
#[derive(Debug)]
struct DequantizeAdaptedAgain<B: QuantBackend> {
    weight: QuantTensors<B>,
    descriptor: WeightDescriptor,
    a: NodeId,
    b: NodeId,
    scale: f64,
    dtype: FloatDType,
}

impl<B: QuantBackend> RetroForward for DequantizeAdaptedAgain<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        let [a, b] = [self.a, self.b].map(|factor| states.get_state::<FloatTensor<B>>(&factor));
        states.save(
            out,
            B::quant_dequantize_adapted(
                self.weight.clone(),
                self.descriptor,
                a,
                b,
                self.scale,
                self.dtype,
            ),
        );
    }
}

impl<B: Backend + QuantBackend, C: CheckpointStrategy> QuantBackend for Autodiff<B, C> {
    fn quant_linear(
        x: FloatTensor<Self>,
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        bias: OptionalFloat<Self>,
    ) -> FloatTensor<Self> {
        let weight = inner::<B, C>(weight);
        // A bias may be trained, so it is added by a separate operation, which has a gradient.
        let (x, node) = x.into_parts();
        let y = match Linear.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(
                (weight.clone(), descriptor),
                B::quant_linear(x, weight, descriptor, OptionalFloat::Absent),
            ),
            OpsKind::UnTracked(prep) => prep.finish(B::quant_linear(
                x,
                weight,
                descriptor,
                OptionalFloat::Absent,
            )),
        };
        match bias.into_option() {
            Some(bias) => {
                let leading = y.shape().rank() - 1;
                let shape = std::iter::repeat_n(1, leading)
                    .chain([bias.shape()[0]])
                    .collect::<Vec<_>>();
                Self::float_add(y, Self::float_reshape(bias, Shape::from(shape)))
            }
            None => y,
        }
    }

    fn quant_dequantize(
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        <Self as AutodiffBackend>::from_inner(B::quant_dequantize(
            inner::<B, C>(weight),
            descriptor,
            dtype,
        ))
    }

    fn quant_dequantize_adapted(
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let weight = inner::<B, C>(weight);
        let again = DequantizeAdaptedAgain {
            weight: weight.clone(),
            descriptor,
            a: a.node().id(),
            b: b.node().id(),
            scale,
            dtype,
        };
        let factors = [a.node(), b.node()];
        let prep = DequantizeAdapted
            .prepare::<BalancedCheckpointing>(factors)
            .memory_bound()
            .retro_forward(again)
            .parents([&a, &b]);
        let (a, b) = (a.into_primitive(), b.into_primitive());
        let output =
            B::quant_dequantize_adapted(weight, descriptor, a.clone(), b.clone(), scale, dtype);
        match prep.stateful() {
            OpsKind::Tracked(prep) => prep.finish((a, b, scale), output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }

    fn quant_repack(
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        to: WeightDescriptor,
    ) -> QuantTensors<Self> {
        let weight = B::quant_repack(inner::<B, C>(weight), descriptor, to);
        QuantTensors {
            qweight: weight.qweight,
            metadata: weight.metadata.into_option().into(),
            scales: <Self as AutodiffBackend>::from_inner(weight.scales),
            zero_points: weight.zero_points.into_option().into(),
            row_permutation: weight.row_permutation.into_option().into(),
        }
    }
}

/// Returns the weight without its autodiff context; the scales are constants.
fn inner<B: Backend, C: CheckpointStrategy>(
    weight: QuantTensors<Autodiff<B, C>>,
) -> QuantTensors<B> {
    let int = |tensor: OptionalInt<Autodiff<B, C>>| OptionalInt::from(tensor.into_option());
    QuantTensors {
        qweight: weight.qweight,
        metadata: int(weight.metadata),
        scales: <Autodiff<B, C> as AutodiffBackend>::inner(weight.scales),
        zero_points: int(weight.zero_points),
        row_permutation: int(weight.row_permutation),
    }
}
