//! The search for weights that cannot be rounded.

use crate::{Error, QuantizedWeight};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{ElementConversion, Tensor};
use marlin_format::{QuantSpec, Sparsity};
use std::collections::HashMap;

/// A visitor that finds the first weight that cannot be rounded, before any weight is rounded.
pub(super) struct Examine<'a> {
    specs: HashMap<&'a str, QuantSpec>,
    path: Vec<String>,
    failed: Option<Error>,
}

impl<'a> Examine<'a> {
    pub fn all<M: Module>(model: &M, specs: HashMap<&'a str, QuantSpec>) -> Result<(), Error> {
        let mut examine = Self {
            specs,
            path: Vec::new(),
            failed: None,
        };
        model.visit(&mut examine);
        examine.failed.map_or(Ok(()), Err)
    }
}

impl ModuleVisitor for Examine<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let Some(spec) = self
            .specs
            .remove(path.as_str())
            .filter(|_| self.failed.is_none())
        else {
            return;
        };
        let weight = param.base().detach();
        // Only scalars are read from the device. Not every backend returns NaN as a maximum, so NaN
        // is checked separately.
        let finite = weight.clone().is_finite().all().into_scalar::<bool>();
        let largest = weight
            .clone()
            .abs()
            .max()
            .into_scalar::<f32>()
            .elem::<f64>();
        // Below this maximum no scale overflows, whatever its dtype.
        if finite && largest < f64::from(half::f16::MAX) {
            return;
        }
        let dims = weight.dims();
        // Rounding on the host returns an error with the position of the value.
        self.failed = QuantizedWeight::round(
            weight.reshape([dims[0], dims[D - 1]]),
            &spec,
            Sparsity::Dense,
        )
        .err()
        .map(|error| error.in_layer(&path));
    }
}
