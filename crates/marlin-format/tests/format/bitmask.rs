//! Tests of float matrices in compressed-tensors' `sparse-24-bitmask`.

use std::fs;

use marlin_format::checkpoint::{Checkpoint, CheckpointError, Dtype};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use safetensors::tensor::TensorView;
use tempfile::TempDir;

use crate::common::{cases, message};

/// A matrix as split by the packer: the bytes of all values, the stored values, and the mask.
struct Matrix {
    dtype: Dtype,
    n: usize,
    k: usize,
    all: Vec<u8>,
    stored: Vec<u8>,
    mask: Vec<u8>,
}

impl Matrix {
    fn random(n: usize, k: usize, dtype: Dtype, seed: u64) -> Self {
        let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
        let size = if dtype == Dtype::F32 { 4 } else { 2 };
        let mask_row = k.div_ceil(8);
        let mut matrix = Self {
            dtype,
            n,
            k,
            all: Vec::new(),
            stored: Vec::new(),
            mask: vec![0; n * mask_row],
        };
        for row in 0..n {
            for four in 0..k / 4 {
                let first = rng.random_range(0..3);
                let kept = [first, rng.random_range(first + 1..4)];
                for place in 0..4 {
                    let bytes: Vec<u8> = (0..size)
                        .map(|_| {
                            if kept.contains(&place) {
                                rng.random()
                            } else {
                                0
                            }
                        })
                        .collect();
                    matrix.all.extend(&bytes);
                    if kept.contains(&place) {
                        matrix.stored.extend(&bytes);
                        matrix.mask[row * mask_row + four / 2] |= 1 << (four % 2 * 4 + place);
                    }
                }
            }
        }
        matrix
    }

    /// Writes a folder with this matrix as `layer.weight`, and another tensor.
    fn write(&self, shape: &[i64], shape_dims: Vec<usize>) -> TempDir {
        let shape: Vec<u8> = shape
            .iter()
            .flat_map(|extent| extent.to_le_bytes())
            .collect();
        let (n, k) = (self.n, self.k);
        let tensors = [
            (
                "layer.shape",
                TensorView::new(Dtype::I64, shape_dims, &shape).unwrap(),
            ),
            (
                "layer.compressed",
                TensorView::new(self.dtype, vec![n, k / 2], &self.stored).unwrap(),
            ),
            (
                "layer.bitmask",
                TensorView::new(Dtype::U8, vec![n, k.div_ceil(8)], &self.mask).unwrap(),
            ),
            (
                "norm.weight",
                TensorView::new(Dtype::F32, vec![1], &[0, 0, 128, 63]).unwrap(),
            ),
        ];
        let dir = tempfile::tempdir().unwrap();
        fs::write(
            dir.path().join("model.safetensors"),
            safetensors::serialize(tensors, None).unwrap(),
        )
        .unwrap();
        dir
    }
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn values_are_in_their_places(n in 1usize..9, fours in 1usize..20, dtype in 0usize..3, seed: u64, flat: bool) {
        let dtype = [Dtype::F16, Dtype::BF16, Dtype::F32][dtype];
        let matrix = Matrix::random(n, 4 * fours, dtype, seed);
        let dir = matrix.write(&[n as i64, 4 * fours as i64], if flat { vec![2] } else { vec![2, 1] });
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        prop_assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["layer.weight", "norm.weight"]);
        prop_assert_eq!(checkpoint.info("layer.weight").unwrap().shape, [n, 4 * fours]);
        for _ in 0..2 {
            let weight = checkpoint.tensor("layer.weight").unwrap();
            prop_assert_eq!((weight.name(), weight.dtype(), weight.shape()), ("layer.weight", dtype, &[n, 4 * fours][..]));
            prop_assert_eq!(weight.bytes(), &matrix.all);
            prop_assert!(weight.is_two_four());
        }
    }
}

#[test]
fn wrong_matrices_are_refused() {
    let mut matrix = Matrix::random(3, 12, Dtype::F16, 1);
    let open = |matrix: &Matrix, shape: &[i64], dims: Vec<usize>| {
        let dir = matrix.write(shape, dims);
        Checkpoint::open(dir.path())
            .and_then(|checkpoint| checkpoint.tensor("layer.weight").map(|_| ()))
            .unwrap_err()
    };
    for (shape, problem) in [
        (vec![3], "it has 1 extents"),
        (vec![-3, 12], "it has 1 extents"),
        (vec![3, 0], "K = 0"),
        (vec![3, 10], "K = 10"),
    ] {
        let error = open(&matrix, &shape, vec![shape.len()]);
        assert!(
            matches!(error, CheckpointError::Values { .. }) && message(&error).contains(problem),
            "{error}"
        );
    }
    let error = open(&matrix, &[3, 16], vec![2]);
    assert!(
        matches!(&error, CheckpointError::Shape { tensor, expected, .. } if tensor == "layer.compressed" && expected == &[3, 8]),
        "{error}"
    );

    // The third four values of row 1, whose mask is the lower half of a byte.
    matrix.mask[3] ^= 0b1111;
    matrix.mask[3] |= 0b0111;
    let error = open(&matrix, &[3, 12], vec![2]);
    assert!(
        message(&error).contains("of values 8 to 11 of row 1 it names"),
        "{error}"
    );
}

#[test]
fn tensors_that_are_no_such_matrix_stay_as_they_are() {
    // 8-bit values belong to a quantised layer.
    let matrix = Matrix {
        dtype: Dtype::U8,
        n: 1,
        k: 4,
        all: Vec::new(),
        stored: vec![1, 2],
        mask: vec![3],
    };
    let dir = matrix.write(&[1, 4], vec![2]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(
        ["layer.bitmask", "layer.compressed", "layer.shape"]
            .iter()
            .all(|name| checkpoint.contains(name))
    );
}
