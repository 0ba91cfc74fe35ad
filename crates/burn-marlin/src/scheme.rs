//! Burn's quantisation scheme as a [`QuantSpec`].

use crate::Error;
use burn::tensor::quantization::{
    BlockScale, QuantMode, QuantScheme, QuantValue, ScaleDtype as BurnDtype,
};
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, WeightValue};

/// Returns the spec of a weight [K, N] that Burn's `QuantScheme` describes, so that a model which
/// is configured with a scheme can be converted with it.
///
/// A `QuantSpec` says more than a scheme: groups that reach over all of K, zero points, groups
/// whose last one is incomplete. And it says less: a scheme also has other floats, lookup tables,
/// and blocks along any dimension, which no kernel here reads. It is a function and no `TryFrom`,
/// because both types are of other crates.
///
/// | scheme | spec |
/// |---|---|
/// | `Q4F`, `Q4S` | 4-bit integers |
/// | `Q8F`, `Q8S` | 8-bit integers |
/// | `E4M3` | [`QuantSpec::fp8_blocks`]: blocks of [128, 1] |
/// | `E2M1`, blocks of [32, 1], scales `UE8M0` | [`QuantSpec::mxfp4`] |
/// | `E2M1`, blocks of [16, 1], scales `UE4M3` and an f32 scale of the tensor | [`QuantSpec::nvfp4`] |
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
        QuantValue::E4M3 => WeightValue::E4m3,
        QuantValue::E2M1 => WeightValue::E2m1,
        other => {
            return Err(unsupported(
                format!("values {other:?}"),
                "Q4F, Q4S, Q8F, Q8S, E4M3 or E2M1",
            ));
        }
    };
    if scheme.mode != QuantMode::Symmetric {
        return Err(unsupported(format!("mode {:?}", scheme.mode), "Symmetric"));
    }
    let Some(block) = scheme.block_scale() else {
        return Err(unsupported(
            "a scale for the whole tensor".into(),
            "scales per block",
        ));
    };
    if let Some(spec) = microscaling(value, &block, scheme.tensor_scale()) {
        return Ok(spec);
    }
    if scheme.num_levels() != 1 {
        return Err(unsupported(
            "a scale for the whole tensor beside those of blocks".into(),
            "scales per block alone, except for NVFP4",
        ));
    }
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
    let spec = QuantSpec::new(value, group).with_scale_dtype(dtype);
    if value.groups().contains(&group) {
        return Ok(spec);
    }
    let expected = match value {
        WeightValue::E4m3 => "blocks of [128, 1] for E4M3",
        WeightValue::E2m1 => "blocks of [32, 1] or [16, 1] for E2M1",
        WeightValue::Int4 | WeightValue::Int8 => "blocks of [32, 1], [64, 1] or [128, 1]",
    };
    Err(unsupported(spec.to_string(), expected))
}

/// Returns the spec of MXFP4 or NVFP4, if the values and scales are those of one of them.
fn microscaling(
    value: WeightValue,
    block: &BlockScale,
    tensor: Option<BurnDtype>,
) -> Option<QuantSpec> {
    match (value, block.size.as_slice(), block.dtype, tensor) {
        (WeightValue::E2m1, [32, 1], BurnDtype::UE8M0, None) => Some(QuantSpec::mxfp4()),
        (WeightValue::E2m1, [16, 1], BurnDtype::UE4M3, Some(BurnDtype::F32)) => {
            Some(QuantSpec::nvfp4())
        }
        _ => None,
    }
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
            (QuantValue::E4M3, [128, 1], BurnDtype::F32, "e4m3 g128 f32"),
            (QuantValue::E2M1, [32, 1], BurnDtype::UE8M0, "e2m1 g32 f32"),
        ] {
            let spec = spec_of_scheme(&scheme(value, block, dtype));
            assert_eq!(
                spec.map(|spec| spec.to_string()).ok().as_deref(),
                Some(expected)
            );
        }
    }

    #[test]
    fn a_block_scale_beside_one_of_the_tensor_is_nvfp4() {
        let nvfp4 = scheme(QuantValue::E2M1, [16, 1], BurnDtype::UE4M3).per_tensor(BurnDtype::F32);
        assert_eq!(spec_of_scheme(&nvfp4).ok(), Some(QuantSpec::nvfp4()));
    }

    #[test]
    fn other_schemes_are_refused() {
        let good = scheme(QuantValue::Q4F, [32, 1], BurnDtype::F16);
        for (wrong, found) in [
            (good.with_value(QuantValue::E5M2), "values E5M2"),
            (good.with_value(QuantValue::E4M3), "e4m3 g32"),
            (good.with_value(QuantValue::Q2F), "values Q2F"),
            (good.with_mode(QuantMode::Lookup), "mode Lookup"),
            (good.per_tensor(BurnDtype::F32), "the whole tensor"),
            (QuantScheme::default(), "the whole tensor"),
            (good.per_block([32], BurnDtype::F16), "blocks of [32]"),
            (good.per_block([16, 1], BurnDtype::F16), "int4 g16 f16"),
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
