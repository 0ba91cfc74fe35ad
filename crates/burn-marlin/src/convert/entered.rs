//! The modules that a traversal has entered: paths, names in checkpoints, and types.
//!
//! Burn passes the type of a module as the text `Struct:Name` or `Enum:Name`. This module alone
//! reads that text.

use crate::weight::REPARAMETERIZATION;
use burn::module::{Module, ModuleVisitor};
use burn::nn::LinearConfig;
use burn::store::{ModuleAdapter, PyTorchToBurnAdapter};
use burn::tensor::Device;
use std::panic::Location;
use std::sync::OnceLock;

/// The source location of a type's `#[derive(Module)]`. Every visitor of a value of the type is
/// called from there, so the location distinguishes types with the same name. If the compiler
/// leaves locations out (`-Z location-detail=none`), only names distinguish types.
type DerivedAt = &'static Location<'static>;

/// A field of a module, or an element of a list.
pub(super) struct Entered {
    /// The name of the field, or the index.
    pub name: String,
    /// The kind and name of the type that contains the field, such as `Struct:Linear`.
    container: String,
    /// The source location where that type is derived.
    derived_at: DerivedAt,
}

impl Entered {
    /// Creates the entry of a field from the arguments of
    /// [`enter_module`](ModuleVisitor::enter_module), which must be `#[track_caller]`, too.
    #[track_caller]
    pub fn new(name: &str, container: &str) -> Self {
        Self {
            name: name.to_owned(),
            container: container.to_owned(),
            derived_at: Location::caller(),
        }
    }

    /// Returns the name of the struct that contains the field; `None` in an enum or a list.
    pub fn struct_name(&self) -> Option<&str> {
        self.container.strip_prefix("Struct:")
    }

    /// Returns true if the field is a reparameterisation of a parameter.
    pub fn is_reparameterization(&self) -> bool {
        self.container == REPARAMETERIZATION
    }

    /// Returns true if the field is a variant of an enum.
    fn is_variant(&self) -> bool {
        self.container.starts_with("Enum:")
    }

    /// Returns true if the field is the weight of a type named `Linear`.
    fn is_weight_of_linear(&self) -> bool {
        self.name == "weight" && self.struct_name() == Some("Linear")
    }

    /// Returns true if the field is of Burn's `Linear`, and not of another type of that name.
    pub fn is_of_burn_linear(&self, device: &Device) -> bool {
        self.struct_name() == Some("Linear") && burn_linear(device) == Some(self.derived_at)
    }
}

/// Returns the path of a parameter, with the variants of enums.
pub(super) fn path(stack: &[Entered]) -> String {
    stack
        .iter()
        .map(|entered| entered.name.as_str())
        .collect::<Vec<_>>()
        .join(".")
}

/// Returns the path of a parameter as PyTorch writes it: without the variants of enums, and with
/// `weight` and `bias` for Burn's `gamma` and `beta` of norms.
pub(super) fn pytorch_name(stack: &[Entered]) -> String {
    let mut names: Vec<&str> = stack
        .iter()
        .filter(|entered| !entered.is_variant())
        .map(|entered| entered.name.as_str())
        .collect();
    let of = stack
        .iter()
        .rev()
        .find(|entered| entered.struct_name().is_some());
    let renamed = names.last().zip(of).and_then(|(name, of)| {
        PyTorchToBurnAdapter.get_alternative_param_name(name, &of.container)
    });
    if let (Some(last), Some(renamed)) = (names.last_mut(), &renamed) {
        *last = renamed;
    }
    names.join(".")
}

/// Returns true inside a reparameterisation, whose tensors are not parameters of the model.
pub(super) fn is_in_reparameterization(stack: &[Entered]) -> bool {
    stack.iter().any(Entered::is_reparameterization)
}

/// Returns true if a parameter is the weight of a type named `Linear`.
pub(super) fn is_linear_weight(stack: &[Entered]) -> bool {
    stack.last().is_some_and(Entered::is_weight_of_linear)
}

/// Returns the source location where Burn's `Linear` is derived. The location is the same for every
/// layer, so it is determined only once.
fn burn_linear(device: &Device) -> Option<DerivedAt> {
    static FOUND: OnceLock<Option<DerivedAt>> = OnceLock::new();
    struct Caller(Option<DerivedAt>);
    impl ModuleVisitor for Caller {
        #[track_caller]
        fn enter_module(&mut self, _name: &str, _container: &str) {
            self.0 = Some(Location::caller());
        }
    }
    *FOUND.get_or_init(|| {
        let mut caller = Caller(None);
        // The layer's weight is lazy and never initialised.
        LinearConfig::new(1, 1)
            .with_bias(false)
            .init(device)
            .visit(&mut caller);
        caller.0
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::module::Param;
    use burn::nn::Linear;
    use burn::tensor::Tensor;

    /// A type with the name of Burn's.
    mod other {
        use super::*;

        #[derive(Module, Debug)]
        pub struct Linear {
            pub weight: Param<Tensor<2>>,
        }
    }

    #[derive(Module, Debug)]
    enum Either {
        One(Linear),
    }

    #[derive(Module, Debug)]
    struct Model {
        layers: Vec<Either>,
        other: other::Linear,
    }

    /// A visitor that notes the path, the PyTorch name and the type of every weight.
    #[derive(Default)]
    struct Weights {
        stack: Vec<Entered>,
        found: Vec<(String, String, bool)>,
    }

    impl ModuleVisitor for Weights {
        #[track_caller]
        fn enter_module(&mut self, name: &str, container: &str) {
            self.stack.push(Entered::new(name, container));
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.stack.pop();
        }

        fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
            if is_linear_weight(&self.stack) {
                let is_burns = self.stack[self.stack.len() - 1].is_of_burn_linear(&Device::flex());
                self.found
                    .push((path(&self.stack), pytorch_name(&self.stack), is_burns));
            }
        }
    }

    /// Fails when Burn writes types in another way, or visits a derived type from elsewhere.
    #[test]
    fn types_and_names_are_read_from_what_burn_passes() {
        let device = Device::flex();
        let linear = LinearConfig::new(2, 3).init(&device);
        let model = Model {
            other: other::Linear {
                weight: linear.weight.clone(),
            },
            layers: vec![Either::One(linear)],
        };
        let mut weights = Weights::default();
        model.visit(&mut weights);
        let expected = [
            ("layers.0.One.weight", "layers.0.weight", true),
            ("other.weight", "other.weight", false),
        ];
        assert_eq!(
            weights.found,
            expected.map(|(path, name, is_burns)| (path.into(), name.into(), is_burns))
        );
    }
}
