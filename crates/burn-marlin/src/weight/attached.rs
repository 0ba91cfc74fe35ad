//! A quantised weight in an unmodified model: attached to the float parameter of an ordinary
//! `Linear`, which it replaces.

use super::{Passed, QuantizedWeight};
use crate::Error;
use burn::module::{Param, ParamId, Reparameterization};
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The state of a placeholder, which the parameter's initialiser and mappers change and the
/// attached weight reads.
#[derive(Debug, Default)]
pub(super) struct PlaceholderState {
    /// True if no parameter is lazy any more: each was read, or got other values.
    is_read: AtomicBool,
    /// The number of times that float values were loaded into the parameter or a clone of it.
    loads: AtomicU64,
}

/// A value that the initialiser of a placeholder owns. Its drop marks the placeholder as read: Burn
/// drops an initialiser after it has run, and with a parameter that gets other values before. Burn
/// has no other notice of that.
struct Lazy(Arc<PlaceholderState>);

impl Drop for Lazy {
    fn drop(&mut self) {
        self.0.is_read.store(true, Ordering::Relaxed);
    }
}

/// The state that an attached weight keeps about its parameter.
#[derive(Debug, Clone)]
pub(super) struct Attached {
    /// The path of the parameter in the model that was converted.
    path: Arc<str>,
    placeholder: Arc<PlaceholderState>,
    /// True if a record of the weight, which includes the placeholder, was loaded.
    is_loaded: bool,
    /// The number of loads at the last check.
    loads_seen: u64,
    /// The contents of the parameter: determined at the first use after a traversal that may have
    /// changed it.
    base: Arc<OnceLock<Base>>,
}

/// The contents of the float parameter under an attached weight.
#[derive(Debug)]
enum Base {
    /// The placeholder.
    Placeholder,
    /// Values that were loaded or mapped into the parameter later, rounded to the weight's spec.
    Rounded(Box<QuantizedWeight>),
    /// Values that were loaded or mapped into the parameter later, and that cannot be rounded to
    /// that spec.
    Float,
}

impl Attached {
    fn new(path: Arc<str>, placeholder: Arc<PlaceholderState>) -> Self {
        let loads_seen = placeholder.loads.load(Ordering::Relaxed);
        Self {
            path,
            placeholder,
            is_loaded: false,
            loads_seen,
            base: Arc::new(OnceLock::from(Base::Placeholder)),
        }
    }

    /// Returns the number of elements that the parameter counts as: 1 for a placeholder that has
    /// not been read, `all` otherwise.
    pub fn elements(&self, all: usize) -> usize {
        if self.is_loaded || self.placeholder.is_read.load(Ordering::Relaxed) {
            all
        } else {
            1
        }
    }

    /// Returns the state after a mapper has traversed the weight. `loaded` is true if the mapper
    /// loaded a record of the weight, which includes the placeholder. `renewed` is the state of the
    /// placeholder that the mapper has put into the parameter.
    pub fn traversed(&self, loaded: bool, renewed: Option<Arc<PlaceholderState>>) -> Self {
        if let Some(renewed) = renewed {
            return Self::new(self.path.clone(), renewed);
        }
        let attached = if self.placeholder.loads.load(Ordering::Relaxed) == self.loads_seen {
            self.clone()
        } else {
            self.unknown()
        };
        Self {
            is_loaded: attached.is_loaded || loaded,
            ..attached
        }
    }

    /// Returns the state after a move: the parameter's contents are unchanged, but the weight
    /// rounded from them is on another device.
    pub fn moved(&self) -> Self {
        if let Some(Base::Placeholder) = self.base.get() {
            self.clone()
        } else {
            self.unknown()
        }
    }

    /// Returns the state for a parameter whose contents are not known.
    pub fn unknown(&self) -> Self {
        Self {
            loads_seen: self.placeholder.loads.load(Ordering::Relaxed),
            base: Arc::default(),
            ..self.clone()
        }
    }
}

/// Creates a parameter of the weight's shape [K, N] that holds a single NaN. A record holds only
/// that one value.
///
/// The parameter is lazy: until it is first read, it costs nothing to move, and a record can be
/// loaded into it. Its mappers pass on other values, so a weight that
/// [`Module::materialize`](burn::module::Module::materialize) puts into the parameter is saved
/// whole.
fn placeholder<const D: usize>(
    id: ParamId,
    dtype: DType,
    device: Device,
    shape: [usize; 2],
) -> (Param<Tensor<D>>, Arc<PlaceholderState>) {
    let state = Arc::new(PlaceholderState::default());
    let (lazy, on_load) = (Lazy(state.clone()), state.clone());
    let init = move |device: &Device, _: bool| {
        drop(lazy);
        Tensor::<D>::full([1; D], f32::NAN, (device, dtype)).expand(Shape::new(shape))
    };
    let recorded = |tensor: Tensor<D>| {
        if is_placeholder(&tensor) {
            tensor.slice([(); D].map(|()| 0..1))
        } else {
            tensor
        }
    };
    let loaded = move |tensor: Tensor<D>| {
        if tensor.shape().num_elements() == 1 && shape != [1, 1] {
            return tensor.expand(Shape::new(shape));
        }
        on_load.loads.fetch_add(1, Ordering::Relaxed);
        // For shape [1, 1], the size of a record does not distinguish a placeholder from a weight.
        if shape == [1, 1] {
            tensor
        } else {
            distinct(tensor)
        }
    };
    let param = Param::uninitialized(id, init, device, false, Shape::new([1; D]))
        .save_mapper(recorded)
        .load_mapper(loaded);
    (param, state)
}

/// Returns true if a tensor holds a placeholder and no weight: all of its values are NaN or, if
/// Burn has quantised the tensor, equal.
fn is_placeholder<const D: usize>(tensor: &Tensor<D>) -> bool {
    let quantized = matches!(tensor.dtype(), DType::QFloat(_));
    let tensor = if quantized {
        tensor.clone().dequantize()
    } else {
        tensor.clone()
    }
    .detach();
    // One row distinguishes most weights from a placeholder.
    let Ok(row) = tensor.clone().slice_dim(0, 0..1).try_into_vec_as::<f32>() else {
        return false;
    };
    let Some(&first) = row.first() else {
        return false;
    };
    if row.iter().all(|value| value.is_nan()) {
        return tensor
            .is_nan()
            .all()
            .try_into_scalar::<bool>()
            .is_ok_and(|all| all);
    }
    quantized
        && row.iter().all(|value| *value == first)
        && tensor
            .equal_elem(first)
            .all()
            .try_into_scalar::<bool>()
            .is_ok_and(|all| all)
}

/// Makes loaded values differ from a placeholder: if all of them are NaN, one becomes infinite.
/// Such a weight cannot be rounded in either case.
fn distinct<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    if matches!(tensor.dtype(), DType::QFloat(_)) || !is_placeholder(&tensor) {
        return tensor;
    }
    let infinite = Tensor::full([1; D], f32::INFINITY, (&tensor.device(), tensor.dtype()));
    tensor.slice_assign([(); D].map(|()| 0..1), infinite)
}

impl QuantizedWeight {
    /// Attaches the weight to the parameter at a path. Returns the placeholder that replaces the
    /// parameter, and the attached weight.
    pub(crate) fn attach<const D: usize>(
        mut self,
        path: &str,
        param: &Param<Tensor<D>>,
        dtype: DType,
    ) -> (Param<Tensor<D>>, Self) {
        let (param, state) = placeholder(param.id, dtype, param.lazy_device(), self.dims());
        self.format_id = param.id;
        self.attached = Some(Attached::new(path.into(), state));
        (param, self)
    }

    /// Returns the same weight, not attached to a parameter.
    pub(crate) fn detached(&self) -> Self {
        Self {
            attached: None,
            ..self.clone()
        }
    }

    /// Rounds float values [K, N] that were loaded into the parameter to this weight's spec.
    ///
    /// # Errors
    /// The errors of [`quantize`](Self::quantize).
    pub(crate) fn requantized(&self, values: Tensor<2>) -> Result<Self, Error> {
        Self::quantize(values.detach(), &self.spec())
    }

    /// Returns a new placeholder for a parameter, and the value that a mapper passes to the
    /// attached weight, which is traversed next. `replacement` is the weight whose values it takes
    /// over.
    pub(crate) fn renew<const D: usize>(
        param: &Param<Tensor<D>>,
        dtype: DType,
        shape: [usize; 2],
        replacement: Option<Self>,
    ) -> (Param<Tensor<D>>, Passed) {
        let (param, state) = placeholder(param.id, dtype, param.lazy_device(), shape);
        (param, Passed::renewed(Some(state), replacement))
    }

    /// Returns true if a tensor holds the values of a weight and is not a placeholder.
    pub(crate) fn holds_values<const D: usize>(base: &Tensor<D>) -> bool {
        !is_placeholder(base)
    }

    /// Returns the contents of the parameter under this weight.
    fn base<const D: usize>(&self, base: &Tensor<D>) -> &Base {
        // A weight that is not attached has no parameter.
        let Some(attached) = &self.attached else {
            return &Base::Placeholder;
        };
        attached.base.get_or_init(|| {
            if is_placeholder(base) {
                return Base::Placeholder;
            }
            match self.requantized(base.clone().reshape(self.dims())) {
                Ok(weight) => {
                    tracing::warn!(
                        layer = %attached.path,
                        spec = %self.spec(),
                        "float values were loaded into a converted layer: they are rounded and used in place of its weight; \
                         `reset_placeholders` frees the float values"
                    );
                    Base::Rounded(Box::new(weight))
                }
                Err(error) => {
                    let layer = &attached.path;
                    tracing::error!(%layer, %error, "float values were loaded into a converted layer and cannot be rounded: the layer is float again");
                    Base::Float
                }
            }
        })
    }
}

/// A quantised weight that is attached to the weight of an ordinary `Linear` makes that layer a
/// quantised layer: see [`WeightQuantizer`](crate::WeightQuantizer).
impl Reparameterization for QuantizedWeight {
    const NAME: &'static str = "w4a16";

    /// Returns the lazy float weight. If the fusion provider is installed, the matmul that follows
    /// reads the packed weight instead, and the float weight is never computed.
    ///
    /// The parameter underneath is a placeholder. Float values that were loaded into it later, from
    /// a float checkpoint for example, take precedence: they are rounded to the weight's spec at
    /// the first use.
    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let weight = match self.base(&base) {
            Base::Placeholder => self,
            Base::Rounded(weight) => weight,
            Base::Float => return base,
        };
        crate::fusion::start_block(&weight.tensors.scales.val());
        let dtype = if base.dtype().is_float() {
            base.dtype()
        } else {
            DType::from(weight.activations())
        };
        weight.effective(FloatDType::from(dtype), self.adapter.as_ref())
    }
}
