use super::pattern::Pattern;
use crate::backend::cube::{launch_linear, launched};
use crate::count::count_fused;
use burn::backend::ir::{BackendIr, ScalarIr, TensorHandle, TensorIr};
use burn::backend::ops::FloatTensorOps;
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::{CubeFusionHandle, FallbackOperation, FusedOperation};
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::stream::{Context, ScalarId};
use marlin_format::{WeightDescriptor, WeightFormat};
use marlin_kernels::Epilogue;

/// A recognised linear layer, which runs as one launch on the packed weight.
pub(super) struct FusedLinear {
    pattern: Pattern,
}

impl FusedLinear {
    pub(super) fn new(pattern: Pattern) -> Self {
        Self { pattern }
    }

    /// Launches the kernel. Returns `None`, without consuming a tensor, if the operations do not
    /// have the form that the kernel computes.
    fn launch(&self, context: &mut Context<CubeFusionHandle>) -> Option<()> {
        let Pattern {
            dequantize,
            x_reshape,
            matmul,
            bias_reshape,
            add,
            ..
        } = &self.pattern;
        let (dequantize, matmul) = (dequantize.as_ref()?, matmul.as_ref()?);
        let weight_shape = shape_of(context, dequantize.outputs.first()?)?;
        let (&k, &n) = (weight_shape.first()?, weight_shape.get(1)?);
        let out_ir = add.as_ref().map_or(&matmul.out, |add| &add.out);
        let out_shape = shape_of(context, out_ir)?;
        let (format, layout) =
            WeightFormat::from_code(scalar_of(context, dequantize.scalars.first()?)?)?;
        let descriptor = WeightDescriptor::plain(format, k, n).in_layout(layout);
        let mut inputs = dequantize.inputs.iter();
        let weight = descriptor
            .tensors()
            .try_map(|_, _| inputs.next().ok_or(()))
            .ok()?;
        let weight = weight
            .try_map(|_, input| take(context, input).ok_or(()))
            .ok()?;
        // The kernel reads the activations as rows of K values, so their reshape is not executed.
        let x = take(
            context,
            x_reshape
                .as_ref()
                .map_or(&matmul.lhs, |reshape| &reshape.input),
        )?;
        let bias = match (add, bias_reshape) {
            (Some(_), Some(reshape)) => Some(take(context, &reshape.input)?),
            _ => None,
        };
        let out = launched(launch_linear(x, weight, &descriptor, bias, Epilogue::None));
        let out = CubeBackend::float_reshape(out, Shape::from(out_shape));
        let id = context.tensors.get(&out_ir.id)?.id;
        context.handles.register_handle(id, out.into());
        count_fused();
        Some(())
    }
}

fn shape_of(context: &Context<CubeFusionHandle>, tensor: &TensorIr) -> Option<Vec<usize>> {
    context
        .tensors
        .get(&tensor.id)
        .map(|tensor| tensor.shape.to_vec())
}

/// Returns the value of a scalar, which in relative form is the id of one of the context's scalars.
fn scalar_of(context: &Context<CubeFusionHandle>, scalar: &ScalarIr) -> Option<u64> {
    let ScalarIr::UInt(value) = *scalar else {
        return None;
    };
    match context.scalars.get(&ScalarId { value })? {
        ScalarIr::UInt(value) => Some(*value),
        _ => None,
    }
}

fn take(context: &mut Context<CubeFusionHandle>, tensor: &TensorIr) -> Option<CubeTensor> {
    let global = context.tensors.get(&tensor.id)?;
    let (id, shape) = (global.id, global.shape.clone());
    let handle = context.handles.get_handle(&id, &tensor.status);
    Some(CubeBackend::float_tensor(TensorHandle { handle, shape }))
}

impl FusedOperation for FusedLinear {
    const NAME: &'static str = "QuantLinear";
    type State = Pattern;

    fn num_ops_fused(&self) -> usize {
        self.pattern.covered
    }

    fn run(
        &mut self,
        context: &mut Context<CubeFusionHandle>,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        if self.launch(context).is_none() {
            for position in 0..self.pattern.covered {
                fallback(position).run(context);
            }
        }
    }

    fn to_state(&self) -> Pattern {
        self.pattern.clone()
    }

    fn from_state(_device: &cubecl::Device, state: Pattern) -> Self {
        Self::new(state)
    }
}
