//! A weight's format and shape as a parameter of records.

use super::record::host;
use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use marlin_format::{WeightDescriptor, WeightFormat};

/// The name of the parameter that describes a weight. It is the first parameter of the weight.
pub(crate) const FORMAT: &str = "format";

/// The number of values that describe a weight in a record: the version, five for the format, four
/// for K, four for N.
const LENGTH: usize = 14;
const VERSION: u8 = 1;

/// Encodes the format and shape of a weight as numbers below 256. Every float dtype holds these
/// numbers exactly, so a cast of the model does not change them. K and N are four digits each, the
/// lowest first.
fn values(descriptor: &WeightDescriptor) -> [f32; LENGTH] {
    let digits = std::iter::once(VERSION)
        .chain(descriptor.format.to_bytes())
        .chain((descriptor.k as u32).to_le_bytes())
        .chain((descriptor.n as u32).to_le_bytes());
    let mut values = [0.0; LENGTH];
    values
        .iter_mut()
        .zip(digits)
        .for_each(|(value, digit)| *value = f32::from(digit));
    values
}

/// Decodes the numbers of [`values`]. Returns `None` if the numbers describe no weight.
fn from_values(values: &[f32]) -> Option<WeightDescriptor> {
    let digits = values.iter().map(|&value| {
        (value.fract() == 0.0 && (0.0..256.0).contains(&value)).then_some(value as u8)
    });
    let digits: Vec<u8> = digits.collect::<Option<_>>()?;
    let [VERSION, digits @ ..] = digits.as_slice() else {
        return None;
    };
    let (&format, sizes) = digits.split_first_chunk::<5>()?;
    let (&k, n) = sizes.split_first_chunk::<4>()?;
    let [k, n] = [k, n.try_into().ok()?].map(|size| u32::from_le_bytes(size) as usize);
    let descriptor = WeightDescriptor::plain(WeightFormat::from_bytes(format)?, k, n);
    descriptor.check().ok()?;
    Some(descriptor)
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
        Tensor::from_data(TensorData::from(values(&descriptor)), (device, DType::F32))
    };
    Param::uninitialized(id, init, device.clone(), false, Shape::new([elements]))
}

/// Creates a parameter into which a mapper may load a description. A loaded parameter has the
/// length of a description; a parameter that is read without being loaded has one value.
pub(super) fn expected(id: ParamId, device: &Device) -> Param<Tensor<1>> {
    let init = |device: &Device, _: bool| Tensor::zeros([1], (device, DType::F32));
    Param::uninitialized(id, init, device.clone(), false, Shape::new([LENGTH]))
}

/// Returns the description that a mapper loaded into [`expected`]; `None` if it loaded nothing, or
/// values that are not a description.
pub(super) fn loaded(parameter: &Param<Tensor<1>>) -> Option<WeightDescriptor> {
    if !parameter.is_initialized() || parameter.dims() != [LENGTH] {
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
                let values = values(&weight);
                assert_eq!(from_values(&values), Some(weight));
                assert_eq!(
                    from_values(&values.map(|value| bf16::from_f32(value).to_f32())),
                    Some(weight)
                );
                assert_eq!(
                    from_values(&values.map(|value| f16::from_f32(value).to_f32())),
                    Some(weight)
                );
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
            let mut other = values;
            other[place] = value;
            assert_eq!(from_values(&other), None, "{value} at {place}");
        }
        assert_eq!(from_values(&values[1..]), None);
    }
}
