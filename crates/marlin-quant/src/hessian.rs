//! The second moments of a layer's inputs.

use crate::QuantError;
use crate::product::{outer, panel, panels, product};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData, s};
use burn_marlin::device::with_dedicated_memory;
use rayon::prelude::*;
use std::ops::Range;

/// The number of batches of activations that are checked at once: each check makes the device wait
/// for the host.
const CHECKED_AT_ONCE: usize = 16;

/// The Hessian `xᵀ x` [K, K] of the activations `x` [tokens, K] that a layer was called with, in
/// f64.
///
/// Documents of different lengths can be added without padding: every token counts once.
#[derive(Debug, Clone, PartialEq)]
pub struct Hessian {
    features: usize,
    /// The sums [K, K], row-major; only the upper triangle is computed.
    sum: Vec<f64>,
    tokens: usize,
}

impl Hessian {
    /// Creates an empty Hessian for a layer of `features` input features. The Hessian takes 8 bytes
    /// for each pair of features.
    pub fn new(features: usize) -> Self {
        Self {
            features,
            sum: vec![0.0; features * features],
            tokens: 0,
        }
    }

    /// Adds activations [tokens, K], row-major.
    ///
    /// # Errors
    /// [`QuantError::Rows`] and [`QuantError::NonFiniteActivation`]; on an error, nothing is added.
    pub fn add(&mut self, activations: &[f32]) -> Result<(), QuantError> {
        let k = self.features;
        if k == 0 || !activations.len().is_multiple_of(k) {
            return Err(QuantError::Rows {
                k,
                found: activations.len(),
            });
        }
        if let Some(place) = activations.iter().position(|value| !value.is_finite()) {
            return Err(QuantError::NonFiniteActivation {
                row: self.tokens + place / k,
                feature: place % k,
                value: activations[place],
            });
        }
        self.sum
            .par_chunks_exact_mut(k)
            .enumerate()
            .for_each(|(i, sums)| {
                for row in activations.chunks_exact(k) {
                    let factor = f64::from(row[i]);
                    if factor != 0.0 {
                        sums[i..]
                            .iter_mut()
                            .zip(&row[i..])
                            .for_each(|(sum, &value)| *sum += factor * f64::from(value));
                    }
                }
            });
        self.tokens += activations.len() / k;
        Ok(())
    }

    /// Returns the number of input features, K.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Returns the number of tokens added.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns entry [row, column].
    ///
    /// # Panics
    /// Panics if `row` or `column` is not below [`features`](Self::features).
    pub fn get(&self, row: usize, column: usize) -> f64 {
        let (first, second) = (row.min(column), row.max(column));
        assert!(
            second < self.features,
            "entry [{row}, {column}] of a Hessian of {} features",
            self.features
        );
        self.sum[first * self.features + second]
    }

    /// Returns the sum of squares of every feature, `[K]`.
    pub fn diagonal(&self) -> Vec<f64> {
        (0..self.features)
            .map(|i| self.sum[i * self.features + i])
            .collect()
    }
}

/// The sums of a [`Hessian`] on a device, in f32. Batches of activations are multiplied on the
/// device.
#[derive(Debug, Clone)]
pub struct HessianSums {
    /// The sum `xᵀ x`, [K, K].
    sum: Tensor<2>,
    drift: Option<Drift>,
    tokens: usize,
    batches: usize,
    /// The sums of the squares of the batches that are not checked yet.
    unchecked: Vec<Tensor<1>>,
}

/// The products of activations `x` [tokens, K] with the difference between a layer and the same
/// layer of the float model.
#[derive(Debug, Clone)]
enum Drift {
    /// `xᵀ (x' - x)` [K, K], where `x'` are the float model's activations.
    Inputs(Tensor<2>),
    /// `xᵀ r` [K, N], where `r` is the residual that the layer's outputs have to compensate for.
    Outputs(Tensor<2>),
}

impl HessianSums {
    /// Creates empty sums for a layer of `features` input features.
    pub fn new(features: usize, device: &Device) -> Self {
        let sum = with_dedicated_memory(device, || {
            Tensor::zeros([features, features], (device, DType::F32))
        });
        Self {
            sum,
            drift: None,
            tokens: 0,
            batches: 0,
            unchecked: Vec::new(),
        }
    }

    /// Adds a batch of activations [tokens, K], of any float dtype. Products of f16 or bf16 values
    /// are exact in f32, and also on tensor cores in TF32.
    ///
    /// # Errors
    /// [`QuantError::NonFiniteBatch`] for one of the batches so far, and [`QuantError::Read`].
    /// Batches are checked sixteen at a time; the last ones are checked when the sums are used.
    ///
    /// # Panics
    /// Panics if K of the activations differs from K of the sums.
    pub fn add(&mut self, activations: Tensor<2>) -> Result<(), QuantError> {
        self.unchecked
            .push(activations.clone().cast(FloatDType::F32).square().sum());
        self.batches += 1;
        self.tokens += activations.dims()[0];
        add_outer(&mut self.sum, activations.clone(), activations);
        if self.unchecked.len() == CHECKED_AT_ONCE {
            self.check()?;
            self.unchecked.clear();
        }
        Ok(())
    }

    /// Checks that the activations of the last batches are finite; earlier batches have been
    /// checked.
    fn check(&self) -> Result<(), QuantError> {
        if self.unchecked.is_empty() {
            return Ok(());
        }
        let squares = read(Tensor::cat(self.unchecked.clone(), 0))?;
        match squares.iter().position(|sum| !sum.is_finite()) {
            Some(place) => Err(QuantError::NonFiniteBatch {
                batch: self.batches - self.unchecked.len() + place,
            }),
            None => Ok(()),
        }
    }

    /// Adds activations like [`add`](Self::add), together with the activations of the float model,
    /// `float` [tokens, K]. Float activations are added either for every batch or for none.
    ///
    /// # Errors
    /// The errors of [`add`](Self::add).
    ///
    /// # Panics
    /// Panics if the shapes do not match, or if an earlier batch had a residual.
    pub fn add_beside(
        &mut self,
        activations: Tensor<2>,
        float: Tensor<2>,
    ) -> Result<(), QuantError> {
        self.add(activations.clone())?;
        let dtype = FloatDType::from(activations.dtype());
        let inputs = float.cast(FloatDType::F32) - activations.clone().cast(FloatDType::F32);
        let inputs = inputs.cast(dtype);
        match &mut self.drift {
            None => self.drift = Some(Drift::Inputs(outer(activations, inputs))),
            Some(Drift::Inputs(sum)) => add_outer(sum, activations, inputs),
            Some(Drift::Outputs(_)) => panic!("a batch before had a residual"),
        }
        Ok(())
    }

    /// Adds activations like [`add`](Self::add), together with `residual` [tokens, N]: the outputs
    /// of the float model minus the outputs of the float weight for these activations. If the
    /// outputs are added to hidden states, the residual includes the difference of the hidden
    /// states. For N below K, this takes less work and memory than
    /// [`add_beside`](Self::add_beside). A residual is added either for every batch or for none.
    ///
    /// # Errors
    /// The errors of [`add`](Self::add).
    ///
    /// # Panics
    /// Panics if the shapes do not match, or if an earlier batch had the float model's activations.
    pub fn add_with_residual(
        &mut self,
        activations: Tensor<2>,
        residual: Tensor<2>,
    ) -> Result<(), QuantError> {
        self.add(activations.clone())?;
        let dtype = FloatDType::from(activations.dtype());
        let residual = residual.cast(dtype);
        match &mut self.drift {
            None => self.drift = Some(Drift::Outputs(outer(activations, residual))),
            Some(Drift::Outputs(sum)) => add_outer(sum, activations, residual),
            Some(Drift::Inputs(_)) => panic!("a batch before had the float model's activations"),
        }
        Ok(())
    }

    /// Returns the number of input features, K.
    pub fn features(&self) -> usize {
        self.sum.dims()[0]
    }

    /// Returns the number of tokens added.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the device that holds the sums.
    pub fn device(&self) -> Device {
        self.sum.device()
    }

    /// Returns true if the difference from the float model was recorded.
    pub(crate) fn has_drift(&self) -> bool {
        self.drift.is_some()
    }

    /// Returns the sums, [K, K].
    pub(crate) fn sum(&self) -> Tensor<2> {
        self.sum.clone()
    }

    /// Returns the sum of squares of every feature, `[K]`.
    pub(crate) fn diagonal(&self) -> Result<Vec<f64>, QuantError> {
        self.check()?;
        let k = self.features();
        let places: Vec<i32> = (0..k).map(|i| (i * (k + 1)) as i32).collect();
        let places =
            Tensor::<1, Int>::from_data(TensorData::new(places, [k]), (&self.device(), DType::I32));
        Ok(read(self.sum().reshape([k * k]).select(0, places))?
            .into_iter()
            .map(f64::from)
            .collect())
    }

    /// Returns the sums for the same activations of both models, with each feature divided by its
    /// scale in `scales`, `[K]`.
    ///
    /// # Panics
    /// Panics if there are not K scales.
    #[must_use]
    pub fn divided(&self, scales: &[f32]) -> Self {
        let k = self.features();
        assert_eq!(scales.len(), k, "scales of {k} features");
        let rows = Tensor::<2>::from_data(
            TensorData::new(scales.to_vec(), [k, 1]),
            (&self.device(), DType::F32),
        );
        // A product does not depend on the order of its factors, so the sums stay symmetric.
        let pairs = rows.clone() * rows.clone().transpose();
        let drift = self.drift.as_ref().map(|drift| match drift {
            Drift::Inputs(inputs) => Drift::Inputs(inputs.clone() / pairs.clone()),
            Drift::Outputs(outputs) => Drift::Outputs(outputs.clone() / rows),
        });
        Self {
            sum: self.sum() / pairs,
            drift,
            unchecked: self.unchecked.clone(),
            ..*self
        }
    }

    /// Returns columns of `xᵀ (x' - x) W` or `xᵀ r` [K, N], for a weight `W` [K, N]. If `H` times a
    /// change of the weight equals this matrix, the changed weight has the outputs nearest to those
    /// of the float model. Returns `None` if the difference from the float model was not recorded.
    pub(crate) fn correction(&self, weight: Tensor<2>, columns: Range<usize>) -> Option<Tensor<2>> {
        Some(match self.drift.clone()? {
            Drift::Inputs(inputs) => product(inputs, weight.slice(s![.., columns])),
            Drift::Outputs(outputs) => outputs.slice(s![.., columns]),
        })
    }

    /// Reads the sums to the host.
    ///
    /// # Errors
    /// [`QuantError::NonFiniteBatch`] for one of the last batches; [`QuantError::Read`] if the
    /// device fails.
    pub fn hessian(&self) -> Result<Hessian, QuantError> {
        self.check()?;
        let sum = read(self.sum.clone())?;
        Ok(Hessian {
            features: self.features(),
            sum: sum.into_iter().map(f64::from).collect(),
            tokens: self.tokens,
        })
    }
}

/// Adds `xᵀ y` of a batch to a sum [K, N], one panel of rows at a time. The sum is changed in
/// place: a sum of 14,336 features takes 0.8 GB.
fn add_outer(sum: &mut Tensor<2>, x: Tensor<2>, y: Tensor<2>) {
    let [k, n] = sum.dims();
    if k <= panel(n) {
        return sum.inplace(|sum| sum + outer(x, y));
    }
    for rows in panels(0..k, n) {
        let products = outer(x.clone().slice(s![.., rows.clone()]), y.clone());
        sum.inplace(|sum| {
            let added = sum.clone().slice(s![rows.clone(), ..]) + products;
            sum.slice_assign(s![rows, ..], added)
        });
    }
}

/// Reads the values of a tensor to the host.
pub(crate) fn read<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, QuantError> {
    tensor
        .try_into_vec_as::<f32>()
        .map_err(|error| QuantError::Read {
            reason: error.to_string(),
        })
}
