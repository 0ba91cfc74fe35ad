//! Names and revisions that the hub does not have or does not show.

use marlin_format::checkpoint::InPlaceOfWeights;
use marlin_hub::{HubError, HubOptions, resolve};
use marlin_testing::{HubFaults, HubFile};

use crate::support::{Hub, NAME, files};

#[test]
fn a_gated_model_says_what_to_do() {
    for status in [401, 403] {
        for faults in [
            HubFaults {
                api: Some((status, "GatedRepo")),
                ..HubFaults::default()
            },
            // The hub lists the files of gated models.
            HubFaults {
                files: Some((status, "GatedRepo")),
                ..HubFaults::default()
            },
        ] {
            let hub = Hub::new(files());
            hub.server.fail(faults);
            let error = hub.resolve().unwrap_err();
            let text = error.to_string();
            let page = format!("{}/{NAME}", hub.server.endpoint());
            match error {
                HubError::Gated {
                    name,
                    url,
                    status: found,
                } => {
                    assert_eq!((&*name, url, found), (NAME, page, status));
                }
                error => panic!("{error:?}"),
            }
            assert!(
                text.contains("accept its licence at http") && text.contains("HF_TOKEN"),
                "{text}"
            );
            hub.has_no_snapshot();
        }
    }
}

#[test]
fn a_missing_model_or_revision_is_named() {
    let hub = Hub::new(files());
    let revision = |revision: &str| HubOptions {
        revision: Some(revision.into()),
        ..hub.options.clone()
    };
    let check = |result: Result<_, HubError>, expected: (&str, &str)| match result {
        Err(error @ HubError::NotFound { .. }) => {
            let text = error.to_string();
            for word in [hub.server.endpoint(), expected.0, expected.1, "no folder"] {
                assert!(text.contains(word), "{word}: {text}");
            }
        }
        result => panic!("{result:?}"),
    };
    check(
        resolve("some-owner/missing", &hub.options, |_| {}),
        ("some-owner/missing", "`main`"),
    );
    check(resolve(NAME, &revision("v9/x"), |_| {}), (NAME, "`v9/x`"));
    // Without a token the hub answers so for a model that does not exist.
    let api = Some((401, "RepoNotFound"));
    hub.server.fail(HubFaults {
        api,
        ..HubFaults::default()
    });
    check(hub.resolve(), (NAME, "`main`"));
    hub.has_no_snapshot();
}

#[test]
fn a_token_that_the_hub_does_not_know_is_said() {
    let hub = Hub::new(files());
    let refused = Some((401, "Invalid credentials in Authorization header"));
    for faults in [
        HubFaults {
            api: refused,
            ..HubFaults::default()
        },
        HubFaults {
            files: refused,
            ..HubFaults::default()
        },
    ] {
        hub.server.fail(faults);
        match hub.resolve() {
            Err(HubError::Token { endpoint }) => assert_eq!(endpoint, hub.server.endpoint()),
            result => panic!("{result:?}"),
        }
        hub.has_no_snapshot();
    }
}

#[test]
fn an_error_of_the_hub_is_not_a_missing_model() {
    let hub = Hub::new(files());
    let api = Some((429, "RateLimited"));
    hub.server.fail(HubFaults {
        api,
        ..HubFaults::default()
    });
    match hub.resolve() {
        Err(HubError::Answer { url, reason }) => {
            assert!(
                url.contains(NAME) && reason.contains("429"),
                "{url}: {reason}"
            );
        }
        result => panic!("{result:?}"),
    }
    // A hub that is down is as one that cannot be reached: the cache is taken, if it has the model.
    let down = HubFaults {
        api: Some((503, "")),
        ..HubFaults::default()
    };
    hub.server.fail(down.clone());
    assert!(matches!(hub.resolve(), Err(HubError::Unreachable { .. })));
    hub.server.fail(HubFaults::default());
    let dir = hub.resolve().unwrap();
    hub.server.fail(down);
    assert_eq!(hub.resolve().unwrap(), dir);
}

#[test]
fn a_text_that_is_no_name_has_both_meanings_in_the_message() {
    let options = HubOptions::default();
    for text in ["gpt2", "a/b/c", "my model", "~/model", "owner/"] {
        let error = resolve(text, &options, |_| {}).unwrap_err();
        let message = error.to_string();
        assert!(matches!(error, HubError::NeitherFolderNorName { text: found } if found == text));
        assert!(
            message.contains("no folder") && message.contains("no name of a model"),
            "{message}"
        );
    }
}

#[test]
fn options_are_checked_before_the_hub_is_asked() {
    let hub = Hub::new(files());
    let with = |change: &dyn Fn(&mut HubOptions)| {
        let mut options = hub.options.clone();
        change(&mut options);
        options
    };
    let outside = with(&|options| options.revision = Some("../../x".into()));
    assert!(
        matches!(resolve(NAME, &outside, |_| {}), Err(HubError::Revision { revision }) if revision == "../../x")
    );
    let dir = tempfile::tempdir().unwrap();
    let main = with(&|options| options.revision = Some("main".into()));
    match resolve(dir.path(), &main, |_| {}) {
        Err(HubError::RevisionOfFolder {
            dir: found,
            revision,
        }) => {
            assert_eq!((&*found, &*revision), (dir.path(), "main"));
        }
        result => panic!("{result:?}"),
    }
    let no_url = with(&|options| options.endpoint = Some("nowhere".into()));
    assert!(
        matches!(resolve(NAME, &no_url, |_| {}), Err(HubError::Endpoint { endpoint, .. }) if endpoint == "nowhere")
    );
    assert!(hub.server.requests().is_empty());
}

#[test]
fn a_model_without_safetensors_is_refused_before_anything_is_downloaded() {
    let hub = Hub::new(vec![
        HubFile::small("config.json", "{}"),
        HubFile::large("pytorch_model.bin", "pickled"),
    ]);
    match hub.resolve() {
        Err(HubError::NoWeights { name, found }) => {
            assert_eq!(name, NAME);
            assert!(
                matches!(found, InPlaceOfWeights::OtherForm(name) if name == "pytorch_model.bin")
            );
        }
        result => panic!("{result:?}"),
    }
    assert!(hub.server.downloads().is_empty());
    hub.has_no_snapshot();
}
