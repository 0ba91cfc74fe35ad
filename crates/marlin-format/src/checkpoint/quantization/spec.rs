//! Parsing of bits, group size and symmetry from the fields of configs.

use serde_json::Value;

use super::fields::Fields;
use crate::checkpoint::ConfigError;
use crate::{GroupSize, QuantSpec, WeightValue};

/// The spec; configs do not have its scale dtype.
pub(super) fn spec(bits: WeightValue, group: GroupSize, symmetric: bool) -> QuantSpec {
    let spec = QuantSpec::new(bits, group);
    if symmetric {
        spec
    } else {
        spec.with_zero_points()
    }
}

/// The width, under the first of these names that is there.
pub(super) fn bits(
    fields: &Fields<'_>,
    names: &[&'static str],
) -> Result<WeightValue, ConfigError> {
    const EXPECTED: &str = "4 or 8";
    let (name, found) = required(fields, names, EXPECTED)?;
    let bits = found
        .as_i64()
        .and_then(|number| WeightValue::try_from(number).ok());
    bits.ok_or_else(|| fields.unsupported(name, EXPECTED, found))
}

/// Returns the group size of integers from the first present field among these names.
pub(super) fn group_size(
    fields: &Fields<'_>,
    names: &[&'static str],
) -> Result<GroupSize, ConfigError> {
    const EXPECTED: &str = "-1, 32, 64 or 128";
    let (name, found) = required(fields, names, EXPECTED)?;
    found
        .as_i64()
        .and_then(|size| GroupSize::try_from(size).ok())
        .filter(|group| GroupSize::INTEGERS.contains(group))
        .ok_or_else(|| fields.unsupported(name, EXPECTED, found))
}

/// Refuses specs that AWQ does not support, which has only 4 bits.
pub(super) fn check_awq(
    fields: &Fields<'_>,
    names: &[&'static str],
    spec: QuantSpec,
) -> Result<(), ConfigError> {
    const EXPECTED: &str = "4 for AWQ";
    let (name, found) = required(fields, names, EXPECTED)?;
    if spec.value == WeightValue::Int4 {
        Ok(())
    } else {
        Err(fields.unsupported(name, EXPECTED, found))
    }
}

/// Refuses specs that the formats of Marlin do not support. Marlin weights are symmetric, with
/// groups of 128 rows or one group over all of K; dense Marlin weights have 4 bits.
///
/// `names` are the field names of the bits, the group size, the symmetry and act-order.
pub(super) fn check_marlin(
    fields: &Fields<'_>,
    names: [&'static str; 4],
    spec: QuantSpec,
    act_order: bool,
    dense: bool,
) -> Result<(), ConfigError> {
    // With one group, the order of rows does not matter.
    let ordered = act_order && spec.scales.group != GroupSize::Channel;
    let checks = [
        (spec.value == WeightValue::Int4 || !dense, "4 for Marlin"),
        (
            matches!(spec.scales.group, GroupSize::Channel | GroupSize::G128),
            "one group a channel or 128 for Marlin formats",
        ),
        (!spec.has_zero_points(), "true for Marlin formats"),
        (!ordered, "rows in their natural order for Marlin formats"),
    ];
    match names.into_iter().zip(checks).find(|(_, (holds, _))| !holds) {
        None => Ok(()),
        Some((name, (_, expected))) => {
            Err(fields.unsupported(name, expected, fields.get(name).unwrap_or(&Value::Null)))
        }
    }
}

fn required<'a>(
    fields: &Fields<'a>,
    names: &[&'static str],
    expected: &'static str,
) -> Result<(&'static str, &'a Value), ConfigError> {
    fields
        .first(names)
        .ok_or_else(|| fields.missing(names.first().copied().unwrap_or_default(), expected))
}
