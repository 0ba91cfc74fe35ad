use marlin_testing::{GoldenTensors, relative_error};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Int, Tensor, TensorData};
use load_published::{Bert, BertConfig};
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

/// Returns the folder that llm-compressor wrote.
pub fn golden() -> PathBuf {
    marlin_testing::golden("bert-ct-int4-g32")
}

pub fn config() -> BertConfig {
    serde_json::from_slice(&std::fs::read(golden().join("config.json")).unwrap()).unwrap()
}

/// Creates a model with random weights.
pub fn model() -> Bert {
    config().init(&Device::flex())
}

/// The outputs of transformers for the folder in f32: `last_hidden_state`, then `logits`.
pub struct Expected {
    pub ids: Tensor<2, Int>,
    pub segments: Tensor<2, Int>,
    pub hidden: Vec<f64>,
    pub logits: Vec<f64>,
}

impl Expected {
    pub fn read() -> Self {
        let file = GoldenTensors::read(&golden().join("expected.safetensors"));
        let floats = |name: &str| file.floats(name).1;
        let ints = |name: &str| {
            let (shape, values) = file.ints(name);
            Tensor::from_data(TensorData::new(values, shape), &Device::flex())
        };
        Self {
            ids: ints("input_ids"),
            segments: ints("token_type_ids"),
            hidden: floats("last_hidden_state"),
            logits: floats("logits"),
        }
    }

    /// Returns the relative errors of a model's hidden state and logits.
    pub fn errors(&self, model: &Bert) -> [f64; 2] {
        let hidden = model.encode(self.ids.clone(), self.segments.clone());
        let logits = model.classify(hidden.clone());
        [
            relative_error(&hidden.try_into_vec_as::<f32>().unwrap(), &self.hidden),
            relative_error(&logits.try_into_vec_as::<f32>().unwrap(), &self.logits),
        ]
    }
}

/// Dtype, shape and bytes of a tensor.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

pub fn read_tensors(file: &Path) -> Tensors {
    let bytes = std::fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            (
                name,
                (view.dtype(), view.shape().to_vec(), view.data().to_vec()),
            )
        })
        .collect()
}

/// Returns a copy of the golden folder with edited tensors.
pub fn edited(edit: impl FnOnce(&mut Tensors)) -> TempDir {
    let mut tensors = read_tensors(&golden().join("model.safetensors"));
    edit(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (
            name,
            safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap(),
        )
    });
    let folder = tempfile::tempdir().unwrap();
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    std::fs::copy(
        golden().join("config.json"),
        folder.path().join("config.json"),
    )
    .unwrap();
    folder
}
