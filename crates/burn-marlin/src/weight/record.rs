//! The form of a weight that visitors, mappers and records see: plain, in tensors that no float mapper rounds.

use super::QuantizedWeight;
use super::tensors::DeviceTensors;
use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Element, Int, IntDType, Shape, Tensor, TensorData};
use half::{bf16, f16};
use marlin_format::{
    Bits, GroupSize, QuantSpec, ScaleDtype, Scales, Sparsity, WeightDescriptor, WeightFormat, WeightLayout, WeightTensor, WeightTensors,
};
use std::sync::{Arc, OnceLock};

const CONTAINER: &str = "Struct:QuantizedWeight";
/// The parameter that describes a weight, the first.
pub(crate) const FORMAT: &str = "format";
const WORDS: &str = "words";
const METADATA: &str = "metadata";
const SCALES: &str = "scales";
const ZERO_POINTS: &str = "zero_points";
const ROW_PERMUTATION: &str = "row_permutation";

/// The dtypes of scales by their number in a record.
const SCALE_DTYPES: [ScaleDtype; 3] = [ScaleDtype::F16, ScaleDtype::BF16, ScaleDtype::F32];
/// Numbers that describe a weight in a record: six of the format, four of K, four of N.
const LENGTH: usize = 14;
const VERSION: u8 = 1;
/// In place of 0 (rows in order) or 1 (act-order): two of every four rows are stored.
const TWO_FOUR: u8 = 2;

fn scales_a_word(dtype: ScaleDtype) -> usize {
    if dtype == ScaleDtype::F32 { 1 } else { 2 }
}

/// A weight's format and shape as numbers below 256, which every float dtype holds exactly, so that a cast of the model changes nothing. K and N
/// are four digits each, the lowest first.
fn values(descriptor: &WeightDescriptor) -> [f32; LENGTH] {
    let WeightDescriptor { format: WeightFormat { spec, permuted, sparsity }, k, n, .. } = *descriptor;
    // No group is 0: that stands for a whole column.
    let group = if spec.group == GroupSize::Channel { 0 } else { spec.group.rows(k) as u8 };
    let head = [
        VERSION,
        spec.bits.count() as u8,
        group,
        spec.zero_points.into(),
        SCALE_DTYPES.iter().position(|&dtype| dtype == spec.scale_dtype).unwrap_or_default() as u8,
        // Rows of a 2:4 weight are in order.
        if sparsity == Sparsity::TwoFour { TWO_FOUR } else { permuted.into() },
    ];
    let mut values = [0.0; LENGTH];
    let digits = head.into_iter().chain((k as u32).to_le_bytes()).chain((n as u32).to_le_bytes());
    values.iter_mut().zip(digits).for_each(|(value, digit)| *value = f32::from(digit));
    values
}

/// Undoes [`values`]; `None` if they describe no weight.
fn from_values(values: &[f32]) -> Option<WeightDescriptor> {
    let digits = values.iter().map(|&value| (value.fract() == 0.0 && (0.0..256.0).contains(&value)).then_some(value as u8));
    let digits: Vec<u8> = digits.collect::<Option<_>>()?;
    let [VERSION, bits, group, zero_points @ 0..=1, scale_dtype, rows @ 0..=TWO_FOUR, sizes @ ..] = digits.as_slice() else {
        return None;
    };
    let (k, n) = (sizes.first_chunk::<4>()?, sizes.get(4..)?.try_into().ok()?);
    let group = if *group == 0 { GroupSize::Channel } else { GroupSize::try_from(i64::from(*group)).ok()? };
    let spec = QuantSpec {
        bits: Bits::try_from(i64::from(*bits)).ok()?,
        group,
        zero_points: *zero_points == 1,
        scale_dtype: *SCALE_DTYPES.get(usize::from(*scale_dtype))?,
    };
    let [k, n] = [*k, n].map(|digits: [u8; 4]| u32::from_le_bytes(digits) as usize);
    let sparsity = if *rows == TWO_FOUR { Sparsity::TwoFour } else { Sparsity::Dense };
    let descriptor = WeightDescriptor::plain(WeightFormat::dense(spec).with_permutation(*rows == 1).with_sparsity(sparsity), k, n);
    descriptor.check().ok()?;
    Some(descriptor)
}

/// The parameter that describes a weight; it counts as the weight's elements until it is read.
pub(super) fn parameter(descriptor: WeightDescriptor, id: ParamId, elements: usize, device: &Device) -> Param<Tensor<1>> {
    let init = move |device: &Device, _: bool| Tensor::from_data(TensorData::from(values(&descriptor)), (device, DType::F32));
    Param::uninitialized(id, init, device.clone(), false, Shape::new([elements]))
}

/// The parameter that a mapper is offered to load. If the mapper loads it, it has the length of a description; otherwise one value.
pub(super) fn expected(id: ParamId, device: &Device) -> Param<Tensor<1>> {
    let init = |device: &Device, _: bool| Tensor::zeros([1], (device, DType::F32));
    Param::uninitialized(id, init, device.clone(), false, Shape::new([LENGTH]))
}

/// The description that a mapper loaded into [`expected`]; `None` if it loaded nothing, or no description.
pub(super) fn loaded(parameter: &Param<Tensor<1>>) -> Option<WeightDescriptor> {
    if !parameter.is_initialized() || parameter.dims() != [LENGTH] {
        return None;
    }
    from_values(&host::<f32, 1, _>(parameter.val()))
}

/// Shapes of a weight's tensors in a record: those of its plain layout, with scales in words.
fn shapes(descriptor: &WeightDescriptor) -> WeightTensors<[usize; 2]> {
    let width = scales_a_word(descriptor.spec().scale_dtype);
    descriptor.tensors().map(|tensor, of| {
        let [rows, columns] = of.matrix_shape();
        if tensor == WeightTensor::Scales { [rows, columns.div_ceil(width)] } else { [rows, columns] }
    })
}

/// The tensors of a weight in a record. None is a float: a cast, a quantiser or an adapter for float weights ignores them.
pub(super) struct RecordTensors {
    words: Param<Tensor<2, Int>>,
    metadata: Option<Param<Tensor<2, Int>>>,
    scales: Param<Tensor<2, Int>>,
    zero_points: Option<Param<Tensor<2, Int>>>,
    row_permutation: Option<Param<Tensor<1, Int>>>,
}

impl RecordTensors {
    /// Those of a weight, made where they are first read.
    pub fn of(weight: &QuantizedWeight) -> Self {
        let plain = Arc::new(Plain { weight: weight.clone(), tensors: OnceLock::new() });
        let (device, tensors) = (weight.device(), &weight.tensors);
        let (k, scale_dtype) = (weight.dims()[0], weight.spec().scale_dtype);
        let shapes = shapes(&weight.descriptor().in_layout(WeightLayout::Plain));
        let (words, places, scales) = (plain.clone(), plain.clone(), plain.clone());
        let read_scales = move |device: &Device| {
            let scales = &scales.tensors().scales;
            let shape = scales.dims();
            scale_words(&Scales::from_f32(&host::<f32, 2, _>(scales.val()), scale_dtype), shape, device)
        };
        Self {
            words: lazy(tensors.words.id, shapes.words, &device, move |device| words.tensors().words.val().to_device(device)),
            metadata: tensors.metadata.as_ref().zip(shapes.metadata).map(|(metadata, shape)| {
                let tile = metadata.val();
                let places_of = move |plain: &Plain| plain.tensors().metadata.as_ref().map_or(tile, |places| places.val());
                lazy(metadata.id, shape, &device, move |device| places_of(&places).to_device(device))
            }),
            scales: lazy(tensors.scales.id, shapes.scales, &device, read_scales),
            zero_points: tensors.zero_points.as_ref().zip(shapes.zero_points).map(|(zeros, shape)| {
                let tile = zeros.val();
                let zeros_of = move |plain: &Plain| plain.tensors().zero_points.as_ref().map_or(tile, |zeros| zeros.val());
                lazy(zeros.id, shape, &device, move |device| zeros_of(&plain).to_device(device))
            }),
            row_permutation: tensors.row_permutation.as_ref().map(|rows| {
                let tensor = rows.val();
                lazy(rows.id, [k], &device, move |device| tensor.to_device(device))
            }),
        }
    }

    /// Those that a record of another format than the model's holds: zeros until a mapper gives them.
    ///
    /// For a record of another K or N it returns shapes that no record has, so the record is refused even if its tensors would fit.
    pub fn expected(own: &WeightDescriptor, recorded: &WeightDescriptor, device: &Device) -> Self {
        let sizes = (recorded.k, recorded.n) != (own.k, own.n);
        let int = |shape: [usize; 2]| {
            let declared = if sizes { Shape::new([own.k, own.n, 1]) } else { Shape::new(shape) };
            zeros(shape, declared, device)
        };
        let shapes = shapes(recorded);
        Self {
            words: int(shapes.words),
            metadata: shapes.metadata.map(int),
            scales: int(shapes.scales),
            zero_points: shapes.zero_points.map(int),
            row_permutation: shapes.row_permutation.map(|[k, _]| zeros([k], Shape::new([k]), device)),
        }
    }

    pub fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visited(visitor, WORDS, |visitor| visitor.visit_int(&self.words));
        if let Some(metadata) = &self.metadata {
            visited(visitor, METADATA, |visitor| visitor.visit_int(metadata));
        }
        visited(visitor, SCALES, |visitor| visitor.visit_int(&self.scales));
        if let Some(zeros) = &self.zero_points {
            visited(visitor, ZERO_POINTS, |visitor| visitor.visit_int(zeros));
        }
        if let Some(rows) = &self.row_permutation {
            visited(visitor, ROW_PERMUTATION, |visitor| visitor.visit_int(rows));
        }
    }

    pub fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        Self {
            words: mapped(mapper, WORDS, |mapper| mapper.map_int(self.words)),
            metadata: self.metadata.map(|places| mapped(mapper, METADATA, |mapper| mapper.map_int(places))),
            scales: mapped(mapper, SCALES, |mapper| mapper.map_int(self.scales)),
            zero_points: self.zero_points.map(|zeros| mapped(mapper, ZERO_POINTS, |mapper| mapper.map_int(zeros))),
            row_permutation: self.row_permutation.map(|rows| mapped(mapper, ROW_PERMUTATION, |mapper| mapper.map_int(rows))),
        }
    }

    /// Makes a mapper refuse a record whose words are integers of another dtype than i32, and returns true if there are any. It is offered such a tensor
    /// again, as a float: Burn's stores report the dtype that the file has, and its records a tensor that is missing.
    pub fn refuse_other_dtypes<M: ModuleMapper>(&self, mapper: &mut M) -> bool {
        fn dtype_of<const D: usize>(tensor: &Param<Tensor<D, Int>>) -> Option<DType> {
            tensor.is_initialized().then(|| tensor.dtype()).filter(|dtype| *dtype != DType::I32)
        }
        let Self { words, metadata, scales, zero_points, row_permutation } = self;
        let found = [
            (WORDS, dtype_of(words)),
            (METADATA, metadata.as_ref().and_then(dtype_of)),
            (SCALES, dtype_of(scales)),
            (ZERO_POINTS, zero_points.as_ref().and_then(dtype_of)),
            (ROW_PERMUTATION, row_permutation.as_ref().and_then(dtype_of)),
        ];
        let found = found.into_iter().filter_map(|(name, dtype)| Some((name, dtype?)));
        let mut refused = false;
        for (name, dtype) in found {
            tracing::error!(tensor = name, ?dtype, "a record holds words of a quantised weight in another dtype than i32: it is refused");
            let init = |device: &Device, _: bool| Tensor::<1>::zeros([1], device);
            let unlike = Param::uninitialized(ParamId::new(), init, words.lazy_device(), false, Shape::new([1]));
            mapped(mapper, name, |mapper| mapper.map_float(unlike));
            refused = true;
        }
        refused
    }

    /// Returns true if a mapper gave or read any of them.
    pub fn is_touched(&self) -> bool {
        self.touched().any(|touched| touched)
    }

    /// Returns true if a mapper gave or read all of them.
    pub fn is_complete(&self) -> bool {
        self.touched().all(|touched| touched)
    }

    fn touched(&self) -> impl Iterator<Item = bool> {
        let matrices = [&self.metadata, &self.zero_points].map(|matrix| matrix.as_ref().map(Param::is_initialized));
        let optional = matrices.into_iter().chain([self.row_permutation.as_ref().map(Param::is_initialized)]);
        [self.words.is_initialized(), self.scales.is_initialized()].into_iter().chain(optional.flatten())
    }

    /// The tensors of a weight of that format in the plain layout, its scales in `scale_dtype`.
    pub fn into_plain(self, descriptor: &WeightDescriptor, scale_dtype: DType) -> DeviceTensors {
        // A mapper may have cast all integers of a model.
        fn held<const D: usize>(parameter: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
            Param::initialized(parameter.id, parameter.val().cast(IntDType::I32))
        }
        let shape = descriptor.tensors().scales.matrix_shape();
        let (id, words) = (self.scales.id, self.scales.val());
        let scales = scales_of_words(words, shape, descriptor.spec().scale_dtype, scale_dtype);
        DeviceTensors {
            words: held(self.words),
            metadata: self.metadata.map(held),
            scales: Param::initialized(id, scales),
            zero_points: self.zero_points.map(held),
            row_permutation: self.row_permutation.map(held),
        }
    }
}

/// Visits everything below a name.
pub(super) fn visited<V: ModuleVisitor>(visitor: &mut V, name: &str, visit: impl FnOnce(&mut V)) {
    visitor.enter_module(name, CONTAINER);
    visit(visitor);
    visitor.exit_module(name, CONTAINER);
}

/// Maps everything below a name.
pub(super) fn mapped<M: ModuleMapper, T>(mapper: &mut M, name: &str, map: impl FnOnce(&mut M) -> T) -> T {
    mapper.enter_module(name, CONTAINER);
    let value = map(mapper);
    mapper.exit_module(name, CONTAINER);
    value
}

fn lazy<const D: usize>(
    id: ParamId,
    shape: [usize; D],
    device: &Device,
    read: impl FnOnce(&Device) -> Tensor<D, Int> + Send + Sync + 'static,
) -> Param<Tensor<D, Int>> {
    Param::uninitialized(id, move |device, _| read(device), device.clone(), false, Shape::new(shape))
}

fn zeros<const D: usize>(shape: [usize; D], declared: Shape, device: &Device) -> Param<Tensor<D, Int>> {
    let init = move |device: &Device, _: bool| Tensor::zeros(shape, (device, DType::I32));
    Param::uninitialized(ParamId::new(), init, device.clone(), false, declared)
}

/// The bits of scales [G, N]: two a word along N, the first in the lower half, [G, N/2 up]; of f32 one, [G, N].
fn scale_words(scales: &Scales, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let width = scales_a_word(scales.dtype());
    let (bytes, columns) = (scales.as_bytes(), shape[1].max(1));
    let word = |scales: &[u8]| {
        let mut word = [0; 4];
        word[..scales.len()].copy_from_slice(scales);
        i32::from_le_bytes(word)
    };
    let words: Vec<i32> = bytes.chunks(columns * 4 / width).flat_map(|row| row.chunks(4).map(word)).collect();
    Tensor::from_data(TensorData::new(words, [shape[0], shape[1].div_ceil(width)]), (device, DType::I32))
}

/// Undoes [`scale_words`].
fn scales_of_words(words: Tensor<2, Int>, shape: [usize; 2], dtype: ScaleDtype, held: DType) -> Tensor<2> {
    let device = words.device();
    let (words, width) = (host::<i32, 2, _>(words), scales_a_word(dtype));
    let scales_of = |row: &[i32]| row.iter().flat_map(|word| word.to_le_bytes()).take(shape[1] * 4 / width).collect::<Vec<_>>();
    let bytes: Vec<u8> = words.chunks(shape[1].div_ceil(width).max(1)).flat_map(scales_of).collect();
    let halves = || bytes.as_chunks::<2>().0.iter().copied();
    let data = match dtype {
        ScaleDtype::F16 => TensorData::new(halves().map(f16::from_le_bytes).collect::<Vec<_>>(), shape),
        ScaleDtype::BF16 => TensorData::new(halves().map(bf16::from_le_bytes).collect::<Vec<_>>(), shape),
        ScaleDtype::F32 => TensorData::new(bytes.as_chunks::<4>().0.iter().copied().map(f32::from_le_bytes).collect::<Vec<_>>(), shape),
    };
    Tensor::from_data(data, (&device, held))
}

/// A tensor's values.
///
/// # Panics
/// Panics if the device fails, as Burn's own records do: a traversal has no way to return an error.
fn host<E: Element, const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Vec<E> {
    tensor.try_into_vec_as::<E>().unwrap_or_else(|error| panic!("a quantised weight cannot be read from its device: {error}"))
}

/// A weight's plain tensors, made once for all of its parameters.
struct Plain {
    weight: QuantizedWeight,
    tensors: OnceLock<DeviceTensors>,
}

impl Plain {
    fn tensors(&self) -> &DeviceTensors {
        self.tensors.get_or_init(|| self.weight.clone().plain().tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_survives_every_float_dtype() {
        for spec in [
            QuantSpec::int4(GroupSize::G128),
            QuantSpec::int8(GroupSize::G32).with_zero_points(),
            QuantSpec::int4(GroupSize::Channel).with_scale_dtype(ScaleDtype::BF16),
            QuantSpec::int4(GroupSize::G64).with_scale_dtype(ScaleDtype::F32),
        ] {
            for (k, n, permuted) in [(128, 1, true), (344, 9, true), (57344, 8191, false), (1 << 30, 3, true), (65, 65_793, true)] {
                let weight = WeightDescriptor::plain(WeightFormat::dense(spec).with_permutation(permuted), k, n);
                let values = values(&weight);
                assert_eq!(from_values(&values), Some(weight));
                assert_eq!(from_values(&values.map(|value| bf16::from_f32(value).to_f32())), Some(weight));
                assert_eq!(from_values(&values.map(|value| f16::from_f32(value).to_f32())), Some(weight));
            }
        }
    }

    #[test]
    fn other_numbers_are_no_format() {
        let values = values(&WeightDescriptor::plain(QuantSpec::int4(GroupSize::G64), 64, 2));
        for (place, value) in [(0, 2.0), (1, 5.0), (2, 33.0), (3, 2.0), (4, 0.5), (5, -1.0), (6, f32::NAN), (6, 0.0)] {
            let mut other = values;
            other[place] = value;
            assert_eq!(from_values(&other), None, "{value} at {place}");
        }
        assert_eq!(from_values(&values[1..]), None);
    }

    #[test]
    fn scales_come_back_from_words() {
        let device = Device::flex();
        for (dtype, held) in [(ScaleDtype::F16, DType::F16), (ScaleDtype::BF16, DType::F32), (ScaleDtype::F32, DType::F32)] {
            for shape in [[2, 3], [1, 1], [3, 4]] {
                let values: Vec<f32> = (0..shape[0] * shape[1]).map(|index| (index as f32 - 2.0) * 0.375).collect();
                let words = scale_words(&Scales::from_f32(&values, dtype), shape, &device);
                assert_eq!(words.dims(), [shape[0], shape[1].div_ceil(if dtype == ScaleDtype::F32 { 1 } else { 2 })]);
                let scales = scales_of_words(words, shape, dtype, held);
                assert_eq!((scales.dims(), scales.dtype()), (shape, held));
                assert_eq!(host::<f32, 2, _>(scales), values);
            }
        }
    }
}
