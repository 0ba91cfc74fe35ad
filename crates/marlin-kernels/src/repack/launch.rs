use super::kernel;
use crate::{KernelError, Problem, marlin};
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_format::layout::{PlainLayout, ScaleLayout, ZeroLayout};

/// Words of [`PlainLayout`] to words of [`marlin::layout`].
///
/// # Errors
/// A buffer of the wrong length, or a weight past what 32-bit indices reach.
pub fn words(client: &Client, problem: &Problem, plain: BufferArg, out: BufferArg) -> Result<(), KernelError> {
    let source = PlainLayout::new(problem.k, problem.n);
    let target = marlin::layout(problem.k, problem.n);
    problem.expect_addressable()?;
    problem.expect_length("words", source.words(), plain.len())?;
    problem.expect_length("words in tile layout", target.words(), out.len())?;
    let (count, dim) = elementwise(client, target.words());
    let [rows, columns, tiles_n] = [source.rows(), source.columns(), target.n_padded() / 64].map(|length| length as u32);
    kernel::words::launch(client, count, dim, plain, out, rows, columns, tiles_n);
    Ok(())
}

/// Scales [G, N] in the problem's scale dtype to [`ScaleLayout`].
///
/// # Errors
/// As [`words`].
pub fn scales(client: &Client, problem: &Problem, plain: BufferArg, out: BufferArg) -> Result<(), KernelError> {
    let target = ScaleLayout::new(&marlin::layout(problem.k, problem.n), problem.spec.group);
    problem.expect_addressable()?;
    problem.expect_length("scales", problem.spec.group.count(problem.k) * problem.n, plain.len())?;
    problem.expect_length("scales in tile layout", target.len(), out.len())?;
    let (count, dim) = elementwise(client, target.len());
    let (n, n_padded, grouped) = (problem.n as u32, target.n_padded() as u32, target.groups_padded() > 1);
    kernel::scales::launch(client, count, dim, plain, out, n, n_padded, grouped, problem.scales.elem());
    Ok(())
}

/// Zero points [G, N/8 up], eight a word along N, to [`ZeroLayout`].
///
/// # Errors
/// As [`words`].
pub fn zero_points(client: &Client, problem: &Problem, plain: BufferArg, out: BufferArg) -> Result<(), KernelError> {
    let layout = marlin::layout(problem.k, problem.n);
    let target = ZeroLayout::new(&layout, problem.spec.group);
    let plain_words = PlainLayout::new(problem.k, problem.n).columns() / 8;
    problem.expect_addressable()?;
    problem.expect_length("zero points", problem.spec.group.count(problem.k) * plain_words, plain.len())?;
    problem.expect_length("zero points in tile layout", target.words(), out.len())?;
    let (count, dim) = elementwise(client, target.words());
    kernel::zero_points::launch(client, count, dim, plain, out, plain_words as u32, (layout.n_padded() / 8) as u32);
    Ok(())
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

fn elementwise(client: &Client, elements: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, elements);
    (calculate_cube_count_elemwise(client, elements, dim), dim)
}
