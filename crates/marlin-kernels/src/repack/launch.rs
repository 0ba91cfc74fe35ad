use super::kernel;
use crate::launch::{elementwise, second};
use crate::problem::{expect_length, expect_presence};
use crate::tile::row_length;
use crate::{KernelError, QuantProblem, WeightBuffers};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_format::{Sparsity, TensorDescriptor, WeightLayout, WeightTensor, WeightValue};

/// Repacks one tensor of a weight from the other layout to `to`. A row permutation is the same in
/// both layouts, so it is not repacked, and `out` is not written.
///
/// # Errors
/// Returns an error for a buffer of the wrong length, a weight that 32-bit indices cannot address,
/// or a tensor that the format does not have.
pub fn tensor(
    client: &Client,
    problem: &QuantProblem,
    tensor: WeightTensor,
    to: WeightLayout,
    source: BufferArg,
    out: BufferArg,
) -> Result<(), KernelError> {
    problem.expect_addressable()?;
    let of = |layout: WeightLayout| {
        problem
            .weight
            .in_layout(layout)
            .tensors()
            .get(tensor)
            .map(TensorDescriptor::matrix_shape)
    };
    let (Some(plain), Some(tile)) = (of(WeightLayout::Plain), of(WeightLayout::Tile)) else {
        return expect_presence(problem, tensor.name(), false, true);
    };
    let [from_shape, to_shape] = if to == WeightLayout::Tile {
        [plain, tile]
    } else {
        [tile, plain]
    };
    expect_length(
        problem,
        tensor.name(),
        from_shape.iter().product(),
        source.len(),
    )?;
    expect_length(problem, tensor.name(), to_shape.iter().product(), out.len())?;
    let (count, dim) = elementwise(client, out.len());
    let bits = problem.spec().value;
    let [from_groups, from_columns, to_columns] =
        [from_shape[0], from_shape[1], to_shape[1]].map(|length| length as u32);
    match (tensor, to) {
        (WeightTensor::Qweight, WeightLayout::Tile) => {
            let [rows, columns, tiles_n] =
                [plain[0], plain[1], tile[1] / 128].map(|length| length as u32);
            kernel::words::launch(
                client, count, dim, source, out, rows, columns, tiles_n, bits,
            );
        }
        (WeightTensor::Qweight, WeightLayout::Plain) => {
            kernel::plain_words::launch(
                client,
                count,
                dim,
                source,
                out,
                to_columns,
                tile[1] as u32 / 128,
                bits,
            );
        }
        (WeightTensor::Metadata, WeightLayout::Tile) => {
            let [rows, columns, tiles_n] =
                [plain[0], plain[1], tile[1] / 128].map(|length| length as u32);
            kernel::metadata::launch(client, count, dim, source, out, rows, columns, tiles_n);
        }
        (WeightTensor::Metadata, WeightLayout::Plain) => {
            kernel::plain_metadata::launch(
                client,
                count,
                dim,
                source,
                out,
                to_columns,
                tile[1] as u32 / 128,
            );
        }
        (WeightTensor::Scales, _) => {
            kernel::scales::launch(
                client,
                count,
                dim,
                source,
                out,
                from_groups,
                from_columns,
                to_columns,
                tile[0] > 1,
                problem.scales.elem(),
            );
        }
        (WeightTensor::ZeroPoints, _) if bits == WeightValue::Int4 => kernel::zero_points::launch(
            client,
            count,
            dim,
            source,
            out,
            from_groups,
            from_columns,
            to_columns,
        ),
        (WeightTensor::ZeroPoints, WeightLayout::Tile) => kernel::byte_zero_points::launch(
            client,
            count,
            dim,
            source,
            out,
            from_groups,
            from_columns,
            to_columns,
        ),
        (WeightTensor::ZeroPoints, WeightLayout::Plain) => kernel::plain_byte_zero_points::launch(
            client,
            count,
            dim,
            source,
            out,
            from_columns,
            to_columns,
        ),
        (WeightTensor::RowPermutation, _) => {}
    }
    Ok(())
}

/// Writes the words of all values of a 2:4 weight, in the plain layout. The kept values, metadata
/// and zero points must be in the plain layout.
///
/// # Errors
/// Returns an error for a buffer of the wrong length, a weight that 32-bit indices cannot address,
/// or a dense weight.
pub fn expand(
    client: &Client,
    problem: &QuantProblem,
    weight: WeightBuffers,
    out: BufferArg,
) -> Result<(), KernelError> {
    let sparse = problem.in_layout(WeightLayout::Plain);
    sparse.expect_addressable()?;
    sparse.expect_weight(&weight.as_ref().map(|_, buffer| buffer.len()))?;
    expect_length(
        problem,
        "output",
        sparse
            .with_sparsity(Sparsity::Dense)
            .weight
            .tensors()
            .qweight
            .elements(),
        out.len(),
    )?;
    let WeightBuffers {
        qweight,
        metadata: Some(metadata),
        zero_points,
        ..
    } = weight
    else {
        return expect_presence(problem, WeightTensor::Metadata.name(), true, false);
    };
    let (count, dim) = elementwise(client, out.len());
    let (k, n, spec) = (problem.k(), problem.n(), problem.spec());
    let [k, n, columns, group] = [
        k,
        n,
        sparse.weight.plain_layout().columns(),
        spec.scales.group.rows(k),
    ]
    .map(|length| length as u32);
    kernel::expand::launch(
        client,
        count,
        dim,
        qweight,
        metadata,
        zero_points.into(),
        out,
        k,
        n,
        columns,
        group,
        spec.value,
    );
    Ok(())
}

/// Returns a problem and its weight in the form that the portable kernels read: dense, in the plain
/// layout. A weight in another form is converted to new buffers.
pub(crate) fn to_portable(
    client: &Client,
    problem: &QuantProblem,
    weight: WeightBuffers,
) -> Result<(QuantProblem, WeightBuffers), KernelError> {
    let weight = to_plain(client, problem, weight)?;
    let problem = problem.in_layout(WeightLayout::Plain);
    if problem.weight.format.sparsity == Sparsity::Dense {
        return Ok((problem, weight));
    }
    let dense = problem.with_sparsity(Sparsity::Dense);
    let words = dense.weight.tensors().qweight.elements();
    let handle = client.empty(words * size_of::<u32>());
    // SAFETY: the buffer was made for these words.
    let out = || unsafe { BufferArg::from_raw_parts(handle.clone(), words) };
    let kept = weight
        .as_ref()
        .try_map(|role, buffer| second(&problem, role.name(), buffer))?;
    expand(client, &problem, kept, out())?;
    Ok((
        dense,
        WeightBuffers {
            qweight: out(),
            metadata: None,
            ..weight
        },
    ))
}

/// Returns a weight in the plain layout, in new buffers if it is in another layout.
fn to_plain(
    client: &Client,
    problem: &QuantProblem,
    weight: WeightBuffers,
) -> Result<WeightBuffers, KernelError> {
    if problem.weight.layout == WeightLayout::Plain {
        return Ok(weight);
    }
    let plain = problem.weight.in_layout(WeightLayout::Plain).tensors();
    weight.try_map(|role, source| {
        let Some(shape) = plain
            .get(role)
            .filter(|_| role != WeightTensor::RowPermutation)
        else {
            return Ok(source);
        };
        let size = if role == WeightTensor::Scales {
            problem.scales.elem().size()
        } else {
            size_of::<u32>()
        };
        let handle = client.empty(shape.elements() * size);
        // SAFETY: the buffer was made for these elements.
        let out = || unsafe { BufferArg::from_raw_parts(handle.clone(), shape.elements()) };
        tensor(client, problem, role, WeightLayout::Plain, source, out())?;
        Ok(out())
    })
}

/// Copies activations [M, K] to [M, K rounded up to a multiple of 8] in the order of the weight's
/// stored rows, with zeros beyond K. The tile kernels read this form.
///
/// # Errors
/// Returns an error for a buffer of the wrong length, activations that 32-bit indices cannot
/// address, or a row permutation `[K]` that is missing or not expected.
pub fn arrange(
    client: &Client,
    problem: &QuantProblem,
    x: BufferArg,
    row_permutation: Option<BufferArg>,
    out: BufferArg,
) -> Result<(), KernelError> {
    let (m, k, k_padded) = (problem.m, problem.k(), row_length(problem.k()));
    problem.expect_addressable()?;
    expect_length(problem, "activations", m * k, x.len())?;
    expect_presence(
        problem,
        WeightTensor::RowPermutation.name(),
        problem.weight.format.permuted,
        row_permutation.is_some(),
    )?;
    if let Some(rows) = &row_permutation {
        expect_length(problem, WeightTensor::RowPermutation.name(), k, rows.len())?;
    }
    expect_length(problem, "arranged activations", m * k_padded, out.len())?;
    if m == 0 {
        return Ok(());
    }
    let (count, dim) = elementwise(client, m * k_padded);
    kernel::arrange::launch(
        client,
        count,
        dim,
        x,
        row_permutation.into(),
        out,
        k as u32,
        k_padded as u32,
        problem.activations.elem(),
    );
    Ok(())
}
