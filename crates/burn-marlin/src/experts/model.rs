//! Experts from the float weights of a Burn model.

use super::{QuantExperts, Router};
use crate::Error;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use marlin_format::QuantSpec;

/// The paths of the stacked weights of a mixture in a model, such as
/// `layers.0.mixture.gate_up_proj`: parameters [experts, K, N], by which activations [.., K] are
/// multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertPaths<'a> {
    /// Gates and ups in one parameter.
    Joined {
        /// Gates and ups side by side, gates first: [experts, hidden, 2 x intermediate].
        gate_up: &'a str,
        /// Down, [experts, intermediate, hidden].
        down: &'a str,
    },
    /// Gates and ups in two parameters.
    Separate {
        /// Gates, [experts, hidden, intermediate].
        gate: &'a str,
        /// Ups, [experts, hidden, intermediate].
        up: &'a str,
        /// Down, [experts, intermediate, hidden].
        down: &'a str,
    },
}

impl QuantExperts {
    /// Rounds the stacked expert weights of a Burn model to the nearest values of the spec's bits.
    /// The model may be of any type; it is not changed.
    ///
    /// ```
    /// use burn::module::{Module, Param, ParamId};
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_marlin::experts::{ExpertPaths, QuantExperts, Router, RouterScores};
    /// use burn_marlin::{GroupSize, QuantSpec};
    ///
    /// #[derive(Module, Debug)]
    /// struct Mixture {
    ///     gate: Param<Tensor<3>>,
    ///     up: Param<Tensor<3>>,
    ///     down: Param<Tensor<3>>,
    /// }
    ///
    /// let device = Device::flex();
    /// let random = |shape: [usize; 3]| {
    ///     let weight = Tensor::random(shape, Distribution::Default, &device);
    ///     Param::initialized(ParamId::new(), weight)
    /// };
    /// let model = Mixture {
    ///     gate: random([8, 64, 96]),
    ///     up: random([8, 64, 96]),
    ///     down: random([8, 96, 64]),
    /// };
    /// let paths = ExpertPaths::Separate { gate: "gate", up: "up", down: "down" };
    /// let scores = RouterScores::Softmax;
    /// let router = Router { experts: 8, top_k: 2, scores, normalises: true };
    /// let spec = QuantSpec::int4(GroupSize::G32);
    /// let experts = QuantExperts::from_model(&model, router, paths, &spec)?;
    /// # assert_eq!(experts.descriptors()[0].n, 192);
    /// # Ok::<(), burn_marlin::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoStack`] for a path without a float parameter of three dimensions, and the errors
    /// of [`quantize`](Self::quantize).
    pub fn from_model<M: Module>(
        model: &M,
        router: Router,
        paths: ExpertPaths<'_>,
        spec: &QuantSpec,
    ) -> Result<Self, Error> {
        let mut stacks = Stacks::default();
        model.visit(&mut stacks);
        let (gate_up, down) = match paths {
            ExpertPaths::Joined { gate_up, down } => (stacks.get(gate_up)?, stacks.get(down)?),
            ExpertPaths::Separate { gate, up, down } => {
                let (gates, ups) = (stacks.get(gate)?, stacks.get(up)?);
                let expected = gates.dims();
                super::expect("the weight of ups", expected, ups.dims())?;
                (Tensor::cat(vec![gates, ups], 2), stacks.get(down)?)
            }
        };
        Self::quantize(router, gate_up.detach(), down.detach(), spec)
    }
}

/// The float parameters of three dimensions in a model, with their paths.
#[derive(Default)]
struct Stacks {
    path: Vec<String>,
    found: Vec<(String, Tensor<3>)>,
}

impl Stacks {
    fn get(&self, path: &str) -> Result<Tensor<3>, Error> {
        let found = self.found.iter().find(|(of, _)| of == path);
        let stack = found.map(|(_, tensor)| tensor.clone());
        stack.ok_or_else(|| Error::NoStack {
            path: path.to_owned(),
            found: self.found.iter().map(|(path, _)| path.clone()).collect(),
        })
    }
}

impl ModuleVisitor for Stacks {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if D != 3 {
            return;
        }
        let tensor = param.val();
        let dims = tensor.dims();
        // Of three dimensions, so the reshape only changes the type.
        let tensor = tensor.reshape([dims[0], dims[1], dims[D - 1]]);
        self.found.push((self.path.join("."), tensor));
    }
}
