//! Downloads that succeed.

use std::fs;
use std::sync::Mutex;
use std::thread;

use marlin_hub::{HubError, HubOptions, resolve};
use marlin_testing::{HubFaults, HubFile};

use crate::support::{Hub, NAME, SIZE, assert_files, files, needed, weights};

#[test]
fn only_the_files_that_are_needed_are_downloaded_and_once() {
    let hub = Hub::new(files());
    let seen = Mutex::new(Vec::new());
    let dir = resolve(NAME, &hub.options, |progress| {
        let progress = (progress.file.to_owned(), progress.done, progress.total);
        seen.lock().unwrap().push(progress);
    })
    .unwrap();
    assert_files(&dir, &needed());
    let commit = hub.server.commit("main");
    assert_eq!(dir, hub.root().join("snapshots").join(commit));
    assert_eq!(
        fs::read_to_string(hub.root().join("refs/main")).unwrap(),
        commit
    );

    let mut paths: Vec<String> = hub
        .server
        .downloads()
        .iter()
        .map(|request| request.line.rsplit('/').next().unwrap().to_owned())
        .collect();
    paths.sort();
    // An empty file needs no request.
    let with_contents = needed()
        .into_iter()
        .filter(|file| !file.contents.is_empty());
    assert_eq!(
        paths,
        with_contents.map(|file| file.path).collect::<Vec<_>>()
    );

    let seen = seen.into_inner().unwrap();
    let total: u64 = needed().iter().map(|file| file.contents.len() as u64).sum();
    assert!(
        seen.iter()
            .all(|&(_, done, of)| done <= total && of == total)
    );
    assert!(seen.is_sorted_by_key(|&(_, done, _)| done));
    assert_eq!(seen.last().map(|&(_, done, _)| done), Some(total));

    // The names in the cache are those of Hugging Face's own programs.
    assert_eq!(
        fs::metadata(hub.blob(&weights().sha256())).unwrap().len(),
        SIZE as u64
    );
    // `printf '{}' | git hash-object --stdin`
    let config = hub.blob("9e26dfeeb6e641a33dae4961196235bdb965b21b");
    assert_eq!(fs::read_to_string(config).unwrap(), "{}");

    assert_eq!(hub.resolve().unwrap(), dir);
    let requests = hub.server.requests();
    assert!(
        requests
            .iter()
            .all(|request| request.line.starts_with("GET /api/models/")),
        "{requests:?}"
    );
}

#[test]
fn a_downloaded_model_is_opened_without_the_network() {
    let hub = Hub::new(files());
    match hub.offline() {
        Err(HubError::Offline {
            name,
            revision,
            cache,
        }) => {
            assert_eq!((&*name, &*revision), (NAME, "main"));
            assert_eq!(Some(cache), hub.options.cache);
        }
        result => panic!("{result:?}"),
    }
    assert!(hub.server.requests().is_empty());
    let dir = hub.resolve().unwrap();
    hub.server.requests();
    assert_eq!(hub.offline().unwrap(), dir);
    assert!(hub.server.requests().is_empty());

    // Of a hub that cannot be reached, the model in the cache is taken.
    let options = HubOptions {
        endpoint: Some("http://127.0.0.1:9".into()),
        ..hub.options.clone()
    };
    assert_eq!(resolve(NAME, &options, |_| {}).unwrap(), dir);
    match resolve("some-owner/another", &options, |_| {}) {
        Err(HubError::Unreachable { url, .. }) => {
            assert!(url.starts_with("http://127.0.0.1:9/"), "{url}");
        }
        result => panic!("{result:?}"),
    }

    // A file whose contents were removed is missing.
    fs::remove_file(hub.blob(&weights().sha256())).unwrap();
    assert!(matches!(hub.offline(), Err(HubError::Offline { .. })));
}

#[test]
fn the_token_is_sent_to_the_hub_alone() {
    let hub = Hub::new(files());
    hub.resolve().unwrap();
    let requests = hub.server.requests();
    assert!(requests.iter().any(|request| request.is_storage));
    for request in requests {
        let expected = (!request.is_storage).then_some("Bearer hf_secret");
        assert_eq!(
            request.authorization.as_deref(),
            expected,
            "{}",
            request.line
        );
    }
}

#[test]
fn revisions_share_files() {
    let mut second = files();
    second.retain(|file| file.path != "config.json");
    second.push(HubFile::small("config.json", "{\"version\": 2}"));
    let hub = Hub::with_branches(&[("main", files()), ("feature/2 #", second)]);
    let first = hub.resolve().unwrap();
    hub.server.requests();
    let options = HubOptions {
        revision: Some("feature/2 #".into()),
        ..hub.options.clone()
    };
    let dir = resolve(NAME, &options, |_| {}).unwrap();
    assert_ne!(dir, first);
    assert_eq!(
        fs::read_to_string(dir.join("config.json")).unwrap(),
        "{\"version\": 2}"
    );
    assert_eq!(fs::read_to_string(first.join("config.json")).unwrap(), "{}");
    let downloads = hub.server.downloads();
    assert_eq!(downloads.len(), 1, "{downloads:?}");
    assert!(downloads[0].line.ends_with("/config.json"));

    // A commit is a revision, too.
    let options = HubOptions {
        revision: Some(hub.server.commit("feature/2 #").into()),
        offline: true,
        ..options
    };
    assert_eq!(resolve(NAME, &options, |_| {}).unwrap(), dir);
}

#[test]
fn a_model_without_its_weights_has_all_else() {
    let hub = Hub::new(files());
    let options = HubOptions {
        without_weights: true,
        ..hub.options.clone()
    };
    let dir = resolve(NAME, &options, |_| {}).unwrap();
    let is_weight = |file: &HubFile| file.path.ends_with(".safetensors");
    let without: Vec<HubFile> = needed()
        .into_iter()
        .filter(|file| !is_weight(file))
        .collect();
    assert_files(&dir, &without);
    let offline = HubOptions {
        offline: true,
        ..options
    };
    assert_eq!(resolve(NAME, &offline, |_| {}).unwrap(), dir);
    // For other callers the folder is not complete.
    assert!(matches!(hub.offline(), Err(HubError::Offline { .. })));
    hub.server.requests();
    assert_files(&hub.resolve().unwrap(), &needed());
    assert_eq!(hub.server.downloads().len(), 1);
}

#[test]
fn shards_are_those_of_the_index() {
    let index = "model.safetensors.index.json";
    let map = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}"#;
    let sharded = vec![
        HubFile::small("config.json", "{}"),
        HubFile::large("model-1.safetensors", "one"),
        HubFile::large("model-2.safetensors", "two"),
        HubFile::small(index, map),
    ];
    let other = HubFile::large("consolidated.safetensors", "all");
    let hub = Hub::new([&[other][..], &sharded].concat());
    assert_files(&hub.resolve().unwrap(), &sharded);

    let incomplete = Hub::new(
        sharded
            .into_iter()
            .filter(|file| !file.path.contains('2'))
            .collect(),
    );
    match incomplete.resolve() {
        Err(HubError::Answer { url, reason }) => {
            assert!(url.ends_with(index) && reason.contains("model-2.safetensors"));
        }
        result => panic!("{result:?}"),
    }
    incomplete.has_no_snapshot();
}

#[test]
fn two_processes_download_each_file_once() {
    let hub = Hub::new(files());
    thread::scope(|scope| {
        for run in [(); 2].map(|()| scope.spawn(|| hub.resolve().unwrap())) {
            assert_files(&run.join().unwrap(), &needed());
        }
    });
    let with_contents = needed()
        .iter()
        .filter(|file| !file.contents.is_empty())
        .count();
    assert_eq!(hub.server.downloads().len(), with_contents);
}

#[test]
fn a_damaged_file_of_the_cache_is_downloaded_again() {
    let hub = Hub::new(files());
    let dir = hub.resolve().unwrap();
    hub.server.requests();
    fs::write(hub.blob(&weights().sha256()), "short").unwrap();
    fs::remove_file(dir.join("config.json")).unwrap();
    assert!(matches!(hub.offline(), Err(HubError::Offline { .. })));
    assert_files(&hub.resolve().unwrap(), &needed());
    assert_eq!(hub.server.downloads().len(), 1);
}

#[test]
fn paths_are_returned_as_they_are() {
    let hub = Hub::new(files());
    let dir = tempfile::tempdir().unwrap();
    let offline = HubOptions::default();
    assert_eq!(resolve(dir.path(), &offline, |_| {}).unwrap(), dir.path());
    let missing = dir.path().join("missing");
    assert_eq!(resolve(&missing, &offline, |_| {}).unwrap(), missing);
    assert_eq!(
        resolve("./some/model", &offline, |_| {}).unwrap().to_str(),
        Some("./some/model")
    );
    // A folder of two parts that exists is no name.
    assert_eq!(
        resolve("tests/hub", &offline, |_| {}).unwrap().to_str(),
        Some("tests/hub")
    );
    hub.server.fail(HubFaults::default());
    assert!(hub.server.requests().is_empty());
}
