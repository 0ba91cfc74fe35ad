mod attached;
mod description;
mod experts;
mod matmul;
mod module;
mod passed;
mod record;
mod scale_words;
mod tensors;

pub(crate) use description::FORMAT;
pub(crate) use module::REPARAMETERIZATION;
pub(crate) use passed::Passed;

use crate::Error;
use crate::backend::{activation_dtype, float_dtype};
use crate::device::{scale_dtype, target};
use attached::Attached;
use burn::module::{LoraAdapter, ParamId};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use marlin_format::{
    PlainParts, PlainWeight, QuantSpec, ScaleDtype, Scales, Sparsity, WeightDescriptor,
    WeightFormat, WeightLayout, WeightTensor, quantize,
};
use marlin_kernels::{ActivationDtype, Plan, Prologue, QuantProblem, device_layout, plan};
use tensors::DeviceTensors;

/// A 4-bit or 8-bit weight [K, N] on a device: the quantised tensor type.
///
/// It is a Burn [`Module`](burn::module::Module): its tensors are part of records, move between
/// devices and appear in `Display`. None of the tensors gets a gradient.
///
/// The device holds the weight in the [`WeightLayout`] that its kernel reads; a move to a device
/// with another layout converts the weight. Records, visitors and mappers see the plain form, so
/// that a record can be loaded on any device. The plain form has no float that a cast would round.
/// Its tensors are:
///
/// | tensor | dtype, shape |
/// |---|---|
/// | `format` | float `[14]`, with experts `[16]`: the spec, K, N and the number of experts, in numbers that every float dtype holds; as a parameter it counts as the weight's values |
/// | `qweight` | i32 [K/8 up, N up to a multiple of 8], eight rows of K per word; with 8 bits [K/4 up, ..], four ([`PlainLayout`](marlin_format::layout::PlainLayout)) |
/// | `metadata` | i32 [K/32 up, N up to a multiple of 8], the positions of a 2:4 weight's values, of which `qweight` has K/2 rows; absent if the weight is dense |
/// | `scales` | i32 [G, N/2 up], the bits of two f16 or bf16 scales per word along N; for f32 [G, N], one scale per word |
/// | `zero_points` | i32 [G, N/8 up], eight per word along N; with 8 bits [G, N/4 up], four; absent if symmetric |
/// | `row_permutation` | i32 `[K]`, act-order; absent if rows are in order |
///
/// A device without kernels that read 2:4 metadata holds a 2:4 weight dense, and its records are
/// dense.
///
/// A record in another format than the weight's is loaded in the record's format: bits, group and
/// zero points included. A record with another K or N is refused.
///
/// [`apply_lora`](burn::module::Module::apply_lora) treats the weight as a float weight [K, N]: the
/// [`LoraAdapter`] is kept beside the packed weight, at the same path in records as the adapter of
/// a float weight (`..weight.lora.a`).
#[derive(Debug, Clone)]
pub struct QuantizedWeight {
    tensors: DeviceTensors,
    /// The format and shape of the weight, and the layout of `tensors`.
    descriptor: WeightDescriptor,
    /// The dtype of activations that the weight is laid out for.
    activations: ActivationDtype,
    /// The id of the parameter `format`, which is also the id of the float parameter that the
    /// weight replaces.
    format_id: ParamId,
    adapter: Option<LoraAdapter>,
    /// The state of a weight that is attached in an unmodified model.
    attached: Option<Attached>,
}

impl QuantizedWeight {
    /// Creates a weight on a device, laid out for activations in the dtype of its scales.
    pub fn from_plain(plain: &PlainWeight, device: &Device) -> Self {
        Self::from_plain_for(
            plain,
            ActivationDtype::from(plain.spec().scales.dtype),
            device,
        )
    }

    /// Creates a weight on a device, laid out for activations in the dtype `activations`.
    /// Activations in another dtype give the same values, but may be slower.
    ///
    /// On a device with tensor cores, f32 scales are rounded to the activations' dtype, because the
    /// tensor core kernels take scales and activations in one dtype.
    pub fn from_plain_for(
        plain: &PlainWeight,
        activations: ActivationDtype,
        device: &Device,
    ) -> Self {
        Self::from_owned_plain(plain.clone(), activations, device)
    }

    /// Creates a weight on a device like [`from_plain_for`](Self::from_plain_for), without a copy
    /// on the host: the tensors take over the weight's memory.
    pub fn from_owned_plain(
        mut plain: PlainWeight,
        activations: ActivationDtype,
        device: &Device,
    ) -> Self {
        round_for_tensor_cores(std::slice::from_mut(&mut plain), activations, device);
        let problem = QuantProblem::new(1, plain.descriptor(), activations);
        let is_sparse =
            device_layout(&problem, &target(device)).format.sparsity == Sparsity::TwoFour;
        let plain = if is_sparse { plain } else { plain.into_dense() };
        let descriptor = plain.descriptor();
        let tensors = DeviceTensors::from_plain(
            plain,
            scale_dtype(descriptor.spec().scales.dtype, device),
            device,
        );
        Self::new(tensors, descriptor, activations).laid_out()
    }

    /// Creates a weight without values, for activations in a dtype. The products are NaN until a
    /// record is loaded into the weight.
    ///
    /// # Errors
    /// The number of features is zero or too large.
    pub fn unloaded(
        k: usize,
        n: usize,
        spec: QuantSpec,
        activations: ActivationDtype,
        device: &Device,
    ) -> Result<Self, Error> {
        let descriptor = WeightDescriptor::plain(spec, k, n);
        descriptor.check()?;
        Ok(Self::new(
            DeviceTensors::unloaded(&descriptor, scale_dtype(spec.scales.dtype, device), device),
            descriptor,
            activations,
        ))
    }

    fn new(
        tensors: DeviceTensors,
        descriptor: WeightDescriptor,
        activations: ActivationDtype,
    ) -> Self {
        Self {
            tensors,
            descriptor,
            activations,
            format_id: ParamId::new(),
            adapter: None,
            attached: None,
        }
    }

    /// Converts the weight to the form that its device's kernel reads.
    fn laid_out(self) -> Self {
        let held = self.device_layout(&self.device());
        self.held_as(held)
    }

    /// Returns the descriptor of the weight in the form that a device's kernel reads.
    fn device_layout(&self, device: &Device) -> WeightDescriptor {
        device_layout(&self.problem(1, self.activations), &target(device))
    }

    /// Rounds a float weight [K, N] to the nearest values of the spec's bits, on the host. The
    /// quantised weight is on the device of `weight`, laid out for activations in the weight's
    /// dtype.
    ///
    /// # Errors
    /// The number of features is zero, or a value is not finite.
    pub fn quantize(weight: Tensor<2>, spec: &QuantSpec) -> Result<Self, Error> {
        Self::quantize_as(weight, spec, Sparsity::Dense)
    }

    /// Prunes a float weight [K, N] to 2:4 sparsity and rounds the kept values, on the host. In
    /// every four rows of a column, the two values with the largest magnitude are kept, so a weight
    /// that is already 2:4 keeps its values. A device without sparse tensor cores holds the weight
    /// dense.
    ///
    /// # Errors
    /// The errors of [`quantize`](Self::quantize); K is not a multiple of 4.
    pub fn quantize_two_four(weight: Tensor<2>, spec: &QuantSpec) -> Result<Self, Error> {
        Self::quantize_as(weight, spec, Sparsity::TwoFour)
    }

    fn quantize_as(weight: Tensor<2>, spec: &QuantSpec, sparsity: Sparsity) -> Result<Self, Error> {
        let (device, activations) = (
            weight.device(),
            activation_dtype(weight.dtype()).unwrap_or(ActivationDtype::F32),
        );
        Ok(Self::from_owned_plain(
            Self::round(weight, spec, sparsity)?,
            activations,
            &device,
        ))
    }

    /// Rounds a float weight on the host, dense or 2:4. A float weight that is already 2:4 stays
    /// 2:4 with either sparsity.
    pub(crate) fn round(
        weight: Tensor<2>,
        spec: &QuantSpec,
        sparsity: Sparsity,
    ) -> Result<PlainWeight, Error> {
        let [k, n] = weight.dims();
        Ok(quantize(Self::values(weight)?, k, n, spec, sparsity)?)
    }

    /// Reads the values of a float weight to the host, row-major.
    pub(crate) fn values(weight: Tensor<2>) -> Result<Vec<f32>, Error> {
        read::<f32>(
            "weight",
            weight
                .try_into_data()
                .map_err(|error| read_error("weight", &error))?
                .convert::<f32>(),
        )
    }

    /// Creates a weight of random values around zero with a standard deviation of about 0.02 on the
    /// device, for timing and for tests of memory.
    ///
    /// # Errors
    /// The number of features is zero or too large.
    pub fn random(
        k: usize,
        n: usize,
        format: impl Into<WeightFormat>,
        activations: ActivationDtype,
        device: &Device,
    ) -> Result<Self, Error> {
        Self::random_of(WeightDescriptor::plain(format, k, n), activations, device)
    }

    /// Creates a random weight in the plain layout's descriptor, laid out for its device.
    pub(crate) fn random_of(
        descriptor: WeightDescriptor,
        activations: ActivationDtype,
        device: &Device,
    ) -> Result<Self, Error> {
        descriptor.check()?;
        let spec = descriptor.spec();
        // The random codes are uniform. The standard deviation of integers is 2^bits / sqrt(12),
        // and that of the difference of two such values is sqrt(2) times as large.
        let differences = if spec.has_zero_points() { 2f64 } else { 1.0 };
        let deviation = if spec.value.is_float() {
            DeviceTensors::deviation_of_floats(spec.value)
        } else {
            f64::from(1u32 << spec.value.bits()) * (differences / 12.0).sqrt()
        };
        let scale = 0.02 / deviation;
        let tensors = DeviceTensors::random(
            &descriptor,
            scale,
            scale_dtype(spec.scales.dtype, device),
            device,
        );
        Ok(Self::new(tensors, descriptor, activations).laid_out())
    }

    /// Reads the weight back to the host.
    ///
    /// # Errors
    /// The device fails, or a record was loaded that does not belong to this weight.
    pub fn to_plain(&self) -> Result<PlainWeight, Error> {
        let tensors = self.clone().plain().tensors;
        let WeightDescriptor {
            k,
            n,
            format: WeightFormat { spec, .. },
            ..
        } = self.descriptor;
        let words = |role: WeightTensor, tensor: Result<TensorData, _>| {
            let data = tensor.map_err(|error| read_error(role.name(), &error))?;
            Ok::<Vec<u32>, Error>(bytemuck::cast_vec(read::<i32>(role.name(), data)?))
        };
        let scales = tensors
            .scales
            .val()
            .try_into_data()
            .map_err(|error| read_error(WeightTensor::Scales.name(), &error))?;
        let scales = read::<f32>(WeightTensor::Scales.name(), scales.convert::<f32>())?;
        let metadata = tensors
            .metadata
            .as_ref()
            .map(|places| words(WeightTensor::Metadata, places.val().try_into_data()));
        let zero_points = tensors
            .zero_points
            .as_ref()
            .map(|zeros| words(WeightTensor::ZeroPoints, zeros.val().try_into_data()));
        let rows = tensors
            .row_permutation
            .as_ref()
            .map(|rows| words(WeightTensor::RowPermutation, rows.val().try_into_data()));
        Ok(PlainWeight::new(PlainParts {
            k,
            n,
            spec,
            qweight: words(WeightTensor::Qweight, tensors.qweight.val().try_into_data())?,
            metadata: metadata.transpose()?,
            scales: Scales::from_f32(&scales, spec.scales.dtype),
            zero_points: zero_points
                .transpose()?
                .map(|words| PlainParts::zero_points_of_words(&words, n, spec.value)),
            row_permutation: rows.transpose()?,
        })?)
    }

    /// Returns the shape [K, N]: the numbers of input and output features.
    pub fn dims(&self) -> [usize; 2] {
        [self.descriptor.k, self.descriptor.n]
    }

    /// Returns the quantisation spec of the weight.
    pub fn spec(&self) -> QuantSpec {
        self.descriptor.spec()
    }

    /// Returns the format and shape of the weight, and the layout in which the device holds it.
    pub fn descriptor(&self) -> WeightDescriptor {
        self.descriptor
    }

    /// Returns true if rows are permuted (act-order).
    pub fn is_permuted(&self) -> bool {
        self.descriptor.format.permuted
    }

    /// Returns the LoRA adapter, if [`apply_lora`](burn::module::Module::apply_lora) attached one.
    pub fn adapter(&self) -> Option<&LoraAdapter> {
        self.adapter.as_ref()
    }

    /// Returns the device that holds the weight.
    pub fn device(&self) -> Device {
        self.tensors.qweight.lazy_device()
    }

    /// Returns the layout in which the device holds the weight.
    pub fn layout(&self) -> WeightLayout {
        self.descriptor.layout
    }

    /// Returns the size of the weight on the device in bytes, including padding.
    pub fn size_bytes(&self) -> usize {
        let scale_bytes = self.tensors.scales.dtype().size();
        let bytes = |role| {
            if role == WeightTensor::Scales {
                scale_bytes
            } else {
                size_of::<u32>()
            }
        };
        self.descriptor
            .tensors()
            .into_iter()
            .map(|(role, tensor)| bytes(role) * tensor.elements())
            .sum()
    }

    /// Returns the dtype of activations that the weight is laid out for.
    pub fn activations(&self) -> FloatDType {
        float_dtype(self.activations)
    }

    /// Returns the problem of multiplying `m` rows of activations with this weight.
    pub fn problem(&self, m: usize, activations: ActivationDtype) -> QuantProblem {
        let scales = activation_dtype(self.tensors.scales.dtype()).unwrap_or(ActivationDtype::F32);
        QuantProblem::new(m, self.descriptor, activations).with_scales(scales)
    }

    /// Returns the kernel that runs `m` rows of activations on this weight's device, after a
    /// prologue, and the reason for the choice.
    pub fn plan(&self, m: usize, activations: ActivationDtype, prologue: Prologue) -> Plan {
        plan(
            self.problem(m, activations).with_prologue(prologue),
            &target(&self.device()),
        )
    }
}

fn read_error(tensor: &'static str, error: &dyn std::fmt::Debug) -> Error {
    Error::Read {
        tensor,
        reason: format!("{error:?}"),
    }
}

fn read<E: burn::tensor::Element>(tensor: &'static str, data: TensorData) -> Result<Vec<E>, Error> {
    let found = data.dtype();
    data.try_into_vec::<E>().map_err(|_| Error::Dtype {
        tensor,
        expected: E::dtype().name(),
        found,
    })
}

/// Rounds the scales of weights in f32 to the activations' dtype if the device has tensor cores. If
/// a scale is too large for that dtype, all weights are unchanged, and the portable kernels take
/// them.
fn round_for_tensor_cores(
    weights: &mut [PlainWeight],
    activations: ActivationDtype,
    device: &Device,
) {
    let dtype = match activations {
        ActivationDtype::F16 => ScaleDtype::F16,
        ActivationDtype::BF16 => ScaleDtype::BF16,
        ActivationDtype::F32 => return,
    };
    let is_f32 = |plain: &PlainWeight| plain.spec().scales.dtype == ScaleDtype::F32;
    if target(device).card.is_some() && weights.iter().any(is_f32) {
        PlainWeight::round_scales(weights, dtype);
    }
}
