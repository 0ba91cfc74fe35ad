//! A model on a server, and a cache for it.

use std::path::{Path, PathBuf};

use marlin_hub::{HubError, HubOptions, resolve};
use marlin_testing::{HubFile, HubServer};
use tempfile::TempDir;

/// The name of the model.
pub const NAME: &str = "some-owner/Tiny.Model_1";

/// The size of the weights.
pub const SIZE: usize = 300_000;

pub fn weights() -> HubFile {
    let bytes: Vec<u8> = (0..SIZE).map(|index| (index * index % 251) as u8).collect();
    HubFile::large("model.safetensors", bytes)
}

/// Returns files that are needed.
pub fn needed() -> Vec<HubFile> {
    vec![
        HubFile::small("config.json", "{}"),
        HubFile::small("generation_config.json", ""),
        weights(),
        HubFile::large("tokenizer.json", "{\"model\": {}}"),
        HubFile::small("tokenizer_config.json", "{\"a\": 1}"),
    ]
}

/// Returns [`needed`] files and others.
pub fn files() -> Vec<HubFile> {
    let others = [
        HubFile::small(".gitattributes", "*.safetensors filter=lfs"),
        HubFile::small("README.md", "A model."),
        HubFile::large("consolidated.safetensors", "consolidated"),
        HubFile::large("pytorch_model.bin", "pickled"),
    ];
    [&others[..], &needed()].concat()
}

/// A server and an empty cache.
pub struct Hub {
    pub server: HubServer,
    home: TempDir,
    pub options: HubOptions,
}

impl Hub {
    pub fn new(files: Vec<HubFile>) -> Self {
        Self::with_branches(&[("main", files)])
    }

    pub fn with_branches(branches: &[(&str, Vec<HubFile>)]) -> Self {
        let server = HubServer::start(NAME, branches);
        let home = tempfile::tempdir().unwrap();
        let options = HubOptions {
            token: Some("hf_secret".into()),
            endpoint: Some(server.endpoint().into()),
            cache: Some(home.path().join("hub")),
            ..HubOptions::default()
        };
        Self {
            server,
            home,
            options,
        }
    }

    pub fn resolve(&self) -> Result<PathBuf, HubError> {
        resolve(NAME, &self.options, |_| {})
    }

    pub fn offline(&self) -> Result<PathBuf, HubError> {
        let options = HubOptions {
            offline: true,
            ..self.options.clone()
        };
        resolve(NAME, &options, |_| {})
    }

    /// Returns the folder of the model in the cache.
    pub fn root(&self) -> PathBuf {
        let folder = format!("models--{}", NAME.replace('/', "--"));
        self.home.path().join("hub").join(folder)
    }

    pub fn blob(&self, blob: &str) -> PathBuf {
        self.root().join("blobs").join(blob)
    }

    /// Checks that nothing can be opened.
    #[track_caller]
    pub fn has_no_snapshot(&self) {
        assert!(!self.root().join("snapshots").exists());
        assert!(matches!(self.offline(), Err(HubError::Offline { .. })));
    }
}

/// Checks that a folder has these files and no others.
#[track_caller]
pub fn assert_files(dir: &Path, files: &[HubFile]) {
    let mut found: Vec<_> = HubFile::of_folder(dir)
        .into_iter()
        .map(|file| (file.path, file.contents))
        .collect();
    let mut expected: Vec<_> = files
        .iter()
        .map(|file| (file.path.clone(), file.contents.clone()))
        .collect();
    found.sort();
    expected.sort();
    let names = |files: &[(String, Vec<u8>)]| {
        files
            .iter()
            .map(|(path, _)| path.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&found), names(&expected));
    assert!(found == expected, "other contents");
}
