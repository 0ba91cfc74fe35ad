//! Tests of `evaluate` with several models.

use marlin_format::checkpoint::Dtype;

use super::calibrate::{config_of_64, run};
use super::support::*;
use crate::{Evaluation, ModelConfig, ModelError, QuantizeOptions, evaluate};

#[test]
fn evaluation_agrees_with_perplexity() {
    let mut rng = rng();
    let (config, other) = (config_of_64(), config());
    let ((_a, source), (_b, target), (_c, foreign)) = (temporary(), temporary(), temporary());
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    write_folder(
        &foreign,
        &ModelConfig {
            vocab_size: 70,
            ..other.clone()
        },
        &random_weights(
            &ModelConfig {
                vocab_size: 70,
                ..other
            },
            &mut rng,
        ),
        Dtype::F32,
    );
    run(&source, &target, &QuantizeOptions::default()).unwrap();
    let (float, quantized) = (open(&source), open(&target));
    let tokens = random_tokens(75, config.vocab_size, &mut rng);
    let models = [&*float.model, &float.model, &quantized.model];
    let [first, second] = [&tokens[..40], &tokens[40..]];
    let found = evaluate(&models, &[&tokens], 16, |_, _| {}).unwrap();
    assert_eq!(found.texts, std::slice::from_ref(&found.all));
    let found = found.all;
    for (model, found) in [&float, &float, &quantized].into_iter().zip(&found) {
        let expected = crate::perplexity(&model.model, &tokens, 16, |_| {}).unwrap();
        assert!((found.nll.mean - expected.nll).abs() < 1e-6 && found.tokens == expected.tokens);
    }
    // The float model compared with itself.
    let same = found[1].against.as_ref().unwrap();
    assert_eq!(
        (
            same.nll_change.mean,
            same.agreement.mean,
            same.agreement.error,
            same.differ
        ),
        (0.0, 1.0, 0.0, 0)
    );
    assert!(same.divergence.mean.abs() < 1e-7);
    let rounded = found[2].against.as_ref().unwrap();
    assert!((rounded.nll_change.mean - (found[2].nll.mean - found[0].nll.mean)).abs() < 1e-9);
    assert!(rounded.divergence.mean > 0.0 && rounded.divergence.error > 0.0);
    assert_eq!(
        rounded.differ,
        ((1.0 - rounded.agreement.mean) * found[2].tokens as f64).round() as usize
    );

    // Two texts, each alone and together. In windows of 16, 15 + 15 + 7 tokens of the first text
    // are predicted, and 15 + 15 + 2 of the second.
    let mut progress = Vec::new();
    let both = evaluate(&models, &[first, second], 16, |done, total| {
        progress.push((done, total))
    })
    .unwrap();
    assert_eq!(progress.last(), Some(&(75, 75)));
    for (index, text) in [first, second].into_iter().enumerate() {
        let alone = evaluate(&models, &[text], 16, |_, _| {}).unwrap().all;
        assert_eq!(both.texts[index], alone);
        assert_eq!(alone[0].tokens, [37, 32][index]);
    }
    for (model, all) in both.all.iter().enumerate() {
        let sum: f64 = both
            .texts
            .iter()
            .map(|text| text[model].nll.mean * text[model].tokens as f64)
            .sum();
        assert_eq!(all.tokens, 69);
        assert!((all.nll.mean - sum / 69.0).abs() < 1e-9);
        let differ =
            |found: &Evaluation| found.against.as_ref().map_or(0, |against| against.differ);
        assert_eq!(
            differ(all),
            both.texts
                .iter()
                .map(|text| differ(&text[model]))
                .sum::<usize>()
        );
    }

    let error = evaluate(
        &[&float.model, &open(&foreign).model],
        &[&tokens, &tokens[..1]],
        16,
        |_, _| {},
    );
    assert!(matches!(error, Err(ModelError::TextTooShort { tokens: 1 })));
    let low: Vec<u32> = tokens.iter().map(|token| token % 70).collect();
    let error = evaluate(
        &[&float.model, &open(&foreign).model],
        &[&low],
        16,
        |_, _| {},
    );
    assert!(matches!(
        error,
        Err(ModelError::Vocabulary {
            expected: 71,
            found: 70
        })
    ));
}
