//! A few steps on the shipped model: the perplexity falls, and is the same after the adapters are
//! saved and loaded.

use std::path::Path;

use burn::tensor::Device;
use fine_tune_lora::{Options, load_adapters, measure, prepare, save_adapters, train};

#[test]
fn the_shipped_model_learns_a_text() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = root.join("examples/train-tiny-llama/model");
    let text =
        std::fs::read_to_string(root.join("LICENSE-MIT")).unwrap_or_else(|error| panic!("{error}"));
    let options = Options {
        steps: 5,
        batch: 2,
        seq: 32,
        ..Options::default()
    };
    let prepared = || {
        prepare(&folder, &text, &options, &Device::flex()).unwrap_or_else(|error| panic!("{error}"))
    };
    let first = prepared();
    assert_eq!(first.report.skipped(), 0, "{}", first.report);
    let perplexity = |model: &_| {
        measure(model, &first.tokens, options.seq).unwrap_or_else(|error| panic!("{error}"))
    };
    let before = perplexity(&first.model);
    let (model, losses) = train(first.model.clone(), &first.tokens, &options)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(losses.len(), options.steps);
    let after = perplexity(&model);
    assert!(
        after < 0.9 * before,
        "perplexity {before} before, {after} after: {losses:?}"
    );

    let dir = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let file = dir.path().join("adapters.bpk");
    save_adapters(model, &file).unwrap_or_else(|error| panic!("{error}"));
    let size = std::fs::metadata(&file)
        .map(|file| file.len())
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(size < 2_000_000, "{size} bytes hold more than the adapters");
    let again = load_adapters(prepared().model, &file).unwrap_or_else(|error| panic!("{error}"));
    assert!(
        (perplexity(&again) - after).abs() < 1e-3 * after,
        "the loaded adapters are others"
    );
}
