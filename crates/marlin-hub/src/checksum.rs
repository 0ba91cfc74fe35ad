//! Checksums of downloaded files.
//!
//! The hub lists the Git object ID of every file. That of a small file is the SHA-1 of its contents.
//! A large file is in Git as an LFS pointer, a short text with the SHA-256 and the size of the
//! contents; the object ID is that of the pointer. [`Checksum::finish`] therefore computes the
//! pointer's text from the contents, and then its object ID.

use sha1::{Digest as _, Sha1};
use sha2::Sha256;

/// The checksum of a file whose contents are added in pieces.
pub(crate) enum Checksum {
    /// A file that is in Git itself.
    Git(Sha1),
    /// A file that is in LFS, with its size.
    Lfs(Sha256, u64),
}

/// The checksums of a complete file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checksums {
    /// The Git object ID.
    pub object_id: String,
    /// The name of the file in the cache's folder `blobs`: the SHA-256 for a file in LFS, otherwise
    /// the object ID.
    pub blob: String,
}

impl Checksum {
    /// Begins the checksum of a file of `size` bytes.
    pub fn new(is_lfs: bool, size: u64) -> Self {
        if is_lfs {
            Self::Lfs(Sha256::new(), size)
        } else {
            Self::Git(Sha1::new_with_prefix(object_header(size)))
        }
    }

    /// Adds the next bytes of the file.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Git(hash) => hash.update(bytes),
            Self::Lfs(hash, _) => hash.update(bytes),
        }
    }

    pub fn finish(self) -> Checksums {
        match self {
            Self::Git(hash) => {
                let object_id = hex(&hash.finalize());
                Checksums {
                    blob: object_id.clone(),
                    object_id,
                }
            }
            Self::Lfs(hash, size) => {
                let blob = hex(&hash.finalize());
                Checksums {
                    object_id: pointer_object_id(&blob, size),
                    blob,
                }
            }
        }
    }
}

/// Returns the Git object ID of the LFS pointer to a file.
pub(crate) fn pointer_object_id(sha256: &str, size: u64) -> String {
    let pointer =
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n");
    let hash = Sha1::new_with_prefix(object_header(pointer.len() as u64)).chain_update(&pointer);
    hex(&hash.finalize())
}

/// Returns what Git hashes before the contents of a file.
fn object_header(size: u64) -> String {
    format!("blob {size}\0")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_ids_are_gits() {
        // `printf 'hello\n' | git hash-object --stdin`
        let mut checksum = Checksum::new(false, 6);
        checksum.update(b"hel");
        checksum.update(b"lo\n");
        let id = "ce013625030ba8dba906f756967f9e9ca394464a";
        let expected = Checksums {
            object_id: id.into(),
            blob: id.into(),
        };
        assert_eq!(checksum.finish(), expected);
    }

    #[test]
    fn the_object_id_of_a_large_file_is_its_pointers() {
        // The object ID of the pointer that `git lfs pointer` writes.
        let mut checksum = Checksum::new(true, 6);
        checksum.update(b"hello\n");
        let expected = Checksums {
            object_id: "fa61e1ef71c9908c0926776a4aa3504b3a27f159".into(),
            blob: "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03".into(),
        };
        assert_eq!(checksum.finish(), expected);
    }
}
