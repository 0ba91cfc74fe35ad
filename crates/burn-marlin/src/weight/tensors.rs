use super::QuantizedWeight;
use crate::backend::{OptionalInt, QuantBackend, QuantTensors};
use burn::backend::Dispatch;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Distribution, Int, Shape, Tensor, TensorData};
use marlin_format::{
    PlainParts, PlainWeight, Scales, TensorDescriptor, WeightDescriptor, WeightLayout, WeightValue,
};

/// The tensors of a weight on a device, as its [`WeightDescriptor`] lists them.
#[derive(Module, Debug)]
pub(super) struct DeviceTensors {
    pub qweight: Param<Tensor<2, Int>>,
    pub metadata: Option<Param<Tensor<2, Int>>>,
    pub scales: Param<Tensor<2>>,
    pub zero_points: Option<Param<Tensor<2, Int>>>,
    pub row_permutation: Option<Param<Tensor<1, Int>>>,
}

/// The tensors of a weight in host memory, in the plain layout.
#[derive(Debug)]
pub(super) struct HostTensors {
    qweight: Vec<u32>,
    metadata: Option<Vec<u32>>,
    scales: Scales,
    zero_points: Option<Vec<u32>>,
    row_permutation: Option<Vec<u32>>,
}

impl Default for HostTensors {
    fn default() -> Self {
        Self {
            qweight: Vec::new(),
            metadata: None,
            scales: Scales::F32(Vec::new()),
            zero_points: None,
            row_permutation: None,
        }
    }
}

impl HostTensors {
    /// Reserves the memory of a weight that is added expert by expert.
    pub fn reserve(&mut self, descriptor: &WeightDescriptor) {
        let shapes = descriptor.tensors();
        self.qweight.reserve_exact(shapes.qweight.elements());
        if let Some(zeros) = shapes.zero_points {
            self.zero_points = Some(Vec::with_capacity(zeros.elements()));
        }
        if let Some(rows) = shapes.row_permutation {
            self.row_permutation = Some(Vec::with_capacity(rows.elements()));
        }
    }

    /// Adds the tensors of a weight below those that are there, which have the same format. The
    /// first weight's memory is taken over. A `permuted` weight without a permutation gets one that
    /// keeps its rows.
    pub fn push(&mut self, plain: PlainWeight, permuted: bool) {
        let zero_points = plain.zero_point_words();
        let PlainParts {
            k,
            qweight,
            metadata,
            scales,
            row_permutation,
            ..
        } = plain.into_parts();
        let rows = row_permutation.or_else(|| permuted.then(|| (0..k as u32).collect()));
        append(&mut self.qweight, qweight);
        let optional = |all: &mut Option<Vec<u32>>, more: Option<Vec<u32>>| match (&mut *all, more)
        {
            (Some(all), Some(more)) => append(all, more),
            (None, more) => *all = more,
            (Some(_), None) => {}
        };
        optional(&mut self.metadata, metadata);
        optional(&mut self.zero_points, zero_points);
        optional(&mut self.row_permutation, rows);
        match (&mut self.scales, scales) {
            (Scales::F16(all), Scales::F16(more)) => append(all, more),
            (Scales::BF16(all), Scales::BF16(more)) => append(all, more),
            (Scales::F32(all), Scales::F32(more)) => append(all, more),
            (all, more) => *all = more,
        }
    }
}

/// Appends elements, or takes over their memory if there are none yet.
fn append<T>(all: &mut Vec<T>, mut more: Vec<T>) {
    if all.capacity() == 0 {
        *all = more;
    } else {
        all.append(&mut more);
    }
}

impl DeviceTensors {
    /// Puts a plain weight on a device, with scales in `scale_dtype`. On the host, the tensors take
    /// over the weight's memory.
    pub fn from_plain(plain: PlainWeight, scale_dtype: DType, device: &Device) -> Self {
        let descriptor = plain.descriptor();
        let mut tensors = HostTensors::default();
        tensors.push(plain, descriptor.format.permuted);
        Self::from_host(&descriptor, tensors, scale_dtype, device)
    }

    /// Puts the tensors of a weight in the plain layout on a device, with scales in `scale_dtype`.
    pub fn from_host(
        descriptor: &WeightDescriptor,
        tensors: HostTensors,
        scale_dtype: DType,
        device: &Device,
    ) -> Self {
        let shapes = descriptor.tensors();
        let HostTensors {
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        } = tensors;
        let matrix = |words: Vec<u32>, shape: TensorDescriptor| {
            parameter(Tensor::from_data(
                TensorData::new(signed(words), shape.matrix_shape()),
                (device, DType::I32),
            ))
        };
        let scale_shape = shapes.scales.matrix_shape();
        let scales = match scales {
            Scales::F16(values) => TensorData::new(values, scale_shape),
            Scales::BF16(values) => TensorData::new(values, scale_shape),
            Scales::F32(values) => TensorData::new(values, scale_shape),
        };
        Self {
            qweight: matrix(qweight, shapes.qweight),
            metadata: metadata
                .zip(shapes.metadata)
                .map(|(metadata, shape)| matrix(metadata, shape)),
            scales: Param::initialized(
                ParamId::new(),
                Tensor::from_data(scales, (device, scale_dtype)),
            ),
            zero_points: zero_points
                .zip(shapes.zero_points)
                .map(|(words, shape)| matrix(words, shape)),
            row_permutation: row_permutation.map(|rows| {
                let length = rows.len();
                parameter(Tensor::from_data(
                    TensorData::new(signed(rows), [length]),
                    (device, DType::I32),
                ))
            }),
        }
    }

    /// Creates a weight without values or act-order, in the plain layout: its scales are NaN, and
    /// so is every product, until a record is loaded.
    pub fn unloaded(descriptor: &WeightDescriptor, scale_dtype: DType, device: &Device) -> Self {
        let shapes = descriptor.tensors();
        let zeros = |shape: TensorDescriptor| {
            let shape = shape.matrix_shape();
            let init = move |device: &Device, _: bool| Tensor::zeros(shape, (device, DType::I32));
            Param::uninitialized(
                ParamId::new(),
                init,
                device.clone(),
                false,
                Shape::new(shape),
            )
        };
        let scales = shapes.scales.matrix_shape();
        let init = move |device: &Device, _: bool| {
            Tensor::from_data(TensorData::full(scales, f32::NAN), (device, scale_dtype))
        };
        Self {
            qweight: zeros(shapes.qweight),
            metadata: shapes.metadata.map(zeros),
            scales: Param::uninitialized(
                ParamId::new(),
                init,
                device.clone(),
                false,
                Shape::new(scales),
            ),
            zero_points: shapes.zero_points.map(zeros),
            row_permutation: None,
        }
    }

    /// Returns the standard deviation of the floats of [`random`](Self::random) words.
    pub fn deviation_of_floats(value: WeightValue) -> f64 {
        let mask = value.finite_mask() as u8;
        let squares = (0..=value.max()).map(|code| f64::from(value.decode(code & mask)).powi(2));
        (squares.sum::<f64>() / (f64::from(value.max()) + 1.0)).sqrt()
    }

    /// Creates random words, metadata and zero points in the plain layout, and random scales of
    /// both signs, whose root mean square is `scale`.
    pub fn random(
        descriptor: &WeightDescriptor,
        scale: f64,
        scale_dtype: DType,
        device: &Device,
    ) -> Self {
        let shapes = descriptor.tensors();
        let bits = |shape: TensorDescriptor| {
            // Each word is made of two random halves: a float of the generator has fewer bits than
            // a word.
            let uniform = Distribution::Uniform(-32768.0, 32767.0);
            let half =
                || Tensor::<2, Int>::random(shape.matrix_shape(), uniform, (device, DType::I32));
            parameter(half() * 65536 + half())
        };
        // The scales have a mean of zero, because 4-bit values have a mean of -1/2. With scales of
        // one sign, all weights would share a mean, and activations would leave the range of f16
        // after tens of layers.
        let width = scale * 3f64.sqrt();
        let scales = Tensor::random(
            shapes.scales.matrix_shape(),
            Distribution::Uniform(-width, width),
            (device, scale_dtype),
        );
        let qweight = bits(shapes.qweight);
        let qweight = match descriptor.spec().value.finite_mask() {
            u32::MAX => qweight,
            mask => qweight.map(|words| words.bitwise_and_scalar(mask as i32)),
        };
        Self {
            qweight,
            metadata: shapes.metadata.map(bits),
            scales: Param::initialized(ParamId::new(), scales),
            zero_points: shapes.zero_points.map(bits),
            row_permutation: None,
        }
    }
}

/// Converts words to signed words in the same memory. Spare capacity is freed, because a tensor may
/// hold the memory for as long as the model exists.
fn signed(mut words: Vec<u32>) -> Vec<i32> {
    words.shrink_to_fit();
    bytemuck::cast_vec(words)
}

fn parameter<const D: usize>(tensor: Tensor<D, Int>) -> Param<Tensor<D, Int>> {
    Param::initialized(ParamId::new(), tensor)
}

impl QuantizedWeight {
    /// Returns the tensors in the form that the operations of [`backend`](crate::backend) take,
    /// together with [`descriptor`](Self::descriptor).
    pub fn to_op(&self) -> QuantTensors<Dispatch> {
        let tensors = &self.tensors;
        QuantTensors {
            qweight: tensors.qweight.val().into_dispatch(),
            metadata: tensors
                .metadata
                .as_ref()
                .map(|metadata| metadata.val().into_dispatch())
                .into(),
            scales: tensors.scales.val().into_dispatch(),
            zero_points: tensors
                .zero_points
                .as_ref()
                .map(|zeros| zeros.val().into_dispatch())
                .into(),
            row_permutation: tensors
                .row_permutation
                .as_ref()
                .map(|rows| rows.val().into_dispatch())
                .into(),
        }
    }

    /// Converts the weight to another layout, or a 2:4 weight to a dense one, on its device.
    /// Parameters keep their ids.
    pub(super) fn held_as(self, to: WeightDescriptor) -> Self {
        if self.descriptor == to {
            return self;
        }
        // The permutation is the same in every layout, so the operation does not need it.
        let without_permutation = |of: WeightDescriptor| WeightDescriptor {
            format: of.format.with_permutation(false),
            ..of
        };
        let weight = QuantTensors {
            row_permutation: None.into(),
            ..self.to_op()
        };
        let op = Dispatch::quant_repack(
            weight,
            without_permutation(self.descriptor),
            without_permutation(to),
        );
        let Self { tensors, .. } = self;
        let optional = |param: Option<Param<Tensor<2, Int>>>, tensor: OptionalInt<Dispatch>| {
            param
                .zip(tensor.into_option())
                .map(|(param, tensor)| Param::initialized(param.id, Tensor::from_dispatch(tensor)))
        };
        let tensors = DeviceTensors {
            qweight: Param::initialized(tensors.qweight.id, Tensor::from_dispatch(op.qweight)),
            metadata: optional(tensors.metadata, op.metadata),
            scales: Param::initialized(tensors.scales.id, Tensor::from_dispatch(op.scales)),
            zero_points: optional(tensors.zero_points, op.zero_points),
            row_permutation: tensors.row_permutation,
        };
        Self {
            tensors,
            descriptor: to,
            ..self
        }
    }

    /// Converts the weight to the plain layout. A 2:4 weight stays 2:4.
    pub(super) fn plain(self) -> Self {
        let plain = self.descriptor.in_layout(WeightLayout::Plain);
        self.held_as(plain)
    }
}
