//! GPTQ (arXiv 2210.17323) with the changes of the Marlin paper, section 3.5, alone or with
//! SparseGPT's choice of weights to prune (arXiv 2301.00774).

use std::ops::Range;

use crate::factor::InverseFactor;
use crate::grid::{expect_weight, in_form};
use crate::hessian::read;
use crate::quantizer::{Quantized, Quantizer, read_and_quantize};
use crate::{Hessian, HessianSums, QuantError, round_with_clipping};
use burn::tensor::{DType, Tensor, TensorData};
use marlin_format::layout::PlainLayout;
use marlin_format::{FormatError, GroupSize, PlainParts, PlainWeight, QuantSpec, Scales, Sparsity};

#[cfg(feature = "cubecl-runtime")]
mod device;
mod host;
#[cfg(feature = "cubecl-runtime")]
mod kernel;
#[cfg(feature = "cubecl-runtime")]
mod op;

/// The order in which the input features of a layer are rounded. Later features compensate for the
/// errors of earlier features, and no feature compensates for the error of the last one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RowOrder {
    /// The features in their natural order.
    Natural,
    /// Act-order: the features with the largest second moments first. Groups are formed of
    /// consecutive features in that order. The weight has a permutation, which is applied to
    /// activations at run time.
    ActOrder,
    /// Groups of consecutive features: the group with the largest mean second moment is rounded
    /// first. The features in each group are ordered in the same way; for a 2:4 weight, blocks of
    /// four features are ordered. Activations are not permuted at run time.
    #[default]
    WithinGroups,
}

/// Options of [`gptq`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GptqOptions {
    /// The order in which features are rounded.
    pub order: RowOrder,
    /// The part of the mean of the Hessian's diagonal that is added to the diagonal. If the Hessian
    /// then has no Cholesky factor, the part grows by a factor of ten, up to eight times.
    pub damping: f64,
    /// The sparsity of the result. With 2:4, the weight is pruned while it is rounded (SparseGPT):
    /// in every four rows of a column, the two rows whose pruning would cost most are kept, and
    /// later rows compensate for the error of the pruned rows. Columns that are already 2:4 keep
    /// their zeros with either setting, except with act-order.
    pub sparsity: Sparsity,
    /// The strength of the correction for inputs that differ from the float model's (arXiv
    /// 2504.02692). Before rounding, the weight moves by this part of the way towards the weight
    /// that compensates best for the difference. 0 is no correction; 1 is the full correction,
    /// which overfits to the calibration text. The correction has an effect only with sums that
    /// record the difference: see [`HessianSums::add_beside`] and
    /// [`HessianSums::add_with_residual`].
    pub correction: f32,
}

impl Default for GptqOptions {
    /// Returns the defaults: dense, ordered within groups, a damping of a hundredth of the mean,
    /// and half of the correction.
    fn default() -> Self {
        Self {
            order: RowOrder::default(),
            damping: 0.01,
            sparsity: Sparsity::Dense,
            correction: 0.5,
        }
    }
}

/// A weight that GPTQ has quantised.
#[derive(Debug, Clone, PartialEq)]
pub struct Gptq {
    /// The weight.
    pub weight: PlainWeight,
    /// The squared error that remains in each output feature of a token, `[N]`, averaged over
    /// tokens. The error includes the contribution of the damping.
    pub losses: Vec<f64>,
    /// The damping that was used.
    pub damping: f64,
    /// The number of input features that were zero in every token. Their weights are rounded to
    /// nearest.
    pub dead: usize,
}

/// The minimum number of tokens for calibration: with fewer, the second moments of most features
/// are noise.
pub(crate) const FEWEST_TOKENS: usize = 128;

impl Quantizer for GptqOptions {
    /// Runs [`gptq`], on the device of `sums` if it is a CubeCL device. A layer with fewer than 128
    /// calibration tokens is [rounded with clipping](round_with_clipping); for 2:4, it is pruned by
    /// magnitude first.
    fn quantize(
        &self,
        weight: &[f32],
        k: usize,
        n: usize,
        sums: Option<&HessianSums>,
        spec: &QuantSpec,
    ) -> Result<Quantized, QuantError> {
        let Some(sums) = sums.filter(|sums| sums.tokens() >= FEWEST_TOKENS) else {
            let weight = round_with_clipping(weight, k, n, spec, self.sparsity)?;
            return Ok(Quantized {
                fell_back: true,
                ..Quantized::rounded(weight)
            });
        };
        Ok(gptq_beside(weight, n, sums, spec, self)?.into())
    }

    fn quantize_on_device(
        &self,
        weight: Tensor<2>,
        sums: Option<&HessianSums>,
        spec: &QuantSpec,
    ) -> Result<(Quantized, Tensor<2>), QuantError> {
        #[cfg(feature = "cubecl-runtime")]
        if let Some(sums) = sums.filter(|sums| sums.tokens() >= FEWEST_TOKENS) {
            return match device::gptq(weight.clone(), sums, spec, self)? {
                Some((found, values)) => Ok((found.into(), values)),
                None => read_and_quantize(weight, |weight, _, n| {
                    expect_weight(weight, sums.features(), n)?;
                    Ok(beside_on_host(weight, n, sums, spec, self)?.into())
                }),
            };
        }
        read_and_quantize(weight, |weight, k, n| {
            self.quantize(weight, k, n, sums, spec)
        })
    }
}

impl From<Gptq> for Quantized {
    fn from(
        Gptq {
            weight,
            losses,
            damping,
            dead,
        }: Gptq,
    ) -> Self {
        Self {
            weight,
            losses: Some(losses),
            damping: Some(damping),
            dead,
            fell_back: false,
        }
    }
}

impl Gptq {
    /// Returns the squared error that remains in all outputs of a token.
    pub fn loss(&self) -> f64 {
        self.losses.iter().sum()
    }
}

/// Quantises `weight` [K, N], row-major, for inputs with the second moments `hessian`.
///
/// Rows are rounded one after the other. After each row, the later rows change to compensate for as
/// much of its error as possible (`factor.rs`). The range of a group is searched before its first
/// row is rounded, on the rows as changed by the earlier groups. For each column, the search tries
/// [`SHRINKS`](crate::SHRINKS) parts of the range. It takes the part with the least squared error
/// of the outputs after compensation by the group's own rows and the later rows. For a group of
/// more than 128 rows, the search uses the squared errors of the rounded weights, weighted by the
/// second moments of their features.
///
/// The result is the same for any number of threads.
///
/// # Errors
/// The weight has another shape or values that are not finite; a scale overflows its dtype; the
/// Hessian has no Cholesky factor; a 2:4 weight has act-order, or a K that is not a multiple of 4.
pub fn gptq(
    weight: &[f32],
    n: usize,
    hessian: &Hessian,
    spec: &QuantSpec,
    options: &GptqOptions,
) -> Result<Gptq, QuantError> {
    expect_weight(weight, hessian.features(), n)?;
    on_host(weight, None, n, hessian, spec, options)
}

/// Runs [`gptq`] with sums on a device. The sums may also record the difference between the inputs
/// and those of the float model. In that case, the weight is first moved towards the weight whose
/// outputs are nearest to those of the float model ([`GptqOptions::correction`]).
///
/// The rounding runs in f32 on the device of the sums if that is a CubeCL device other than a CPU.
/// Otherwise, and for a weight with 2:4 columns, it runs on the host.
///
/// # Errors
/// The errors of [`gptq`]; [`QuantError::Read`] if the device fails.
pub fn gptq_beside(
    weight: &[f32],
    n: usize,
    sums: &HessianSums,
    spec: &QuantSpec,
    options: &GptqOptions,
) -> Result<Gptq, QuantError> {
    let k = sums.features();
    expect_weight(weight, k, n)?;
    #[cfg(feature = "cubecl-runtime")]
    if crate::device::rounds(&sums.device())
        && let Some((found, _)) = device::gptq(beside_sums(weight, n, sums), sums, spec, options)?
    {
        return Ok(found);
    }
    beside_on_host(weight, n, sums, spec, options)
}

/// Returns a weight [K, N] in f32 on the device of `sums`.
fn beside_sums(weight: &[f32], n: usize, sums: &HessianSums) -> Tensor<2> {
    Tensor::from_data(
        TensorData::new(weight.to_vec(), [sums.features(), n]),
        (&sums.device(), DType::F32),
    )
}

/// Runs [`gptq_beside`] on the host.
fn beside_on_host(
    weight: &[f32],
    n: usize,
    sums: &HessianSums,
    spec: &QuantSpec,
    options: &GptqOptions,
) -> Result<Gptq, QuantError> {
    let mut right = None;
    if options.correction != 0.0 && sums.has_drift() {
        right = sums
            .correction(beside_sums(weight, n, sums), 0..n)
            .map(read)
            .transpose()?;
    }
    on_host(weight, right.as_deref(), n, &sums.hessian()?, spec, options)
}

/// Runs [`gptq`] for a weight to which `options.correction` times `H⁻¹ right` is added, with
/// `right` [K, N].
fn on_host(
    weight: &[f32],
    right: Option<&[f32]>,
    n: usize,
    hessian: &Hessian,
    spec: &QuantSpec,
    options: &GptqOptions,
) -> Result<Gptq, QuantError> {
    let layer = Layer::new(&hessian.diagonal(), n, spec, options)?;
    let factor = InverseFactor::new(hessian, &layer.order, options.damping)?;
    let target = right.map(|right| {
        let mut target = weight.to_vec();
        let ordered: Vec<f32> = layer
            .order
            .iter()
            .flat_map(|&row| &right[row * n..(row + 1) * n])
            .copied()
            .collect();
        for (&row, changes) in layer
            .order
            .iter()
            .zip(factor.solve(&ordered, n).chunks_exact(n))
        {
            target[row * n..(row + 1) * n]
                .iter_mut()
                .zip(changes)
                .for_each(|(value, change)| *value += options.correction * change);
        }
        target
    });
    let (weight, losses) =
        host::round(&layer, &factor, weight, target.as_deref().unwrap_or(weight))?;
    Ok(Gptq {
        weight,
        losses: per_token(losses, hessian.tokens()),
        damping: factor.damping,
        dead: layer.dead(),
    })
}

/// Converts the losses of all tokens to the mean loss of one token.
fn per_token(losses: Vec<f64>, tokens: usize) -> Vec<f64> {
    losses
        .into_iter()
        .map(|loss| loss / tokens.max(1) as f64)
        .collect()
}

/// Returns the features in the order in which they are rounded.
fn row_order(moments: &[f64], group: GroupSize, options: &GptqOptions) -> Vec<usize> {
    let k = moments.len();
    let mean =
        |rows: &[usize]| rows.iter().map(|&row| moments[row]).sum::<f64>() / rows.len() as f64;
    // Sorts parts of `rows` by their mean second moments, the largest first.
    let sorted = |rows: &[usize], part: usize| {
        let mut parts: Vec<&[usize]> = rows.chunks(part).collect();
        parts.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        parts.concat()
    };
    let rows: Vec<usize> = (0..k).collect();
    match options.order {
        RowOrder::Natural => rows,
        RowOrder::ActOrder => sorted(&rows, 1),
        RowOrder::WithinGroups => {
            // Two of every four rows are kept, so the four rows stay together.
            let together = if options.sparsity == Sparsity::TwoFour {
                4
            } else {
                1
            };
            let group = group.rows(k);
            sorted(&rows, group)
                .chunk_by(|&a, &b| a / group == b / group)
                .flat_map(|rows| sorted(rows, together))
                .collect()
        }
    }
}

/// Returns the groups in the order in which they are rounded: the index of each group, and its
/// range of places in `order`.
fn groups(order: &[usize], group: GroupSize, kind: RowOrder) -> Vec<(usize, Range<usize>)> {
    let (k, rows) = (order.len(), group.rows(order.len()));
    let mut found = Vec::with_capacity(group.count(k));
    let mut start = 0;
    while start < k {
        let (index, len) = match kind {
            RowOrder::ActOrder => (start / rows, rows.min(k - start)),
            RowOrder::Natural | RowOrder::WithinGroups => {
                let index = order[start] / rows;
                (index, rows.min(k - index * rows))
            }
        };
        found.push((index, start..start + len));
        start += len;
    }
    found
}

/// The data that all columns of a layer share.
struct Layer {
    n: usize,
    spec: QuantSpec,
    options: GptqOptions,
    /// The second moment of each feature, in the order in which features are rounded.
    moments: Vec<f64>,
    /// The index of each group, and the places of its features.
    groups: Vec<(usize, Range<usize>)>,
    /// The feature that is rounded at each place.
    order: Vec<usize>,
}

impl Layer {
    /// Creates the layer for features with the second moments `diagonal` [K].
    fn new(
        diagonal: &[f64],
        n: usize,
        spec: &QuantSpec,
        options: &GptqOptions,
    ) -> Result<Self, QuantError> {
        let k = diagonal.len();
        if options.sparsity == Sparsity::TwoFour {
            if options.order == RowOrder::ActOrder {
                return Err(FormatError::SparsePermuted.into());
            }
            if !k.is_multiple_of(4) {
                return Err(FormatError::SparseRows { k }.into());
            }
        }
        let order = row_order(diagonal, spec.scales.group, options);
        let moments = order.iter().map(|&row| diagonal[row]).collect();
        Ok(Self {
            n,
            spec: *spec,
            options: *options,
            moments,
            groups: groups(&order, spec.scales.group, options.order),
            order,
        })
    }

    /// Returns the place of each feature: the inverse of `order`.
    fn places(&self) -> Vec<usize> {
        let mut places = vec![0; self.order.len()];
        self.order
            .iter()
            .enumerate()
            .for_each(|(place, &row)| places[row] = place);
        places
    }

    /// Returns the number of features that are always zero.
    fn dead(&self) -> usize {
        self.moments.iter().filter(|&&moment| moment == 0.0).count()
    }

    /// Assembles the weight from the codes `q` [K, N], in the order in which rows are rounded, and
    /// the groups' scales and zero points, each [groups, N].
    fn assemble(
        &self,
        q: &[u8],
        scales: &[f32],
        zeros: Vec<u8>,
    ) -> Result<PlainWeight, QuantError> {
        let (k, n, order) = (self.order.len(), self.n, &self.order);
        let is_permuted = self.options.order == RowOrder::ActOrder;
        // The place of each stored row.
        let places = if is_permuted {
            (0..k).collect()
        } else {
            self.places()
        };
        let weight = PlainWeight::new(PlainParts {
            k,
            n,
            spec: self.spec,
            qweight: PlainLayout::new(k, n, self.spec.value)
                .pack_with(|row, column| q[places[row] * n + column]),
            metadata: None,
            scales: Scales::from_f32(scales, self.spec.scales.dtype),
            zero_points: self.spec.has_zero_points().then_some(zeros),
            row_permutation: is_permuted.then(|| order.iter().map(|&row| row as u32).collect()),
        })?;
        in_form(weight, self.options.sparsity)
    }
}
