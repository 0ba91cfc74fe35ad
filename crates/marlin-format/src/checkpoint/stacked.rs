//! MXFP4 weights of all experts of a mixture in one tensor, as OpenAI's gpt-oss stores them
//! (`quant_method: mxfp4`).
//!
//! A stack of E experts, each with K input features and N output features, is stored in these
//! tensors, where `{stack}` is a name such as `model.layers.0.mlp.experts.gate_up_proj`:
//!
//! | tensor | dtype | shape | holds |
//! |---|---|---|---|
//! | `{stack}_blocks` | u8 | `[E, N, K/32, 16]` | two values a byte, the first in the lower bits |
//! | `{stack}_scales` | u8 | `[E, N, K/32]` | the scale of each group of 32, `2^(code - 127)` |
//!
//! Rows of gates and of ups alternate in `gate_up_proj`. Biases are in `{stack}_bias` `[E, N]`.
//!
//! Source: transformers `integrations/mxfp4.py`, `models/gpt_oss/modeling_gpt_oss.py`.

use super::layer_tensors::float_weight;
use super::packed::transposed_as;
use super::{Checkpoint, CheckpointError, Dtype, TensorView, float_scales};
use crate::layout::PlainLayout;
use crate::{FormatError, PlainWeight, QuantSpec};

/// The ends of the names of a stack's tensors.
pub(super) const TENSORS: [&str; 2] = [BLOCKS, SCALES];
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";
/// The number of values that share a scale, and the bytes that hold them.
const GROUP: usize = 32;
const GROUP_BYTES: usize = GROUP / 2;

/// The rows of a stack that are the output features of one layer of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StackRows {
    /// The number of the expert.
    pub expert: usize,
    /// The first of the expert's rows.
    pub first: usize,
    /// The distance of the rows: 2 for a gate or an up, which alternate.
    pub step: usize,
    /// The number of rows.
    pub count: usize,
}

/// Returns true if the checkpoint has the stack of experts with this name.
pub fn contains(checkpoint: &Checkpoint, stack: &str) -> bool {
    checkpoint.contains(&format!("{stack}{BLOCKS}"))
}

/// Reads the weights of all experts as one weight `[K, E N]`.
///
/// # Errors
/// [`CheckpointError`] for tensors that are missing, or have another dtype or shape, and for scales
/// that are NaN.
pub fn to_plain(checkpoint: &Checkpoint, stack: &str) -> Result<PlainWeight, CheckpointError> {
    let stack = Stack::new(checkpoint, stack)?;
    let (blocks, scales) = (stack.blocks.bytes(), stack.scales.bytes());
    stack.weight(blocks, scales, stack.experts * stack.rows)
}

/// Reads a layer of one expert, `[K, N]` with the rows as N.
///
/// # Errors
/// The errors of [`to_plain`], and [`CheckpointError::Shape`] if the stack does not have these
/// experts and rows; `experts` and `rows` are the numbers that it should have.
pub fn read_rows(
    checkpoint: &Checkpoint,
    stack: &str,
    [experts, rows]: [usize; 2],
    of_layer: &StackRows,
) -> Result<PlainWeight, CheckpointError> {
    let stack = Stack::new(checkpoint, stack)?;
    let groups = stack.k / GROUP;
    stack
        .blocks
        .expect_shape(&[experts, rows, groups, GROUP_BYTES])?;
    let StackRows {
        expert,
        first,
        step,
        count,
    } = *of_layer;
    let selected = |bytes: &[u8], width: usize| -> Vec<u8> {
        let of_expert = bytes.chunks_exact(width).skip(expert * rows).take(rows);
        let selected = of_expert.skip(first).step_by(step.max(1)).take(count);
        selected.flatten().copied().collect()
    };
    let blocks = selected(stack.blocks.bytes(), groups * GROUP_BYTES);
    let scales = selected(stack.scales.bytes(), groups);
    stack.weight(&blocks, &scales, count)
}

/// Reads a layer of one expert from a stack of floats: the bytes of `[count, K]`. `[experts, rows,
/// k]` are the extents that the stack should have, which is [experts, K, rows] if `has_k_first` and
/// otherwise [experts, rows, K]. A stack of biases has the K 1 and two extents.
///
/// # Errors
/// [`CheckpointError::Shape`] for a stack of another shape; [`CheckpointError::Dtype`] for another
/// dtype than F16, BF16 and F32.
pub fn float_rows(
    stack: &TensorView<'_>,
    [experts, rows, k]: [usize; 3],
    has_k_first: bool,
    of_layer: &StackRows,
) -> Result<Vec<u8>, CheckpointError> {
    let expected = match (stack.shape.len(), has_k_first) {
        (2, _) if k == 1 => vec![experts, rows],
        (_, true) => vec![experts, k, rows],
        (_, false) => vec![experts, rows, k],
    };
    let stack = stack.expect_float()?.expect_shape(&expected)?;
    let size = stack.dtype.bitsize() / 8;
    let of_expert = rows * k * size;
    let bytes = &stack.bytes[of_layer.expert * of_expert..][..of_expert];
    let selected = (0..of_layer.count).map(|row| of_layer.first + row * of_layer.step);
    if !has_k_first {
        let row_bytes = k * size;
        return Ok(selected
            .flat_map(|row| &bytes[row * row_bytes..][..row_bytes])
            .copied()
            .collect());
    }
    let mut found = Vec::with_capacity(of_layer.count * k * size);
    for row in selected {
        for line in bytes.chunks_exact(rows * size) {
            found.extend_from_slice(&line[row * size..][..size]);
        }
    }
    Ok(found)
}

/// The tensors of a stack, whose shapes fit together.
struct Stack<'a> {
    checkpoint: &'a Checkpoint,
    name: &'a str,
    blocks: TensorView<'a>,
    scales: TensorView<'a>,
    experts: usize,
    /// The number of output features of an expert.
    rows: usize,
    /// The number of input features.
    k: usize,
}

impl<'a> Stack<'a> {
    fn new(checkpoint: &'a Checkpoint, name: &'a str) -> Result<Self, CheckpointError> {
        let [blocks, scales] = TENSORS.map(|end| checkpoint.tensor(&format!("{name}{end}")));
        let (blocks, scales) = (blocks?, scales?);
        blocks.expect_dtype(
            &[Dtype::U8],
            "U8, because the config says that experts are MXFP4",
        )?;
        scales.expect_dtype(&[Dtype::U8, Dtype::F8_E8M0], "U8 or F8_E8M0")?;
        let [experts, rows, groups] = match blocks.shape() {
            &[experts, rows, groups, GROUP_BYTES] => [experts, rows, groups],
            found => {
                return Err(blocks.bad_values(format!(
                    "its shape is {found:?}; expected [experts, N, K/32, 16]"
                )));
            }
        };
        scales.expect_shape(&[experts, rows, groups])?;
        Ok(Self {
            checkpoint,
            name,
            blocks,
            scales,
            experts,
            rows,
            k: groups.saturating_mul(GROUP),
        })
    }

    /// Returns the weight `[K, n]` with these values and codes of scales.
    fn weight(
        &self,
        values: &[u8],
        codes: &[u8],
        n: usize,
    ) -> Result<PlainWeight, CheckpointError> {
        let (k, spec) = (self.k, QuantSpec::mxfp4());
        let invalid = |source: FormatError| CheckpointError::Weight {
            layer: self.name.into(),
            path: self.blocks.path().into(),
            source,
        };
        QuantSpec::check_shape(k, n).map_err(invalid)?;
        let numbers = float_scales::numbers(Dtype::U8);
        let numbers = numbers.ok_or_else(|| self.scales.wrong_dtype("U8"))?;
        let scales = transposed_as(codes, n, k / GROUP, |code| numbers[usize::from(code)]);
        float_scales::check(&self.scales, &scales, n)?;
        let layout = PlainLayout::new(k, n, spec.value);
        let words = self.checkpoint.buffer(layout.words());
        float_weight(words, values, spec, [k, n], scales).map_err(invalid)
    }
}
