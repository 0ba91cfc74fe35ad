//! Models that are opened by their name.

use std::path::Path;
use std::process::Command;

use burn::tensor::Device;
use marlin_testing::{HubFile, HubServer, repository_file};

use crate::quantize::COPIED_FILES;
use crate::{LanguageModel, ModelError, OpenOptions};

const NAME: &str = "some-owner/tiny-llama";

#[test]
fn the_files_that_quantisation_copies_are_downloaded() {
    assert!(COPIED_FILES.into_iter().all(marlin_hub::is_needed));
}

/// Opens the model in another process, which has the server in its environment.
#[test]
fn a_name_is_opened_as_its_folder_is() {
    let files = HubFile::of_folder(&repository_file("examples/train-tiny-llama/model"));
    let server = HubServer::start(NAME, &[("main", files)]);
    let home = tempfile::tempdir().unwrap();
    let open = |model: &str| {
        Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "tests::hub::open_the_models_name",
                "--ignored",
                "--nocapture",
            ])
            .env("NO_PROXY", "127.0.0.1,localhost")
            .env("HF_ENDPOINT", server.endpoint())
            .env("HF_HOME", home.path())
            .env("MODEL_TO_OPEN", model)
            .env_remove("HF_HUB_CACHE")
            .env_remove("HF_HUB_OFFLINE")
            .output()
            .unwrap()
    };
    let output = open(NAME);
    assert!(output.status.success(), "{output:?}");
    assert!(!server.downloads().is_empty());
    let output = open("some-owner/other");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        !output.status.success() && text.contains("has no model some-owner/other"),
        "{output:?}"
    );
}

#[test]
#[ignore = "opens the model that another test names"]
fn open_the_models_name() {
    let model = std::env::var("MODEL_TO_OPEN").unwrap();
    match LanguageModel::open(Path::new(&model), &Device::flex(), &OpenOptions::default()) {
        Ok(llama) => assert!(llama.tokenizer.is_some()),
        Err(error) => {
            println!("{error}");
            assert!(!matches!(error, ModelError::Hub(_)));
        }
    }
}
