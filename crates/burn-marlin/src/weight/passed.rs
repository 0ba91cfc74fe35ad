//! The values that a weight and this crate's visitors and mappers pass to each other during a
//! traversal of a model.
//!
//! Burn's traversals pass parameters. They detach a parameter's reparameterisation first and
//! traverse its tensors on their own, so a visitor sees the tensors of a quantised weight but not
//! the weight. A parameter that is given to a visitor directly, without a traversal of its own,
//! keeps its reparameterisation: a weight hands its first parameter, `format`, to visitors in this
//! way, and the parameter carries the weight. A mapper returns the parameter with what the weight
//! is to take over. Other visitors and mappers, such as those of records, see a parameter whose
//! value is unchanged.
//!
//! What Burn would have to offer for this module, and for the detour of
//! [`beside`](super::module::beside), to be unnecessary:
//!
//! - visitors and mappers that get a parameter with its reparameterisation, or a method
//!   `visit_reparameterization` with the concrete type;
//! - more than one reparameterisation on a parameter, so that a LoRA adapter and a quantised weight
//!   can be attached to the same one;
//! - the `TypeId` of a module in `enter_module`, in place of the name of its type;
//! - a parameter that reports whether it still has to be initialised, and whether records store it
//!   transposed.

use super::QuantizedWeight;
use super::attached::PlaceholderState;
use burn::module::{Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::Tensor;
use std::sync::Arc;

/// What the parameter `format` of a weight carries.
#[derive(Module, Debug)]
pub(crate) struct Passed {
    /// The weight, if it is passed to a visitor; the weight whose values replace those of the
    /// weight, if a mapper passes it.
    #[module(skip)]
    weight: Option<QuantizedWeight>,
    /// The state of the placeholder that a mapper has put into the parameter to which the weight
    /// is attached.
    #[module(skip)]
    placeholder: Option<Arc<PlaceholderState>>,
}

/// The value of the parameter stays as it is.
impl Reparameterization for Passed {
    const NAME: &'static str = "passed";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base
    }
}

/// A reparameteriser that attaches a value to the first parameter that it gets.
struct Attach(Option<Passed>);

impl Reparameterizer for Attach {
    type Reparam = Passed;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Passed>) {
        (param, self.0.take())
    }
}

impl Passed {
    /// Creates the value that passes a weight to a visitor, or a replacement to a weight.
    pub fn weight(weight: QuantizedWeight) -> Self {
        Self::renewed(None, Some(weight))
    }

    /// Creates the value that passes the state of a new placeholder to a weight, and the weight
    /// whose values replace its values, if there is one.
    pub(super) fn renewed(
        placeholder: Option<Arc<PlaceholderState>>,
        weight: Option<QuantizedWeight>,
    ) -> Self {
        Self {
            weight,
            placeholder,
        }
    }

    /// Returns the parameter with this value attached.
    pub fn attach<const D: usize>(self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.apply_reparameterization(Attach(Some(self)))
    }

    /// Returns the weight whose parameter `format` is being visited; `None` for other parameters.
    pub fn visited<const D: usize>(param: &Param<Tensor<D>>) -> Option<&QuantizedWeight> {
        param.reparameterization::<Self>()?.weight.as_ref()
    }

    /// Returns the replacement and the state of the new placeholder that a mapper has attached to
    /// the parameter `format`.
    pub(super) fn mapped<const D: usize>(
        param: &Param<Tensor<D>>,
    ) -> (Option<QuantizedWeight>, Option<Arc<PlaceholderState>>) {
        match param.reparameterization::<Self>() {
            Some(passed) => (passed.weight.clone(), passed.placeholder.clone()),
            None => (None, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupSize, QuantSpec};
    use burn::module::ModuleVisitor;
    use burn::nn::LinearConfig;
    use burn::tensor::Device;

    /// A visitor that counts the parameters that have a quantised weight or carry one.
    #[derive(Default)]
    struct Count {
        attached: usize,
        passed: usize,
    }

    impl ModuleVisitor for Count {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.attached += usize::from(param.reparameterization::<QuantizedWeight>().is_some());
            self.passed += usize::from(Passed::visited(param).is_some());
        }
    }

    /// Fails when Burn's traversals no longer detach reparameterisations: then visitors can ask a
    /// parameter for its quantised weight, and [`Passed`] is unnecessary.
    #[test]
    fn a_visitor_gets_no_reparameterization_but_what_a_parameter_carries() {
        let layer = LinearConfig::new(64, 32).init(&Device::flex());
        let quantizer = crate::WeightQuantizer::new(QuantSpec::int4(GroupSize::G32));
        let (layer, _) = quantizer.quantize(layer).unwrap();
        let mut count = Count::default();
        layer.visit(&mut count);
        assert_eq!((count.attached, count.passed), (0, 1));
    }

    /// A record holds the value of `format`, whatever the parameter carries.
    #[test]
    fn a_parameter_that_carries_a_weight_keeps_its_value() {
        let device = Device::flex();
        let weight = QuantizedWeight::quantize(
            Tensor::random([64, 32], burn::tensor::Distribution::Default, &device),
            &QuantSpec::int4(GroupSize::G32),
        )
        .unwrap();
        let value = Tensor::<1>::from_floats([1.0, 4.0, 32.0], &device);
        let param = Param::initialized(burn::module::ParamId::new(), value.clone());
        let carrying = Passed::weight(weight.clone()).attach(param);
        assert_eq!(Passed::visited(&carrying).unwrap().dims(), weight.dims());
        let saved = carrying.transform_for_save().val().into_data();
        assert_eq!(saved, value.into_data());
    }
}
