//! The experts of a mixture as a Burn module.

mod model;
mod portable;
mod weights;

use crate::backend::activation_dtype;
use crate::backend::experts::{self, ExpertsBackend};
use crate::device::target;
use crate::{Error, QuantizedWeight};
use burn::backend::Dispatch;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, FloatDType, Tensor};
use marlin_format::{PlainWeight, QuantSpec, Sparsity, WeightDescriptor, WeightFormat};
use marlin_kernels::{ActivationDtype, Epilogue, Plan, QuantProblem, Runtime};

pub use marlin_kernels::experts::{MAX_TOP_K, Router, RouterScores};
pub use model::ExpertPaths;
pub use portable::gated;
pub use weights::dense_weights;

/// The experts of a mixture with quantised weights: for each token, the weighted sum of
/// `down(silu(gate(x)) * up(x))` of the experts that its router chose.
///
/// On NVIDIA cards from compute capability 8.0 on, the kernels of [`marlin_kernels::experts`]
/// choose the experts and multiply the rows by their matrices without reading anything to the
/// host. On Flex they run in Rust. On other devices, and with autodiff, the choice is read to the
/// host, and each expert's rows are multiplied by its matrices. Gradients flow to the activations
/// and to the logits.
///
/// | tensor | shape |
/// |---|---|
/// | weight of gates and ups side by side | [experts, hidden, 2 x intermediate] |
/// | weight of down | [experts, intermediate, hidden] |
/// | biases, if there are any | [experts, 2 x intermediate], [experts, hidden] |
/// | correction of the scores, if there is one | `[experts]` |
///
/// A record has these tensors. The router, the factor and the SwiGLU are those of the layer that it
/// is loaded into.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_marlin::experts::{QuantExperts, Router, RouterScores};
/// use burn_marlin::{GroupSize, QuantSpec};
///
/// let device = Device::flex();
/// let random = |shape: [usize; 3]| Tensor::<3>::random(shape, Distribution::Default, &device);
/// let router = Router { experts: 8, top_k: 2, scores: RouterScores::Softmax, normalises: true };
/// let spec = QuantSpec::int4(GroupSize::G32);
/// let (gate_up, down) = (random([8, 64, 192]), random([8, 96, 64]));
/// let experts = QuantExperts::quantize(router, gate_up, down, &spec)?;
///
/// let (x, logits) = (random([2, 5, 64]), random([2, 5, 8]));
/// assert_eq!(experts.forward(x, logits).dims(), [2, 5, 64]);
/// # Ok::<(), burn_marlin::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct QuantExperts {
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    gate_up_bias: Option<Param<Tensor<2>>>,
    down_bias: Option<Param<Tensor<2>>>,
    correction: Option<Param<Tensor<1>>>,
    #[module(skip)]
    router: Router,
    #[module(skip)]
    factor: f64,
    /// What is computed from gates and ups.
    #[module(skip)]
    epilogue: Epilogue,
}

impl QuantExperts {
    /// Creates a layer from the weights of each expert: gates and ups side by side [hidden, 2 x
    /// intermediate], and down [intermediate, hidden]. They are laid out for activations in the
    /// dtype `activations`. A 2:4 weight becomes dense.
    ///
    /// # Errors
    /// [`Error::Router`] for a router that no kernel supports, [`Error::ExpertFormats`] for weights
    /// of different shapes or formats, and [`Error::ExpertShapes`] if the weights do not fit
    /// together or the router.
    pub fn new(
        router: Router,
        gate_up: Vec<PlainWeight>,
        down: Vec<PlainWeight>,
        activations: ActivationDtype,
        device: &Device,
    ) -> Result<Self, Error> {
        let [gate_up, down] = [gate_up, down]
            .map(|experts| QuantizedWeight::from_experts(experts, activations, device));
        Self::of(router, gate_up?, down?)
    }

    /// Rounds float weights to the nearest values of the spec's bits, on the host: `gate_up`
    /// [experts, hidden, 2 x intermediate], gates first, and `down` [experts, intermediate,
    /// hidden].
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and an error for a value that is not finite.
    pub fn quantize(
        router: Router,
        gate_up: Tensor<3>,
        down: Tensor<3>,
        spec: &QuantSpec,
    ) -> Result<Self, Error> {
        let device = gate_up.device();
        let activations = activation_dtype(gate_up.dtype()).unwrap_or(ActivationDtype::F32);
        let [gate_up, down] = [gate_up, down].map(|weight| {
            weight
                .iter_dim(0)
                .map(|expert| QuantizedWeight::round(expert.squeeze_dim(0), spec, Sparsity::Dense))
                .collect::<Result<Vec<_>, _>>()
        });
        Self::new(router, gate_up?, down?, activations, &device)
    }

    /// Creates a layer of random weights around zero with a standard deviation of about 0.02 on the
    /// device, for timing and for tests of memory. A 2:4 format becomes dense.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn random(
        router: Router,
        hidden: usize,
        intermediate: usize,
        format: impl Into<WeightFormat>,
        activations: ActivationDtype,
        device: &Device,
    ) -> Result<Self, Error> {
        let format = format.into().with_sparsity(Sparsity::Dense);
        let random = |k, n| {
            let descriptor = WeightDescriptor::plain(format, k, n).with_experts(router.experts);
            QuantizedWeight::random_of(descriptor, activations, device)
        };
        Self::of(
            router,
            random(hidden, 2 * intermediate)?,
            random(intermediate, hidden)?,
        )
    }

    /// Creates a layer from the weights of all experts.
    fn of(router: Router, gate_up: QuantizedWeight, down: QuantizedWeight) -> Result<Self, Error> {
        router.check().map_err(Error::Router)?;
        let shape = |weight: &QuantizedWeight| {
            let [k, n] = weight.dims();
            [weight.experts(), k, n]
        };
        let [experts, hidden, both] = shape(&gate_up);
        expect("the number of experts", router.experts, experts)?;
        expect(
            "the weight of down",
            [experts, both / 2, hidden],
            shape(&down),
        )?;
        expect("the number of gates and ups", both / 2 * 2, both)?;
        tracing::debug!(%experts, hidden, intermediate = both / 2, spec = %gate_up.spec(), "quantised experts");
        Ok(Self {
            gate_up,
            down,
            gate_up_bias: None,
            down_bias: None,
            correction: None,
            router,
            factor: 1.0,
            epilogue: Epilogue::SwiGlu,
        })
    }

    /// Returns the layer with biases: of gates and ups [experts, 2 x intermediate], and of down
    /// [experts, hidden].
    ///
    /// # Errors
    /// [`Error::ExpertShapes`] for biases of other shapes.
    pub fn with_biases(self, gate_up: Tensor<2>, down: Tensor<2>) -> Result<Self, Error> {
        let experts = self.router.experts;
        let of = |weight: &QuantizedWeight| [experts, weight.dims()[1]];
        expect(
            "the bias of gates and ups",
            of(&self.gate_up),
            gate_up.dims(),
        )?;
        expect("the bias of down", of(&self.down), down.dims())?;
        let bias = |tensor| Some(Param::initialized(ParamId::new(), tensor));
        Ok(Self {
            gate_up_bias: bias(gate_up),
            down_bias: bias(down),
            ..self
        })
    }

    /// Returns the layer with a correction `[experts]`, which is added to the scores of
    /// [`RouterScores::Sigmoid`] before experts are chosen, and does not change their weights.
    ///
    /// # Errors
    /// [`Error::ExpertShapes`] for a correction of another length, and [`Error::Correction`] for a
    /// router with other scores.
    pub fn with_correction(self, correction: Tensor<1>) -> Result<Self, Error> {
        if self.router.scores != RouterScores::Sigmoid {
            return Err(Error::Correction);
        }
        expect("the correction", [self.router.experts], correction.dims())?;
        let correction = Some(Param::initialized(ParamId::new(), correction));
        Ok(Self { correction, ..self })
    }

    /// Returns the layer with a factor by which all weights of experts are multiplied.
    pub fn with_factor(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// Returns the layer with the SwiGLU of gpt-oss, [`Epilogue::ClampedSwiGlu`].
    pub fn with_clamped_swiglu(self) -> Self {
        let epilogue = Epilogue::ClampedSwiGlu;
        Self { epilogue, ..self }
    }

    /// Returns the weighted sums [.., hidden] of the outputs of each token's experts, for
    /// activations `x` [.., hidden] and the router's logits [.., experts], in the dtype of `x`.
    ///
    /// A token with a logit that is not finite gets NaN; other tokens are not affected.
    ///
    /// # Panics
    /// Panics if `x` or the logits have another last dimension, or different numbers of tokens, as
    /// Burn's own layers do.
    pub fn forward<const D: usize>(&self, x: Tensor<D>, logits: Tensor<D>) -> Tensor<D> {
        let (shape, of_logits) = (x.dims(), logits.dims());
        let ([hidden, _], experts) = (self.gate_up.dims(), self.router.experts);
        let mut expected = shape;
        expected[D - 1] = experts;
        assert!(
            shape[D - 1] == hidden && of_logits == expected,
            "activations {shape:?} and logits {of_logits:?}; the experts take [.., {hidden}] and [.., {experts}]"
        );
        let (x, logits) = (
            x.reshape([-1, hidden as i32]),
            logits.reshape([-1, experts as i32]),
        );
        let dtype = x.dtype();
        let out = if activation_dtype(dtype).is_none() || !x.device().supports_dtype(dtype) {
            let x = x.cast(FloatDType::F32);
            self.forward_rows(x, logits).cast(FloatDType::from(dtype))
        } else {
            self.forward_rows(x, logits)
        };
        out.reshape(shape)
    }

    fn forward_rows(&self, x: Tensor<2>, logits: Tensor<2>) -> Tensor<2> {
        let dtype = FloatDType::from(x.dtype());
        let logits = match activation_dtype(logits.dtype()) {
            Some(_) => logits,
            None => logits.cast(FloatDType::F32),
        };
        if !self.has_kernels(&x.device(), dtype) {
            return self.forward_portable(x, logits);
        }
        let bias = |bias: &Option<Param<Tensor<2>>>| {
            let bias = bias.as_ref();
            bias.map(|bias| bias.val().cast(dtype).into_dispatch())
                .into()
        };
        let correction = self.correction.as_ref();
        let correction =
            correction.map(|correction| correction.val().cast(FloatDType::F32).into_dispatch());
        Tensor::from_dispatch(Dispatch::quant_experts(
            x.into_dispatch(),
            logits.into_dispatch(),
            correction.into(),
            self.gate_up.to_op(),
            self.gate_up.descriptor(),
            bias(&self.gate_up_bias),
            self.down.to_op(),
            self.down.descriptor(),
            bias(&self.down_bias),
            self.router,
            self.factor,
            self.epilogue,
        ))
    }

    /// Returns true if a device computes the layer for activations in a dtype without reading the
    /// choice of experts to the host. A recorded pass can have such a layer.
    pub fn has_kernels(&self, device: &Device, dtype: FloatDType) -> bool {
        if device.is_autodiff() {
            return false;
        }
        let target = target(device);
        if target.runtime == Runtime::Flex {
            return cfg!(feature = "flex");
        }
        let [gate_up, down] = self.problems(1, dtype);
        experts::has_plan(&gate_up, &down, &target)
    }

    /// Returns the matmuls of the layer for a number of tokens: of gates and ups, and of down. M is
    /// the number of rows, one for each expert of each token.
    fn problems(&self, tokens: usize, dtype: FloatDType) -> [QuantProblem; 2] {
        let dtype = activation_dtype(dtype.into()).unwrap_or(ActivationDtype::F32);
        let rows = tokens * self.router.top_k;
        let gate_up = self.gate_up.problem(rows, dtype);
        [
            gate_up.with_epilogue(self.epilogue),
            self.down.problem(rows, dtype),
        ]
    }

    /// Returns the matmuls of the layer for a number of tokens, of gates and ups and of down, each
    /// with the kernel that runs it on the weights' device and the reason for the choice.
    pub fn plans(&self, tokens: usize, dtype: FloatDType) -> [(QuantProblem, Plan); 2] {
        let problems = self.problems(tokens, dtype);
        let plans = experts::plans(problems, tokens, &target(&self.gate_up.device()));
        std::array::from_fn(|matmul| (problems[matmul], plans[matmul]))
    }

    /// Returns the float weights of all experts in `dtype`: of gates and ups side by side
    /// [experts, hidden, 2 x intermediate], and of down [experts, intermediate, hidden].
    pub fn dequantize(&self, dtype: FloatDType) -> [Tensor<3>; 2] {
        [&self.gate_up, &self.down].map(|weight| {
            let experts = (0..weight.experts()).map(|expert| weight.expert(expert));
            Tensor::stack(experts.map(|expert| expert.dequantize(dtype)).collect(), 0)
        })
    }

    /// Returns the router.
    pub fn router(&self) -> Router {
        self.router
    }

    /// Returns what is computed from gates and ups.
    pub fn epilogue(&self) -> Epilogue {
        self.epilogue
    }

    /// Returns the biases, if there are any: of gates and ups [experts, 2 x intermediate], and of
    /// down [experts, hidden].
    pub fn biases(&self) -> Option<[Tensor<2>; 2]> {
        let (gate_up, down) = self.gate_up_bias.as_ref().zip(self.down_bias.as_ref())?;
        Some([gate_up.val(), down.val()])
    }

    /// Returns the descriptors of the weights of all experts: of gates and ups side by side, and of
    /// down.
    pub fn descriptors(&self) -> [WeightDescriptor; 2] {
        [self.gate_up.descriptor(), self.down.descriptor()]
    }

    /// Returns the size of the weights on the device in bytes, including padding.
    pub fn size_bytes(&self) -> usize {
        self.gate_up.size_bytes() + self.down.size_bytes()
    }

    /// Returns the dtype of activations that the weights are laid out for.
    pub fn activations(&self) -> FloatDType {
        self.gate_up.activations()
    }
}

/// Checks a shape.
fn expect<T: PartialEq + std::fmt::Debug>(
    what: &'static str,
    expected: T,
    found: T,
) -> Result<(), Error> {
    if expected == found {
        return Ok(());
    }
    Err(Error::ExpertShapes {
        what,
        expected: format!("{expected:?}"),
        found: format!("{found:?}"),
    })
}
