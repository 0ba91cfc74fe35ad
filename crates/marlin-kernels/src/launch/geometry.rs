//! Grids, vector sizes and tensor maps of launches.

use crate::ActivationDtype;
use crate::tile::shape::ATOM_K;
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::prelude::*;

/// Returns the cube count and cube dimensions of a kernel with one unit for each element.
pub fn elementwise(client: &Client, elements: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, elements);
    (calculate_cube_count_elemwise(client, elements, dim), dim)
}

/// Returns the tensor map through which the copy engine reads a matrix [rows, columns] for `wgmma`.
/// A box is `box_rows` rows by 64 columns of 16 bits, 128 bytes a row, swizzled within these 128
/// bytes. `None` if the buffer is an alias of another operand's.
pub fn swizzled_map(
    matrix: BufferArg,
    [rows, columns]: [usize; 2],
    box_rows: usize,
    dtype: ActivationDtype,
) -> Option<TensorMapArg<Tiled>> {
    let BufferArg::Handle { handle } = matrix else {
        return None;
    };
    let tensor = TensorBinding {
        shape: [rows, columns].into(),
        strides: [columns, 1].into(),
        ..handle.into_tensor()
    };
    let boxes = TiledArgs {
        tile_size: [box_rows, ATOM_K].into(),
    };
    Some(
        TensorMapArg::new(boxes, tensor.into_tensor_arg(), dtype.elem())
            .with_swizzle(TensorMapSwizzle::B128),
    )
}

/// Returns the number of values that a unit loads at a time: 16 bytes, or fewer if the length of a
/// row, `features` values, is not a multiple of 16 bytes.
pub fn vector_size(client: &Client, features: usize, dtype: ActivationDtype) -> usize {
    let bytes = dtype.elem().size();
    let widest = (client.properties().hardware.load_width as usize / 8 / bytes).min(16 / bytes);
    (0..)
        .map(|power| widest >> power)
        .find(|&size| features.is_multiple_of(size.max(1)))
        .unwrap_or(1)
        .max(1)
}
