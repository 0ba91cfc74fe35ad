use std::fs;

use marlin_format::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriter, Dtype, HeaderError, TensorSpec,
};
use proptest::prelude::*;
use safetensors::SafeTensors;

use crate::common::{cases, message};

const DTYPES: &[Dtype] = &[
    Dtype::U8,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::F32,
    Dtype::I64,
];

fn specs() -> [TensorSpec; 3] {
    [
        TensorSpec::new("scale", Dtype::F16, [3]),
        TensorSpec::new("shape", Dtype::I64, [2]),
        TensorSpec::new("packed", Dtype::I32, [1, 2]),
    ]
}

/// Returns the names in a folder, sorted.
fn entries(dir: &std::path::Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_checkpoint_appears_whole() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("some").join("model");
    let source = parent.path().join("tokenizer.json");
    fs::write(&source, "[1]").unwrap();

    let mut writer = CheckpointWriter::create(&dir).unwrap();
    writer.write_file("config.json", b"{}").unwrap();
    writer.copy_file(&source).unwrap();
    writer.declare(specs()).unwrap();
    // An order other than that of the declaration.
    writer
        .write_tensor("packed", &[1, 2, 3, 4, 5, 6, 7, 8])
        .unwrap();
    writer.write_tensor("scale", &[9; 6]).unwrap();
    assert!(!dir.exists());
    writer.write_tensor("shape", &[10; 16]).unwrap();
    writer.finish().unwrap();

    assert_eq!(entries(dir.parent().unwrap()), ["model"]);
    assert_eq!(
        entries(&dir),
        ["config.json", "model.safetensors", "tokenizer.json"]
    );
    assert_eq!(fs::read(dir.join("tokenizer.json")).unwrap(), b"[1]");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for (spec, bytes) in
        specs()
            .into_iter()
            .zip([vec![9; 6], vec![10; 16], vec![1, 2, 3, 4, 5, 6, 7, 8]])
    {
        let tensor = checkpoint.tensor(&spec.name).unwrap();
        assert_eq!(
            (tensor.dtype(), tensor.shape(), tensor.bytes()),
            (spec.dtype, &spec.shape[..], &bytes[..])
        );
    }
    // Readers in PyTorch require the entry `format` and an aligned header.
    let file = fs::read(dir.join("model.safetensors")).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&file).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    assert_eq!(header % 8, 0);
    for info in metadata.tensors().values() {
        assert_eq!(
            info.data_offsets.0 % (info.dtype.bitsize() / 8),
            0,
            "{info:?}"
        );
    }
}

#[test]
fn nothing_is_left_of_an_unfinished_checkpoint() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("model");
    let mut writer = CheckpointWriter::create(&dir).unwrap();
    writer.write_file("config.json", b"{}").unwrap();
    writer.declare(specs()).unwrap();
    writer.write_tensor("scale", &[0; 6]).unwrap();
    assert_eq!(entries(parent.path()).len(), 1);
    drop(writer);
    assert_eq!(entries(parent.path()), [""; 0]);

    let mut writer = CheckpointWriter::create(&dir).unwrap();
    writer.declare(specs()).unwrap();
    writer.write_tensor("scale", &[0; 6]).unwrap();
    let error = writer.finish().unwrap_err();
    assert!(
        matches!(&error, CheckpointError::NotWritten { missing: 2, tensor } if tensor == "packed"),
        "{error}"
    );
    assert_eq!(entries(parent.path()), [""; 0]);

    let error = CheckpointWriter::create(&dir)
        .unwrap()
        .finish()
        .unwrap_err();
    assert!(
        matches!(error, CheckpointError::Declare { declared: false }),
        "{error}"
    );
    assert_eq!(entries(parent.path()), [""; 0]);
}

#[test]
fn targets_in_use_are_refused() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("model");
    fs::create_dir(&dir).unwrap();
    // An empty target folder is accepted.
    let mut writer = CheckpointWriter::create(&dir).unwrap();
    writer.declare([]).unwrap();
    writer.finish().unwrap();
    assert_eq!(Checkpoint::open(&dir).unwrap().names().count(), 0);

    let error = CheckpointWriter::create(&dir).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::TargetNotEmpty { dir: found } if found == &dir),
        "{error}"
    );
    assert_eq!(entries(parent.path()), ["model"]);

    // A target that is a file.
    fs::write(parent.path().join("file"), "").unwrap();
    assert!(matches!(
        CheckpointWriter::create(parent.path().join("file")).unwrap_err(),
        CheckpointError::Io { .. }
    ));
    assert!(CheckpointWriter::create("/").is_err());

    // A target that is filled while the checkpoint is written keeps its contents.
    let late = parent.path().join("late");
    let mut writer = CheckpointWriter::create(&late).unwrap();
    writer.declare([]).unwrap();
    fs::create_dir(&late).unwrap();
    fs::write(late.join("other"), "kept").unwrap();
    assert!(matches!(
        writer.finish().unwrap_err(),
        CheckpointError::TargetNotEmpty { .. }
    ));
    assert_eq!(entries(parent.path()), ["file", "late", "model"]);
    assert_eq!(fs::read(late.join("other")).unwrap(), b"kept");
}

#[test]
fn wrong_use_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let mut writer = CheckpointWriter::create(parent.path().join("model")).unwrap();
    for name in [
        "",
        ".",
        "..",
        "a/b",
        "/a",
        "a/",
        "../a",
        "model.safetensors",
        "model.safetensors.index.json",
    ] {
        let error = writer.write_file(name, b"").unwrap_err();
        assert!(
            matches!(&error, CheckpointError::FileName { name: found } if found == name),
            "{name}: {error}"
        );
    }
    assert!(matches!(
        writer
            .copy_file(&parent.path().join("model.safetensors"))
            .unwrap_err(),
        CheckpointError::FileName { .. }
    ));
    let absent = parent.path().join("absent.json");
    assert!(
        matches!(writer.copy_file(&absent).unwrap_err(), CheckpointError::Io { action: "copy", path, .. } if path == absent)
    );

    assert!(matches!(
        writer.write_tensor("scale", &[]).unwrap_err(),
        CheckpointError::Declare { declared: false }
    ));
    let twice = [
        TensorSpec::new("a", Dtype::U8, [1]),
        TensorSpec::new("a", Dtype::U8, [1]),
    ];
    let error = writer.declare(twice).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Declaration { source: HeaderError::DuplicateTensor { tensor } } if tensor == "a")
    );
    let error = writer
        .declare([TensorSpec::new("__metadata__", Dtype::U8, [1])])
        .unwrap_err();
    assert!(
        matches!(
            error,
            CheckpointError::Declaration {
                source: HeaderError::ReservedName { .. }
            }
        ),
        "{error:?}"
    );
    for shape in [vec![usize::MAX, 2], vec![1 << 60, 8]] {
        let error = writer
            .declare([TensorSpec::new("a", Dtype::U8, shape)])
            .unwrap_err();
        assert!(message(&error).contains("`a`"), "{error:?}");
    }

    writer.declare(specs()).unwrap();
    assert!(matches!(
        writer.declare([]).unwrap_err(),
        CheckpointError::Declare { declared: true }
    ));
    assert!(
        matches!(writer.write_tensor("other", &[]).unwrap_err(), CheckpointError::NotDeclared { tensor } if tensor == "other")
    );
    let error = writer.write_tensor("scale", &[0; 5]).unwrap_err();
    assert!(
        matches!(
            &error,
            CheckpointError::TensorSize {
                expected: 6,
                found: 5,
                ..
            }
        ),
        "{error}"
    );
    writer.write_tensor("scale", &[0; 6]).unwrap();
    assert!(
        matches!(writer.write_tensor("scale", &[0; 6]).unwrap_err(), CheckpointError::WrittenTwice { tensor } if tensor == "scale")
    );
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn written_checkpoints_read_back_equal(
        tensors in prop::collection::btree_map(
            "[a-z\\\\\"é.]{1,8}",
            (prop::sample::select(DTYPES), prop::collection::vec(0..5usize, 0..4), any::<u8>()),
            0..12,
        ),
    ) {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("model");
        let mut writer = CheckpointWriter::create(&dir).unwrap();
        let bytes = |dtype: Dtype, shape: &[usize], first: u8| -> Vec<u8> {
            (0..shape.iter().product::<usize>() * dtype.bitsize() / 8).map(|i| first.wrapping_add(i as u8)).collect()
        };
        writer.declare(tensors.iter().map(|(name, (dtype, shape, _))| TensorSpec::new(name, *dtype, shape.clone()))).unwrap();
        for (name, (dtype, shape, first)) in tensors.iter().rev() {
            writer.write_tensor(name, &bytes(*dtype, shape, *first)).unwrap();
        }
        writer.finish().unwrap();

        let checkpoint = Checkpoint::open(&dir).unwrap();
        prop_assert!(checkpoint.names().eq(tensors.keys()));
        for (name, (dtype, shape, first)) in &tensors {
            let tensor = checkpoint.tensor(name).unwrap();
            prop_assert_eq!((tensor.dtype(), tensor.shape()), (*dtype, &shape[..]));
            prop_assert_eq!(tensor.bytes(), bytes(*dtype, shape, *first));
        }
        let file = fs::read(dir.join("model.safetensors")).unwrap();
        prop_assert_eq!(SafeTensors::deserialize(&file).unwrap().len(), tensors.len());
    }
}
