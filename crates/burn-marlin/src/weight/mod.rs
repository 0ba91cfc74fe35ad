mod attached;
mod collect;
mod module;
mod record;
mod tensors;

pub(crate) use module::REPARAMETERIZATION;

use crate::Error;
use crate::decode::DecodeBackend;
use crate::device::{scale_dtype, target};
use crate::ops::{W4A16Backend, activation_dtype};
use attached::Attached;
use burn::backend::Dispatch;
use burn::module::{LoraAdapter, ParamId};
use burn::tensor::module::linear;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use marlin_format::{PlainParts, PlainWeight, QuantSpec, ScaleDtype, Scales, quantize_rtn};
use marlin_kernels::{ActivationDtype, Plan, Problem, WeightLayout, layout_for, select};
use record::Format;
use tensors::{WeightTensors, unpack_zero_points};

/// A 4-bit or 8-bit weight [K, N] on a device: the quantised tensor type.
///
/// It is a Burn [`Module`](burn::module::Module): its tensors take part in records, devices and `Display`, and none of them ever gets a gradient.
///
/// The device holds it in the [`WeightLayout`] that its kernel reads; a move to a device of another layout converts it. Records, visitors and
/// mappers see the plain form, so that a record opens on any device, and see no float in it that a cast would round:
///
/// | tensor | dtype, shape |
/// |---|---|
/// | `format` | float `[14]`: the spec, K and N, in numbers that every float dtype holds; as a parameter it counts as K * N |
/// | `words` | i32 [K/8 up, N up to a multiple of 8], eight rows of K a word; of 8 bits [K/4 up, ..], four ([`PlainLayout`](marlin_format::layout::PlainLayout)) |
/// | `scales` | i32 [G, N/2 up], the bits of two f16 or bf16 a word along N; [G, N], those of an f32 |
/// | `zero_points` | i32 [G, N/8 up], eight a word along N; of 8 bits [G, N/4 up], four; absent where symmetric |
/// | `row_permutation` | i32 `[K]`, act-order; absent where rows are in order |
///
/// A record of another format than the weight's is loaded in its own: bits, group, zero points and all. One of another K or N is refused.
///
/// [`apply_lora`](burn::module::Module::apply_lora) finds a float weight [K, N] in it: the [`LoraAdapter`] is kept beside the packed weight, in the same
/// place in records as with a float weight (`..weight.lora.a`).
#[derive(Debug, Clone)]
pub struct QuantizedWeight {
    tensors: WeightTensors,
    k: usize,
    n: usize,
    spec: QuantSpec,
    /// How `tensors` lie.
    layout: WeightLayout,
    /// The dtype of activations that it is laid out for.
    activations: ActivationDtype,
    /// Id of `format`, and so of the float parameter that the weight stands for.
    format_id: ParamId,
    adapter: Option<LoraAdapter>,
    /// In a model that knows nothing of it.
    attached: Option<Attached>,
}

impl QuantizedWeight {
    /// Puts a weight on a device, laid out for activations in its scales' dtype.
    pub fn from_plain(plain: &PlainWeight, device: &Device) -> Self {
        Self::from_plain_for(plain, ActivationDtype::from(plain.spec().scale_dtype), device)
    }

    /// Puts a weight on a device, laid out for activations in a dtype. Activations in another dtype give the same values, but may be slower.
    ///
    /// Scales in f32 are rounded to the dtype of the activations where these go through tensor cores, which take both in one dtype.
    pub fn from_plain_for(plain: &PlainWeight, activations: ActivationDtype, device: &Device) -> Self {
        let rounded = rounded_for_tensor_cores(plain, activations, device);
        let plain = rounded.as_ref().unwrap_or(plain);
        let (k, n, spec) = (plain.k(), plain.n(), plain.spec());
        let tensors = WeightTensors::from_plain(plain, scale_dtype(spec.scale_dtype, device), device);
        Self::plain(tensors, k, n, spec, activations).laid_out()
    }

    /// A weight without values, to load a record into, for activations in a dtype. Its products are NaN until then.
    ///
    /// # Errors
    /// No features, or too many.
    pub fn unloaded(k: usize, n: usize, spec: QuantSpec, activations: ActivationDtype, device: &Device) -> Result<Self, Error> {
        QuantSpec::check_shape(k, n)?;
        Ok(Self::plain(WeightTensors::unloaded(k, n, &spec, scale_dtype(spec.scale_dtype, device), device), k, n, spec, activations))
    }

    /// Of tensors in the plain layout.
    fn plain(tensors: WeightTensors, k: usize, n: usize, spec: QuantSpec, activations: ActivationDtype) -> Self {
        let layout = WeightLayout::Plain;
        Self { tensors, k, n, spec, layout, activations, format_id: ParamId::new(), adapter: None, attached: None }
    }

    fn format(&self) -> Format {
        Format { k: self.k, n: self.n, spec: self.spec, permuted: self.is_permuted() }
    }

    /// The same weight in the layout that its device's kernel reads.
    fn laid_out(self) -> Self {
        let layout = self.layout_on(&self.device());
        self.in_layout(layout)
    }

    /// The layout in which a device's kernel reads this weight.
    fn layout_on(&self, device: &Device) -> WeightLayout {
        layout_for(&self.problem(1, self.activations), &target(device))
    }

    /// Rounds a float weight [K, N] to the nearest values of the spec's bits, on the host, and puts it on the weight's device, laid out for activations in
    /// the weight's dtype.
    ///
    /// # Errors
    /// No features, or values that are not finite.
    pub fn quantize(weight: Tensor<2>, spec: &QuantSpec) -> Result<Self, Error> {
        let (device, activations) = (weight.device(), activation_dtype(weight.dtype()).unwrap_or(ActivationDtype::F32));
        Ok(Self::from_plain_for(&Self::round(weight, spec)?, activations, &device))
    }

    /// The rounded weight on the host.
    pub(crate) fn round(weight: Tensor<2>, spec: &QuantSpec) -> Result<PlainWeight, Error> {
        let [k, n] = weight.dims();
        let values = read::<f32>("weight", weight.try_into_data().map_err(|error| read_error("weight", &error))?.convert::<f32>())?;
        Ok(quantize_rtn(&values, k, n, spec)?)
    }

    /// A weight of random values around zero with a standard deviation of about 0.02, made on the device: for timing and for tests of memory.
    ///
    /// # Errors
    /// No features, or too many.
    pub fn random(k: usize, n: usize, spec: QuantSpec, activations: ActivationDtype, device: &Device) -> Result<Self, Error> {
        QuantSpec::check_shape(k, n)?;
        // Values of so many bits are uniform: their deviation is 2^bits / sqrt(12), and that of a difference of two of them sqrt(2) times as large.
        let differences = if spec.zero_points { 2.0 } else { 1.0 };
        let scale = 0.02 * (12f64 / differences).sqrt() / f64::from(1u32 << spec.bits.count());
        let tensors = WeightTensors::random(k, n, &spec, scale, scale_dtype(spec.scale_dtype, device), device);
        Ok(Self::plain(tensors, k, n, spec, activations).laid_out())
    }

    /// Reads the weight back to the host.
    ///
    /// # Errors
    /// The device fails, or a record was loaded that does not belong to this weight.
    pub fn to_plain(&self) -> Result<PlainWeight, Error> {
        let tensors = self.clone().in_layout(WeightLayout::Plain).tensors;
        let words = tensors.words.val().try_into_data().map_err(|error| read_error("words", &error))?;
        let scales = tensors.scales.val().try_into_data().map_err(|error| read_error("scales", &error))?;
        let scales = Scales::from_f32(&read::<f32>("scales", scales.convert::<f32>())?, self.spec.scale_dtype);
        let zero_points = match &tensors.zero_points {
            Some(zeros) => {
                let words = zeros.val().try_into_data().map_err(|error| read_error("zero points", &error))?;
                Some(unpack_zero_points(&read::<i32>("zero points", words)?, self.n, self.spec.bits))
            }
            None => None,
        };
        let row_permutation = match &tensors.row_permutation {
            Some(rows) => {
                let rows = rows.val().try_into_data().map_err(|error| read_error("row permutation", &error))?;
                Some(read::<i32>("row permutation", rows)?.into_iter().map(|row| row as u32).collect())
            }
            None => None,
        };
        Ok(PlainWeight::new(PlainParts {
            k: self.k,
            n: self.n,
            spec: self.spec,
            words: read::<i32>("words", words)?.into_iter().map(|word| word as u32).collect(),
            scales,
            zero_points,
            row_permutation,
        })?)
    }

    /// The float weight [K, N] in natural row order, without its adapter.
    pub fn dequantize(&self, dtype: FloatDType) -> Tensor<2> {
        self.effective(dtype, None)
    }

    /// The float weight [K, N] plus what an adapter adds to it.
    fn effective<const D: usize>(&self, dtype: FloatDType, adapter: Option<&LoraAdapter>) -> Tensor<D> {
        // What no kernel makes is made of f32.
        let made = if activation_dtype(dtype.into()).is_some() { dtype } else { FloatDType::F32 };
        let weight = Tensor::from_dispatch(match adapter {
            None => Dispatch::w4a16_dequantize(self.to_op(), made),
            Some(LoraAdapter { a, b, scale }) => {
                let [a, b] = [a, b].map(|factor| factor.val().cast(made).into_dispatch());
                Dispatch::w4a16_dequantize_adapted(self.to_op(), a, b, *scale, made)
            }
        });
        if made == dtype { weight } else { weight.cast(dtype) }
    }

    /// Activations [.., K] times this weight: [.., N], in the activations' dtype, accumulated in f32.
    ///
    /// f32, f16 and bf16 reach the kernels; any other float dtype is computed in f32.
    ///
    /// # Panics
    /// Where the last dimension of `x` is not K, as Burn's own layers do.
    pub fn matmul<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.matmul_bias(x, None)
    }

    /// As [`matmul`](Self::matmul), with a bias `[N]` in the activations' dtype added before the output is rounded.
    pub(crate) fn matmul_bias<const D: usize>(&self, x: Tensor<D>, bias: Option<Tensor<1>>) -> Tensor<D> {
        let found = x.dims().last().copied().unwrap_or(0);
        assert!(found == self.k, "W4A16: activations have {found} features in their last dimension, the weight has K = {}", self.k);
        let dtype = x.dtype();
        if activation_dtype(dtype).is_none() {
            let bias = bias.map(|bias| bias.cast(FloatDType::F32));
            return self.matmul_bias(x.cast(FloatDType::F32), bias).cast(FloatDType::from(dtype));
        }
        let Some(LoraAdapter { a, b, scale }) = &self.adapter else {
            return Tensor::from_dispatch(Dispatch::w4a16_linear(x.into_dispatch(), self.to_op(), bias.map(Tensor::into_dispatch).into()));
        };
        // The adapter's product is of its low rank, not of the weight's K and N.
        let [a, b] = [a, b].map(|factor| factor.val().cast(FloatDType::from(dtype)));
        let adapted = linear(linear(x.clone(), a, None), b, None) * *scale;
        adapted + Tensor::from_dispatch(Dispatch::w4a16_linear(x.into_dispatch(), self.to_op(), bias.map(Tensor::into_dispatch).into()))
    }

    /// As [`matmul_bias`](Self::matmul_bias), of the norm of `residual + x`, and that sum; for a device with the kernels of [`decode`](crate::decode).
    pub(crate) fn matmul_add_norm<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
        norm: Tensor<1>,
        epsilon: f64,
        bias: Option<Tensor<1>>,
    ) -> (Tensor<D>, Tensor<D>) {
        let (found, features) = (x.dims(), norm.dims()[0]);
        assert!(
            found.last() == Some(&self.k) && residual.dims() == found && features == self.k,
            "W4A16: activations {found:?}, a residual stream {:?} and a norm of {features} features, the weight has K = {}",
            residual.dims(),
            self.k
        );
        let [x, residual, norm] = [x.into_dispatch(), residual.into_dispatch(), norm.into_dispatch()];
        let bias = bias.map(Tensor::into_dispatch).into();
        let (out, sum) = Dispatch::decode_add_norm_linear(x, residual, norm, epsilon, self.to_op(), bias);
        (Tensor::from_dispatch(out), Tensor::from_dispatch(sum))
    }

    /// [K, N]: input and output features.
    pub fn dims(&self) -> [usize; 2] {
        [self.k, self.n]
    }

    /// How the weight is quantised.
    pub fn spec(&self) -> QuantSpec {
        self.spec
    }

    /// Whether rows are permuted (act-order).
    pub fn is_permuted(&self) -> bool {
        self.tensors.row_permutation.is_some()
    }

    /// The LoRA adapter, where [`apply_lora`](burn::module::Module::apply_lora) attached one.
    pub fn adapter(&self) -> Option<&LoraAdapter> {
        self.adapter.as_ref()
    }

    /// The device that holds the weight.
    pub fn device(&self) -> Device {
        self.tensors.words.lazy_device()
    }

    /// How the device holds the weight.
    pub fn layout(&self) -> WeightLayout {
        self.layout
    }

    /// Bytes on the device, padding included.
    pub fn size_bytes(&self) -> usize {
        let WeightTensors { words, scales, zero_points, row_permutation } = &self.tensors;
        let ints = words.shape().num_elements()
            + zero_points.as_ref().map_or(0, |zeros| zeros.shape().num_elements())
            + row_permutation.as_ref().map_or(0, |rows| rows.shape().num_elements());
        4 * ints + scales.shape().num_elements() * scales.dtype().size()
    }

    /// The dtype of activations that it is laid out for.
    pub fn activations(&self) -> FloatDType {
        match self.activations {
            ActivationDtype::F16 => FloatDType::F16,
            ActivationDtype::BF16 => FloatDType::BF16,
            ActivationDtype::F32 => FloatDType::F32,
        }
    }

    /// The problem of multiplying `m` rows of activations with this weight.
    pub fn problem(&self, m: usize, activations: ActivationDtype) -> Problem {
        let scales = activation_dtype(self.tensors.scales.dtype()).unwrap_or(ActivationDtype::F32);
        Problem { m, n: self.n, k: self.k, spec: self.spec, activations, scales, permuted: self.is_permuted() }
    }

    /// The kernel that runs `m` rows of activations on this weight's device, and why.
    pub fn plan(&self, m: usize, activations: ActivationDtype) -> Plan {
        select(&self.problem(m, activations), self.layout, &target(&self.device()))
    }
}

fn read_error(tensor: &'static str, error: &dyn std::fmt::Debug) -> Error {
    Error::Read { tensor, reason: format!("{error:?}") }
}

fn read<E: burn::tensor::Element>(tensor: &'static str, data: TensorData) -> Result<Vec<E>, Error> {
    let found = data.dtype();
    data.try_into_vec::<E>().map_err(|_| Error::Dtype { tensor, expected: E::dtype().name(), found })
}

/// The weight with scales in the activations' dtype, where its own are in f32 and the device has tensor cores. `None` also where a scale is too large for
/// that dtype: the portable kernels take it as it is.
fn rounded_for_tensor_cores(plain: &PlainWeight, activations: ActivationDtype, device: &Device) -> Option<PlainWeight> {
    let dtype = match activations {
        ActivationDtype::F16 => ScaleDtype::F16,
        ActivationDtype::BF16 => ScaleDtype::BF16,
        ActivationDtype::F32 => return None,
    };
    let spec = plain.spec();
    if spec.scale_dtype != ScaleDtype::F32 || target(device).card.is_none() {
        return None;
    }
    let mut parts = plain.clone().into_parts();
    parts.scales = Scales::from_f32(&parts.scales.to_f32(), dtype);
    parts.spec = spec.with_scale_dtype(dtype);
    PlainWeight::new(parts).ok()
}
