//! Tests of perplexity against the reference's logits.

use std::sync::Arc;

use burn::tensor::FloatDType;
use marlin_format::checkpoint::Dtype;
use serde_json::json;

use super::reference;
use super::support::*;
use crate::{Model, ModelConfig, ModelError, perplexity};

fn model(config: &ModelConfig, weights: &Weights) -> Model {
    let (_parent, dir) = temporary();
    write_folder(&dir, config, weights, Dtype::F32);
    Arc::unwrap_or_clone(open(&dir).model)
}

/// Returns the sum of -log softmax(logits)[next] over a window, and the number of terms.
fn expected(config: &ModelConfig, weights: &Weights, window: &[u32]) -> (f64, usize) {
    let logits = reference::forward(config, weights, window);
    let nll = |logits: &Vec<f64>, next: u32| {
        logits.iter().map(|x| x.exp()).sum::<f64>().ln() - logits[next as usize]
    };
    (
        logits
            .iter()
            .zip(&window[1..])
            .map(|(logits, &next)| nll(logits, next))
            .sum(),
        window.len() - 1,
    )
}

#[test]
fn perplexity_matches_the_reference_in_every_kind_of_window() {
    let mut rng = rng();
    let config = config();
    let weights = random_weights(&config, &mut rng);
    let model = model(&config, &weights);
    // Whole windows only; a shorter last window; a last window of one token; less than one window.
    for (len, window) in [(24, 8), (29, 8), (25, 8), (5, 8), (8, 2), (2, 96)] {
        let tokens = random_tokens(len, config.vocab_size, &mut rng);
        let (sum, count) = tokens
            .chunks(window)
            .map(|window| expected(&config, &weights, window))
            .fold((0.0, 0), |(sum, count), (nll, predicted)| {
                (sum + nll, count + predicted)
            });
        let mut last = None;
        let found = perplexity(&model, &tokens, window, |progress| last = Some(progress)).unwrap();
        assert_eq!(found.tokens, count, "{len} tokens in windows of {window}");
        assert!(
            (found.nll - sum / count as f64).abs() < 1e-5 * found.nll,
            "{found:?}"
        );
        assert!((found.perplexity - found.nll.exp()).abs() < 1e-9 * found.perplexity);
        let last = last.unwrap();
        assert_eq!((last.windows, last.so_far), (last.total, found.perplexity));
    }
}

#[test]
fn a_model_that_knows_nothing_is_as_good_as_guessing() {
    let mut rng = rng();
    let config = config_with(json!({ "vocab_size": 50 }));
    let mut weights = random_weights(&config, &mut rng);
    weights.get_mut("lm_head.weight").unwrap().1.fill(0.0);
    let found = perplexity(
        &model(&config, &weights),
        &random_tokens(40, 50, &mut rng),
        16,
        |_| {},
    )
    .unwrap();
    assert!((found.perplexity - 50.0).abs() < 1e-3, "{found:?}");
}

#[test]
fn what_has_no_perplexity_is_refused() {
    let config = config();
    let mut weights = random_weights(&config, &mut rng());
    let valid = model(&config, &weights);
    let run = |model: &Model, tokens: &[u32], window| {
        perplexity(model, tokens, window, |_| {}).expect_err("must be refused")
    };
    assert!(matches!(
        run(&valid, &[1, 2], 1),
        ModelError::Window {
            window: 1,
            max_len: 96
        }
    ));
    assert!(matches!(
        run(&valid, &[1, 2], 97),
        ModelError::Window {
            window: 97,
            max_len: 96
        }
    ));
    assert!(matches!(
        run(&valid, &[1], 4),
        ModelError::TextTooShort { tokens: 1 }
    ));
    assert!(matches!(
        run(&valid, &[1, 70, 71, 4], 4),
        ModelError::Token {
            token: 71,
            position: 2,
            vocab_size: 71
        }
    ));

    // The embedding of token 5, in the second window of 6, is NaN. Even where it is masked, it
    // makes all of its window NaN (0 * NaN), and no other window.
    weights.get_mut("model.embed_tokens.weight").unwrap().1[5 * 36] = f32::NAN;
    let error = run(
        &model(&config, &weights),
        &[1, 2, 3, 4, 1, 2, 3, 4, 5, 1, 2, 3],
        6,
    );
    assert!(
        matches!(
            error,
            ModelError::LogLikelihood {
                position: 7,
                dtype: FloatDType::F32,
                ..
            }
        ),
        "{error}"
    );
}
