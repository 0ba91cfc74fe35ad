//! The op on Burn's Flex backend: Rust on the CPU.

use super::{OptionalFloat, OptionalInt, W4A16Backend, W4A16Weight, activation_dtype, linear_shape, problem};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, TensorData};
use half::{bf16, f16};
use marlin_format::layout::PlainLayout;
use marlin_kernels::host::{self, HostWeight};
use marlin_kernels::{ActivationDtype, Kernel, Target, select};

impl W4A16Backend for Flex {
    fn w4a16_linear(x: FloatTensor<Self>, weight: W4A16Weight<Self>, bias: OptionalFloat<Self>) -> FloatTensor<Self> {
        let shape = linear_shape(&x.shape(), weight.n);
        let dtype = x.dtype();
        let (k, n) = (weight.k, weight.n);
        let m = x.shape().num_elements() / k;
        let permuted = matches!(weight.row_permutation, OptionalInt::Present(_));
        // Any other dtype is refused before the op; f32 serves it all the same.
        let activations = activation_dtype(dtype).unwrap_or(ActivationDtype::F32);
        let problem = problem(m, k, n, weight.spec, activations, ActivationDtype::F32, permuted);
        if select(&problem, &Target::flex()).kernel != Kernel::Host {
            let x = Self::float_reshape(x, Shape::new([m, k]));
            let mut out = Self::float_matmul(x, Self::w4a16_dequantize(weight, dtype.into()));
            if let Some(bias) = bias.into_option() {
                out = Self::float_add(out, Self::float_reshape(bias, Shape::new([1, n])));
            }
            return Self::float_reshape(out, shape);
        }
        let (words, scales) = (words_of(weight.words), floats(weight.scales));
        let zero_points = weight.zero_points.into_option().map(words_of);
        let row_permutation = weight.row_permutation.into_option().map(words_of);
        let host = HostWeight {
            words: &words,
            scales: &scales,
            zero_points: zero_points.as_deref(),
            row_permutation: row_permutation.as_deref(),
        };
        let bias = bias.into_option().map(floats);
        let out = host::matmul(&problem, &floats(x), host, bias.as_deref()).unwrap_or_else(|error| panic!("W4A16 matmul refused: {error}"));
        tensor(out, shape, dtype)
    }

    fn w4a16_dequantize(weight: W4A16Weight<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let (k, n) = (weight.k, weight.n);
        let columns = PlainLayout::new(k, n).columns();
        let (words, scales) = (words_of(weight.words), floats(weight.scales));
        let zero_points = weight.zero_points.into_option().map(words_of);
        let rows = weight.row_permutation.into_option().map(words_of);
        let mut values = vec![0.0f32; k * n];
        for row in 0..k {
            let natural = rows.as_ref().map_or(row, |rows| rows[row] as usize);
            let group = row / weight.spec.group.rows(k);
            let words = &words[(row / 8) * columns..][..n];
            let scales = &scales[group * n..][..n];
            let zeros = zero_points.as_ref().map(|zeros| &zeros[group * columns / 8..][..columns / 8]);
            for (column, value) in values[natural * n..][..n].iter_mut().enumerate() {
                let q = (words[column] >> (4 * (row % 8))) & 15;
                let zero = zeros.map_or(8, |zeros| (zeros[column / 8] >> (4 * (column % 8))) & 15);
                *value = (q as f32 - zero as f32) * scales[column];
            }
        }
        tensor(values, Shape::new([k, n]), dtype.into())
    }
}

/// The bits of an i32 tensor, contiguous.
fn words_of(tensor: IntTensor<Flex>) -> Vec<u32> {
    tensor.to_contiguous().storage::<i32>().iter().map(|&word| word as u32).collect()
}

/// The values of a float tensor, contiguous, as f32.
fn floats(tensor: FloatTensor<Flex>) -> Vec<f32> {
    let tensor = tensor.to_contiguous();
    match tensor.dtype() {
        DType::F16 => tensor.storage::<f16>().iter().map(|value| value.to_f32()).collect(),
        DType::BF16 => tensor.storage::<bf16>().iter().map(|value| value.to_f32()).collect(),
        _ => tensor.storage::<f32>().to_vec(),
    }
}

fn tensor(values: Vec<f32>, shape: Shape, dtype: DType) -> FloatTensor<Flex> {
    FloatTensor::<Flex>::from_data(TensorData::new(values, shape).convert_dtype(dtype))
}
