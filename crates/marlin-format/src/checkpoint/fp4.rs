//! FP4: weights of e2m1 values in groups along K, as compressed-tensors (`nvfp4-pack-quantized`,
//! `mxfp4-pack-quantized`), AutoRound and ModelOpt store them.
//!
//! A linear layer with K input features, N output features and G groups is stored in these tensors,
//! each named `{layer}.{tensor}`:
//!
//! | tensor | dtype | shape | holds |
//! |---|---|---|---|
//! | `weight_packed`; ModelOpt: `weight` | u8 | `[N, K/2]` | two values a byte, the first in the lower bits |
//! | `weight_scale` of NVFP4 | F8_E4M3 | `[N, G]` | the scale of each group of 16 |
//! | `weight_scale` of MXFP4 | u8 or F8_E8M0 | `[N, G]` | the scale of each group of 32, `2^(code - 127)` |
//! | `weight_global_scale` of NVFP4 | f32 | `[1]` | a divisor of all scales |
//! | `weight_scale_2` of NVFP4 by ModelOpt | f32 | `[]` | a factor of all scales |
//!
//! A weight is the product of value and scale. The quotient or product of the two scales of NVFP4
//! is rounded to f32 first, as in the programs that write the files.
//!
//! Scales of activations (`input_global_scale`, `input_scale`) and of caches are not used: here
//! activations keep their 16 or 32 bits, so products are more accurate than those of FP4
//! activations.
//!
//! Sources: compressed-tensors `compressors/{nvfp4,mxfp4}/base.py`; AutoRound
//! `export/export_to_autoround/qlinear_fp.py`; vLLM `quantization/modelopt.py`.

use super::layer_tensors::LayerTensors;
use super::packed::transposed_as;
use super::{Checkpoint, CheckpointError, Dtype, Fp4Format, TensorView, float_scales, is_float};
use crate::{PlainWeight, QuantSpec};

const PACKED: &str = "weight_packed";
const WEIGHT: &str = "weight";
const SCALE: &str = "weight_scale";
const GLOBAL_SCALE: &str = "weight_global_scale";
const SCALE_2: &str = "weight_scale_2";

/// Returns the names of the tensors of a layer: those that are read, and those that are not used.
pub(super) fn tensors(format: Fp4Format) -> &'static [&'static str] {
    match format {
        Fp4Format::NvFp4Packed => &[PACKED, SCALE, GLOBAL_SCALE, "input_global_scale"],
        Fp4Format::MxFp4Packed => &[PACKED, SCALE, "input_global_scale"],
        Fp4Format::ModelOptNvFp4 => &[WEIGHT, SCALE, SCALE_2, "input_scale", "k_scale", "v_scale"],
    }
}

/// Returns the name of the tensor of values.
fn weight_name(format: Fp4Format) -> &'static str {
    match format {
        Fp4Format::NvFp4Packed | Fp4Format::MxFp4Packed => PACKED,
        Fp4Format::ModelOptNvFp4 => WEIGHT,
    }
}

/// Returns true if `layer` is quantised: it has scales, or values that are not float.
pub fn contains(checkpoint: &Checkpoint, layer: &str, format: Fp4Format) -> bool {
    let weight = checkpoint.info(&format!("{layer}.{}", weight_name(format)));
    checkpoint.contains(&format!("{layer}.{SCALE}"))
        || weight.is_some_and(|weight| !is_float(weight.dtype))
}

/// Reads the weight of `layer`.
///
/// # Errors
/// [`CheckpointError`] for tensors that are missing, or have another dtype or shape, and for scales
/// that are NaN, infinite or negative, of activations also for scales of 0.
pub fn to_plain(
    checkpoint: &Checkpoint,
    layer: &str,
    format: Fp4Format,
) -> Result<PlainWeight, CheckpointError> {
    let (tensors, spec) = (LayerTensors::new(checkpoint, layer), format.spec());
    let weight = tensors.get(weight_name(format))?.expect_dtype(
        &[Dtype::U8],
        "U8, because the config says that the layer is quantised",
    )?;
    let [n, row_bytes] = weight.expect_matrix("[N, K/2]")?;
    let k = row_bytes.saturating_mul(2);
    QuantSpec::check_shape(k, n).map_err(|source| tensors.invalid(&weight, source))?;

    let groups = spec.scales.group.count(k);
    let stored = tensors.get(SCALE)?;
    let numbers = scale_numbers(&tensors, &stored, format)?;
    let codes = stored.expect_shape(&[n, groups])?.bytes();
    let scales = transposed_as(codes, n, groups, |code| numbers[usize::from(code)]);
    float_scales::check(&stored, &scales, n)?;
    float_scales::check_activations(&tensors)?;
    tensors.float_weight(&weight, spec, [k, n], scales)
}

/// Returns the scale that each code in the tensor of scales stands for, which includes the scale of
/// the whole weight.
fn scale_numbers(
    tensors: &LayerTensors<'_>,
    stored: &TensorView<'_>,
    format: Fp4Format,
) -> Result<[f32; 256], CheckpointError> {
    let (dtypes, expected): (&[Dtype], _) = match format {
        Fp4Format::NvFp4Packed | Fp4Format::ModelOptNvFp4 => (&[Dtype::F8_E4M3], "F8_E4M3"),
        Fp4Format::MxFp4Packed => (&[Dtype::U8, Dtype::F8_E8M0], "U8 or F8_E8M0"),
    };
    stored.expect_dtype(dtypes, expected)?;
    let numbers = float_scales::numbers(stored.dtype());
    let numbers = numbers.ok_or_else(|| stored.wrong_dtype(expected))?;
    match format {
        Fp4Format::MxFp4Packed => Ok(numbers),
        Fp4Format::NvFp4Packed => {
            let divisor = whole_scale(tensors, GLOBAL_SCALE, false)?;
            Ok(numbers.map(|number| number / divisor))
        }
        Fp4Format::ModelOptNvFp4 => {
            let factor = whole_scale(tensors, SCALE_2, true)?;
            Ok(numbers.map(|number| number * factor))
        }
    }
}

/// Returns the scale of a whole weight. Only a factor may be 0.
fn whole_scale(
    tensors: &LayerTensors<'_>,
    name: &str,
    is_factor: bool,
) -> Result<f32, CheckpointError> {
    let tensor = tensors.get(name)?;
    let scale = float_scales::single(&tensor)?;
    if scale.is_finite() && (scale > 0.0 || is_factor && scale == 0.0) {
        return Ok(scale);
    }
    let expected = if is_factor {
        "not negative"
    } else {
        "positive"
    };
    Err(tensor.bad_values(format!(
        "the scale of the weight is {scale}; it must be finite and {expected}"
    )))
}
