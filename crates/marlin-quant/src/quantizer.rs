//! What quantisers have in common.

use crate::hessian::read;
use crate::{HessianSums, QuantError, round_with_clipping};
use burn::tensor::{DType, Tensor, TensorData};
use marlin_format::{PlainWeight, QuantSpec, Sparsity, quantize};

/// A way to quantise the weight of a linear layer.
pub trait Quantizer: Send + Sync {
    /// Quantises `weight` [K, N], row-major, for inputs of the second moments `sums`, which one
    /// that looks at no data ignores.
    ///
    /// # Errors
    /// A weight of another shape, or that has values that are no numbers, or that the quantiser
    /// cannot quantise so.
    fn quantize(
        &self,
        weight: &[f32],
        k: usize,
        n: usize,
        sums: Option<&HessianSums>,
        spec: &QuantSpec,
    ) -> Result<Quantized, QuantError>;

    /// As [`quantize`](Self::quantize), of a weight [K, N] in f32 on a device: returns the
    /// quantised values there too, f32 [K, N].
    ///
    /// # Errors
    /// As [`quantize`](Self::quantize); [`QuantError::Read`] where the device fails.
    fn quantize_on_device(
        &self,
        weight: Tensor<2>,
        sums: Option<&HessianSums>,
        spec: &QuantSpec,
    ) -> Result<(Quantized, Tensor<2>), QuantError> {
        read_and_quantize(weight, |weight, k, n| {
            self.quantize(weight, k, n, sums, spec)
        })
    }

    /// True if it looks at second moments: for one that does not they need not be summed.
    fn looks_at_data(&self) -> bool {
        true
    }
}

/// [`quantize_on_device`](Quantizer::quantize_on_device) by what `quantize` makes of the weight, K
/// and N on the host.
pub(crate) fn read_and_quantize(
    weight: Tensor<2>,
    quantize: impl FnOnce(&[f32], usize, usize) -> Result<Quantized, QuantError>,
) -> Result<(Quantized, Tensor<2>), QuantError> {
    let ([k, n], device) = (weight.dims(), weight.device());
    let found = quantize(&read(weight)?, k, n)?;
    let values = Tensor::from_data(
        TensorData::new(found.weight.dequantize(), [k, n]),
        (&device, DType::F32),
    );
    Ok((found, values))
}

/// A weight that was quantised.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// The weight.
    pub weight: PlainWeight,
    /// The squared error that is left of a token's outputs, by output feature, where the quantiser
    /// knows it: `[N]`.
    pub losses: Option<Vec<f64>>,
    /// The part of the Hessian's mean diagonal that was added to it, where one was used.
    pub damping: Option<f64>,
    /// Input features that were zero in every token.
    pub dead: usize,
    /// True if the layer saw too little, and was rounded.
    pub fell_back: bool,
}

impl Quantized {
    /// A weight that was rounded without data.
    pub(crate) fn rounded(weight: PlainWeight) -> Self {
        Self {
            weight,
            losses: None,
            damping: None,
            dead: 0,
            fell_back: false,
        }
    }
}

/// Round to nearest, after pruning by magnitude where it is 2:4.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rounding {
    /// 2:4 prunes the weight before.
    pub sparsity: Sparsity,
    /// True if each group's range is searched: [`round_with_clipping`].
    pub clipping: bool,
}

impl Quantizer for Rounding {
    fn quantize(
        &self,
        weight: &[f32],
        k: usize,
        n: usize,
        _: Option<&HessianSums>,
        spec: &QuantSpec,
    ) -> Result<Quantized, QuantError> {
        Ok(Quantized::rounded(match self.clipping {
            true => round_with_clipping(weight, k, n, spec, self.sparsity)?,
            false => quantize(weight.to_vec(), k, n, spec, self.sparsity)?,
        }))
    }

    fn looks_at_data(&self) -> bool {
        false
    }
}
