use marlin_format::checkpoint::{FileError, read_file, read_text};
use std::fs::{self, File};

/// Returns the [`FileError`] inside an error of the operating system.
fn refused(error: &std::io::Error) -> &FileError {
    error
        .get_ref()
        .and_then(|inner| inner.downcast_ref())
        .unwrap_or_else(|| panic!("{error:?}"))
}

#[test]
fn regular_files_up_to_the_limit_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "text").unwrap();
    assert_eq!(read_file(&path, 4).unwrap(), b"text");
    assert_eq!(read_text(&path, 4).unwrap(), "text");
    assert_eq!(
        refused(&read_file(&path, 3).unwrap_err()),
        &FileError::TooLarge { limit: 3 }
    );
    File::create(&path).unwrap().set_len(1 << 40).unwrap();
    assert_eq!(
        refused(&read_file(&path, 16 << 20).unwrap_err()),
        &FileError::TooLarge { limit: 16 << 20 }
    );
    fs::write(&path, [0xff]).unwrap();
    assert_eq!(
        read_text(&path, 4).unwrap_err().kind(),
        std::io::ErrorKind::InvalidData
    );
    assert_eq!(
        read_file(&dir.path().join("none"), 4).unwrap_err().kind(),
        std::io::ErrorKind::NotFound
    );
    assert_eq!(
        refused(&read_file(dir.path(), 4).unwrap_err()),
        &FileError::NotRegular
    );
}

#[cfg(unix)]
#[test]
fn links_are_followed_to_regular_files_alone() {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let (path, target) = (dir.path().join("link"), dir.path().join("target"));
    fs::write(&target, "text").unwrap();
    symlink("target", &path).unwrap();
    assert_eq!(read_file(&path, 4).unwrap(), b"text");
    for device in ["/dev/zero", "/dev/null"] {
        fs::remove_file(&path).unwrap();
        symlink(device, &path).unwrap();
        assert_eq!(
            refused(&read_file(&path, 1 << 20).unwrap_err()),
            &FileError::NotRegular,
            "{device}"
        );
    }
    fs::remove_file(&path).unwrap();
    symlink("link", &path).unwrap();
    assert!(read_file(&path, 4).is_err(), "a link to itself");
}

/// Tests links as in the Hugging Face hub's cache, and links that an attacker could have packed.
#[cfg(unix)]
#[test]
fn links_leave_the_folder_only_in_the_hubs_cache() {
    use std::os::unix::fs::symlink;
    let cache = tempfile::tempdir().unwrap();
    let model = cache.path().join("models--a--b");
    let snapshot = model.join("snapshots/0123abcd");
    for dir in [&snapshot, &model.join("blobs")] {
        fs::create_dir_all(dir).unwrap();
    }
    fs::write(model.join("blobs/feed"), "text").unwrap();
    fs::write(model.join("secret"), "text").unwrap();
    fs::write(cache.path().join("secret"), "text").unwrap();
    let link = |target: &str| {
        let path = snapshot.join("config.json");
        let _ = fs::remove_file(&path);
        symlink(target, &path).unwrap();
        read_file(&path, 4)
    };
    assert_eq!(link("../../blobs/feed").unwrap(), b"text");
    for outside in [
        "../../secret",
        "../../../secret",
        cache.path().join("secret").to_str().unwrap(),
    ] {
        let error = link(outside).unwrap_err();
        assert!(
            matches!(refused(&error), FileError::Outside { target } if target.ends_with("secret")),
            "{outside}: {error:?}"
        );
    }
    // The folder itself may be reached through a link.
    symlink(&snapshot, cache.path().join("main")).unwrap();
    link("../../blobs/feed").unwrap();
    assert_eq!(
        read_file(&cache.path().join("main/config.json"), 4).unwrap(),
        b"text"
    );
}
