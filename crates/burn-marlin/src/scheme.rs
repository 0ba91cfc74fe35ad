//! Burn's quantisation scheme as a [`QuantSpec`].

use crate::Error;
use burn::tensor::quantization::{QuantMode, QuantScheme, QuantValue, ScaleDtype as BurnDtype};
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, WeightValue};

/// Returns the spec of a weight [K, N] that Burn's `QuantScheme` describes, so that a model which
/// is configured with a scheme can be converted with it.
///
/// A `QuantSpec` says more than a scheme: groups that reach over all of K, zero points, groups
/// whose last one is incomplete. And it says less: a scheme also has floats, lookup tables, a
/// second level of scales, and blocks along any dimension, which no kernel here reads.
///
/// | scheme | spec |
/// |---|---|
/// | `Q4F`, `Q4S` | 4-bit integers |
/// | `Q8F`, `Q8S` | 8-bit integers |
/// | a block of [32, 1], [64, 1] or [128, 1] | groups of as many rows of K |
/// | scales in f16, bf16 or f32 | the same |
///
/// # Errors
/// [`Error::Scheme`] for every other scheme.
///
/// ```
/// use burn::tensor::quantization::{QuantScheme, QuantValue, ScaleDtype};
///
/// let scheme = QuantScheme::default()
///     .with_value(QuantValue::Q4F)
///     .per_block([64, 1], ScaleDtype::F16);
/// assert_eq!(burn_marlin::spec_of_scheme(&scheme)?.to_string(), "int4 g64 f16");
/// # Ok::<(), burn_marlin::Error>(())
/// ```
pub fn spec_of_scheme(scheme: &QuantScheme) -> Result<QuantSpec, Error> {
    let unsupported = |found: String, expected: &'static str| Error::Scheme { found, expected };
    let value = match scheme.value {
        QuantValue::Q4F | QuantValue::Q4S => WeightValue::Int4,
        QuantValue::Q8F | QuantValue::Q8S => WeightValue::Int8,
        other => {
            return Err(unsupported(
                format!("values {other:?}"),
                "Q4F, Q4S, Q8F or Q8S",
            ));
        }
    };
    if scheme.mode != QuantMode::Symmetric {
        return Err(unsupported(format!("mode {:?}", scheme.mode), "Symmetric"));
    }
    let Some(block) = scheme.block_scale().filter(|_| scheme.num_levels() == 1) else {
        return Err(unsupported(
            "a scale for the whole tensor".into(),
            "scales per block alone",
        ));
    };
    let group = match block.size.as_slice() {
        [rows, 1] => GroupSize::try_from(i64::from(*rows)).ok(),
        _ => None,
    };
    let group = group.ok_or_else(|| {
        unsupported(
            format!("blocks of {:?}", block.size.as_slice()),
            "[32, 1], [64, 1] or [128, 1]",
        )
    })?;
    let dtype = match block.dtype {
        BurnDtype::F16 => ScaleDtype::F16,
        BurnDtype::BF16 => ScaleDtype::BF16,
        BurnDtype::F32 => ScaleDtype::F32,
        other => {
            return Err(unsupported(
                format!("scales in {other:?}"),
                "F16, BF16 or F32",
            ));
        }
    };
    Ok(QuantSpec::new(value, group).with_scale_dtype(dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheme(value: QuantValue, block: [u8; 2], dtype: BurnDtype) -> QuantScheme {
        QuantScheme::default()
            .with_value(value)
            .per_block(block, dtype)
    }

    #[test]
    fn blocks_along_k_are_groups() {
        for (value, block, dtype, expected) in [
            (QuantValue::Q4F, [32, 1], BurnDtype::F16, "int4 g32 f16"),
            (QuantValue::Q4S, [128, 1], BurnDtype::BF16, "int4 g128 bf16"),
            (QuantValue::Q8S, [64, 1], BurnDtype::F32, "int8 g64 f32"),
        ] {
            let spec = spec_of_scheme(&scheme(value, block, dtype));
            assert_eq!(
                spec.map(|spec| spec.to_string()).ok().as_deref(),
                Some(expected)
            );
        }
    }

    #[test]
    fn other_schemes_are_refused() {
        let good = scheme(QuantValue::Q4F, [32, 1], BurnDtype::F16);
        for (wrong, found) in [
            (good.with_value(QuantValue::E2M1), "values E2M1"),
            (good.with_value(QuantValue::Q2F), "values Q2F"),
            (good.with_mode(QuantMode::Lookup), "mode Lookup"),
            (good.per_tensor(BurnDtype::F32), "the whole tensor"),
            (QuantScheme::default(), "the whole tensor"),
            (good.per_block([32], BurnDtype::F16), "blocks of [32]"),
            (good.per_block([16, 1], BurnDtype::F16), "blocks of [16, 1]"),
            (good.per_block([32, 1], BurnDtype::UE4M3), "scales in UE4M3"),
        ] {
            let error = spec_of_scheme(&wrong).map_err(|error| error.to_string());
            assert!(
                matches!(&error, Err(text) if text.contains(found)),
                "{wrong:?}: {error:?}"
            );
        }
    }
}
