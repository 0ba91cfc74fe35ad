use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use half::{bf16, f16};
use marlin_format::checkpoint::{Checkpoint, CheckpointError, Dtype, HeaderError, InPlaceOfWeights};
use proptest::prelude::*;
use safetensors::SafeTensors;
use tempfile::TempDir;

use crate::common::{cases, message};

/// A safetensors file, byte by byte.
fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Tensors `a` (f32 [2]) and `b` (i32 [1, 1]), at an odd offset in the file.
fn small_file() -> Vec<u8> {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"I32","shape":[1,1],"data_offsets":[8,12]}} "#;
    assert_eq!(header.len() % 2, 1);
    file(header, &[0, 0, 128, 63, 0, 0, 0, 64, 255, 255, 255, 255])
}

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, contents)| fs::write(dir.path().join(name), contents).unwrap());
    dir
}

fn open_one(contents: &[u8]) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(folder(&[("model.safetensors", contents)]).path())
}

fn one_tensor(name: &str) -> Vec<u8> {
    file(&format!(r#"{{"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#), &[7])
}

fn index(tensors: &[(&str, &str)]) -> Vec<u8> {
    let map: serde_json::Map<_, _> = tensors.iter().map(|&(name, shard)| (name.into(), shard.into())).collect();
    serde_json::json!({ "metadata": { "total_size": 2 }, "weight_map": map }).to_string().into_bytes()
}

#[test]
fn one_file() {
    let dir = folder(&[("model.safetensors", &small_file())]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(checkpoint.dir(), dir.path());
    assert!(checkpoint.contains("a") && !checkpoint.contains("c"));
    let info = checkpoint.info("b").unwrap();
    assert_eq!((info.dtype, info.shape, info.path), (Dtype::I32, &[1, 1][..], dir.path().join("model.safetensors").as_path()));
    assert!(checkpoint.info("c").is_none());

    let a = checkpoint.tensor("a").unwrap();
    assert_eq!((a.name(), a.dtype(), a.shape(), a.bytes().len()), ("a", Dtype::F32, &[2][..], 8));
    assert_eq!(a.to_f32().unwrap(), [1.0, 2.0]);
    assert_eq!(a.expect_shape(&[2]).unwrap().bytes(), a.bytes());
    let b = checkpoint.tensor("b").unwrap();
    assert_eq!((b.to_i32().unwrap(), b.to_i64().unwrap()), (vec![-1], vec![-1]));
}

#[test]
fn every_readable_dtype() {
    let halves = [f16::from_f32(1.5), f16::from_f32(-2.0)];
    let brains = [bf16::from_f32(1.5), bf16::from_f32(3.0e38)];
    let data = [bytemuck::cast_slice(&[i64::MIN, 3]), bytemuck::cast_slice(&halves), bytemuck::cast_slice::<_, u8>(&brains)].concat();
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
fn shards() {
    let second = one_tensor("z");
    let index = index(&[("a", "x-1.safetensors"), ("b", "x-1.safetensors"), ("z", "x-2.safetensors")]);
    let files: [(&str, &[u8]); 3] =
        [("x-1.safetensors", &small_file()), ("x-2.safetensors", &second), ("model.safetensors.index.json", &index)];
    let dir = folder(&files);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b", "z"]);
    assert_eq!(checkpoint.tensor("z").unwrap().bytes(), [7]);
    assert_eq!(checkpoint.tensor("a").unwrap().to_f32().unwrap(), [1.0, 2.0]);
    assert!(checkpoint.info("z").unwrap().path.ends_with("x-2.safetensors"));

    // One file goes before an index.
    fs::write(dir.path().join("model.safetensors"), one_tensor("only")).unwrap();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().names().collect::<Vec<_>>(), ["only"]);
}

/// AutoGPTQ names its file after the format.
#[test]
fn the_only_file_or_index_of_another_name_is_opened() {
    let dir = folder(&[("gptq_model-4bit-128g.safetensors", &one_tensor("a")), ("adapter_model.safetensors", b"no weights of a model")]);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().names().collect::<Vec<_>>(), ["a"]);

    let index = index(&[("a", "gptq-1.safetensors"), ("b", "gptq-2.safetensors")]);
    let files: [(&str, &[u8]); 3] =
        [("gptq-1.safetensors", &one_tensor("a")), ("gptq-2.safetensors", &one_tensor("b")), ("gptq.safetensors.index.json", &index)];
    assert_eq!(Checkpoint::open(folder(&files).path()).unwrap().names().collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn what_lies_in_place_of_weights_is_named() {
    use InPlaceOfWeights::{Adapter, Nothing, OtherForm, Several};
    let cases: [(&[&str], InPlaceOfWeights, &str); 6] = [
        (&["config.json"], Nothing, "download"),
        (&["adapter_config.json", "adapter_model.safetensors"], Adapter, "LoRA adapter"),
        (&["pytorch_model.bin"], OtherForm("pytorch_model.bin".into()), "save_pretrained"),
        (&["model-Q4_1.gguf", "README.md"], OtherForm("model-Q4_1.gguf".into()), "save_pretrained"),
        (&["b.safetensors", "a.safetensors"], Several("a.safetensors".into(), "b.safetensors".into()), "by its path"),
        (&["evil\u{1b}[2J.bin"], OtherForm("evil\u{1b}[2J.bin".into()), "\\u{1b}"),
    ];
    for (names, expected, told) in cases {
        let files: Vec<(&str, &[u8])> = names.iter().map(|&name| (name, b"".as_slice())).collect();
        let error = Checkpoint::open(folder(&files).path()).unwrap_err();
        assert!(message(&error).contains(told), "{error}");
        assert!(matches!(&error, CheckpointError::NoWeights { found, .. } if *found == expected), "{error:?}");
    }
}

#[test]
fn a_pointer_of_git_lfs_is_told_from_weights() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
    let error = open_one(pointer).unwrap_err();
    assert!(matches!(&error, CheckpointError::LfsPointer { .. }) && message(&error).contains("git lfs pull"), "{error:?}");
}

/// Opening a pipe to read from it waits for a writer.
#[cfg(unix)]
#[test]
fn a_pipe_is_refused_without_waiting() {
    let dir = folder(&[]);
    let path = dir.path().join("model.safetensors");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(&error, CheckpointError::Io { .. }) && message(&error).contains("not a regular file"), "{error:?}");
}

#[test]
fn folders_that_are_no_checkpoint_are_refused() {
    let dir = folder(&[("config.json", b"{}")]);
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(&error, CheckpointError::NoWeights { dir: found, .. } if found == dir.path()));
    assert!(message(&error).contains(dir.path().to_str().unwrap()));
    assert!(matches!(Checkpoint::open(dir.path().join("none")).unwrap_err(), CheckpointError::NoWeights { .. }));
    fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(&error, CheckpointError::Io { .. }) && message(&error).contains("not a regular file"), "{error:?}");
}

#[test]
fn bad_indices_are_refused() {
    let open = |index: &[u8], shards: &[(&str, &[u8])]| {
        let dir = folder(shards);
        fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        Checkpoint::open(dir.path()).unwrap_err()
    };
    let one = one_tensor("t");
    for text in ["", "[]", "{}", r#"{"weight_map":[]}"#, r#"{"weight_map":{"t":1}}"#, "\u{feff}{}"] {
        assert!(matches!(open(text.as_bytes(), &[]), CheckpointError::Index { .. }), "{text}");
    }
    let error = open(&index(&[("t", "\u{1b}[2J.safetensors")]), &[]);
    assert!(matches!(&error, CheckpointError::ShardName { shard, .. } if shard == "\\u{1b}[2J.safetensors"), "{error:?}");
    for shard in ["../x.safetensors", "/etc/passwd", "", ".", "..", "a/b.safetensors"] {
        let error = open(&index(&[("t", shard)]), &[]);
        assert!(matches!(&error, CheckpointError::ShardName { shard: found, .. } if found == shard), "{shard}: {error:?}");
    }
    let error = open(&index(&[("t", "x.safetensors"), ("u", "y.safetensors")]), &[("x.safetensors", &one)]);
    assert!(matches!(&error, CheckpointError::MissingShard { tensor, path, .. } if tensor == "u" && path.ends_with("y.safetensors")));
    let error = open(&index(&[("t", "x.safetensors"), ("u", "x.safetensors")]), &[("x.safetensors", &one)]);
    assert!(matches!(&error, CheckpointError::NotInShard { tensor, .. } if tensor == "u"), "{error:?}");
    let u = one_tensor("u");
    let swapped = index(&[("t", "y.safetensors"), ("u", "x.safetensors")]);
    let error = open(&swapped, &[("x.safetensors", &one), ("y.safetensors", &u)]);
    assert!(matches!(&error, CheckpointError::NotInShard { tensor, path, .. } if tensor == "t" && path.ends_with("y.safetensors")));
    let both = index(&[("t", "x.safetensors"), ("u", "y.safetensors")]);
    let error = open(&both, &[("x.safetensors", &one), ("y.safetensors", &one)]);
    let CheckpointError::DuplicateTensor { tensor, first, second } = &error else { panic!("{error:?}") };
    assert_eq!(
        (tensor.as_str(), first.file_name(), second.file_name()),
        ("t", Path::new("x.safetensors").file_name(), Path::new("y.safetensors").file_name())
    );
    assert!(matches!(open(&both, &[("x.safetensors", &one), ("y.safetensors", b"no")]), CheckpointError::Header { .. }));
}

fn header_error(contents: &[u8]) -> HeaderError {
    match open_one(contents) {
        Err(CheckpointError::Header { path, source }) => {
            assert!(path.ends_with("model.safetensors"));
            source
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn truncated_and_oversized_files_are_refused() {
    let whole = small_file();
    assert!(matches!(header_error(&[]), HeaderError::TooShort { found: 0 }));
    for length in 0..whole.len() {
        let error = header_error(&whole[..length]);
        match length {
            0..8 => assert!(matches!(error, HeaderError::TooShort { .. })),
            _ if length < whole.len() - 12 => assert!(matches!(error, HeaderError::PastEnd { .. })),
            _ => assert!(matches!(error, HeaderError::Coverage { .. }), "{length}: {error:?}"),
        }
    }
    let longer = [&whole[..], &[0]].concat();
    let error = header_error(&longer);
    assert!(matches!(error, HeaderError::Coverage { expected: 12, found: 13 }));
    assert!(error.to_string().contains("longer than it says"));
    for length in [u64::MAX, u64::MAX - 7, 1 << 40] {
        let error = header_error(&[&length.to_le_bytes(), &whole[8..]].concat());
        assert!(matches!(error, HeaderError::PastEnd { header, .. } if header == length));
    }
}

#[test]
fn headers_that_are_too_large_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    fs::write(&path, 100_000_001u64.to_le_bytes()).unwrap();
    // A sparse file: no such amount is written.
    fs::File::options().write(true).open(&path).unwrap().set_len(100_000_010).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::Header { source: HeaderError::TooLarge { header: 100_000_001, .. }, .. }), "{error:?}");
}

#[test]
fn headers_that_lie_are_refused() {
    let tensor = |shape: &str, start: u64, end: u64| format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}"#);
    let error = |header: &str| header_error(&file(header, &[0; 12]));
    let two = |a: String, b: String| error(&format!(r#"{{"a":{a},"b":{b}}}"#));

    for header in ["", "{", "[]", "null", r#"{"a":1}"#, r#"{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}"#, "{}x"] {
        assert!(matches!(error(header), HeaderError::Json(_)), "{header}");
    }
    assert!(matches!(error(&format!(r#"{{"a":{}}}"#, tensor("[-1]", 0, 4))), HeaderError::Json(_)));
    for name in ["\\u001b[2J", &"x".repeat(2000)] {
        let error = error(&format!(r#"{{"{name}":{}}}"#, tensor("[1]", 0, 4)));
        assert!(matches!(&error, HeaderError::Name { tensor } if tensor.len() < 300 && !tensor.contains('\u{1b}')), "{error:?}");
    }
    assert!(matches!(header_error(&[&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat()), HeaderError::Json(_)));
    assert!(matches!(error(&"[".repeat(100_000)), HeaderError::Json(_)));

    assert!(matches!(two(tensor("[1]", 0, 4), tensor("[1]", 8, 12)), HeaderError::Gap { expected: 4, found: 8, .. }));
    assert!(matches!(two(tensor("[2]", 0, 8), tensor("[2]", 4, 12)), HeaderError::Gap { expected: 8, found: 4, .. }));
    assert!(matches!(error(&format!(r#"{{"a":{}}}"#, tensor("[2]", 0, 12))), HeaderError::Offsets { expected: 8, .. }));
    assert!(matches!(two(tensor("[3]", 0, 12), tensor("[1]", 12, 8)), HeaderError::Offsets { start: 12, end: 8, .. }));
    assert!(matches!(error(&format!(r#"{{"a":{}}}"#, tensor("[5]", 0, 20))), HeaderError::Coverage { expected: 20, found: 12 }));
    assert!(matches!(error("{}"), HeaderError::Coverage { expected: 0, found: 12 }));
    let huge = tensor("[4294967296,4294967296]", 0, 12);
    assert!(matches!(error(&format!(r#"{{"a":{huge}}}"#)), HeaderError::Size { .. }));
    let odd = r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#;
    assert!(matches!(error(odd), HeaderError::Size { dtype: Dtype::F4, .. }));
}

/// Files that the `safetensors` crate's own check accepts, or panics at where arithmetic is checked.
#[test]
fn duplicates_and_overflowing_offsets_are_refused() {
    let one = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    let error = header_error(&file(&format!(r#"{{"a":{one},"a":{one}}}"#), &[0; 4]));
    assert!(matches!(&error, HeaderError::DuplicateTensor { tensor } if tensor == "a"), "{error:?}");

    // Sizes whose sum, with the header's, is above 2^64.
    let (mut start, mut entries) = (0u64, Vec::new());
    for i in 0..8 {
        let size = if i < 7 { (1u64 << 61) - 1 } else { u64::MAX - start };
        entries.push(format!(r#""{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{}]}}"#, start + size));
        start += size;
    }
    let error = header_error(&file(&format!("{{{}}}", entries.join(",")), &[0; 16]));
    assert!(matches!(error, HeaderError::Coverage { .. } | HeaderError::Size { .. }), "{error:?}");
}

#[test]
fn wrong_dtypes_and_shapes_are_refused() {
    let checkpoint = open_one(&small_file()).unwrap();
    let (a, b) = (checkpoint.tensor("a").unwrap(), checkpoint.tensor("b").unwrap());
    for error in [a.to_i32().unwrap_err(), a.to_i64().unwrap_err()] {
        assert!(matches!(&error, CheckpointError::Dtype { tensor, found: Dtype::F32, .. } if tensor == "a"));
    }
    let error = b.to_f32().unwrap_err();
    assert!(message(&error).contains("`b`") && message(&error).contains("is I32; expected F16, BF16 or F32"), "{error}");
    let error = b.expect_shape(&[1]).unwrap_err();
    assert!(matches!(&error, CheckpointError::Shape { expected, found, .. } if expected == &[1] && found == &[1, 1]));
    assert!(message(&error).contains("model.safetensors"));
    let error = checkpoint.tensor("c").unwrap_err();
    assert!(matches!(&error, CheckpointError::MissingTensor { tensor, .. } if tensor == "c"));
}

/// A change to a valid file: a byte, a cut, an insertion.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<prop::sample::Index>(), prop_oneof![any::<u8>(), prop::sample::select(b"0123456789{}[],:\"aF-".to_vec())], 0..4u8);
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

    /// Never a panic, and the same judgement as the `safetensors` crate, wherever that comes to one.
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
