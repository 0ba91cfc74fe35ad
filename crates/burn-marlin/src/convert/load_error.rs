use marlin_format::checkpoint::{CheckpointError, Dtype, LayerFormat};
use std::path::PathBuf;

/// A checkpoint that does not go into a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The files cannot be read, or do not match their config.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Parameters of the model that no tensor of the checkpoint goes into.
    #[error(
        "{} has no tensor for {} parameters of the model, the first of them `{}`{}: map the names of the files to those of the model with the key map, \
         load the checkpoint of this very model, or let `LoadOptions::allow_missing` leave them as they are",
        dir.display(), missing.len(), first(missing), candidates(unused)
    )]
    Missing {
        /// The folder.
        dir: PathBuf,
        /// The parameters, by the names they are looked for: those of the model, without the
        /// variants of enums, with PyTorch's `weight` and `bias` of norms.
        missing: Vec<String>,
        /// Names, after the key map, that no parameter has.
        unused: Vec<String>,
    },
    /// Two tensors or layers that the key map gives one name.
    #[error("the key map gives `{first}` and `{second}` of {} the same name, `{name}`; make its patterns tell them apart", dir.display())]
    SameName {
        /// The folder.
        dir: PathBuf,
        /// One of them, as in the files.
        first: String,
        /// The other.
        second: String,
        /// Their name after the key map.
        name: String,
    },
    /// A tensor or layer of another shape than its parameter.
    #[error(
        "`{tensor}` in {} has shape {found:?}; `{path}` of the model needs {expected:?}: build the model with the sizes of the checkpoint's config",
        file.display()
    )]
    Shape {
        /// The tensor or layer, as in the files.
        tensor: String,
        /// The file it is in.
        file: PathBuf,
        /// Path of the parameter in the model.
        path: String,
        /// The shape that the file would have: [N, K] for a linear layer.
        expected: Vec<usize>,
        /// The shape that it has.
        found: Vec<usize>,
    },
    /// A tensor of a dtype that its parameter cannot hold.
    #[error("`{tensor}` in {} is {found}; `{path}` of the model holds {expected}", file.display())]
    Dtype {
        /// The tensor, as in the files.
        tensor: String,
        /// The file it is in.
        file: PathBuf,
        /// Path of the parameter in the model.
        path: String,
        /// The kind of values that the parameter holds.
        expected: &'static str,
        /// The dtype of the tensor.
        found: Dtype,
    },
    /// A quantised layer whose place in the model is not the weight of a `Linear`.
    #[error(
        "`{layer}` in {} is quantised ({format}), and `{path}` of the model is not the weight of a Linear: only those take quantised weights; \
         use a checkpoint with this layer in float",
        dir.display()
    )]
    NotLinear {
        /// The layer, as in the files.
        layer: String,
        /// The folder.
        dir: PathBuf,
        /// The format of the layer in the files.
        format: LayerFormat,
        /// Path of the parameter in the model.
        path: String,
    },
    /// A float tensor whose place in the model is a quantised weight, such as that of a
    /// `QuantLinear`.
    #[error(
        "`{tensor}` in {} is not quantised, and `{path}` of the model is a quantised weight: quantise this layer of the checkpoint, or build the model \
         with a Linear there and convert it",
        file.display()
    )]
    NotQuantized {
        /// The tensor, as in the files.
        tensor: String,
        /// The file it is in.
        file: PathBuf,
        /// Path of the weight in the model.
        path: String,
    },
    /// A pattern on parameter paths is no regular expression.
    #[error("`{pattern}` is not a regular expression: {source}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The cause.
        source: Box<regex::Error>,
    },
    /// A parameter with a reparameterisation.
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

/// The names that may be meant instead.
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
