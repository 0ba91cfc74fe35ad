use super::kernel;
use crate::{KernelError, Problem, WeightLayout, elementwise, marlin};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_format::Bits;

/// Words of a weight from the other layout to `to`.
///
/// # Errors
/// A buffer of the wrong length, a weight past what 32-bit indices reach, or one of 8 bits, which the tile layout does not hold.
pub fn words(client: &Client, problem: &Problem, to: WeightLayout, source: BufferArg, out: BufferArg) -> Result<(), KernelError> {
    let Problem { k, n, spec, .. } = *problem;
    let [plain, tile] = [WeightLayout::Plain, WeightLayout::Tile].map(|layout| layout.words(k, n, spec.bits));
    expect(problem, to, "words", [plain, tile], &source, &out)?;
    let (count, dim) = elementwise(client, out.len());
    let [rows, columns, tiles_n] = [plain[0], plain[1], tile[1] / 128].map(|length| length as u32);
    match to {
        WeightLayout::Tile => kernel::words::launch(client, count, dim, source, out, rows, columns, tiles_n),
        WeightLayout::Plain => kernel::plain_words::launch(client, count, dim, source, out, columns, tiles_n),
    }
    Ok(())
}

/// Scales of a weight, in the problem's scale dtype, from the other layout to `to`.
///
/// # Errors
/// As [`words`].
pub fn scales(client: &Client, problem: &Problem, to: WeightLayout, source: BufferArg, out: BufferArg) -> Result<(), KernelError> {
    let Problem { k, n, spec, .. } = *problem;
    let [plain, tile] = [WeightLayout::Plain, WeightLayout::Tile].map(|layout| layout.scales(k, n, spec.group));
    expect(problem, to, "scales", [plain, tile], &source, &out)?;
    let (count, dim) = elementwise(client, out.len());
    let [from, to] = ends(to, plain, tile).map(|[_, columns]| columns as u32);
    kernel::scales::launch(client, count, dim, source, out, from, to, tile[0] > 1, problem.scales.elem());
    Ok(())
}

/// Zero points of a weight, eight a word, from the other layout to `to`.
///
/// # Errors
/// As [`words`].
pub fn zero_points(client: &Client, problem: &Problem, to: WeightLayout, source: BufferArg, out: BufferArg) -> Result<(), KernelError> {
    let Problem { k, n, spec, .. } = *problem;
    let [plain, tile] = [WeightLayout::Plain, WeightLayout::Tile].map(|layout| layout.zero_points(k, n, &spec));
    expect(problem, to, "zero points", [plain, tile], &source, &out)?;
    let (count, dim) = elementwise(client, out.len());
    let [from, to] = ends(to, plain, tile).map(|[_, words]| words as u32);
    kernel::zero_points::launch(client, count, dim, source, out, from, to);
    Ok(())
}

/// The shapes of source and output on the way to a layout.
fn ends(to: WeightLayout, plain: [usize; 2], tile: [usize; 2]) -> [[usize; 2]; 2] {
    match to {
        WeightLayout::Plain => [tile, plain],
        WeightLayout::Tile => [plain, tile],
    }
}

/// Checks lengths against the shapes in both layouts, the problem against 32-bit indices and its width against the tile layout.
fn expect(
    problem: &Problem,
    to: WeightLayout,
    operand: &'static str,
    [plain, tile]: [[usize; 2]; 2],
    source: &BufferArg,
    out: &BufferArg,
) -> Result<(), KernelError> {
    problem.expect_addressable()?;
    if problem.spec.bits != Bits::Four {
        return Err(KernelError::TileBits { bits: problem.spec.bits });
    }
    let [from, to] = ends(to, plain, tile).map(|[rows, columns]| rows * columns);
    problem.expect_length(operand, from, source.len())?;
    problem.expect_length(operand, to, out.len())
}

/// Activations [M, K] to [M, K up to a multiple of 8] in the order of the weight's stored rows, with zeros past K: what
/// [`marlin::matmul`] reads.
///
/// # Errors
/// As [`words`]; a row permutation `[K]` that is missing or one too many.
pub fn arrange(
    client: &Client,
    problem: &Problem,
    x: BufferArg,
    row_permutation: Option<BufferArg>,
    out: BufferArg,
) -> Result<(), KernelError> {
    let (m, k, k_padded) = (problem.m, problem.k, marlin::row_length(problem.k));
    problem.expect_addressable()?;
    problem.expect_length("activations", m * k, x.len())?;
    problem.expect_optional("row permutation", problem.permuted.then_some(k), row_permutation.as_ref().map(BufferArg::len))?;
    problem.expect_length("arranged activations", m * k_padded, out.len())?;
    if m == 0 {
        return Ok(());
    }
    let (count, dim) = elementwise(client, m * k_padded);
    kernel::arrange::launch(client, count, dim, x, row_permutation.into(), out, k as u32, k_padded as u32, problem.activations.elem());
    Ok(())
}
