//! Tests of folders whose output head is quantised, too.

use burn::tensor::Device;
use marlin_format::checkpoint::Dtype;
use marlin_format::{GroupSize, QuantSpec, Sparsity};
use serde_json::json;

use super::SPEC;
use crate::tests::calibrate::{gptq, samples};
use crate::tests::folder::logits;
use crate::tests::support::*;
use crate::{
    FileFormat, LanguageModel, ModelConfig, ModelError, OpenOptions, Projection, QuantizeOptions,
};

const HEAD: QuantSpec = QuantSpec::int8(GroupSize::G128);

fn config_of(tied: bool) -> ModelConfig {
    config_with(json!({
        "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96,
        "vocab_size": 64, "tie_word_embeddings": tied
    }))
}

/// Tests that the head in the file is the head that a float head is rounded to when a folder is
/// opened, tied to the embedding or not.
#[test]
fn a_head_in_the_file_is_the_head_of_the_option() {
    let mut rng = rng();
    for tied in [false, true] {
        let config = config_of(tied);
        let (_a, source) = random_folder(&config, Dtype::F32, &mut rng);
        let tokens = random_tokens(8, config.vocab_size, &mut rng);
        for format in [FileFormat::CompressedTensors, FileFormat::Gptq] {
            let without = QuantizeOptions {
                format,
                ..QuantizeOptions::default()
            };
            let with = QuantizeOptions {
                head: Some(HEAD),
                ..without.clone()
            };
            let ((_b, float_head), (_c, target)) = (temporary(), temporary());
            let float_report = quantize_with(&source, &float_head, &SPEC, &without).unwrap();
            let report = quantize_with(&source, &target, &SPEC, &with).unwrap();
            assert_eq!(report.quantized.len(), float_report.quantized.len() + 1);
            assert_eq!(report.source_bytes, float_report.source_bytes);

            let model = open(&target).model;
            assert!(matches!(&model.lm_head, Some(Projection::Quant(_))));
            assert!(
                !ModelConfig::read(&target.join("config.json"))
                    .unwrap()
                    .tie_word_embeddings
            );
            let expected = LanguageModel::open(
                &float_head,
                &Device::flex(),
                &OpenOptions {
                    head: Some(HEAD),
                    ..options()
                },
            )
            .unwrap();
            assert_eq!(
                logits(&model, &tokens),
                logits(&expected.model, &tokens),
                "{format:?}, tied: {tied}"
            );
        }
    }
}

/// Tests that a calibrated run rounds the head, and that a head of the layers' own spec opens.
#[test]
fn a_calibrated_run_rounds_the_head() {
    let mut rng = rng();
    let config = config_of(true);
    let (_a, source) = random_folder(&config, Dtype::F32, &mut rng);
    for head in [HEAD, SPEC] {
        let (_b, target) = temporary();
        let options = QuantizeOptions {
            head: Some(head),
            ..gptq(&samples(&config, &mut rng))
        };
        let report = quantize_with(&source, &target, &SPEC, &options).unwrap();
        let written = report
            .quantized
            .iter()
            .find(|layer| layer.name == "lm_head");
        assert_eq!(written.map(|layer| layer.spec), Some(head));
        let model = open(&target).model;
        assert!(matches!(&model.lm_head, Some(Projection::Quant(_))));
        check_dequantized(&model, &random_tokens(8, config.vocab_size, &mut rng));
    }
}

#[test]
fn heads_that_cannot_be_written_are_refused() {
    let mut rng = rng();
    let config = config_of(false);
    let (_a, source) = random_folder(&config, Dtype::F32, &mut rng);
    // An exclusion takes precedence.
    let (_b, target) = temporary();
    let excluded = QuantizeOptions {
        head: Some(HEAD),
        exclude: vec!["lm_head".into()],
        ..QuantizeOptions::default()
    };
    quantize_with(&source, &target, &SPEC, &excluded).unwrap();
    assert!(matches!(
        &open(&target).model.lm_head,
        Some(Projection::Dense(_))
    ));
    let sparse = QuantizeOptions {
        head: Some(HEAD),
        format: FileFormat::Marlin24,
        sparsity: Sparsity::TwoFour,
        ..QuantizeOptions::default()
    };
    let (_c, target) = temporary();
    let spec = QuantSpec::int4(GroupSize::G128);
    let error = quantize_with(&source, &target, &spec, &sparse);
    assert!(matches!(error, Err(ModelError::DenseHead)));
    assert!(!target.exists());
}
