//! The second moments of a layer's inputs.

use crate::QuantError;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use rayon::prelude::*;

/// `xᵀ x` [K, K] over the activations `x` [tokens, K] that a layer was called with, in f64.
///
/// Documents of different lengths are added as they come: a token counts once, and there is no padding.
#[derive(Debug, Clone, PartialEq)]
pub struct Hessian {
    features: usize,
    /// Row-major; only the upper triangle is kept up to date.
    sum: Vec<f64>,
    tokens: usize,
}

impl Hessian {
    /// Of no activations yet, for a layer of `features` input features: takes 8 bytes for each pair of features.
    pub fn new(features: usize) -> Self {
        Self { features, sum: vec![0.0; features * features], tokens: 0 }
    }

    /// Adds activations [tokens, K], row-major.
    ///
    /// # Errors
    /// [`QuantError::Rows`] and [`QuantError::NonFiniteActivation`]; nothing is added then.
    pub fn add(&mut self, activations: &[f32]) -> Result<(), QuantError> {
        let k = self.features;
        if k == 0 || !activations.len().is_multiple_of(k) {
            return Err(QuantError::Rows { k, found: activations.len() });
        }
        if let Some(place) = activations.iter().position(|value| !value.is_finite()) {
            return Err(QuantError::NonFiniteActivation { row: self.tokens + place / k, feature: place % k, value: activations[place] });
        }
        self.sum.par_chunks_exact_mut(k).enumerate().for_each(|(i, sums)| {
            for row in activations.chunks_exact(k) {
                let factor = f64::from(row[i]);
                if factor != 0.0 {
                    sums[i..].iter_mut().zip(&row[i..]).for_each(|(sum, &value)| *sum += factor * f64::from(value));
                }
            }
        });
        self.tokens += activations.len() / k;
        Ok(())
    }

    /// K, input features.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Tokens that were added.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Entry [row, column].
    ///
    /// # Panics
    /// Panics if one of them is not below [`features`](Self::features).
    pub fn get(&self, row: usize, column: usize) -> f64 {
        let (first, second) = (row.min(column), row.max(column));
        assert!(second < self.features, "entry [{row}, {column}] of a Hessian of {} features", self.features);
        self.sum[first * self.features + second]
    }

    /// The sum of squares of every feature, `[K]`.
    pub fn diagonal(&self) -> Vec<f64> {
        (0..self.features).map(|i| self.sum[i * self.features + i]).collect()
    }
}

/// The sums of a [`Hessian`] on a device, in f32: batches of activations are multiplied there.
#[derive(Debug)]
pub struct HessianSums {
    /// [K, K].
    sum: Tensor<2>,
    tokens: usize,
    batches: usize,
}

impl HessianSums {
    /// Of no activations yet, for a layer of `features` input features.
    pub fn new(features: usize, device: &Device) -> Self {
        Self { sum: Tensor::zeros([features, features], (device, DType::F32)), tokens: 0, batches: 0 }
    }

    /// Adds a batch of activations [tokens, K], of any float dtype: products of f16 and bf16 are exact in f32, and so are those of tensor cores in TF32.
    ///
    /// # Errors
    /// [`QuantError::NonFiniteBatch`] and [`QuantError::Read`]; nothing is added then.
    ///
    /// # Panics
    /// Panics if the activations have another K.
    pub fn add(&mut self, activations: Tensor<2>) -> Result<(), QuantError> {
        let x = activations.cast(FloatDType::F32);
        let tokens = x.dims()[0];
        let squares = x.clone().square().sum().try_into_vec_as::<f32>().map_err(|error| QuantError::Read { reason: error.to_string() })?;
        if !squares.iter().all(|sum| sum.is_finite()) {
            return Err(QuantError::NonFiniteBatch { batch: self.batches });
        }
        self.sum = self.sum.clone() + x.clone().transpose().matmul(x);
        self.tokens += tokens;
        self.batches += 1;
        Ok(())
    }

    /// The sums on the host.
    ///
    /// # Errors
    /// [`QuantError::Read`] where the device fails.
    pub fn finish(self) -> Result<Hessian, QuantError> {
        let features = self.sum.dims()[0];
        let sum = self.sum.try_into_vec_as::<f32>().map_err(|error| QuantError::Read { reason: error.to_string() })?;
        Ok(Hessian { features, sum: sum.into_iter().map(f64::from).collect(), tokens: self.tokens })
    }
}
