//! Tests of safetensors headers that are refused.

use std::fs;

use marlin_format::checkpoint::{Checkpoint, CheckpointError, Dtype, HeaderError};

use super::{file, open_one, small_file};

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
    assert!(matches!(
        header_error(&[]),
        HeaderError::TooShort { found: 0 }
    ));
    for length in 0..whole.len() {
        let error = header_error(&whole[..length]);
        match length {
            0..8 => assert!(matches!(error, HeaderError::TooShort { .. })),
            _ if length < whole.len() - 12 => assert!(matches!(error, HeaderError::PastEnd { .. })),
            _ => assert!(
                matches!(error, HeaderError::Coverage { .. }),
                "{length}: {error:?}"
            ),
        }
    }
    let longer = [&whole[..], &[0]].concat();
    let error = header_error(&longer);
    assert!(matches!(
        error,
        HeaderError::Coverage {
            expected: 12,
            found: 13
        }
    ));
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
    // A sparse file, which occupies little space on the disk.
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(100_000_010)
        .unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(
        matches!(
            error,
            CheckpointError::Header {
                source: HeaderError::TooLarge {
                    header: 100_000_001,
                    ..
                },
                ..
            }
        ),
        "{error:?}"
    );
}

#[test]
fn headers_that_lie_are_refused() {
    let tensor = |shape: &str, start: u64, end: u64| {
        format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    };
    let error = |header: &str| header_error(&file(header, &[0; 12]));
    let two = |a: String, b: String| error(&format!(r#"{{"a":{a},"b":{b}}}"#));

    for header in [
        "",
        "{",
        "[]",
        "null",
        r#"{"a":1}"#,
        r#"{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}"#,
        "{}x",
    ] {
        assert!(matches!(error(header), HeaderError::Json(_)), "{header}");
    }
    assert!(matches!(
        error(&format!(r#"{{"a":{}}}"#, tensor("[-1]", 0, 4))),
        HeaderError::Json(_)
    ));
    for name in ["\\u001b[2J", &"x".repeat(2000)] {
        let error = error(&format!(r#"{{"{name}":{}}}"#, tensor("[1]", 0, 4)));
        assert!(
            matches!(&error, HeaderError::Name { tensor } if tensor.len() < 300 && !tensor.contains('\u{1b}')),
            "{error:?}"
        );
    }
    assert!(matches!(
        header_error(&[&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat()),
        HeaderError::Json(_)
    ));
    assert!(matches!(error(&"[".repeat(100_000)), HeaderError::Json(_)));

    assert!(matches!(
        two(tensor("[1]", 0, 4), tensor("[1]", 8, 12)),
        HeaderError::Gap {
            expected: 4,
            found: 8,
            ..
        }
    ));
    assert!(matches!(
        two(tensor("[2]", 0, 8), tensor("[2]", 4, 12)),
        HeaderError::Gap {
            expected: 8,
            found: 4,
            ..
        }
    ));
    assert!(matches!(
        error(&format!(r#"{{"a":{}}}"#, tensor("[2]", 0, 12))),
        HeaderError::Offsets { expected: 8, .. }
    ));
    assert!(matches!(
        two(tensor("[3]", 0, 12), tensor("[1]", 12, 8)),
        HeaderError::Offsets {
            start: 12,
            end: 8,
            ..
        }
    ));
    assert!(matches!(
        error(&format!(r#"{{"a":{}}}"#, tensor("[5]", 0, 20))),
        HeaderError::Coverage {
            expected: 20,
            found: 12
        }
    ));
    assert!(matches!(
        error("{}"),
        HeaderError::Coverage {
            expected: 0,
            found: 12
        }
    ));
    let huge = tensor("[4294967296,4294967296]", 0, 12);
    assert!(matches!(
        error(&format!(r#"{{"a":{huge}}}"#)),
        HeaderError::Size { .. }
    ));
    let odd = r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#;
    assert!(matches!(
        error(odd),
        HeaderError::Size {
            dtype: Dtype::F4,
            ..
        }
    ));
}

/// Tests files that the `safetensors` crate accepts, or on which it panics if arithmetic overflow
/// is checked.
#[test]
fn duplicates_and_overflowing_offsets_are_refused() {
    let one = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    let error = header_error(&file(&format!(r#"{{"a":{one},"a":{one}}}"#), &[0; 4]));
    assert!(
        matches!(&error, HeaderError::DuplicateTensor { tensor } if tensor == "a"),
        "{error:?}"
    );

    // Sizes whose sum, including the header, is above 2^64.
    let (mut start, mut entries) = (0u64, Vec::new());
    for i in 0..8 {
        let size = if i < 7 {
            (1u64 << 61) - 1
        } else {
            u64::MAX - start
        };
        entries.push(format!(
            r#""{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{}]}}"#,
            start + size
        ));
        start += size;
    }
    let error = header_error(&file(&format!("{{{}}}", entries.join(",")), &[0; 16]));
    assert!(
        matches!(
            error,
            HeaderError::Coverage { .. } | HeaderError::Size { .. }
        ),
        "{error:?}"
    );
}
