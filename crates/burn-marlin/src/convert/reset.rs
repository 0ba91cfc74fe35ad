//! Resetting of placeholders to their state after the conversion.

use super::ConvertError;
use super::survey::{Types, survey};
use crate::weight::Passed;
use crate::{Error, QuantizedWeight};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;
use std::collections::{HashMap, HashSet};

/// Resets the placeholders of converted weights to their state right after the conversion: they are
/// small, and a record can be loaded.
///
/// Call this function before a record is loaded into a converted model that has been used, and
/// after a cast or a move to another backend. Float values that were loaded into converted layers
/// are rounded to the layers' specs, and freed. All other weights are unchanged.
///
/// # Errors
/// [`Error::Layer`] names the first layer whose loaded float values cannot be rounded: the values
/// are not finite, or a scale is too large for the dtype of the layer's scales. The error contains
/// the unchanged model, in which that layer computes with its float values.
pub fn reset_placeholders<M: Module>(model: M) -> Result<M, ConvertError<M>> {
    let converted = survey(
        &model,
        Types {
            also: &[],
            initialize: false,
        },
    )
    .converted;
    let mut loaded = Loaded {
        converted: &converted,
        path: Vec::new(),
        values: None,
        weights: HashMap::new(),
        failed: None,
    };
    model.visit(&mut loaded);
    let Loaded {
        weights, failed, ..
    } = loaded;
    match failed {
        Some(error) => Err(ConvertError { model, error }),
        None => Ok(model.map(&mut Reset {
            converted,
            weights,
            passed: None,
            path: Vec::new(),
        })),
    }
}

/// A visitor that rounds the float values that were loaded into converted layers.
struct Loaded<'a> {
    /// Paths of converted weights.
    converted: &'a HashSet<String>,
    path: Vec<String>,
    /// Path and float values of the previous parameter, whose quantised weight is visited next.
    values: Option<(String, Tensor<2>)>,
    /// The weights rounded from loaded values, by the paths of the parameters.
    weights: HashMap<String, QuantizedWeight>,
    /// The first layer whose values cannot be rounded.
    failed: Option<Error>,
}

impl ModuleVisitor for Loaded<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.failed.is_some() {
            return;
        }
        if let Some((weight, (path, values))) = Passed::visited(param).zip(self.values.take()) {
            match weight.requantized(values) {
                Ok(weight) => drop(self.weights.insert(path, weight)),
                Err(error) => self.failed = Some(error.in_layer(&path)),
            }
            return;
        }
        let path = self.path.join(".");
        if !self.converted.contains(&path) || !param.is_initialized() {
            return;
        }
        let base = param.base();
        if QuantizedWeight::holds_values(&base) {
            let dims = base.dims();
            self.values = Some((path, base.reshape([dims[0], dims[D - 1]])));
        }
    }
}

/// A mapper that puts new placeholders into the parameters of converted layers. It also replaces
/// the weights of layers into which float values were loaded.
struct Reset {
    /// Paths of converted weights.
    converted: HashSet<String>,
    /// The weights rounded from loaded values, by the paths of the parameters.
    weights: HashMap<String, QuantizedWeight>,
    /// What is passed to the weight of the previous parameter, which is mapped next.
    passed: Option<Passed>,
    path: Vec<String>,
}

impl ModuleMapper for Reset {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if let Some(passed) = self.passed.take() {
            return passed.attach(param);
        }
        let path = self.path.join(".");
        // The attached weight offers its float parameter at the same path, which must not match
        // again.
        if !param.is_initialized() || !self.converted.remove(&path) {
            return param;
        }
        let replacement = self.weights.remove(&path);
        let base = param.base();
        let dims = base.dims();
        let shape = [dims[0], dims[D - 1]];
        let (param, passed) = QuantizedWeight::renew(&param, base.dtype(), shape, replacement);
        self.passed = Some(passed);
        param
    }
}
