//! The operations on an input. No operation may panic, and accepted inputs must be consistent.

use std::fs;

use marlin_format::checkpoint::{Checkpoint, LayerFormat, Quantization, layer_tensors, read_layer};
use marlin_format::{GroupSize, WeightValue};
use tempfile::TempDir;

use super::errors::check_error;
use super::formats::{LAYER, formats};

/// Names of layers that are looked up in configs.
const LAYERS: [&str; 4] = [
    "model.layers.0.mlp.up_proj",
    "model.layers.11.self_attn.q_proj",
    "lm_head",
    "",
];

/// Reads a text as a `config.json` and as a `quantize_config.json`, and looks up layers in each.
pub fn config(data: &[u8]) {
    for quantization in [
        Quantization::from_config(data),
        Quantization::from_quantize_config(data).map(Some),
    ] {
        match quantization {
            Ok(None) => {}
            Ok(Some(quantization)) => {
                assert!(!quantization.to_string().is_empty());
                for layer in LAYERS {
                    match quantization.layer(layer) {
                        Ok(format) => check_format(&format),
                        Err(error) => check_error(&error),
                    }
                }
            }
            Err(error) => check_error(&error),
        }
    }
}

/// A folder with one file, which is overwritten for every input.
pub struct Folder(TempDir);

impl Folder {
    /// Creates a folder in the system's folder for temporary files.
    #[allow(
        clippy::new_without_default,
        reason = "it makes a folder; the tests' module, which is not public, does not lint it"
    )]
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    /// Opens a safetensors file, and reads every tensor.
    pub fn header(&self, file: &[u8]) {
        let Some(checkpoint) = self.open(file) else {
            return;
        };
        for name in checkpoint.names() {
            let tensor = checkpoint.tensor(name).expect("it is listed");
            let bits: usize = tensor.shape().iter().product::<usize>() * tensor.dtype().bitsize();
            assert_eq!(tensor.bytes().len() * 8, bits, "{name}");
        }
    }

    /// Reads a layer from a safetensors file. The first byte of `data` selects the format; the file
    /// follows. Returns true if the layer was read.
    pub fn tensors(&self, data: &[u8]) -> bool {
        let Some((&selector, file)) = data.split_first() else {
            return false;
        };
        let Some(checkpoint) = self.open(file) else {
            return false;
        };
        let formats = formats();
        let format = &formats[usize::from(selector) % formats.len()];
        let names = layer_tensors(&checkpoint, LAYER, format);
        assert!(names.iter().all(|name| checkpoint.contains(name)));
        match read_layer(&checkpoint, LAYER, format) {
            Ok(weight) => {
                let asked = format.spec().expect("floats are not read");
                let spec = weight.spec();
                assert_eq!(
                    (spec.value, spec.scales.group, spec.has_zero_points()),
                    (asked.value, asked.scales.group, asked.has_zero_points())
                );
                assert_eq!(weight.dequantize().len(), weight.k() * weight.n());
                true
            }
            Err(error) => {
                check_error(&error);
                false
            }
        }
    }

    fn open(&self, file: &[u8]) -> Option<Checkpoint> {
        fs::write(self.0.path().join("model.safetensors"), file)
            .expect("a temporary file can be written");
        Checkpoint::open(self.0.path())
            .inspect_err(|error| check_error(error))
            .ok()
    }
}

/// Checks that a format is one that a config may declare for a layer.
fn check_format(format: &LayerFormat) {
    match format {
        LayerFormat::Awq(spec) => assert_eq!(spec.value, WeightValue::Int4),
        LayerFormat::Marlin(spec) | LayerFormat::Marlin24(spec, _) => {
            assert!(
                !spec.has_zero_points()
                    && matches!(spec.scales.group, GroupSize::Channel | GroupSize::G128)
            );
        }
        _ => {}
    }
}
