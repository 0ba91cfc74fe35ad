use super::QuantizedWeight;
use crate::ops::{W4A16Backend, W4A16Weight};
use burn::backend::Dispatch;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Distribution, Int, Shape, Tensor, TensorData};
use marlin_format::{Bits, PlainWeight, QuantSpec, Scales};
use marlin_kernels::WeightLayout;

/// The tensors of a weight, in one of the [`WeightLayout`]s.
#[derive(Module, Debug)]
pub(super) struct WeightTensors {
    pub words: Param<Tensor<2, Int>>,
    pub scales: Param<Tensor<2>>,
    pub zero_points: Option<Param<Tensor<2, Int>>>,
    pub row_permutation: Option<Param<Tensor<1, Int>>>,
}

impl WeightTensors {
    /// A plain weight on a device, its scales in `scale_dtype`.
    pub fn from_plain(plain: &PlainWeight, scale_dtype: DType, device: &Device) -> Self {
        let (k, n, spec, layout) = (plain.k(), plain.n(), plain.spec(), WeightLayout::Plain);
        let scale_shape = layout.scales(k, n, spec.group);
        let int = |values: Vec<i32>, shape: [usize; 2]| parameter(Tensor::from_data(TensorData::new(values, shape), (device, DType::I32)));
        let scales = match plain.scales() {
            Scales::F16(values) => TensorData::new(values.clone(), scale_shape),
            Scales::BF16(values) => TensorData::new(values.clone(), scale_shape),
            Scales::F32(values) => TensorData::new(values.clone(), scale_shape),
        };
        Self {
            words: int(plain.words().iter().map(|&word| word as i32).collect(), layout.words(k, n, spec.bits)),
            scales: Param::initialized(ParamId::new(), Tensor::from_data(scales, (device, scale_dtype))),
            zero_points: plain.zero_points().map(|values| int(pack_zero_points(values, n, spec.bits), layout.zero_points(k, n, &spec))),
            row_permutation: plain.row_permutation().map(|rows| {
                let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
                parameter(Tensor::from_data(TensorData::new(rows, [k]), (device, DType::I32)))
            }),
        }
    }

    /// A weight without values, in the plain layout: its scales are not a number, and so is every product, until a record is loaded.
    pub fn unloaded(k: usize, n: usize, spec: &QuantSpec, scale_dtype: DType, device: &Device) -> Self {
        let layout = WeightLayout::Plain;
        let zeros = |shape: [usize; 2]| {
            let init = move |device: &Device, _: bool| Tensor::zeros(shape, (device, DType::I32));
            Param::uninitialized(ParamId::new(), init, device.clone(), false, Shape::new(shape))
        };
        let scales = layout.scales(k, n, spec.group);
        let init = move |device: &Device, _: bool| Tensor::from_data(TensorData::full(scales, f32::NAN), (device, scale_dtype));
        Self {
            words: zeros(layout.words(k, n, spec.bits)),
            scales: Param::uninitialized(ParamId::new(), init, device.clone(), false, Shape::new(scales)),
            zero_points: spec.zero_points.then(|| zeros(layout.zero_points(k, n, spec))),
            row_permutation: None,
        }
    }

    /// Random words and zero points in the plain layout, and random scales of both signs, whose root mean square is `scale`.
    pub fn random(k: usize, n: usize, spec: &QuantSpec, scale: f64, scale_dtype: DType, device: &Device) -> Self {
        let layout = WeightLayout::Plain;
        let bits = |shape: [usize; 2]| {
            // Two halves: a float of the generator has fewer bits than a word.
            let half = || Tensor::<2, Int>::random(shape, Distribution::Uniform(-32768.0, 32767.0), (device, DType::I32));
            parameter(half() * 65536 + half())
        };
        // Around zero, as 4-bit values themselves are not: theirs is -1/2, and through tens of layers a mean that all weights share leaves the range of f16.
        let width = scale * 3f64.sqrt();
        let scales = Tensor::random(layout.scales(k, n, spec.group), Distribution::Uniform(-width, width), (device, scale_dtype));
        Self {
            words: bits(layout.words(k, n, spec.bits)),
            scales: Param::initialized(ParamId::new(), scales),
            zero_points: spec.zero_points.then(|| bits(layout.zero_points(k, n, spec))),
            row_permutation: None,
        }
    }
}

fn parameter<const D: usize>(tensor: Tensor<D, Int>) -> Param<Tensor<D, Int>> {
    Param::initialized(ParamId::new(), tensor)
}

impl QuantizedWeight {
    /// The weight as the op takes it.
    pub(super) fn to_op(&self) -> W4A16Weight<Dispatch> {
        let tensors = &self.tensors;
        W4A16Weight {
            words: tensors.words.val().into_dispatch(),
            scales: tensors.scales.val().into_dispatch(),
            zero_points: tensors.zero_points.as_ref().map(|zeros| zeros.val().into_dispatch()).into(),
            row_permutation: tensors.row_permutation.as_ref().map(|rows| rows.val().into_dispatch()).into(),
            k: self.k,
            n: self.n,
            spec: self.spec,
            layout: self.layout,
        }
    }

    /// The same weight in another layout, on its device. Parameters keep their ids.
    pub(super) fn in_layout(self, layout: WeightLayout) -> Self {
        if self.layout == layout {
            return self;
        }
        // The permutation is the same in every layout: the op need not carry it.
        let op = W4A16Weight { row_permutation: None.into(), ..self.to_op() };
        let op = Dispatch::w4a16_relayout(op, layout);
        let Self { tensors, .. } = self;
        let tensors = WeightTensors {
            words: Param::initialized(tensors.words.id, Tensor::from_dispatch(op.words)),
            scales: Param::initialized(tensors.scales.id, Tensor::from_dispatch(op.scales)),
            zero_points: match (tensors.zero_points, op.zero_points.into_option()) {
                (Some(zeros), Some(tensor)) => Some(Param::initialized(zeros.id, Tensor::from_dispatch(tensor))),
                _ => None,
            },
            row_permutation: tensors.row_permutation,
        };
        Self { tensors, layout, ..self }
    }
}

/// The zero points [G, N] in words [G, N/8 up], of 8 bits [G, N/4 up], the first in the lowest bits.
fn pack_zero_points(zeros: &[u8], n: usize, bits: Bits) -> Vec<i32> {
    let word = |zeros: &[u8]| zeros.iter().rev().fold(0u32, |word, &zero| word << bits.count() | u32::from(zero)) as i32;
    zeros.chunks(n).flat_map(|row| row.chunks(bits.per_word()).map(word)).collect()
}

/// Undoes [`pack_zero_points`].
pub(super) fn unpack_zero_points(words: &[i32], n: usize, bits: Bits) -> Vec<u8> {
    let per_word = bits.per_word();
    let zero = |word: i32, slot: usize| (word as u32 >> (bits.count() * slot)) as u8 & bits.max();
    let row = |words: &[i32]| (0..n).map(|column| zero(words[column / per_word], column % per_word)).collect::<Vec<_>>();
    words.chunks_exact(n.div_ceil(per_word)).flat_map(row).collect()
}
