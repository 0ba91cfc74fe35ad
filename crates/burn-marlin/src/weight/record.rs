//! The form of a weight that visitors, mappers and records see: the plain layout, in integer
//! tensors that no float mapper rounds.

use super::QuantizedWeight;
use super::scale_words::{scale_words, scales_a_word, scales_of_words};
use super::tensors::DeviceTensors;
use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Element, Int, IntDType, Shape, Tensor};
use marlin_format::{Scales, WeightDescriptor, WeightLayout, WeightTensor, WeightTensors};
use std::sync::{Arc, OnceLock};

const CONTAINER: &str = "Struct:QuantizedWeight";
const QWEIGHT: &str = "qweight";
const METADATA: &str = "metadata";
const SCALES: &str = "scales";
const ZERO_POINTS: &str = "zero_points";
const ROW_PERMUTATION: &str = "row_permutation";

/// Returns the shapes of a weight's tensors in a record: the shapes of its plain layout, with
/// scales packed into words.
fn shapes(descriptor: &WeightDescriptor) -> WeightTensors<[usize; 2]> {
    let width = scales_a_word(descriptor.spec().scales.dtype);
    descriptor.tensors().map(|tensor, of| {
        let [rows, columns] = of.matrix_shape();
        if tensor == WeightTensor::Scales {
            [rows, columns.div_ceil(width)]
        } else {
            [rows, columns]
        }
    })
}

/// The tensors of a weight in a record. All of them are integers, so a cast, a quantiser or an
/// adapter for float weights ignores them.
pub(super) struct RecordTensors {
    qweight: Param<Tensor<2, Int>>,
    metadata: Option<Param<Tensor<2, Int>>>,
    scales: Param<Tensor<2, Int>>,
    zero_points: Option<Param<Tensor<2, Int>>>,
    row_permutation: Option<Param<Tensor<1, Int>>>,
}

impl RecordTensors {
    /// Creates the record tensors of a weight. Their values are computed when they are first read.
    pub fn of(weight: &QuantizedWeight) -> Self {
        let plain = Arc::new(Plain {
            weight: weight.clone(),
            tensors: OnceLock::new(),
        });
        let (device, tensors) = (weight.device(), &weight.tensors);
        let scale_dtype = weight.spec().scales.dtype;
        let stored = weight.experts() * weight.dims()[0];
        let shapes = shapes(&weight.descriptor().in_layout(WeightLayout::Plain));
        let (qweight, places, scales) = (plain.clone(), plain.clone(), plain.clone());
        let read_scales = move |device: &Device| {
            let scales = &scales.tensors().scales;
            let shape = scales.dims();
            scale_words(
                &Scales::from_f32(&host::<f32, 2, _>(scales.val()), scale_dtype),
                shape,
                device,
            )
        };
        Self {
            qweight: lazy(tensors.qweight.id, shapes.qweight, &device, move |device| {
                qweight.tensors().qweight.val().to_device(device)
            }),
            metadata: tensors
                .metadata
                .as_ref()
                .zip(shapes.metadata)
                .map(|(metadata, shape)| {
                    let tile = metadata.val();
                    let places_of = move |plain: &Plain| {
                        plain
                            .tensors()
                            .metadata
                            .as_ref()
                            .map_or(tile, |places| places.val())
                    };
                    lazy(metadata.id, shape, &device, move |device| {
                        places_of(&places).to_device(device)
                    })
                }),
            scales: lazy(tensors.scales.id, shapes.scales, &device, read_scales),
            zero_points: tensors.zero_points.as_ref().zip(shapes.zero_points).map(
                |(zeros, shape)| {
                    let tile = zeros.val();
                    let zeros_of = move |plain: &Plain| {
                        plain
                            .tensors()
                            .zero_points
                            .as_ref()
                            .map_or(tile, |zeros| zeros.val())
                    };
                    lazy(zeros.id, shape, &device, move |device| {
                        zeros_of(&plain).to_device(device)
                    })
                },
            ),
            row_permutation: tensors.row_permutation.as_ref().map(|rows| {
                let tensor = rows.val();
                lazy(rows.id, [stored], &device, move |device| {
                    tensor.to_device(device)
                })
            }),
        }
    }

    /// Creates the tensors for a record in another format than the model's. They are zeros until a
    /// mapper loads them.
    ///
    /// For a record with another K, N or number of experts, the tensors have shapes that no record
    /// has, so the record is refused even if its tensors would fit.
    pub fn expected(own: &WeightDescriptor, recorded: &WeightDescriptor, device: &Device) -> Self {
        let declared = |shape: Shape| {
            if own.has_shape_of(recorded) {
                shape
            } else {
                Shape::new([own.k, own.n, 1])
            }
        };
        let int = |shape: [usize; 2]| zeros(shape, declared(Shape::new(shape)), device);
        let shapes = shapes(recorded);
        Self {
            qweight: int(shapes.qweight),
            metadata: shapes.metadata.map(int),
            scales: int(shapes.scales),
            zero_points: shapes.zero_points.map(int),
            row_permutation: shapes
                .row_permutation
                .map(|[k, _]| zeros([k], declared(Shape::new([k])), device)),
        }
    }

    pub fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visited(visitor, QWEIGHT, |visitor| visitor.visit_int(&self.qweight));
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
            qweight: mapped(mapper, QWEIGHT, |mapper| mapper.map_int(self.qweight)),
            metadata: self
                .metadata
                .map(|places| mapped(mapper, METADATA, |mapper| mapper.map_int(places))),
            scales: mapped(mapper, SCALES, |mapper| mapper.map_int(self.scales)),
            zero_points: self
                .zero_points
                .map(|zeros| mapped(mapper, ZERO_POINTS, |mapper| mapper.map_int(zeros))),
            row_permutation: self
                .row_permutation
                .map(|rows| mapped(mapper, ROW_PERMUTATION, |mapper| mapper.map_int(rows))),
        }
    }

    /// Makes a mapper refuse a record whose words are integers of another dtype than i32, and
    /// returns true if there are such words. The mapper is offered such a tensor again, as a float:
    /// Burn's stores then report the dtype that the file has, and its records report a missing
    /// tensor.
    pub fn refuse_other_dtypes<M: ModuleMapper>(&self, mapper: &mut M) -> bool {
        fn dtype_of<const D: usize>(tensor: &Param<Tensor<D, Int>>) -> Option<DType> {
            tensor
                .is_initialized()
                .then(|| tensor.dtype())
                .filter(|dtype| *dtype != DType::I32)
        }
        let Self {
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        } = self;
        let found = [
            (QWEIGHT, dtype_of(qweight)),
            (METADATA, metadata.as_ref().and_then(dtype_of)),
            (SCALES, dtype_of(scales)),
            (ZERO_POINTS, zero_points.as_ref().and_then(dtype_of)),
            (ROW_PERMUTATION, row_permutation.as_ref().and_then(dtype_of)),
        ];
        let found = found
            .into_iter()
            .filter_map(|(name, dtype)| Some((name, dtype?)));
        let mut refused = false;
        for (name, dtype) in found {
            tracing::error!(
                tensor = name,
                ?dtype,
                "a record holds words of a quantised weight in another dtype than i32: it is refused"
            );
            let init = |device: &Device, _: bool| Tensor::<1>::zeros([1], device);
            let unlike = Param::uninitialized(
                ParamId::new(),
                init,
                qweight.lazy_device(),
                false,
                Shape::new([1]),
            );
            mapped(mapper, name, |mapper| mapper.map_float(unlike));
            refused = true;
        }
        refused
    }

    /// Returns true if a mapper loaded or read any of the tensors.
    pub fn is_touched(&self) -> bool {
        self.touched().any(|touched| touched)
    }

    /// Returns true if a mapper loaded or read all of the tensors.
    pub fn is_complete(&self) -> bool {
        self.touched().all(|touched| touched)
    }

    fn touched(&self) -> impl Iterator<Item = bool> {
        let matrices = [&self.metadata, &self.zero_points]
            .map(|matrix| matrix.as_ref().map(Param::is_initialized));
        let optional = matrices
            .into_iter()
            .chain([self.row_permutation.as_ref().map(Param::is_initialized)]);
        [self.qweight.is_initialized(), self.scales.is_initialized()]
            .into_iter()
            .chain(optional.flatten())
    }

    /// Returns the device tensors of a weight of the format `descriptor` in the plain layout, with
    /// scales in `scale_dtype`.
    pub fn into_plain(self, descriptor: &WeightDescriptor, scale_dtype: DType) -> DeviceTensors {
        // A mapper may have cast all integers of a model to another dtype.
        fn held<const D: usize>(parameter: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
            Param::initialized(parameter.id, parameter.val().cast(IntDType::I32))
        }
        let shape = descriptor.tensors().scales.matrix_shape();
        let (id, words) = (self.scales.id, self.scales.val());
        let scales = scales_of_words(words, shape, descriptor.spec().scales.dtype, scale_dtype);
        DeviceTensors {
            qweight: held(self.qweight),
            metadata: self.metadata.map(held),
            scales: Param::initialized(id, scales),
            zero_points: self.zero_points.map(held),
            row_permutation: self.row_permutation.map(held),
        }
    }
}

/// Enters the module `name`, calls `visit`, and exits the module.
pub(super) fn visited<V: ModuleVisitor>(visitor: &mut V, name: &str, visit: impl FnOnce(&mut V)) {
    visitor.enter_module(name, CONTAINER);
    visit(visitor);
    visitor.exit_module(name, CONTAINER);
}

/// Enters the module `name`, calls `map`, exits the module, and returns the result of `map`.
pub(super) fn mapped<M: ModuleMapper, T>(
    mapper: &mut M,
    name: &str,
    map: impl FnOnce(&mut M) -> T,
) -> T {
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
    Param::uninitialized(
        id,
        move |device, _| read(device),
        device.clone(),
        false,
        Shape::new(shape),
    )
}

fn zeros<const D: usize>(
    shape: [usize; D],
    declared: Shape,
    device: &Device,
) -> Param<Tensor<D, Int>> {
    let init = move |device: &Device, _: bool| Tensor::zeros(shape, (device, DType::I32));
    Param::uninitialized(ParamId::new(), init, device.clone(), false, declared)
}

/// Reads a tensor's values to the host.
///
/// # Panics
/// Panics if the device fails, as Burn's own records do: a traversal has no way to return an error.
pub(super) fn host<E: Element, const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Vec<E> {
    tensor.try_into_vec_as::<E>().unwrap_or_else(|error| {
        panic!("a quantised weight cannot be read from its device: {error}")
    })
}

/// The tensors of a weight in the plain layout, computed once for all of its parameters.
struct Plain {
    weight: QuantizedWeight,
    tensors: OnceLock<DeviceTensors>,
}

impl Plain {
    fn tensors(&self) -> &DeviceTensors {
        self.tensors
            .get_or_init(|| self.weight.clone().plain().tensors)
    }
}
