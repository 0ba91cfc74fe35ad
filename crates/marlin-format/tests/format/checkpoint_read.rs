mod folders;
mod headers;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

use half::{bf16, f16};
use marlin_format::checkpoint::{Checkpoint, CheckpointError, Dtype};
use proptest::prelude::*;
use safetensors::SafeTensors;
use tempfile::TempDir;

use crate::common::{cases, message};

/// Returns the bytes of a safetensors file.
fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        data,
    ]
    .concat()
}

/// Returns a file with the tensors `a` (f32 [2]) and `b` (i32 [1, 1]) at an odd offset.
fn small_file() -> Vec<u8> {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"I32","shape":[1,1],"data_offsets":[8,12]}} "#;
    assert_eq!(header.len() % 2, 1);
    file(header, &[0, 0, 128, 63, 0, 0, 0, 64, 255, 255, 255, 255])
}

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    files
        .iter()
        .for_each(|(name, contents)| fs::write(dir.path().join(name), contents).unwrap());
    dir
}

fn open_one(contents: &[u8]) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(folder(&[("model.safetensors", contents)]).path())
}

fn one_tensor(name: &str) -> Vec<u8> {
    file(
        &format!(r#"{{"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#),
        &[7],
    )
}

fn index(tensors: &[(&str, &str)]) -> Vec<u8> {
    let map: serde_json::Map<_, _> = tensors
        .iter()
        .map(|&(name, shard)| (name.into(), shard.into()))
        .collect();
    serde_json::json!({ "metadata": { "total_size": 2 }, "weight_map": map })
        .to_string()
        .into_bytes()
}

#[test]
fn one_file() {
    let dir = folder(&[("model.safetensors", &small_file())]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(checkpoint.dir(), dir.path());
    assert!(checkpoint.contains("a") && !checkpoint.contains("c"));
    let info = checkpoint.info("b").unwrap();
    assert_eq!(
        (info.dtype, info.shape, info.path),
        (
            Dtype::I32,
            &[1, 1][..],
            dir.path().join("model.safetensors").as_path()
        )
    );
    assert!(checkpoint.info("c").is_none());

    let a = checkpoint.tensor("a").unwrap();
    assert_eq!(
        (a.name(), a.dtype(), a.shape(), a.bytes().len()),
        ("a", Dtype::F32, &[2][..], 8)
    );
    assert_eq!(a.to_f32().unwrap(), [1.0, 2.0]);
    assert_eq!(a.expect_shape(&[2]).unwrap().bytes(), a.bytes());
    let b = checkpoint.tensor("b").unwrap();
    assert_eq!(
        (b.to_i32().unwrap(), b.to_i64().unwrap()),
        (vec![-1], vec![-1])
    );
}

#[test]
fn every_readable_dtype() {
    let halves = [f16::from_f32(1.5), f16::from_f32(-2.0)];
    let brains = [bf16::from_f32(1.5), bf16::from_f32(3.0e38)];
    let data = [
        bytemuck::cast_slice(&[i64::MIN, 3]),
        bytemuck::cast_slice(&halves),
        bytemuck::cast_slice::<_, u8>(&brains),
    ]
    .concat();
    let header = r#"{"i":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},"h":{"dtype":"F16","shape":[2],"data_offsets":[16,20]},
        "b":{"dtype":"BF16","shape":[2],"data_offsets":[20,24]},"e":{"dtype":"F32","shape":[0,3],"data_offsets":[24,24]},
        "__metadata__":{"format":"pt"}}"#;
    let checkpoint = open_one(&file(header, &data)).unwrap();
    let tensor = |name| checkpoint.tensor(name).unwrap();
    assert_eq!(tensor("i").to_i64().unwrap(), [i64::MIN, 3]);
    assert_eq!(tensor("h").to_f32().unwrap(), [1.5, -2.0]);
    assert_eq!(tensor("b").to_f32().unwrap(), [1.5, brains[1].to_f32()]);
    assert_eq!(tensor("e").to_f32().unwrap(), [0.0; 0]);
    assert!(!checkpoint.contains("__metadata__"));
}

#[test]
fn wrong_dtypes_and_shapes_are_refused() {
    let checkpoint = open_one(&small_file()).unwrap();
    let (a, b) = (
        checkpoint.tensor("a").unwrap(),
        checkpoint.tensor("b").unwrap(),
    );
    for error in [a.to_i32().unwrap_err(), a.to_i64().unwrap_err()] {
        assert!(
            matches!(&error, CheckpointError::Dtype { tensor, found: Dtype::F32, .. } if tensor == "a")
        );
    }
    let error = b.to_f32().unwrap_err();
    assert!(
        message(&error).contains("`b`")
            && message(&error).contains("is I32; expected F16, BF16 or F32"),
        "{error}"
    );
    let error = b.expect_shape(&[1]).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Shape { expected, found, .. } if expected == &[1] && found == &[1, 1])
    );
    assert!(message(&error).contains("model.safetensors"));
    let error = checkpoint.tensor("c").unwrap_err();
    assert!(matches!(&error, CheckpointError::MissingTensor { tensor, .. } if tensor == "c"));
}

/// Generates a valid file with one change: a changed byte, a cut or an insertion.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let change = (
        any::<prop::sample::Index>(),
        prop_oneof![
            any::<u8>(),
            prop::sample::select(b"0123456789{}[],:\"aF-".to_vec())
        ],
        0..4u8,
    );
    prop::collection::vec(change, 1..4).prop_map(|changes| {
        let mut bytes = small_file();
        for (place, value, kind) in changes {
            let place = place.index(bytes.len());
            match kind {
                0 | 1 => bytes[place] = value,
                2 => bytes.insert(place, value),
                _ => bytes.truncate(place.max(1)),
            }
        }
        bytes
    })
}

proptest! {
    #![proptest_config(cases(600))]

    /// Checks that a mutated file never causes a panic, and is accepted exactly if the
    /// `safetensors` crate accepts it. A file on which that crate panics must be refused.
    #[test]
    fn mutated_files_never_panic(bytes in mutated()) {
        let opened = open_one(&bytes);
        let Ok(reference) = catch_unwind(AssertUnwindSafe(|| SafeTensors::deserialize(&bytes))) else {
            prop_assert!(opened.is_err());
            return Ok(());
        };
        prop_assert_eq!(opened.is_ok(), reference.is_ok(), "{:?} and {:?}", opened.err(), reference.err());
        if let (Ok(opened), Ok(reference)) = (opened, reference) {
            for (name, expected) in reference.iter() {
                let tensor = opened.tensor(name).unwrap();
                prop_assert_eq!((tensor.dtype(), tensor.shape(), tensor.bytes()), (expected.dtype(), expected.shape(), expected.data()));
                let _ = (tensor.to_f32(), tensor.to_i32(), tensor.to_i64());
            }
        }
    }

    #[test]
    fn mutated_indices_never_panic(place: prop::sample::Index, value: u8) {
        let mut index = index(&[("t", "x.safetensors")]);
        let place = place.index(index.len());
        index[place] = value;
        let dir = folder(&[("x.safetensors", &one_tensor("t")), ("model.safetensors.index.json", &index)]);
        if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
            prop_assert_eq!(checkpoint.tensor("t").unwrap().bytes(), [7]);
        }
    }
}
