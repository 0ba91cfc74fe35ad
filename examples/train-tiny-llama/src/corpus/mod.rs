//! `corpus`: collects the training text, trains the tokenizer, and writes both as tokens.

mod sources;
pub mod tokenizer;

use std::collections::HashSet;
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::json;
use tokenizers::Tokenizer;

use crate::error::Error;
use sources::{Package, SourceFile};

/// Crates that the model never sees in training: its perplexity is measured on their sources.
/// Ordinary Rust, all under MIT OR Apache-2.0.
const HELD_OUT: [&str; 5] = ["indexmap", "itertools", "regex-syntax", "tempfile", "url"];
/// The maximum number of bytes of held-out text, divided among the crates.
const HELD_OUT_BYTES: usize = 180_000;
/// The maximum training text from one crate, in bytes. The limit prevents the model from learning
/// only the style of the largest crates.
const MAX_CRATE_BYTES: usize = 2_000_000;
/// The file with the tokens of the training text.
pub const TRAIN_TOKENS: &str = "train.bin";
/// The file with the tokens of [`HELD_OUT_TEXT`].
pub const HELD_OUT_TOKENS: &str = "heldout.bin";
/// The file with the held-out text.
const HELD_OUT_TEXT: &str = "heldout.txt";
/// The longest input of the shipped model, in tokens.
pub const CONTEXT: usize = 512;

/// Options of `corpus`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Folder to write: train.bin, heldout.bin, heldout.txt, tokenizer.json, tokenizer_config.json,
    /// corpus.json
    #[arg(long)]
    out: PathBuf,
    /// Maximum training text, in bytes
    #[arg(long, default_value_t = 110_000_000)]
    max_bytes: usize,
    /// The tokenizer.json of the model that `train --from` will fine-tune; without this option, a
    /// tokenizer is trained on the text
    #[arg(long)]
    tokenizer: Option<PathBuf>,
}

/// Runs `corpus`.
pub fn run(options: &Options) -> Result<(), Error> {
    fs::create_dir_all(&options.out).map_err(Error::io(&options.out))?;
    let packages = sources::packages()?;
    // Held-out texts are selected first. A copy of such a text in another crate then counts as
    // seen, and is not used for training.
    let mut seen = HashSet::new();
    let held_out = held_out(&packages, &mut seen)?;
    let training = training(&packages, &mut seen, options.max_bytes)?;

    let texts: Vec<&str> = training
        .iter()
        .flat_map(|(_, files)| files)
        .map(|file| file.text.as_str())
        .collect();
    let bytes: usize = texts.iter().map(|text| text.len()).sum();
    println!(
        "training text: {} files of {} crates, {:.1} MB",
        texts.len(),
        training.len(),
        bytes as f64 / 1e6
    );
    let path = options.out.join("tokenizer.json");
    let tokenizer = match &options.tokenizer {
        Some(given) => {
            // The file is copied byte for byte, so that `train --from` recognises the same
            // tokenizer.
            let content = fs::read(given).map_err(Error::io(given))?;
            fs::write(&path, &content).map_err(Error::io(&path))?;
            Tokenizer::from_bytes(content).map_err(Error::Tokenizer)?
        }
        None => {
            let trained = tokenizer::train(texts.iter().copied(), tokenizer::VOCAB_SIZE)?;
            trained.save(&path, false).map_err(Error::Tokenizer)?;
            trained
        }
    };
    write_json(
        &options.out.join("tokenizer_config.json"),
        &tokenizer::config(CONTEXT),
    )?;
    println!("tokenizer: {} tokens", tokenizer.get_vocab_size(true));

    let train_tokens = write_tokens(&options.out.join(TRAIN_TOKENS), &tokenizer, &texts)?;
    let per_token = bytes as f64 / train_tokens.max(1) as f64;
    println!("{TRAIN_TOKENS}: {train_tokens} tokens, {per_token:.2} bytes a token");

    let text = held_out
        .iter()
        .flat_map(|(_, files)| files)
        .map(|file| file.text.as_str())
        .collect::<Vec<_>>()
        .join("\n");
    let path = options.out.join(HELD_OUT_TEXT);
    fs::write(&path, &text).map_err(Error::io(&path))?;
    let ids = tokenizer::encode(&tokenizer, &[&text])?.concat();
    let path = options.out.join(HELD_OUT_TOKENS);
    fs::write(&path, to_bytes(&ids)).map_err(Error::io(&path))?;
    println!(
        "{HELD_OUT_TEXT}: {} bytes, {} tokens, of {}",
        text.len(),
        ids.len(),
        HELD_OUT.join(", ")
    );

    let held_out: Vec<_> = held_out
        .iter()
        .map(|(package, files)| {
            let files: Vec<_> = files.iter().map(|file| file.path.as_str()).collect();
            json!({"crate": package.name, "version": package.version, "license": package.license, "files": files})
        })
        .collect();
    let training: Vec<_> = training
        .iter()
        .map(|(package, _)| format!("{} {}", package.name, package.version))
        .collect();
    let report = json!({
        "train": {"bytes": bytes, "files": texts.len(), "tokens": train_tokens, "crates": training},
        "held_out": {"bytes": text.len(), "tokens": ids.len(), "crates": held_out},
    });
    write_json(&options.out.join("corpus.json"), &report)
}

type Selection<'a> = Vec<(&'a Package, Vec<SourceFile>)>;

/// Selects the evaluation text: Rust files under `src/` of the [`HELD_OUT`] crates.
fn held_out<'a>(packages: &'a [Package], seen: &mut HashSet<u64>) -> Result<Selection<'a>, Error> {
    let mut selection = Vec::new();
    for name in HELD_OUT {
        let package = packages
            .iter()
            .find(|package| package.name == name)
            .ok_or(Error::HeldOutMissing(name))?;
        let mut files = sources::files(package, seen)?;
        files.retain(|file| file.path.starts_with("src/") && file.path.ends_with(".rs"));
        selection.push((package, files));
    }
    Ok(limited(selection, HELD_OUT_BYTES, HELD_OUT_BYTES))
}

/// Selects the training text: the files of all other crates except bindings.
fn training<'a>(
    packages: &'a [Package],
    seen: &mut HashSet<u64>,
    max_bytes: usize,
) -> Result<Selection<'a>, Error> {
    let mut selection = Vec::new();
    for package in packages.iter().filter(|package| {
        !HELD_OUT.contains(&package.name.as_str()) && !sources::is_binding(&package.name)
    }) {
        let files = sources::files(package, seen)?;
        if !files.is_empty() {
            selection.push((package, files));
        }
    }
    Ok(limited(selection, max_bytes, MAX_CRATE_BYTES))
}

/// Limits a selection to `budget` bytes in total and `per_crate` bytes per crate.
fn limited(selection: Selection<'_>, budget: usize, per_crate: usize) -> Selection<'_> {
    let size = |files: &[SourceFile]| {
        files
            .iter()
            .map(|file| file.text.len())
            .sum::<usize>()
            .min(per_crate)
    };
    let sizes: Vec<usize> = selection.iter().map(|(_, files)| size(files)).collect();
    let share = sources::fair_share(&sizes, budget).min(per_crate);
    selection
        .into_iter()
        .map(|(package, files)| (package, sources::within(files, share)))
        .collect()
}

/// Writes the tokens of `texts`, each preceded by the separator, as 16-bit little-endian integers,
/// and returns their number.
fn write_tokens(path: &Path, tokenizer: &Tokenizer, texts: &[&str]) -> Result<usize, Error> {
    let file = fs::File::create(path).map_err(Error::io(path))?;
    let mut file = BufWriter::new(file);
    let separator = [tokenizer.token_to_id(tokenizer::END_OF_TEXT).unwrap_or(0) as u16];
    let mut count = 0;
    // An encoding also holds offsets and strings, which take many times the size of its ids. Files
    // are therefore encoded a few hundred at a time.
    for texts in texts.chunks(256) {
        for ids in tokenizer::encode(tokenizer, texts)? {
            file.write_all(&to_bytes(&separator))
                .and_then(|()| file.write_all(&to_bytes(&ids)))
                .map_err(Error::io(path))?;
            count += 1 + ids.len();
        }
    }
    file.flush().map_err(Error::io(path))?;
    Ok(count)
}

fn to_bytes(ids: &[u16]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// Writes indented JSON that ends with a newline.
pub fn write_json(path: &Path, value: &serde_json::Value) -> Result<(), Error> {
    fs::write(path, format!("{value:#}\n")).map_err(Error::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_separated_and_little_endian() {
        let texts = ["fn a() {}\n", "fn b() {}\n"];
        let tokenizer = tokenizer::train(texts.into_iter(), 270).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(TRAIN_TOKENS);
        let count = write_tokens(&path, &tokenizer, &texts).unwrap();
        let bytes = fs::read(&path).unwrap();
        let ids: Vec<u32> = bytes
            .chunks(2)
            .map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])))
            .collect();
        assert_eq!(ids.len(), count);
        assert_eq!(
            tokenizer.decode(&ids, false).unwrap(),
            "<|endoftext|>fn a() {}\n<|endoftext|>fn b() {}\n"
        );
    }

    #[test]
    fn a_missing_held_out_crate_is_named() {
        let error = held_out(&[], &mut HashSet::new()).unwrap_err();
        assert!(error.to_string().contains("`indexmap`"), "{error}");
    }
}
