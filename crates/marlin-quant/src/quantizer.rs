//! The trait that all quantisers implement.

use crate::hessian::read;
use crate::{HessianSums, QuantError, round_with_clipping};
use burn::tensor::{DType, Tensor, TensorData};
use marlin_format::{PlainWeight, QuantSpec, Sparsity, quantize};

/// A method of quantising the weight of a linear layer.
pub trait Quantizer: Send + Sync {
    /// Quantises `weight` [K, N], row-major, for inputs with the second moments `sums`. A quantiser
    /// that uses no calibration data ignores `sums`.
    ///
    /// # Errors
    /// The weight has another shape or values that are not finite, or the quantiser cannot quantise
    /// it to `spec`.
    fn quantize(
        &self,
        weight: &[f32],
        k: usize,
        n: usize,
        sums: Option<&HessianSums>,
        spec: &QuantSpec,
    ) -> Result<Quantized, QuantError>;

    /// Quantises like [`quantize`](Self::quantize), for a weight [K, N] in f32 on a device. Also
    /// returns the quantised values on that device, f32 [K, N].
    ///
    /// # Errors
    /// The errors of [`quantize`](Self::quantize); [`QuantError::Read`] if the device fails.
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

    /// Returns true if the quantiser uses second moments; otherwise they need not be summed.
    fn needs_calibration(&self) -> bool {
        true
    }
}

/// Implements [`quantize_on_device`](Quantizer::quantize_on_device) with `quantize`, which gets the
/// weight on the host, K and N.
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

/// A quantised weight, and the loss of its quantisation.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// The weight.
    pub weight: PlainWeight,
    /// The squared error that remains in each output feature of a token, `[N]`, averaged over
    /// tokens; `None` if the quantiser does not compute the error.
    pub losses: Option<Vec<f64>>,
    /// The damping: the part of the mean of the Hessian's diagonal that was added to the diagonal;
    /// `None` if no Hessian was used.
    pub damping: Option<f64>,
    /// The number of input features that were zero in every token.
    pub dead: usize,
    /// True if the layer was rounded because it had too few calibration tokens.
    pub fell_back: bool,
}

impl Quantized {
    /// Returns the result for a weight that was rounded without calibration data.
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

/// A quantiser that rounds to nearest; for 2:4 sparsity, it prunes by magnitude first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rounding {
    /// The sparsity of the result; with 2:4, the weight is pruned before it is rounded.
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

    fn needs_calibration(&self) -> bool {
        false
    }
}
