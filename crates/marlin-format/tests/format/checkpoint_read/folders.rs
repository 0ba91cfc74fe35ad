//! Tests which files of a folder are opened, and which folders and indices are refused.

use std::fs;
use std::path::Path;

use marlin_format::checkpoint::{Checkpoint, CheckpointError, InPlaceOfWeights};

use super::{folder, index, one_tensor, open_one, small_file};
use crate::common::message;

#[test]
fn shards() {
    let second = one_tensor("z");
    let index = index(&[
        ("a", "x-1.safetensors"),
        ("b", "x-1.safetensors"),
        ("z", "x-2.safetensors"),
    ]);
    let files: [(&str, &[u8]); 3] = [
        ("x-1.safetensors", &small_file()),
        ("x-2.safetensors", &second),
        ("model.safetensors.index.json", &index),
    ];
    let dir = folder(&files);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b", "z"]);
    assert_eq!(checkpoint.tensor("z").unwrap().bytes(), [7]);
    assert_eq!(
        checkpoint.tensor("a").unwrap().to_f32().unwrap(),
        [1.0, 2.0]
    );
    assert!(
        checkpoint
            .info("z")
            .unwrap()
            .path
            .ends_with("x-2.safetensors")
    );

    // A single file takes precedence over an index.
    fs::write(dir.path().join("model.safetensors"), one_tensor("only")).unwrap();
    assert_eq!(
        Checkpoint::open(dir.path())
            .unwrap()
            .names()
            .collect::<Vec<_>>(),
        ["only"]
    );
}

/// AutoGPTQ includes the format in its file name.
#[test]
fn the_only_file_or_index_of_another_name_is_opened() {
    let dir = folder(&[
        ("gptq_model-4bit-128g.safetensors", &one_tensor("a")),
        ("adapter_model.safetensors", b"no weights of a model"),
    ]);
    assert_eq!(
        Checkpoint::open(dir.path())
            .unwrap()
            .names()
            .collect::<Vec<_>>(),
        ["a"]
    );

    let index = index(&[("a", "gptq-1.safetensors"), ("b", "gptq-2.safetensors")]);
    let files: [(&str, &[u8]); 3] = [
        ("gptq-1.safetensors", &one_tensor("a")),
        ("gptq-2.safetensors", &one_tensor("b")),
        ("gptq.safetensors.index.json", &index),
    ];
    assert_eq!(
        Checkpoint::open(folder(&files).path())
            .unwrap()
            .names()
            .collect::<Vec<_>>(),
        ["a", "b"]
    );
}

#[test]
fn what_lies_in_place_of_weights_is_named() {
    use InPlaceOfWeights::{Adapter, Nothing, OtherForm, Several};
    let cases: [(&[&str], InPlaceOfWeights, &str); 6] = [
        (&["config.json"], Nothing, "download"),
        (
            &["adapter_config.json", "adapter_model.safetensors"],
            Adapter,
            "LoRA adapter",
        ),
        (
            &["pytorch_model.bin"],
            OtherForm("pytorch_model.bin".into()),
            "save_pretrained",
        ),
        (
            &["model-Q4_1.gguf", "README.md"],
            OtherForm("model-Q4_1.gguf".into()),
            "save_pretrained",
        ),
        (
            &["b.safetensors", "a.safetensors"],
            Several("a.safetensors".into(), "b.safetensors".into()),
            "by its path",
        ),
        (
            &["evil\u{1b}[2J.bin"],
            OtherForm("evil\u{1b}[2J.bin".into()),
            "\\u{1b}",
        ),
    ];
    for (names, expected, told) in cases {
        let files: Vec<(&str, &[u8])> = names.iter().map(|&name| (name, b"".as_slice())).collect();
        let error = Checkpoint::open(folder(&files).path()).unwrap_err();
        assert!(message(&error).contains(told), "{error}");
        assert!(
            matches!(&error, CheckpointError::NoWeights { found, .. } if *found == expected),
            "{error:?}"
        );
    }
}

#[test]
fn a_pointer_of_git_lfs_is_told_from_weights() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
    let error = open_one(pointer).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::LfsPointer { .. })
            && message(&error).contains("git lfs pull"),
        "{error:?}"
    );
}

/// Opening a pipe for reading waits for a writer.
#[cfg(unix)]
#[test]
fn a_pipe_is_refused_without_waiting() {
    let dir = folder(&[]);
    let path = dir.path().join("model.safetensors");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&path)
            .status()
            .unwrap()
            .success()
    );
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Io { .. })
            && message(&error).contains("not a regular file"),
        "{error:?}"
    );
}

#[test]
fn folders_that_are_no_checkpoint_are_refused() {
    let dir = folder(&[("config.json", b"{}")]);
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(&error, CheckpointError::NoWeights { dir: found, .. } if found == dir.path()));
    assert!(message(&error).contains(dir.path().to_str().unwrap()));
    assert!(matches!(
        Checkpoint::open(dir.path().join("none")).unwrap_err(),
        CheckpointError::NoWeights { .. }
    ));
    fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Io { .. })
            && message(&error).contains("not a regular file"),
        "{error:?}"
    );
}

#[test]
fn bad_indices_are_refused() {
    let open = |index: &[u8], shards: &[(&str, &[u8])]| {
        let dir = folder(shards);
        fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        Checkpoint::open(dir.path()).unwrap_err()
    };
    let one = one_tensor("t");
    for text in [
        "",
        "[]",
        "{}",
        r#"{"weight_map":[]}"#,
        r#"{"weight_map":{"t":1}}"#,
        "\u{feff}{}",
    ] {
        assert!(
            matches!(open(text.as_bytes(), &[]), CheckpointError::Index { .. }),
            "{text}"
        );
    }
    let error = open(&index(&[("t", "\u{1b}[2J.safetensors")]), &[]);
    assert!(
        matches!(&error, CheckpointError::ShardName { shard, .. } if shard == "\\u{1b}[2J.safetensors"),
        "{error:?}"
    );
    for shard in [
        "../x.safetensors",
        "/etc/passwd",
        "",
        ".",
        "..",
        "a/b.safetensors",
    ] {
        let error = open(&index(&[("t", shard)]), &[]);
        assert!(
            matches!(&error, CheckpointError::ShardName { shard: found, .. } if found == shard),
            "{shard}: {error:?}"
        );
    }
    let error = open(
        &index(&[("t", "x.safetensors"), ("u", "y.safetensors")]),
        &[("x.safetensors", &one)],
    );
    assert!(
        matches!(&error, CheckpointError::MissingShard { tensor, path, .. } if tensor == "u" && path.ends_with("y.safetensors"))
    );
    let error = open(
        &index(&[("t", "x.safetensors"), ("u", "x.safetensors")]),
        &[("x.safetensors", &one)],
    );
    assert!(
        matches!(&error, CheckpointError::NotInShard { tensor, .. } if tensor == "u"),
        "{error:?}"
    );
    let u = one_tensor("u");
    let swapped = index(&[("t", "y.safetensors"), ("u", "x.safetensors")]);
    let error = open(&swapped, &[("x.safetensors", &one), ("y.safetensors", &u)]);
    assert!(
        matches!(&error, CheckpointError::NotInShard { tensor, path, .. } if tensor == "t" && path.ends_with("y.safetensors"))
    );
    let both = index(&[("t", "x.safetensors"), ("u", "y.safetensors")]);
    let error = open(&both, &[("x.safetensors", &one), ("y.safetensors", &one)]);
    let CheckpointError::DuplicateTensor {
        tensor,
        first,
        second,
    } = &error
    else {
        panic!("{error:?}")
    };
    assert_eq!(
        (tensor.as_str(), first.file_name(), second.file_name()),
        (
            "t",
            Path::new("x.safetensors").file_name(),
            Path::new("y.safetensors").file_name()
        )
    );
    assert!(matches!(
        open(&both, &[("x.safetensors", &one), ("y.safetensors", b"no")]),
        CheckpointError::Header { .. }
    ));
}
