//! Scales of activations beside weights of floats, which are not used but must be valid.

use marlin_format::checkpoint::{Dtype, Fp4Format, LayerFormat, TensorData, read_layer};

use crate::common::{LAYER, checkpoint, message, rng, tensor};
use crate::{fp4, fp8};

#[test]
fn scales_of_activations_must_be_positive() {
    let rng = &mut rng();
    let nvfp4 = Fp4Format::NvFp4Packed;
    let layers: [(LayerFormat, Vec<TensorData>, &[&str]); 2] = [
        (
            LayerFormat::Fp8(fp8::FORMATS[2]),
            fp8::published(rng, 20, 4, fp8::FORMATS[2]),
            &["input_scale", "activation_scale"],
        ),
        (
            LayerFormat::Fp4(nvfp4),
            fp4::published(rng, 32, 8, nvfp4),
            &["input_global_scale"],
        ),
    ];
    for (format, tensors, names) in layers {
        for name in names {
            let read = |scale: f32| {
                let bytes = scale.to_le_bytes();
                let scale = tensor(name, Dtype::F32, &[1], &bytes);
                let (_folder, checkpoint) = checkpoint(&[&tensors[..], &[scale]].concat());
                read_layer(&checkpoint, LAYER, &format)
            };
            for good in [0.5, 1e-30] {
                assert!(read(good).is_ok(), "{name} of {good}");
            }
            for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
                let error = read(bad).expect_err(name);
                let found = message(&error);
                let expected =
                    format!("a scale of activations is {bad}; it must be finite and positive");
                assert!(
                    found.contains(&expected) && found.contains(&format!("{LAYER}.{name}")),
                    "{found}"
                );
            }
        }
    }
}
