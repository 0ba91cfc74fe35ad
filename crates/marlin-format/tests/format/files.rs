use marlin_format::checkpoint::{FileError, read_file, read_text};
use std::fs::{self, File};

/// The refusal inside the system's error.
fn refused(error: &std::io::Error) -> &FileError {
    error.get_ref().and_then(|inner| inner.downcast_ref()).unwrap_or_else(|| panic!("{error:?}"))
}

#[test]
fn regular_files_up_to_the_limit_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "text").unwrap();
    assert_eq!(read_file(&path, 4).unwrap(), b"text");
    assert_eq!(read_text(&path, 4).unwrap(), "text");
    assert_eq!(refused(&read_file(&path, 3).unwrap_err()), &FileError::TooLarge { limit: 3 });
    File::create(&path).unwrap().set_len(1 << 40).unwrap();
    assert_eq!(refused(&read_file(&path, 16 << 20).unwrap_err()), &FileError::TooLarge { limit: 16 << 20 });
    fs::write(&path, [0xff]).unwrap();
    assert_eq!(read_text(&path, 4).unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    assert_eq!(read_file(&dir.path().join("none"), 4).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    assert_eq!(refused(&read_file(dir.path(), 4).unwrap_err()), &FileError::NotRegular);
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
        assert_eq!(refused(&read_file(&path, 1 << 20).unwrap_err()), &FileError::NotRegular, "{device}");
    }
    fs::remove_file(&path).unwrap();
    symlink("link", &path).unwrap();
    assert!(read_file(&path, 4).is_err(), "a link to itself");
}
