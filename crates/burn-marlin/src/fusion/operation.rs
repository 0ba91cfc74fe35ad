use super::FUSED;
use super::pattern::Pattern;
use crate::ops::{OptionalInt, W4A16Weight, launch_linear, launched};

use burn::backend::ir::{BackendIr, TensorHandle, TensorIr};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::{CubeFusionHandle, FallbackOperation, FusedOperation};
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::stream::Context;
use marlin_format::{GroupSize, QuantSpec, ScaleDtype};
use marlin_kernels::WeightLayout;
use std::sync::atomic::Ordering;

/// A linear layer that was recognised: one launch on the packed weight.
pub(super) struct FusedLinear {
    pattern: Pattern,
}

impl FusedLinear {
    pub(super) fn new(pattern: Pattern) -> Self {
        Self { pattern }
    }

    /// Launches; `None` where the operations are not what the kernel takes, with nothing consumed.
    fn launch(&self, context: &mut Context<CubeFusionHandle>) -> Option<()> {
        let Pattern { dequantize, x_reshape, matmul, bias_reshape, add, .. } = &self.pattern;
        let (dequantize, matmul) = (dequantize.as_ref()?, matmul.as_ref()?);
        let weight_shape = shape_of(context, dequantize.outputs.first()?)?;
        let (&k, &n) = (weight_shape.first()?, weight_shape.get(1)?);
        let out_ir = add.as_ref().map_or(&matmul.out, |add| &add.out);
        let out_shape = shape_of(context, out_ir)?;
        let [words, scales, optional @ ..] = dequantize.inputs.as_slice() else { return None };
        // The format, from what a stream still knows of it.
        let (layout, bits) = WeightLayout::of_words(shape_of(context, words)?.try_into().ok()?, k, n)?;
        // Several groups are of one size alone, the last one incomplete or not; one group is a whole column.
        let groups = *shape_of(context, scales)?.first()?;
        let group = GroupSize::ALL.into_iter().find(|&group| layout.scales(k, 1, group)[0] == groups)?;
        // Zero points have two dimensions, the row permutation has one.
        let zero_points = optional.iter().any(|input| input.shape.rank() == 2);
        // Scales held in f32 come from either dtype; the kernels do not care which.
        let scale_dtype = if scales.dtype == DType::BF16 { ScaleDtype::BF16 } else { ScaleDtype::F16 };
        let spec = QuantSpec { bits, group, zero_points, scale_dtype };

        let words = take(context, words)?;
        let scales = take(context, scales)?;
        let (zero_points, row_permutation) = (OptionalInt::Absent, OptionalInt::Absent);
        let mut weight = W4A16Weight { words, scales, zero_points, row_permutation, k, n, spec, layout };
        for input in optional {
            let tensor = OptionalInt::Present(take(context, input)?);
            if input.shape.rank() == 2 {
                weight.zero_points = tensor;
            } else {
                weight.row_permutation = tensor;
            }
        }
        // A reshape changes nothing that the kernel looks at: it sees rows of K.
        let x = take(context, x_reshape.as_ref().map_or(&matmul.lhs, |reshape| &reshape.input))?;
        let bias = match (add, bias_reshape) {
            (Some(_), Some(reshape)) => Some(take(context, &reshape.input)?),
            _ => None,
        };
        let out = launched(launch_linear(x, weight, bias, Shape::from(out_shape)));
        let id = context.tensors.get(&out_ir.id)?.id;
        context.handles.register_handle(id, out.into());
        FUSED.fetch_add(1, Ordering::Relaxed);
        Some(())
    }
}

fn shape_of(context: &Context<CubeFusionHandle>, tensor: &TensorIr) -> Option<Vec<usize>> {
    context.tensors.get(&tensor.id).map(|tensor| tensor.shape.to_vec())
}

fn take(context: &mut Context<CubeFusionHandle>, tensor: &TensorIr) -> Option<CubeTensor> {
    let global = context.tensors.get(&tensor.id)?;
    let (id, shape) = (global.id, global.shape.clone());
    let handle = context.handles.get_handle(&id, &tensor.status);
    Some(CubeBackend::float_tensor(TensorHandle { handle, shape }))
}

impl FusedOperation for FusedLinear {
    const NAME: &'static str = "W4A16Linear";
    type State = Pattern;

    fn num_ops_fused(&self) -> usize {
        self.pattern.covered
    }

    fn run(&mut self, context: &mut Context<CubeFusionHandle>, fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>) {
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
