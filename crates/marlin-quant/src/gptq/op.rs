//! The rounding of a block as a Burn backend extension for CubeCL's runtimes.

use super::kernel::{self, Levels, Rounded, Rows};
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_marlin::backend::cube::{buffer, empty};

/// A backend that rounds blocks of rows. All tensors are in f32.
#[backend_extension(Cube, Fusion)]
pub trait RoundingBackend: Backend {
    /// Finds the scale and the zero point of each column, `[N]`, with the least squared error of
    /// the outputs for a group's rows [rows, N], given the part [rows, rows] of the inverse factor
    /// and the second moments `[rows]` of the rows' features.
    #[fusion(meta = grids_spec)]
    fn gptq_grids(
        rows: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        moments: FloatTensor<Self>,
        levels: Levels,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Finds scales and zero points like [`gptq_grids`](Self::gptq_grids), for a group of more rows
    /// than a block, by the squared errors of its weights, weighted by `moments`.
    #[fusion(meta = weighted_grids_spec)]
    fn gptq_weighted_grids(
        rows: FloatTensor<Self>,
        moments: FloatTensor<Self>,
        levels: Levels,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Rounds a block [rows, N] to grids. Returns the codes and the errors divided by the factor's
    /// diagonal, each [rows, N], and the sum of the squares of these errors, `[N]`.
    #[fusion(meta = round_spec)]
    fn gptq_round(
        rows: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        moments: FloatTensor<Self>,
        scales: FloatTensor<Self>,
        zeros: FloatTensor<Self>,
        levels: Levels,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

fn columns_of(rows: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([rows.shape[1]]), DType::F32)
}

fn grids_spec(
    rows: &TensorSpec,
    _factor: &TensorSpec,
    moments: &TensorSpec,
    levels: &Levels,
) -> (TensorSpec, TensorSpec) {
    weighted_grids_spec(rows, moments, levels)
}

fn weighted_grids_spec(
    rows: &TensorSpec,
    _moments: &TensorSpec,
    _levels: &Levels,
) -> (TensorSpec, TensorSpec) {
    (columns_of(rows), columns_of(rows))
}

fn round_spec(
    rows: &TensorSpec,
    _factor: &TensorSpec,
    _moments: &TensorSpec,
    _scales: &TensorSpec,
    _zeros: &TensorSpec,
    _levels: &Levels,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    (rows.clone(), rows.clone(), columns_of(rows))
}

impl RoundingBackend for CubeBackend {
    fn gptq_grids(
        rows: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        moments: FloatTensor<Self>,
        levels: Levels,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        grids(rows, Some(factor), moments, levels)
    }

    fn gptq_weighted_grids(
        rows: FloatTensor<Self>,
        moments: FloatTensor<Self>,
        levels: Levels,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        grids(rows, None, moments, levels)
    }

    fn gptq_round(
        rows: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        moments: FloatTensor<Self>,
        scales: FloatTensor<Self>,
        zeros: FloatTensor<Self>,
        levels: Levels,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let [codes, errors] = [(); 2].map(|()| empty(&rows, rows.shape(), DType::F32));
        let losses = empty(&rows, scales.shape(), DType::F32);
        let client = rows.client.clone();
        let out = Rounded {
            codes: codes.clone().into_buffer_arg(),
            errors: errors.clone().into_buffer_arg(),
            losses: losses.clone().into_buffer_arg(),
        };
        kernel::round(
            &client,
            levels,
            block(rows, moments),
            buffer(factor),
            buffer(scales),
            buffer(zeros),
            out,
        );
        (codes, errors, losses)
    }
}

fn grids(
    rows: CubeTensor,
    factor: Option<CubeTensor>,
    moments: CubeTensor,
    levels: Levels,
) -> (CubeTensor, CubeTensor) {
    let n = rows.shape()[1];
    let losses = empty(&rows, Shape::new([levels.candidates(), n]), DType::F32);
    let [scales, zeros] = [(); 2].map(|()| empty(&rows, Shape::new([n]), DType::F32));
    let client = rows.client.clone();
    kernel::group_losses(
        &client,
        levels,
        block(rows.clone(), moments.clone()),
        factor.map(buffer),
        losses.clone().into_buffer_arg(),
    );
    let (out_scales, out_zeros) = (
        scales.clone().into_buffer_arg(),
        zeros.clone().into_buffer_arg(),
    );
    kernel::choose(
        &client,
        levels,
        block(rows, moments),
        losses.into_buffer_arg(),
        out_scales,
        out_zeros,
    );
    (scales, zeros)
}

fn block(rows: CubeTensor, moments: CubeTensor) -> Rows {
    let shape = rows.shape();
    Rows {
        rows: shape[0],
        n: shape[1],
        weight: buffer(rows),
        moments: buffer(moments),
    }
}
