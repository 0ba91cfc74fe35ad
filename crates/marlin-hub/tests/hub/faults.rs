//! Downloads that break off, and disks and servers that fail. Nothing partial can be opened.

use std::fs;

use marlin_hub::HubError;
use marlin_testing::{HubFaults, HubFile};

use crate::support::{Hub, SIZE, assert_files, files, needed, weights};

/// The byte of the weights at which connections break.
const HALF: usize = SIZE / 2;

fn breaking(times: usize) -> HubFaults {
    HubFaults {
        breaks: Some((HALF, times)),
        ..HubFaults::default()
    }
}

/// Returns the ranges of the requests for the weights since the last call.
fn ranges(hub: &Hub) -> Vec<Option<String>> {
    let downloads = hub.server.downloads().into_iter();
    let weights = downloads.filter(|request| request.line.ends_with("/model.safetensors"));
    weights.map(|request| request.range).collect()
}

fn second_half() -> Option<String> {
    Some(format!("bytes={HALF}-"))
}

#[test]
fn a_connection_that_breaks_once_is_resumed() {
    let hub = Hub::new(files());
    hub.server.fail(breaking(1));
    assert_files(&hub.resolve().unwrap(), &needed());
    assert_eq!(ranges(&hub), [None, second_half()]);
}

/// Takes 3 s, the pauses between attempts.
#[test]
fn a_server_without_ranges_sends_the_file_anew() {
    let hub = Hub::new(files());
    hub.server.fail(HubFaults {
        no_ranges: true,
        ..breaking(1)
    });
    assert_files(&hub.resolve().unwrap(), &needed());
    assert_eq!(ranges(&hub), [None, second_half()]);

    let hub = Hub::new(files());
    hub.server.fail(HubFaults {
        no_ranges: true,
        ..breaking(usize::MAX)
    });
    assert!(matches!(hub.resolve(), Err(HubError::Interrupted { .. })));
    hub.has_no_snapshot();
}

/// Takes 3 s, the pauses between attempts.
#[test]
fn a_connection_that_always_breaks_is_given_up_and_resumed_by_the_next_run() {
    let hub = Hub::new(files());
    hub.server.fail(breaking(usize::MAX));
    match hub.resolve() {
        Err(HubError::Interrupted {
            url,
            done,
            total,
            attempts,
            ..
        }) => {
            assert!(
                url.starts_with(hub.server.endpoint()) && url.ends_with("/model.safetensors"),
                "{url}"
            );
            assert_eq!((done, total, attempts), (HALF as u64, SIZE as u64, 5));
        }
        result => panic!("{result:?}"),
    }
    hub.has_no_snapshot();
    let partial = hub.blob(&format!("{}.incomplete", weights().checksum()));
    assert_eq!(fs::metadata(&partial).unwrap().len(), HALF as u64);
    assert!(!hub.blob(&weights().sha256()).exists());
    assert_eq!(ranges(&hub).len(), 5);

    hub.server.fail(HubFaults::default());
    assert_files(&hub.resolve().unwrap(), &needed());
    assert_eq!(ranges(&hub), [second_half()]);
    assert!(!partial.exists());
}

#[test]
fn a_file_with_another_checksum_is_deleted() {
    for file in [
        weights(),
        HubFile::small("tokenizer_config.json", "{\"a\": 1}"),
    ] {
        let hub = Hub::new(files());
        let wrong = if file.is_lfs {
            "model.safetensors"
        } else {
            "tokenizer_config.json"
        };
        hub.server.fail(HubFaults {
            wrong: Some(wrong),
            ..HubFaults::default()
        });
        match hub.resolve() {
            Err(HubError::Checksum {
                url,
                expected,
                found,
            }) => {
                assert!(url.ends_with(wrong), "{url}");
                assert_eq!(expected, file.checksum());
                assert_ne!(found, expected);
            }
            result => panic!("{result:?}"),
        }
        hub.has_no_snapshot();
        assert!(
            !hub.blob(&format!("{}.incomplete", file.checksum()))
                .exists()
        );
        hub.server.fail(HubFaults::default());
        assert_files(&hub.resolve().unwrap(), &needed());
    }
}

#[test]
fn the_rest_of_another_file_is_found_out() {
    // What an earlier run left has other contents, or is longer than the file.
    for (left, is_refused) in [(vec![1; HALF], true), (vec![1; SIZE + 1], false)] {
        let hub = Hub::new(files());
        let partial = hub.blob(&format!("{}.incomplete", weights().checksum()));
        fs::create_dir_all(partial.parent().unwrap()).unwrap();
        fs::write(&partial, left).unwrap();
        if is_refused {
            assert!(matches!(hub.resolve(), Err(HubError::Checksum { .. })));
            hub.has_no_snapshot();
        }
        assert_files(&hub.resolve().unwrap(), &needed());
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_named() {
    let hub = Hub::new(files());
    let partial = hub.blob(&format!("{}.incomplete", weights().checksum()));
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    // Every write to this device fails as on a full disk.
    std::os::unix::fs::symlink("/dev/full", &partial).unwrap();
    match hub.resolve() {
        Err(HubError::DiskFull {
            path, url, missing, ..
        }) => {
            assert_eq!((path, missing), (partial.clone(), SIZE as u64));
            assert!(url.ends_with("/model.safetensors"), "{url}");
        }
        result => panic!("{result:?}"),
    }
    hub.has_no_snapshot();
    fs::remove_file(&partial).unwrap();
    assert_files(&hub.resolve().unwrap(), &needed());
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let hub = Hub::new(files());
    fs::create_dir_all(hub.root().parent().unwrap()).unwrap();
    fs::write(hub.root(), "a file").unwrap();
    match hub.resolve() {
        Err(HubError::Io { action, path, .. }) => {
            assert_eq!((action, path), ("create", hub.root().join("blobs")));
        }
        result => panic!("{result:?}"),
    }
}
