use marlin_format::{FormatError, QuantSpec};
use marlin_kernels::Plan;
use std::fmt;

/// What the conversion did to every layer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Every parameter of two dimensions or more, in the model's order.
    pub layers: Vec<LayerReport>,
}

impl Report {
    /// Layers that now have a quantised weight.
    pub fn quantized(&self) -> usize {
        self.layers.iter().filter(|layer| matches!(layer.outcome, Outcome::Quantized { .. })).count()
    }

    /// Layers that stayed as they were.
    pub fn left(&self) -> usize {
        self.layers.len() - self.quantized()
    }
}

/// What happened to one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerReport {
    /// Path of the parameter in the model.
    pub path: String,
    /// Shape of the weight; [K, N] for a `Linear`.
    pub shape: Vec<usize>,
    /// What happened.
    pub outcome: Outcome,
}

/// Changed, or left and why.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The layer has a quantised weight.
    Quantized {
        /// Its format.
        spec: QuantSpec,
        /// Its bytes on the device.
        size_bytes: usize,
        /// The kernel that runs it with one row of activations, and why.
        plan: Plan,
    },
    /// The layer is as it was.
    Left(LeftReason),
}

/// Why a layer was left.
#[derive(Debug, Clone, PartialEq)]
pub enum LeftReason {
    /// Not the weight of Burn's `Linear`: an embedding, a convolution, a parameter of another module.
    NotLinear,
    /// An excluding pattern matches its path.
    Excluded {
        /// The pattern.
        pattern: String,
    },
    /// There are including patterns, and none matches its path.
    NotIncluded,
    /// Its weight is already quantised by Burn.
    AlreadyQuantized,
    /// Another reparameterisation is attached, LoRA or an earlier conversion; a parameter takes one.
    Reparameterized,
    /// The group does not divide K.
    Group {
        /// The sizes.
        error: FormatError,
    },
}

impl fmt::Display for LeftReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLinear => f.write_str("not the weight of a Linear"),
            Self::Excluded { pattern } => write!(f, "excluded by `{pattern}`"),
            Self::NotIncluded => f.write_str("not included by any pattern"),
            Self::AlreadyQuantized => f.write_str("already quantised by Burn"),
            Self::Reparameterized => f.write_str("already reparameterised (LoRA or an earlier conversion)"),
            Self::Group { error } => error.fmt(f),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.layers.iter().map(|layer| layer.path.len()).max().unwrap_or(0);
        for layer in &self.layers {
            let shape = layer.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
            write!(f, "{:width$}  {shape:>14}  ", layer.path)?;
            match &layer.outcome {
                Outcome::Quantized { spec, size_bytes, plan } => {
                    writeln!(f, "{spec}, {size_bytes} bytes; {}: {}", plan.kernel, plan.reason)?;
                }
                Outcome::Left(reason) => writeln!(f, "left: {reason}")?,
            }
        }
        write!(f, "{} quantised, {} left", self.quantized(), self.left())
    }
}
