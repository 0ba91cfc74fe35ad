//! Scales as the integer words of a record.

use super::record::host;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use half::{bf16, f16};
use marlin_format::{ScaleDtype, Scales};

pub(super) fn scales_a_word(dtype: ScaleDtype) -> usize {
    if dtype == ScaleDtype::F32 { 1 } else { 2 }
}

/// Packs the bits of scales [G, N] into words: two scales per word along N, the first in the lower
/// half, as [G, N/2 up]; for f32 one scale per word, as [G, N].
pub(super) fn scale_words(scales: &Scales, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let width = scales_a_word(scales.dtype());
    let (bytes, columns) = (scales.as_bytes(), shape[1].max(1));
    let word = |scales: &[u8]| {
        let mut word = [0; 4];
        word[..scales.len()].copy_from_slice(scales);
        i32::from_le_bytes(word)
    };
    let words: Vec<i32> = bytes
        .chunks(columns * 4 / width)
        .flat_map(|row| row.chunks(4).map(word))
        .collect();
    Tensor::from_data(
        TensorData::new(words, [shape[0], shape[1].div_ceil(width)]),
        (device, DType::I32),
    )
}

/// Unpacks the words of [`scale_words`] to scales of the shape `shape`, in the dtype `held`.
pub(super) fn scales_of_words(
    words: Tensor<2, Int>,
    shape: [usize; 2],
    dtype: ScaleDtype,
    held: DType,
) -> Tensor<2> {
    let device = words.device();
    let (words, width) = (host::<i32, 2, _>(words), scales_a_word(dtype));
    let scales_of = |row: &[i32]| {
        row.iter()
            .flat_map(|word| word.to_le_bytes())
            .take(shape[1] * 4 / width)
            .collect::<Vec<_>>()
    };
    let bytes: Vec<u8> = words
        .chunks(shape[1].div_ceil(width).max(1))
        .flat_map(scales_of)
        .collect();
    let halves = || bytes.as_chunks::<2>().0.iter().copied();
    let data = match dtype {
        ScaleDtype::F16 => {
            TensorData::new(halves().map(f16::from_le_bytes).collect::<Vec<_>>(), shape)
        }
        ScaleDtype::BF16 => {
            TensorData::new(halves().map(bf16::from_le_bytes).collect::<Vec<_>>(), shape)
        }
        ScaleDtype::F32 => TensorData::new(
            bytes
                .as_chunks::<4>()
                .0
                .iter()
                .copied()
                .map(f32::from_le_bytes)
                .collect::<Vec<_>>(),
            shape,
        ),
    };
    Tensor::from_data(data, (&device, held))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_come_back_from_words() {
        let device = Device::flex();
        for (dtype, held) in [
            (ScaleDtype::F16, DType::F16),
            (ScaleDtype::BF16, DType::F32),
            (ScaleDtype::F32, DType::F32),
        ] {
            for shape in [[2, 3], [1, 1], [3, 4]] {
                let values: Vec<f32> = (0..shape[0] * shape[1])
                    .map(|index| (index as f32 - 2.0) * 0.375)
                    .collect();
                let words = scale_words(&Scales::from_f32(&values, dtype), shape, &device);
                assert_eq!(
                    words.dims(),
                    [
                        shape[0],
                        shape[1].div_ceil(if dtype == ScaleDtype::F32 { 1 } else { 2 })
                    ]
                );
                let scales = scales_of_words(words, shape, dtype, held);
                assert_eq!((scales.dims(), scales.dtype()), (shape, held));
                assert_eq!(host::<f32, 2, _>(scales), values);
            }
        }
    }
}
