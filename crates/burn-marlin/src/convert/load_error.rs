use marlin_format::checkpoint::{CheckpointError, Dtype, LayerFormat};
use std::path::PathBuf;

/// The reason why a checkpoint cannot be loaded into a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The files cannot be read, or do not match their config.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint has no tensor for some parameters of the model.
    #[error(
        "{} has no tensor for {} parameters of the model, the first of them `{}`{}: map the names of the files to those of the model with the key map, \
         load the checkpoint of this very model, or let `LoadOptions::allow_missing` leave them as they are",
        dir.display(), missing.len(), first(missing), candidates(unused)
    )]
    Missing {
        /// The folder.
        dir: PathBuf,
        /// The names under which the parameters were looked up: their paths in the model, without
        /// the variants of enums and with PyTorch's `weight` and `bias` for norms.
        missing: Vec<String>,
        /// The names in the checkpoint, after the key map, that match no parameter.
        unused: Vec<String>,
    },
    /// The key map gives two tensors or layers the same name.
    #[error("the key map gives `{first}` and `{second}` of {} the same name, `{name}`; make its patterns tell them apart", dir.display())]
    SameName {
        /// The folder.
        dir: PathBuf,
        /// The first tensor or layer, as named in the files.
        first: String,
        /// The second tensor or layer, as named in the files.
        second: String,
        /// The name of both tensors or layers after the key map.
        name: String,
    },
    /// The shape of a tensor or layer differs from the shape that its parameter needs.
    #[error(
        "`{tensor}` in {} has shape {found:?}; `{path}` of the model needs {expected:?}: build the model with the sizes of the checkpoint's config",
        file.display()
    )]
    Shape {
        /// The tensor or layer, as named in the files.
        tensor: String,
        /// The file that contains the tensor or layer.
        file: PathBuf,
        /// Path of the parameter in the model.
        path: String,
        /// The shape that the parameter needs in the file: [N, K] for a linear layer.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor has a dtype that its parameter cannot hold.
    #[error("`{tensor}` in {} is {found}; `{path}` of the model holds {expected}", file.display())]
    Dtype {
        /// The tensor, as named in the files.
        tensor: String,
        /// The file that contains the tensor or layer.
        file: PathBuf,
        /// Path of the parameter in the model.
        path: String,
        /// The kind of values that the parameter holds.
        expected: &'static str,
        /// The dtype of the tensor.
        found: Dtype,
    },
    /// A quantised layer belongs to a parameter that is not the weight of a `Linear`.
    #[error(
        "`{layer}` in {} is quantised ({format}), and `{path}` of the model is not the weight of a Linear: only those take quantised weights; \
         use a checkpoint with this layer in float",
        dir.display()
    )]
    NotLinear {
        /// The layer, as named in the files.
        layer: String,
        /// The folder.
        dir: PathBuf,
        /// The format of the layer in the files.
        format: LayerFormat,
        /// Path of the parameter in the model.
        path: String,
    },
    /// A float tensor belongs to a quantised weight of the model, such as that of a `QuantLinear`.
    #[error(
        "`{tensor}` in {} is not quantised, and `{path}` of the model is a quantised weight: quantise this layer of the checkpoint, or build the model \
         with a Linear there and convert it",
        file.display()
    )]
    NotQuantized {
        /// The tensor, as named in the files.
        tensor: String,
        /// The file that contains the tensor or layer.
        file: PathBuf,
        /// Path of the weight in the model.
        path: String,
    },
    /// A pattern for parameter paths is not a valid regular expression.
    #[error("`{pattern}` is not a regular expression: {source}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The cause.
        source: Box<regex::Error>,
    },
    /// A parameter already has a reparameterisation.
    #[error(
        "`{path}` of the model is reparameterised already (LoRA, or a quantised weight); load into a model as it is built, and attach adapters afterwards"
    )]
    Reparameterized {
        /// Path of the parameter in the model.
        path: String,
    },
}

fn first(names: &[String]) -> &str {
    names.first().map_or("", String::as_str)
}

/// Describes the unused names of the checkpoint, since one of them may belong to a missing
/// parameter.
fn candidates(unused: &[String]) -> String {
    match unused {
        [] => String::new(),
        [only] => format!("; unused is `{only}`"),
        [first, .., last] => format!(
            "; {} tensors and layers are unused, `{first}` to `{last}`",
            unused.len()
        ),
    }
}
