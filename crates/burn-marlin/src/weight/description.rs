//! A weight's format and shape as a parameter of records.

use super::record::host;
use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use marlin_format::{Sparsity, WeightDescriptor, WeightFormat};

/// The name of the parameter that describes a weight. It is the first parameter of the weight.
pub(crate) const FORMAT: &str = "format";

/// The number of values that describe a weight in a record: the version, five for the format, four
/// for K, four for N.
const LENGTH: usize = 14;
const VERSION: u8 = 1;
/// The number of values that describe a weight with experts, which has two more for their number.
const EXPERTS_LENGTH: usize = LENGTH + 2;
const EXPERTS_VERSION: u8 = 2;

/// Encodes the format and shape of a weight as numbers below 256. Every float dtype holds these
/// numbers exactly, so a cast of the model does not change them. K, N and the number of experts are
/// digits, the lowest first.
fn values(descriptor: &WeightDescriptor) -> Vec<f32> {
    let (version, experts) = match descriptor.experts {
        1 => (VERSION, None),
        experts => (EXPERTS_VERSION, Some((experts as u16).to_le_bytes())),
    };
    std::iter::once(version)
        .chain(descriptor.format.to_bytes())
        .chain((descriptor.k as u32).to_le_bytes())
        .chain((descriptor.n as u32).to_le_bytes())
        .chain(experts.into_iter().flatten())
        .map(f32::from)
        .collect()
}

/// Returns the number of values that describe a weight.
fn length(descriptor: &WeightDescriptor) -> usize {
    match descriptor.experts {
        1 => LENGTH,
        _ => EXPERTS_LENGTH,
    }
}

/// Decodes the numbers of [`values`]. Returns `None` if the numbers describe no weight.
fn from_values(values: &[f32]) -> Option<WeightDescriptor> {
    let digits = values.iter().map(|&value| {
        (value.fract() == 0.0 && (0.0..256.0).contains(&value)).then_some(value as u8)
    });
    let digits: Vec<u8> = digits.collect::<Option<_>>()?;
    let (&version, digits) = digits.split_first()?;
    let (&format, digits) = digits.split_first_chunk::<5>()?;
    let (&k, digits) = digits.split_first_chunk::<4>()?;
    let (&n, digits) = digits.split_first_chunk::<4>()?;
    let experts = match (version, digits) {
        (VERSION, []) => 1,
        (EXPERTS_VERSION, &[low, high]) => u16::from_le_bytes([low, high]).into(),
        _ => return None,
    };
    let [k, n] = [k, n].map(|size| u32::from_le_bytes(size) as usize);
    let format = WeightFormat::from_bytes(format)?;
    let descriptor = WeightDescriptor::plain(format, k, n).with_experts(experts);
    descriptor.check().ok()?;
    // Experts are dense.
    (experts == 1 || format.sparsity == Sparsity::Dense).then_some(descriptor)
}

/// Creates the parameter that describes a weight; until it is read, it counts as `elements`
/// elements.
pub(super) fn parameter(
    descriptor: WeightDescriptor,
    id: ParamId,
    elements: usize,
    device: &Device,
) -> Param<Tensor<1>> {
    let init = move |device: &Device, _: bool| {
        Tensor::from_data(
            TensorData::from(values(&descriptor).as_slice()),
            (device, DType::F32),
        )
    };
    Param::uninitialized(id, init, device.clone(), false, Shape::new([elements]))
}

/// Creates a parameter into which a mapper may load a description of a weight like `own`. A loaded
/// parameter has the length of a description; a parameter that is read without being loaded has one
/// value.
pub(super) fn expected(own: &WeightDescriptor, id: ParamId, device: &Device) -> Param<Tensor<1>> {
    let init = |device: &Device, _: bool| Tensor::zeros([1], (device, DType::F32));
    Param::uninitialized(id, init, device.clone(), false, Shape::new([length(own)]))
}

/// Returns the description that a mapper loaded into [`expected`]; `None` if it loaded nothing, or
/// values that are not a description.
pub(super) fn loaded(parameter: &Param<Tensor<1>>) -> Option<WeightDescriptor> {
    if !parameter.is_initialized() || ![[LENGTH], [EXPERTS_LENGTH]].contains(&parameter.dims()) {
        return None;
    }
    from_values(&host::<f32, 1, _>(parameter.val()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use marlin_format::{GroupSize, QuantSpec, ScaleDtype};

    #[test]
    fn a_format_survives_every_float_dtype() {
        for spec in [
            QuantSpec::int4(GroupSize::G128),
            QuantSpec::int8(GroupSize::G32).with_zero_points(),
            QuantSpec::int4(GroupSize::Channel).with_scale_dtype(ScaleDtype::BF16),
            QuantSpec::int4(GroupSize::G64).with_scale_dtype(ScaleDtype::F32),
        ] {
            for (k, n, permuted) in [
                (128, 1, true),
                (344, 9, true),
                (57344, 8191, false),
                (1 << 30, 3, true),
                (65, 65_793, true),
            ] {
                let weight = WeightDescriptor::plain(
                    WeightFormat::dense(spec).with_permutation(permuted),
                    k,
                    n,
                );
                for weight in [weight, weight.with_experts(2), weight.with_experts(1024)] {
                    let values = values(&weight);
                    assert_eq!(values.len(), length(&weight));
                    assert_eq!(from_values(&values), Some(weight));
                    let cast = |to: fn(f32) -> f32| values.iter().map(|&value| to(value)).collect();
                    let halves: Vec<f32> = cast(|value| bf16::from_f32(value).to_f32());
                    assert_eq!(from_values(&halves), Some(weight));
                    let halves: Vec<f32> = cast(|value| f16::from_f32(value).to_f32());
                    assert_eq!(from_values(&halves), Some(weight));
                }
            }
        }
    }

    #[test]
    fn other_numbers_are_no_format() {
        let values = values(&WeightDescriptor::plain(
            QuantSpec::int4(GroupSize::G64),
            64,
            2,
        ));
        for (place, value) in [
            (0, 2.0),
            (1, 5.0),
            (2, 33.0),
            (3, 2.0),
            (4, 0.5),
            (5, -1.0),
            (6, f32::NAN),
            (6, 0.0),
        ] {
            let mut other = values.clone();
            other[place] = value;
            assert_eq!(from_values(&other), None, "{value} at {place}");
        }
        assert_eq!(from_values(&values[1..]), None);
    }
}
