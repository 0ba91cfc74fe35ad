//! Complete training runs of a small model on the processor.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use marlin_format::checkpoint::{Checkpoint, Quantization, layer_format, read_layer};
use marlin_format::{GroupSize, QuantSpec, Sparsity, WeightValue};
use marlin_lm::{Calibration, FileFormat, Method, QuantizeOptions, RowOrder, quantize_folder};

use super::*;

fn small() -> ModelConfig {
    ModelConfig {
        vocab_size: 32,
        hidden_size: 32,
        intermediate_size: 64,
        experts: None,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        max_position_embeddings: 32,
        ..Size::Shipped.config()
    }
}

/// Writes a corpus folder that is easy to learn: its tokens count up in steps of 3, modulo the
/// vocabulary.
fn corpus_folder(dir: &Path) {
    let tokens = |count: u16| {
        (0..count)
            .flat_map(|i| (i * 3 % 32).to_le_bytes())
            .collect::<Vec<u8>>()
    };
    fs::write(dir.join(corpus::TRAIN_TOKENS), tokens(2000)).unwrap();
    fs::write(dir.join(corpus::HELD_OUT_TOKENS), tokens(150)).unwrap();
    fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    fs::write(dir.join("tokenizer_config.json"), "{}").unwrap();
}

fn options(data: &Path, out: &Path) -> Options {
    Options {
        data: data.to_owned(),
        out: out.to_owned(),
        device: DeviceKind::Flex,
        size: Size::Shipped,
        steps: 60,
        max_seconds: None,
        batch: 8,
        seq: 16,
        lr: 1e-2,
        warmup: 5,
        eval_steps: 30,
        seed: 7,
        sparse24: false,
        from: None,
    }
}

#[test]
fn learns_and_writes_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    corpus_folder(dir.path());
    let out = dir.path().join("model");
    let options = options(dir.path(), &out);
    train(&options, small()).unwrap();
    let training: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("training.json")).unwrap()).unwrap();
    let perplexity = training["heldout_perplexity"].as_f64().unwrap();
    assert!(
        perplexity < 2.0,
        "guessing is 32, knowing is 1, found {perplexity}"
    );
    assert_eq!(
        training["tokens"],
        training["steps"].as_u64().unwrap() * 8 * 16
    );
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ] {
        assert!(out.join(file).is_file(), "{file}");
    }
    let config = ModelConfig::read(&out.join("config.json")).unwrap();
    assert_eq!((config.vocab_size, config.tie_word_embeddings), (32, true));

    train(
        &Options {
            steps: 1,
            ..options
        },
        small(),
    )
    .unwrap();
    let replaced: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("training.json")).unwrap()).unwrap();
    assert_eq!(replaced["steps"], 1, "an earlier training is replaced");
    assert!(!dir.path().join("model.new").exists());
}

/// Checks that pruning makes the small model worse, and that it recovers in fine-tuning with a
/// fixed mask, with the same weights at zero.
#[test]
fn a_pruned_model_recovers_with_its_mask_held() {
    let dir = tempfile::tempdir().unwrap();
    corpus_folder(dir.path());
    let (dense, sparse) = (dir.path().join("dense"), dir.path().join("sparse"));
    let first = options(dir.path(), &dense);
    train(&first, small()).unwrap();
    let from = || options(dir.path(), &sparse);
    train(
        &Options {
            sparse24: true,
            from: Some(dense.clone()),
            lr: 3e-3,
            ..from()
        },
        small(),
    )
    .unwrap();
    let training: serde_json::Value =
        serde_json::from_slice(&fs::read(sparse.join("training.json")).unwrap()).unwrap();
    let (pruned, recovered) = (
        &training["heldout_perplexity_when_pruned"],
        training["heldout_perplexity"].as_f64().unwrap(),
    );
    assert!(
        recovered < 2.0 && recovered < pruned.as_f64().unwrap(),
        "{training}"
    );
    // In each layer, q, k and v are one matmul, and gate and up are another.
    assert_eq!(training["projections_pruned_by_magnitude"], 2 * 4);

    let open = |dir: &Path| Checkpoint::open(dir).unwrap();
    let (before, after) = (open(&dense), open(&sparse));
    let mut projections = 0;
    for name in after.names().filter(|name| name.contains("_proj")) {
        let [before, after] = [&before, &after].map(|checkpoint| checkpoint.tensor(name).unwrap());
        assert!(after.is_two_four() && !before.is_two_four(), "{name}");
        // The two smallest of four are zero now. Another value may have become zero in training.
        let (before, after) = (before.to_f32().unwrap(), after.to_f32().unwrap());
        for (before, after) in before.chunks(4).zip(after.chunks(4)) {
            let mut sizes: Vec<f32> = before.iter().map(|value| value.abs()).collect();
            sizes.sort_by(f32::total_cmp);
            assert!(
                before
                    .iter()
                    .zip(after)
                    .all(|(before, after)| *after == 0.0 || before.abs() >= sizes[2]),
                "{name}"
            );
        }
        projections += 1;
    }
    assert_eq!(projections, 14);
}

/// Prunes a folder with SparseGPT and quantises it to int8.
fn sparsegpt(source: &Path, target: &Path) {
    let sample = |start: u32| (0..32).map(|i| (start + i) * 3 % 32).collect();
    let calibration = Calibration {
        samples: (0..16).map(sample).collect(),
        device: Device::flex(),
        dtype: None,
        route_all: false,
    };
    let method = Method::Gptq {
        order: RowOrder::default(),
        damping: 0.01,
        awq: false,
        calibration,
    };
    let options = QuantizeOptions {
        format: FileFormat::Marlin24,
        sparsity: Sparsity::TwoFour,
        method,
        ..QuantizeOptions::default()
    };
    let spec = QuantSpec::new(WeightValue::Int8, GroupSize::Channel);
    quantize_folder(source, target, &spec, &options, |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
}

/// Checks that fine-tuning a folder that SparseGPT has pruned and quantised starts with the
/// folder's values, and keeps its zeros.
#[test]
fn a_quantised_two_of_four_model_recovers_with_its_own_mask() {
    let dir = tempfile::tempdir().unwrap();
    corpus_folder(dir.path());
    let [dense, quantised, recovered] =
        ["dense", "quantised", "recovered"].map(|name| dir.path().join(name));
    // The Marlin24 file format requires output features in multiples of 64.
    let config = ModelConfig {
        hidden_size: 64,
        num_key_value_heads: 4,
        head_dim: 16,
        ..small()
    };
    train(&options(dir.path(), &dense), config).unwrap();
    sparsegpt(&dense, &quantised);
    let again = Options {
        sparse24: true,
        from: Some(quantised.clone()),
        seed: 11,
        lr: 3e-3,
        ..options(dir.path(), &recovered)
    };
    run(&again).unwrap();
    let training: serde_json::Value =
        serde_json::from_slice(&fs::read(recovered.join("training.json")).unwrap()).unwrap();
    assert_eq!(training["projections_pruned_by_magnitude"], 0);
    let (before, after) = (
        &training["heldout_perplexity_when_pruned"],
        training["heldout_perplexity"].as_f64().unwrap(),
    );
    assert!(
        after < 2.0 && after < before.as_f64().unwrap(),
        "{training}"
    );

    let (source, result) = (
        Checkpoint::open(&quantised).unwrap(),
        Checkpoint::open(&recovered).unwrap(),
    );
    let quantization = Quantization::read(&quantised).unwrap();
    let mut projections = 0;
    for name in result
        .names()
        .filter_map(|name| name.strip_suffix(".weight"))
        .filter(|name| name.ends_with("_proj"))
    {
        let plain = read_layer(
            &source,
            name,
            &layer_format(quantization.as_ref(), name).unwrap(),
        )
        .unwrap();
        let (k, n, values) = (plain.k(), plain.n(), plain.dequantize());
        let found = result
            .tensor(&format!("{name}.weight"))
            .unwrap()
            .to_f32()
            .unwrap();
        // A weight in a file is [N, K].
        let zeros = |row: usize, column: usize| {
            (
                values[row * n + column] == 0.0,
                found[column * k + row] == 0.0,
            )
        };
        let [mut before, mut after] = [0, 0];
        for (was_zero, is_zero) in (0..k)
            .flat_map(|row| (0..n).map(move |column| (row, column)))
            .map(|(row, column)| zeros(row, column))
        {
            assert!(is_zero || !was_zero, "{name}");
            before += usize::from(was_zero);
            after += usize::from(is_zero);
        }
        // Only a few other values are rounded to 0 in f16.
        assert!(
            before >= k * n / 2 && after - before < k * n / 100,
            "{name}: {before} zeros, then {after}"
        );
        projections += 1;
    }
    assert_eq!(projections, 14);
}

#[test]
fn the_first_loss_is_that_of_guessing_and_losses_are_read_once() {
    let dir = tempfile::tempdir().unwrap();
    corpus_folder(dir.path());
    let tokens = tokens::read(&dir.path().join(corpus::TRAIN_TOKENS), 32, 17).unwrap();
    let mut trainer = Trainer::new(
        &small(),
        tokens,
        &options(dir.path(), dir.path()),
        &Device::flex(),
    );
    for _ in 0..2 {
        trainer.step(0.0).unwrap();
    }
    let loss = trainer.mean_loss().unwrap();
    assert!((loss - 32f32.ln()).abs() < 0.1, "{loss}");
    assert!(trainer.mean_loss().unwrap().is_nan(), "no step since");
}

#[test]
fn the_shipped_models_are_dense_and_two_of_four() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (model, is_sparse) in [("model", false), ("model-24", true)] {
        let checkpoint = Checkpoint::open(root.join(model)).unwrap();
        let projections: Vec<&str> = checkpoint
            .names()
            .filter(|name| name.contains("_proj"))
            .collect();
        assert_eq!(projections.len(), 5 * 7, "{model}");
        for name in projections {
            assert_eq!(
                checkpoint.tensor(name).unwrap().is_two_four(),
                is_sparse,
                "{model}: {name}"
            );
        }
    }
    let tokenizer = |model: &str| fs::read(root.join(model).join("tokenizer.json")).unwrap();
    assert!(tokenizer("model") == tokenizer("model-24"));
}

#[test]
fn options_that_cannot_work_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    corpus_folder(dir.path());
    let refused = |change: fn(&mut Options)| {
        let mut options = options(dir.path(), &dir.path().join("model"));
        change(&mut options);
        train(&options, small()).unwrap_err().to_string()
    };
    assert!(refused(|options| options.steps = 0).contains("--steps must be at least 1"));
    assert!(refused(|options| options.seq = 1).contains("--seq 1"));
    assert!(refused(|options| options.seq = CONTEXT + 1).contains("context of 512"));
    assert!(refused(|options| options.lr = f64::NAN).contains("--lr"));
    assert!(
        refused(|options| options.out = options.data.clone())
            .contains("no trained model to replace")
    );
    let dense = dir.path().join("dense");
    train(
        &Options {
            steps: 1,
            ..options(dir.path(), &dense)
        },
        small(),
    )
    .unwrap();
    fs::write(dense.join("tokenizer.json"), "{ }").unwrap();
    let pruned = Options {
        sparse24: true,
        from: Some(dense),
        ..options(dir.path(), &dir.path().join("sparse"))
    };
    assert!(
        train(&pruned, small())
            .unwrap_err()
            .to_string()
            .contains("corpus --tokenizer")
    );
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    assert!(refused(|_| ()).contains("tokenizer.json"));
}
