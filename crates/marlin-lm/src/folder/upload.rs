//! The upload of float tensors to the device.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::{DType, Device, Element, FloatDType, Tensor, TensorData};
use burn_marlin::device::with_dedicated_memory;
use half::{bf16, f16};
use marlin_format::checkpoint::{CheckpointError, Dtype, TensorView, is_float};
use rayon::prelude::*;

use crate::ModelError;

/// The largest number of bytes of a float tensor that are converted at a time. The host holds two
/// such blocks: one that is sent, and one that is converted.
pub(super) const UPLOAD_BYTES: usize = 32 << 20;

/// Waits until the device has received everything given to it, at the end of a layer or tensor.
pub(super) fn sync(device: &Device, layer: &str) -> Result<(), ModelError> {
    device.sync().map_err(|error| ModelError::Upload {
        layer: layer.into(),
        reason: error.to_string(),
    })
}

/// Uploads a float tensor to the device, contiguously: CUDA's tensors of two and more dimensions
/// are otherwise padded to rows of whole 512 bytes, and kernels would copy them in every step. A
/// tensor of more than `most` bytes is uploaded in blocks of its first dimension.
pub(super) fn upload<const D: usize>(
    view: &TensorView<'_>,
    shape: [usize; D],
    dtype: FloatDType,
    device: &Device,
    most: usize,
) -> Result<Tensor<D>, ModelError> {
    let target = (device, DType::from(dtype));
    let row_bytes = view.bytes().len() / shape[0].max(1);
    if view.bytes().len() <= most || row_bytes == 0 || !is_float(view.dtype()) {
        let values = Tensor::<1>::from_data(data(view, view.bytes())?, target);
        return Ok(values.reshape(shape));
    }
    let rows = (most / row_bytes).max(1);
    let elements: usize = shape.iter().product();
    let row = elements / shape[0];
    // An embedding is larger than any other tensor of a calibration on the device.
    let mut tensor = with_dedicated_memory(device, || Tensor::<1>::empty([elements], target));
    for (block, bytes) in view.bytes().chunks(rows * row_bytes).enumerate() {
        let (start, count) = (block * rows, bytes.len() / row_bytes);
        let range = start * row..(start + count) * row;
        let values = data(view, bytes)?;
        // Copies are queued: without a wait the host would hold all blocks at once. The block
        // before is sent while this one is converted.
        sync(device, view.name())?;
        tensor = tensor.slice_assign([range], Tensor::from_data(values, target));
    }
    Ok(tensor.reshape(shape))
}

/// Returns the bytes of the parts of a tensor of `shape` with these indices of each dimension. What
/// lies side by side is not copied.
pub(super) fn part_of<'a>(
    bytes: &'a [u8],
    shape: &[usize],
    parts: &[&[Range<usize>]],
) -> Cow<'a, [u8]> {
    let (Some(&length), Some(ranges)) = (shape.first(), parts.first()) else {
        return Cow::Borrowed(bytes);
    };
    let (rest, rest_parts) = (&shape[1..], &parts[1..]);
    let size = bytes.len() / length.max(1);
    let rows_are_whole = rest
        .iter()
        .zip(rest_parts)
        .all(|(&length, ranges)| matches!(ranges, [all] if *all == (0..length)));
    if let ([range], true) = (ranges, rows_are_whole) {
        return Cow::Borrowed(&bytes[range.start * size..range.end * size]);
    }
    let mut part = Vec::new();
    for range in *ranges {
        if rows_are_whole {
            part.extend_from_slice(&bytes[range.start * size..range.end * size]);
            continue;
        }
        for index in range.clone() {
            part.extend_from_slice(&part_of(&bytes[index * size..][..size], rest, rest_parts));
        }
    }
    Cow::Owned(part)
}

/// Converts `bytes`, a part of a tensor, to values in the file's dtype, on all cores.
fn data(view: &TensorView<'_>, bytes: &[u8]) -> Result<TensorData, CheckpointError> {
    let halves = bytes.as_chunks::<2>().0.par_iter();
    Ok(match view.dtype() {
        Dtype::F16 => vector::<f16>(halves.map(|&bytes| f16::from_le_bytes(bytes)).collect()),
        Dtype::BF16 => vector::<bf16>(halves.map(|&bytes| bf16::from_le_bytes(bytes)).collect()),
        Dtype::F32 => {
            let words = bytes.as_chunks::<4>().0.par_iter();
            vector::<f32>(words.map(|&bytes| f32::from_le_bytes(bytes)).collect())
        }
        _ => vector(view.to_f32()?),
    })
}

fn vector<E: Element>(values: Vec<E>) -> TensorData {
    let count = values.len();
    TensorData::new(values, [count])
}

/// Returns a tensor with rows that follow each other in memory without a gap; see [`upload`].
pub(crate) fn contiguous<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let shape = tensor.dims();
    tensor
        .reshape([shape.iter().product::<usize>()])
        .reshape(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use marlin_format::checkpoint::Checkpoint;

    use crate::tests::support::{config, random_weights, rng, temporary, write_folder};

    #[test]
    #[allow(
        clippy::single_range_in_vec_init,
        reason = "a part is a list of ranges, here often of one"
    )]
    fn parts_have_the_bytes_of_their_indices() {
        let (shape, bytes): (_, Vec<u8>) = ([2, 3, 4], (0..24).collect());
        let parts = |parts: [&[Range<usize>]; 3]| part_of(&bytes, &shape, &parts).into_owned();
        assert_eq!(parts([&[0..2], &[0..3], &[0..4]]), bytes);
        assert_eq!(parts([&[1..2], &[0..3], &[0..4]]), bytes[12..]);
        assert_eq!(parts([&[1..2], &[0..1, 2..3], &[1..3]]), [13, 14, 21, 22]);
        assert_eq!(parts([&[0..2], &[1..2], &[0..1, 3..4]]), [4, 7, 16, 19]);
        let whole = part_of(&bytes, &shape, &[&[0..1], &[0..3], &[0..4]]);
        assert!(matches!(whole, Cow::Borrowed(_)));
    }

    #[test]
    fn blocks_make_the_whole_tensor() {
        let device = Device::flex();
        let config = config();
        let weights = random_weights(&config, &mut rng());
        let name = "model.embed_tokens.weight";
        let shape = [config.vocab_size, config.hidden_size];
        for file in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let (_parent, dir) = temporary();
            write_folder(&dir, &config, &weights, file);
            let checkpoint = Checkpoint::open(&dir).unwrap();
            let view = checkpoint.tensor(name).unwrap();
            let values = |most| {
                upload(&view, shape, FloatDType::F32, &device, most)
                    .unwrap()
                    .try_into_vec_as::<f32>()
                    .unwrap()
            };
            let whole = values(usize::MAX);
            // Blocks of one row, of some rows, of all rows but one, and of all rows.
            for rows in [0, 1, 7, config.vocab_size - 1, config.vocab_size] {
                assert_eq!(
                    values(rows * view.bytes().len() / config.vocab_size),
                    whole,
                    "{file:?}, {rows} rows"
                );
            }
        }
    }
}
