use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::Value;

use crate::repository_file;

/// Returns the path of a golden file or folder: files that the formats' own packers wrote, and what
/// other implementations made of them. `tests/golden/README.md` describes how they are made.
pub fn golden(name: &str) -> PathBuf {
    repository_file("tests/golden").join(name)
}

/// Reads a golden JSON file.
///
/// # Panics
/// Panics if there is no such file.
#[track_caller]
pub fn golden_json(name: &str) -> Value {
    read_json(&golden(name))
}

/// A golden checkpoint, as `index.json` has it.
#[derive(Debug, Clone, Deserialize)]
pub struct GoldenFolder {
    /// The name of the folder.
    pub name: String,
    /// The class of the model in transformers.
    pub architecture: String,
    /// The formats of the quantised layers, as text.
    pub layers: BTreeMap<String, String>,
    /// The dtype of the packer's own dequantised weights, if it rounds them.
    pub dequantized_in: Option<String>,
    /// True if the logits of transformers are there.
    pub logits: bool,
    expected: String,
}

impl GoldenFolder {
    /// Returns all golden checkpoints.
    ///
    /// # Panics
    /// Panics if the index is missing.
    #[track_caller]
    pub fn all() -> Vec<Self> {
        serde_json::from_value(golden_json("index.json")).unwrap()
    }

    /// Returns the path of the folder.
    pub fn dir(&self) -> PathBuf {
        golden(&self.name)
    }

    /// Returns the config of the model.
    ///
    /// # Panics
    /// Panics if the config is missing.
    #[track_caller]
    pub fn config(&self) -> Value {
        read_json(&self.dir().join("config.json"))
    }

    /// Returns the path of the file with the dequantised weights [N, K], or the tokens and logits.
    pub fn expected(&self) -> PathBuf {
        golden(&self.expected)
    }
}

/// The tensors of a golden safetensors file.
#[derive(Debug)]
pub struct GoldenTensors {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl GoldenTensors {
    /// Reads a file.
    ///
    /// # Panics
    /// Panics if there is no such file.
    #[track_caller]
    pub fn read(path: &Path) -> Self {
        Self {
            path: path.into(),
            bytes: std::fs::read(path)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display())),
        }
    }

    /// Returns the shape and the values of a tensor of i64.
    ///
    /// # Panics
    /// Panics if there is no such tensor.
    #[track_caller]
    pub fn ints(&self, name: &str) -> (Vec<usize>, Vec<i64>) {
        self.values(name, i64::from_le_bytes)
    }

    /// Returns the shape and the values of a tensor of f32.
    ///
    /// # Panics
    /// Panics if there is no such tensor.
    #[track_caller]
    pub fn floats(&self, name: &str) -> (Vec<usize>, Vec<f64>) {
        self.values(name, |bytes| f32::from_le_bytes(bytes).into())
    }

    /// Returns the tokens that a model got.
    ///
    /// # Panics
    /// Panics if the file has none.
    #[track_caller]
    pub fn tokens(&self) -> Vec<u32> {
        let (_, tokens) = self.ints("input_ids");
        tokens.into_iter().map(|token| token as u32).collect()
    }

    #[track_caller]
    fn values<const N: usize, T>(
        &self,
        name: &str,
        value: impl Fn([u8; N]) -> T,
    ) -> (Vec<usize>, Vec<T>) {
        let tensors = SafeTensors::deserialize(&self.bytes);
        let found = tensors.as_ref().map(|tensors| tensors.tensor(name));
        let Ok(Ok(tensor)) = found else {
            panic!("{}: {name}: {found:?}", self.path.display())
        };
        assert_eq!(tensor.dtype().bitsize(), 8 * N, "{name}");
        let (chunks, _) = tensor.data().as_chunks::<N>();
        let values = chunks.iter().map(|&bytes| value(bytes)).collect();
        (tensor.shape().to_vec(), values)
    }
}

#[track_caller]
fn read_json(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
