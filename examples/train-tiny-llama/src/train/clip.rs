//! Gradient clipping by the joint norm of all gradients. Burn's own clipping handles one parameter
//! at a time.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

/// Scales all gradients by one factor so that their joint L2 norm is at most `max_norm`.
///
/// The factor is computed and applied on the device.
pub fn clip_by_global_norm<M: Module>(
    model: &M,
    grads: GradientsParams,
    max_norm: f32,
) -> GradientsParams {
    let mut norms = SquaredNorms {
        grads: &grads,
        squares: Vec::new(),
    };
    model.visit(&mut norms);
    if norms.squares.is_empty() {
        return grads;
    }
    let norm = Tensor::cat(norms.squares, 0).sum().sqrt();
    let factor = (norm.add_scalar(1e-6).recip().mul_scalar(max_norm)).clamp_max(1.0);
    let mut scale = Scale {
        factor,
        grads,
        scaled: GradientsParams::new(),
    };
    model.visit(&mut scale);
    scale.scaled
}

struct SquaredNorms<'a> {
    grads: &'a GradientsParams,
    squares: Vec<Tensor<1>>,
}

impl ModuleVisitor for SquaredNorms<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            self.squares.push(grad.square().sum());
        }
    }
}

struct Scale {
    factor: Tensor<1>,
    grads: GradientsParams,
    scaled: GradientsParams,
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.scaled
                .register(param.id, grad * self.factor.clone().unsqueeze());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::nn::LinearConfig;
    use burn::tensor::Device;

    #[test]
    fn scales_all_gradients_by_one_factor() {
        let device = Device::flex();
        let model = LinearConfig::new(2, 2).init(&device);
        let grads = |scale: f32| {
            let mut grads = GradientsParams::new();
            grads.register(
                model.weight.id,
                Tensor::<2>::from_floats([[1.0, 2.0], [2.0, 0.0]], &device).mul_scalar(scale),
            );
            grads.register(
                model.bias.as_ref().unwrap().id,
                Tensor::<1>::from_floats([0.0, 4.0], &device).mul_scalar(scale),
            );
            grads
        };
        let read = |grads: GradientsParams| {
            let mut values: Vec<f32> = grads
                .get::<2>(model.weight.id)
                .unwrap()
                .into_data()
                .iter::<f32>()
                .collect();
            values.extend(
                grads
                    .get::<1>(model.bias.as_ref().unwrap().id)
                    .unwrap()
                    .into_data()
                    .iter::<f32>(),
            );
            values
        };
        // The norm of [1, 2, 2, 0, 0, 4] is 5.
        let clipped = read(clip_by_global_norm(&model, grads(2.0), 1.0));
        for (value, expected) in clipped.iter().zip([0.2, 0.4, 0.4, 0.0, 0.0, 0.8]) {
            assert!((value - expected).abs() < 1e-6, "{clipped:?}");
        }
        let kept = read(clip_by_global_norm(&model, grads(0.1), 1.0));
        for (value, expected) in kept.iter().zip([0.1, 0.2, 0.2, 0.0, 0.0, 0.4]) {
            assert!((value - expected).abs() < 1e-6, "{kept:?}");
        }
        assert!(clip_by_global_norm(&model, GradientsParams::new(), 1.0).is_empty());
    }
}
