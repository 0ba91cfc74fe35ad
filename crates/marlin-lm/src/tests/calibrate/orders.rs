//! Tests of the orders in which GPTQ rounds rows, in the file formats that can store them.

use std::ops::ControlFlow;
use std::path::Path;

use marlin_format::checkpoint::{Checkpoint, Dtype};
use marlin_format::{FormatError, GroupSize, QuantSpec, Sparsity};
use serde_json::json;

use super::{SPEC, config_of_64, gptq, run, samples};
use crate::config::read_json;
use crate::tests::folder::logits;
use crate::tests::support::*;
use crate::{FileFormat, Method, ModelError, QuantizeOptions, RowOrder, quantize_folder};

#[test]
fn forms_and_orders_hold_what_the_walk_has_seen() {
    let mut rng = rng();
    let config = config_of_64();
    let (_a, source) = random_folder(&config, Dtype::F16, &mut rng);
    let samples = samples(&config, &mut rng);
    let tokens = random_tokens(20, config.vocab_size, &mut rng);
    let of = |order, format| {
        let (_parent, target) = temporary();
        let mut options = QuantizeOptions {
            format,
            exclude: vec!["re:.*o_proj".into()],
            ..gptq(&samples)
        };
        if let Method::Gptq { order: asked, .. } = &mut options.method {
            *asked = order;
        }
        let report = run(&source, &target, &options).unwrap();
        assert_eq!((report.quantized.len(), report.excluded.len()), (12, 2));
        logits(&open(&target).model, &tokens)
    };
    for order in [RowOrder::Natural, RowOrder::WithinGroups] {
        assert_eq!(
            of(order, FileFormat::CompressedTensors),
            of(order, FileFormat::Gptq),
            "{order:?}"
        );
    }
}

/// Act-order over several groups is a row permutation, which readers of compressed-tensors refuse.
/// With one group per channel, the files do not store the order.
#[test]
fn act_order_is_written_where_readers_take_it_alone() {
    let mut rng = rng();
    let config = config_of_64();
    let (_a, source) = random_folder(&config, Dtype::F16, &mut rng);
    let (samples, tokens) = (
        samples(&config, &mut rng),
        random_tokens(20, config.vocab_size, &mut rng),
    );
    let of = |format, spec: QuantSpec, sparsity| {
        let (parent, target) = temporary();
        let mut options = QuantizeOptions {
            format,
            sparsity,
            ..gptq(&samples)
        };
        if let Method::Gptq { order, .. } = &mut options.method {
            *order = RowOrder::ActOrder;
        }
        let report = quantize_folder(&source, &target, &spec, &options, |_| {
            ControlFlow::Continue(())
        });
        assert_eq!(
            (
                target.exists(),
                target.with_file_name("model.partial").exists()
            ),
            (report.is_ok(), false)
        );
        report.map(|_| (parent, target))
    };
    let channel = QuantSpec::int4(GroupSize::Channel);
    let Err(ModelError::ActOrderGroups { layer, groups }) =
        of(FileFormat::CompressedTensors, SPEC, Sparsity::Dense)
    else {
        panic!("act-order over groups")
    };
    assert_eq!(groups, if layer.ends_with("down_proj") { 3 } else { 2 });
    for format in [
        FileFormat::CompressedTensors,
        FileFormat::Gptq,
        FileFormat::Marlin24,
    ] {
        let error = of(format, channel, Sparsity::TwoFour);
        assert!(
            matches!(
                error,
                Err(ModelError::Quantize {
                    source: FormatError::SparsePermuted,
                    ..
                })
            ),
            "{format:?}"
        );
    }

    let folders = [FileFormat::CompressedTensors, FileFormat::Gptq]
        .map(|format| of(format, channel, Sparsity::Dense).unwrap());
    let found: Vec<Vec<f32>> = folders
        .iter()
        .map(|(_, target)| logits(&open(target).model, &tokens))
        .collect();
    assert_eq!(found[0], found[1]);
    let [(_, packed), (_, gptq)] = &folders;
    assert!(
        Checkpoint::open(packed)
            .unwrap()
            .names()
            .all(|name| !name.ends_with("g_idx"))
    );
    let config_of = |target: &Path| {
        read_json(&target.join("config.json")).unwrap()["quantization_config"].clone()
    };
    assert_eq!(
        config_of(packed)["config_groups"]["group_0"]["weights"]["actorder"],
        json!(null)
    );
    assert_eq!(config_of(gptq)["desc_act"], json!(false));
    // The order still has an effect: the natural order gives other logits.
    let (_b, natural) = temporary();
    let mut options = self::gptq(&samples);
    if let Method::Gptq { order, .. } = &mut options.method {
        *order = RowOrder::Natural;
    }
    quantize_folder(&source, &natural, &channel, &options, |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_ne!(logits(&open(&natural).model, &tokens), found[0]);
}
