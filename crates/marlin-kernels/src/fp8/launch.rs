use super::kernel::{RUN, RowsConfig, quantize_rows};
use crate::problem::expect_length;
use crate::{Card, KernelError, NormOperands, QuantProblem, pdl};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Rows of activations in e4m3.
pub(crate) struct Fp8Rows {
    /// The codes [M, K], two in an element of the activations' dtype.
    pub codes: BufferArg,
    /// The scale of each row, `[M]` in f32.
    pub scales: BufferArg,
}

/// Rounds the activations of a problem, whose K is a multiple of 16, to e4m3. With `norm`, rounds
/// the RMSNorm of their sum with the residual stream.
///
/// # Errors
/// Returns an error for buffers of the wrong length.
pub(crate) fn quantize(
    client: &Client,
    card: &Card,
    problem: &QuantProblem,
    x: BufferArg,
    norm: Option<NormOperands>,
) -> Result<Fp8Rows, KernelError> {
    let (m, k) = (problem.m, problem.k());
    expect_length(problem, "activations", m * k, x.len())?;
    let config = RowsConfig {
        runs: k / RUN,
        has_norm: norm.is_some(),
    };
    let epsilon = norm.as_ref().map_or(0.0, |norm| norm.epsilon);
    let [residual, norm, sum] = NormOperands::arguments(norm, problem)?;
    let (codes, scales) = (client.empty(m * k), client.empty(m * size_of::<f32>()));
    // SAFETY: the buffers were allocated for these elements.
    let [scales_out, scales] =
        [(); 2].map(|()| unsafe { BufferArg::from_raw_parts(scales.clone(), m) });
    // SAFETY: the kernel has a cube for each of the M rows, and the lengths of all buffers were
    // checked against M and K.
    unsafe {
        quantize_rows::launch_unchecked(
            client,
            CubeCount::new_1d(m as u32),
            CubeDim::new_1d(config.units() as u32),
            x,
            residual.into(),
            norm.into(),
            sum.into(),
            BufferArg::from_raw_parts(codes.clone(), m * k / size_of::<u32>()),
            scales_out,
            epsilon,
            config,
            pdl::is_supported_by(card.capability),
            problem.activations.elem(),
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(Fp8Rows {
        // SAFETY: the buffer has M x K bytes.
        codes: unsafe { BufferArg::from_raw_parts(codes, m * k / 2) },
        scales,
    })
}
