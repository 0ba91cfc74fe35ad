//! Models that are given by their name, from a server on this machine that speaks the hub's
//! interface.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use marlin_testing::{HubFaults, HubFile, HubServer};
use tempfile::TempDir;

use crate::support::{Folder, Run, args, command, heldout, run_command, succeed};

const NAME: &str = "some-owner/Tiny-W4A16";

/// A server with a model, and a home for the cache.
struct Hub {
    server: HubServer,
    home: TempDir,
}

impl Hub {
    /// Serves the files of a folder, and a file that is not needed.
    fn of(dir: &std::path::Path) -> Self {
        let mut files = HubFile::of_folder(dir);
        files.push(HubFile::small("README.md", "A model."));
        Self {
            server: HubServer::start(NAME, &[("main", files)]),
            home: tempfile::tempdir().unwrap(),
        }
    }

    fn run(&self, args: &[OsString], input: &str) -> Run {
        self.run_with(args, input, &[])
    }

    fn run_with(&self, args: &[OsString], input: &str, variables: &[(&str, &OsStr)]) -> Run {
        let mut command = command(args);
        for variable in [
            "HF_TOKEN",
            "HF_TOKEN_PATH",
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
        ] {
            command.env_remove(variable);
        }
        command
            .env("NO_PROXY", "127.0.0.1,localhost")
            .env("HF_ENDPOINT", self.server.endpoint())
            .env("HF_HOME", self.home.path())
            .envs(variables.iter().copied());
        run_command(command, input.as_bytes())
    }

    #[track_caller]
    fn succeed(&self, args: &[OsString]) -> String {
        let run = self.run(args, "");
        assert_eq!(run.code, Some(0), "{args:?}: {}", run.stderr);
        run.stdout
    }

    /// Runs a command that fails with this message alone.
    #[track_caller]
    fn refuse(&self, args: &[OsString], message: &str) {
        let run = self.run(args, "");
        assert_eq!((run.code, &*run.stdout), (Some(1), ""), "{args:?}");
        assert_eq!(run.stderr, format!("error: {message}\n"), "{args:?}");
    }

    fn cache(&self) -> PathBuf {
        self.home.path().join("hub")
    }
}

fn logits(model: impl AsRef<OsStr>) -> Vec<OsString> {
    args![
        "logits",
        model.as_ref(),
        "--device",
        "flex",
        "--ids",
        "1,2,3"
    ]
}

#[test]
fn every_command_takes_a_name() {
    let folder = Folder::tiny_quantized();
    let hub = Hub::of(&folder.target);
    let (dir, text) = (&folder.target, heldout());
    let perplexity = |model: OsString| {
        args![
            "perplexity",
            model,
            "--device",
            "flex",
            "--text",
            &text,
            "--max-tokens",
            "64",
            "--window",
            "32"
        ]
    };
    assert_eq!(hub.succeed(&logits(NAME)), succeed(&logits(dir)));
    assert!(
        hub.succeed(&perplexity(NAME.into()))
            .starts_with("perplexity ")
    );
    let downloads = hub.server.downloads();
    let is_readme = |line: &str| line.ends_with("README.md");
    assert!(
        !downloads.iter().any(|request| is_readme(&request.line)),
        "{downloads:?}"
    );

    // From here on everything is in the cache.
    hub.server.requests();
    for args in [
        args!["inspect", NAME, "--device", "flex"],
        args!["kernels", NAME, "--device", "flex"],
        args!["doctor", NAME, "--device", "flex"],
        args![
            "generate",
            NAME,
            "--device",
            "flex",
            "--prompt",
            "A",
            "--max-new-tokens",
            "2"
        ],
        args!["chat", NAME, "--device", "flex"],
    ] {
        hub.succeed(&args);
    }
    let with = args![
        "evaluate",
        NAME,
        "--with",
        NAME,
        "--device",
        "flex",
        "--text",
        &text,
        "--max-tokens",
        "64",
        "--window",
        "32"
    ];
    // The table has the name that was given.
    assert!(hub.succeed(&with).matches(NAME).count() >= 2);
    let offline = [logits(NAME), args!["--offline"]].concat();
    assert_eq!(hub.succeed(&offline), succeed(&logits(dir)));
    assert!(hub.server.downloads().is_empty());
}

#[test]
fn advice_needs_no_weights() {
    let folder = Folder::tiny_quantized();
    let hub = Hub::of(&folder.target);
    let advise = |model: &OsStr| args!["advise", model, "--card", "h100-80gb", "--prompt", "8"];
    let found = hub.succeed(&advise(NAME.as_ref()));
    assert!(found.contains("no tensors in the folder"), "{found}");
    let downloads = hub.server.downloads();
    let is_weight = |line: &str| line.ends_with(".safetensors");
    assert!(!downloads.iter().any(|request| is_weight(&request.line)));
    hub.succeed(&logits(NAME));
    assert_eq!(
        hub.succeed(&advise(NAME.as_ref())),
        succeed(&advise(folder.target.as_ref()))
    );
}

#[test]
fn the_environment_is_that_of_hugging_faces_programs() {
    let folder = Folder::tiny_quantized();
    let hub = Hub::of(&folder.target);
    let sent = |variables: &[(&str, &OsStr)]| {
        let run = hub.run_with(&logits(NAME), "", variables);
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let requests = hub.server.requests().into_iter();
        let mut tokens: Vec<_> = requests
            .filter(|request| !request.is_storage)
            .map(|request| request.authorization)
            .collect();
        tokens.dedup();
        tokens
    };
    let other = hub.home.path().join("other");
    let bearer = |token: &str| Some(format!("Bearer {token}"));
    assert_eq!(sent(&[("HF_HUB_CACHE", other.as_ref())]), [None]);
    assert!(other.is_dir() && !hub.cache().exists());
    assert_eq!(sent(&[("HF_TOKEN", "hf_a".as_ref())]), [bearer("hf_a")]);
    assert!(hub.cache().is_dir());
    // Where `hf auth login` keeps it.
    std::fs::write(hub.home.path().join("token"), "hf_b\n").unwrap();
    assert_eq!(sent(&[]), [bearer("hf_b")]);
    let file = hub.home.path().join("token-2");
    std::fs::write(&file, "hf_c").unwrap();
    assert_eq!(sent(&[("HF_TOKEN_PATH", file.as_ref())]), [bearer("hf_c")]);
    assert_eq!(sent(&[("HF_HUB_OFFLINE", "1".as_ref())]), []);
}

#[test]
fn a_model_is_quantised_from_its_name() {
    let folder = Folder::tiny();
    let hub = Hub::of(&folder.source);
    hub.succeed(&args!["quantize", NAME, &folder.target]);
    let of_folder = folder.beside("of-folder");
    succeed(&args!["quantize", &folder.source, &of_folder]);
    let weights = |dir: PathBuf| std::fs::read(dir.join("model.safetensors")).unwrap();
    assert!(weights(folder.target.clone()) == weights(of_folder));
    assert!(folder.target.join("tokenizer.json").is_file());

    // Arguments that do not fit are refused first.
    hub.server.requests();
    let run = hub.run(
        &args!["quantize", NAME, folder.beside("x"), "--method", "gptq"],
        "",
    );
    assert!(run.stderr.contains("--calibration"), "{}", run.stderr);
    assert!(hub.server.requests().is_empty());
}

#[test]
fn what_cannot_be_downloaded_is_said() {
    let folder = Folder::tiny_quantized();
    let hub = Hub::of(&folder.target);
    let (endpoint, cache) = (hub.server.endpoint(), hub.cache());
    hub.refuse(
        &[logits(NAME), args!["--offline"]].concat(),
        &format!(
            "{NAME}, revision `main`, is not complete in {} and the network is not used (--offline, HF_HUB_OFFLINE): run once with the network, or \
             set HF_HOME to the cache that has it",
            cache.display()
        ),
    );
    let not_found = |name: &str, revision: &str| {
        format!(
            "{endpoint} has no model {name} with a revision `{revision}`, or does not show it without a token of its owner (HF_TOKEN), and there is \
             no folder {name} here; check the spelling of both"
        )
    };
    hub.refuse(
        &logits("some-owner/other"),
        &not_found("some-owner/other", "main"),
    );
    hub.refuse(
        &[logits(NAME), args!["--revision", "v2"]].concat(),
        &not_found(NAME, "v2"),
    );
    hub.refuse(
        &logits("Tiny-W4A16"),
        "`Tiny-W4A16` is no folder here, and no name of a model on the Hugging Face hub; a name has an owner, as Qwen/Qwen3-8B-AWQ has, a folder of \
         two parts can be given as ./owner/name",
    );
    hub.server.fail(HubFaults {
        files: Some((403, "GatedRepo")),
        ..HubFaults::default()
    });
    hub.refuse(
        &logits(NAME),
        &format!(
            "{NAME} is gated or private, the hub answers 403: accept its licence at {endpoint}/{NAME}, then set HF_TOKEN to a token of the account \
             that accepted it"
        ),
    );
    assert!(
        !cache
            .join("models--some-owner--Tiny-W4A16/snapshots")
            .exists()
    );
}

/// Costs about 3 s, the pauses between the attempts.
#[test]
fn a_broken_connection_is_resumed_by_the_next_run() {
    let folder = Folder::tiny_quantized();
    let hub = Hub::of(&folder.target);
    let weights = std::fs::metadata(folder.target.join("model.safetensors")).unwrap();
    let half = weights.len() as usize / 2;
    hub.server.fail(HubFaults {
        breaks: Some((half, usize::MAX)),
        ..HubFaults::default()
    });
    let run = hub.run(&logits(NAME), "");
    assert_eq!((run.code, &*run.stdout), (Some(1), ""));
    let words = format!(
        "model.safetensors broke off after {half} of {} bytes, 5 times in a row",
        weights.len()
    );
    assert!(run.stderr.contains(&words), "{}", run.stderr);
    hub.server.fail(HubFaults::default());
    hub.server.requests();
    assert_eq!(hub.succeed(&logits(NAME)), succeed(&logits(&folder.target)));
    let range = format!("bytes={half}-");
    let ranges: Vec<_> = hub
        .server
        .downloads()
        .into_iter()
        .filter_map(|request| request.range)
        .collect();
    assert_eq!(ranges, [range]);
}
