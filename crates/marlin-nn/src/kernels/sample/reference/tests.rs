use super::super::bitmap;
use super::*;
use rand::RngExt;

const ALL: SequenceState = SequenceState {
    status: SequenceStatus::At(7),
    seed: 3,
    temperature: 1.0,
    ..SequenceState::IDLE
};
const GREEDY: SequenceState = SequenceState {
    temperature: 0.0,
    ..ALL
};

/// Returns the token that a row chooses after `tokens`.
fn chosen(logits: &[f32], row: SequenceState, tokens: &[u32]) -> Option<u32> {
    chosen_but(&[], logits, row, tokens)
}

/// Returns the token that a row chooses after `tokens` if the tokens `suppressed` are suppressed.
fn chosen_but(
    suppressed: &[u32],
    logits: &[f32],
    row: SequenceState,
    tokens: &[u32],
) -> Option<u32> {
    let mut row = SequenceState {
        suppresses: !suppressed.is_empty(),
        ..row
    };
    let mut tokens = SlotTokens {
        occurred: &mut bitmap(tokens, logits.len()),
        suppressed: &bitmap(suppressed, logits.len()),
        ..no_tokens()
    };
    sample_host(logits, &mut row, &mut tokens, 1024);
    (row.status != SequenceStatus::Failed).then_some(row.token)
}

/// Returns bitmaps and biases of no tokens.
fn no_tokens() -> SlotTokens<'static> {
    SlotTokens {
        occurred: &mut [],
        suppressed: &[],
        generated: &mut [],
        biases: &mut [],
    }
}

#[test]
fn philox_gives_the_words_of_its_authors() {
    // The vector is the one of `kat_vectors` in Random123, philox4x32 10, whose second key word
    // is 0.
    assert_eq!(
        philox([0; 4], 0),
        [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
    );
}

#[test]
fn logarithm_and_mass_are_close_to_exact() {
    let mut rng = marlin_testing::rng();
    for _ in 0..100_000 {
        let x: f32 = rng.random_range(1e-9..20.0);
        let exact = f64::from(x).ln();
        assert!(
            (f64::from(ln(x)) - exact).abs() <= 2e-7 * exact.abs().max(1e-3),
            "ln({x}) is {} instead of {exact}",
            ln(x)
        );
        let x: f32 = rng.random_range(-29.0..=0.0);
        let exact = f64::from(x).exp() * 2f64.powi(MASS_BITS);
        assert!(
            (mass(x) as f64 - exact).abs() <= 4e-7 * exact + 1.0,
            "mass({x}) is {} instead of {exact}",
            mass(x)
        );
    }
    assert_eq!(mass(0.0), 1 << MASS_BITS);
}

#[test]
fn noise_has_the_gumbel_distribution() {
    // The largest distance between empirical and true distribution (Kolmogorov-Smirnov) is above
    // 1.95 / sqrt(n) once in a thousand.
    let mut noise: Vec<f64> = (0..50_000u32)
        .flat_map(|i| philox([i, 5, 0, 0], 17))
        .map(|word| f64::from(gumbel(word)))
        .collect();
    noise.sort_by(f64::total_cmp);
    let n = noise.len() as f64;
    let distance = noise
        .iter()
        .enumerate()
        .map(|(i, x)| ((i as f64 + 0.5) / n - (-(-x).exp()).exp()).abs())
        .fold(0.0, f64::max);
    assert!(distance < 1.95 / n.sqrt(), "{distance}");
    assert!(gumbel(0).is_finite() && gumbel(u32::MAX).is_finite());
}

#[test]
fn draws_follow_the_softmax() {
    let logits: Vec<f32> = (0..40).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
    for temperature in [0.5f32, 1.0, 2.0] {
        let weights: Vec<f64> = logits
            .iter()
            .map(|&logit| (f64::from(logit) / f64::from(temperature)).exp())
            .collect();
        let total: f64 = weights.iter().sum();
        let draws = 20_000;
        let mut counts = vec![0.0; logits.len()];
        for position in 0..draws {
            let row = SequenceState {
                status: SequenceStatus::At(position),
                temperature,
                ..ALL
            };
            counts[choose(&logits, &row, position, &no_tokens()).unwrap() as usize] += 1.0;
        }
        let chi_square: f64 = counts
            .iter()
            .zip(&weights)
            .map(|(count, weight)| {
                let expected = weight / total * f64::from(draws);
                (count - expected).powi(2) / expected
            })
            .sum();
        // With 39 degrees of freedom, chi-square is above 72 once in a thousand; the seed is fixed.
        assert!(
            chi_square < 72.0,
            "temperature {temperature}: chi-square {chi_square}"
        );
    }
}

#[test]
fn the_seed_decides() {
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
    let run = |seed| {
        (0..40)
            .map(|position| {
                chosen(
                    &logits,
                    SequenceState {
                        seed,
                        status: SequenceStatus::At(position),
                        ..ALL
                    },
                    &[],
                )
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn greedy_takes_the_largest_and_of_equals_the_first() {
    assert_eq!(chosen(&[0.5, 2.0, -1.0, 2.0], GREEDY, &[]), Some(1));
    assert_eq!(chosen(&[-1.0, -0.0, 0.0], GREEDY, &[]), Some(1));
    assert_eq!(chosen(&[f32::NEG_INFINITY, -70000.0], GREEDY, &[]), Some(1));
    // The penalty changes 3.0 to 1.5; negative logits are multiplied.
    let penalised = SequenceState {
        repetition_penalty: 2.0,
        ..GREEDY
    };
    assert_eq!(chosen(&[1.4, 3.0, 1.0], penalised, &[1, 1]), Some(1));
    assert_eq!(chosen(&[1.6, 3.0, 1.0], penalised, &[1]), Some(0));
    assert_eq!(chosen(&[-1.0, -1.5], penalised, &[0, 7000]), Some(1));
}

#[test]
fn suppressed_tokens_are_never_chosen() {
    // Suppression applies after the penalty, and whatever the logits are.
    assert_eq!(
        chosen_but(&[1], &[0.5, 2.0, -1.0, 1.0], GREEDY, &[]),
        Some(3)
    );
    assert_eq!(
        chosen_but(
            &[1, 3, 9000],
            &[0.5, f32::NAN, -1.0, f32::INFINITY],
            GREEDY,
            &[]
        ),
        Some(0)
    );
    assert_eq!(
        chosen_but(
            &[0],
            &[5.0, 3.0, 2.0],
            SequenceState {
                repetition_penalty: 2.0,
                ..GREEDY
            },
            &[1]
        ),
        Some(2)
    );
    assert_eq!(chosen_but(&[0, 1, 2], &[0.5, 2.0, -1.0], GREEDY, &[]), None);
    // Top-k, top-p and min-p count only the tokens that are not suppressed.
    let logits = [9.0, 1.0, 8.0, 0.0];
    for row in [
        SequenceState { top_k: 2, ..ALL },
        SequenceState { top_p: 0.9, ..ALL },
        SequenceState { min_p: 0.3, ..ALL },
    ] {
        let tokens = (0..200).map(|position| {
            chosen_but(
                &[0, 2],
                &logits,
                SequenceState {
                    status: SequenceStatus::At(position),
                    ..row
                },
                &[],
            )
        });
        let found = bitmap(&tokens.collect::<Option<Vec<_>>>().unwrap(), 4);
        assert_eq!(found, bitmap(&[1, 3], 4), "{row:?}");
    }
    // A row without suppressed tokens does not read their bitmap.
    let mut row = GREEDY;
    let mut tokens = SlotTokens {
        suppressed: &[u32::MAX],
        ..no_tokens()
    };
    sample_host(&[0.0, 1.0], &mut row, &mut tokens, 1024);
    assert_eq!(row.token, 1);
}

#[test]
fn biases_and_penalties_on_generated_tokens_change_the_choice() {
    let logits = [1.0, 0.9, 0.5, -2.0];
    let biased = SequenceState {
        is_biased: true,
        presence_penalty: 0.25,
        frequency_penalty: 0.5,
        ..GREEDY
    };
    let (mut occurred, mut generated) = (bitmap(&[0, 1, 2, 3], 4), bitmap(&[], 4));
    let mut biases = [0.0f32, 0.0, 0.0, 2.5].map(f32::to_bits);
    let mut tokens = SlotTokens {
        occurred: &mut occurred,
        suppressed: &[],
        generated: &mut generated,
        biases: &mut biases,
    };
    // After 0.0 there is 0.9 left for token 1: each token in turn loses 0.75, then 0.5.
    let mut row = biased;
    // Of the prompt, no token counts.
    sample_host(&logits, &mut row, &mut tokens, 1024);
    assert_eq!(row.token, 0);
    let mut chosen = Vec::new();
    for _ in 0..5 {
        sample_host(&logits, &mut row, &mut tokens, 1024);
        chosen.push(row.token);
    }
    // Token 3 starts at 0.5 with its bias; equal logits take the lower token.
    assert_eq!(chosen, [1, 2, 3, 0, 1]);
    let left: Vec<f32> = biases.iter().map(|&bias| f32::from_bits(bias)).collect();
    assert_eq!(left, [-1.25, -1.25, -0.75, 1.75]);
    assert_eq!(generated, bitmap(&[0, 1, 2, 3], 4));
    // A row that is not biased reads no biases and writes none.
    let mut tokens = SlotTokens {
        occurred: &mut occurred,
        suppressed: &[],
        generated: &mut generated,
        biases: &mut biases,
    };
    let mut row = SequenceState {
        is_biased: false,
        ..biased
    };
    sample_host(&logits, &mut row, &mut tokens, 1024);
    assert_eq!(row.token, 0);
    assert_eq!(biases[0], (-1.25f32).to_bits());
}

#[test]
fn log_probabilities_are_those_of_the_softmax() {
    let logits = [0.5f32, 2.0, f32::NEG_INFINITY, 2.0, -1.0];
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    let words = logprobs_host(&logits, 4, 3);
    let expect = |token: u32, bits: u32| {
        let expected = f64::from(logits[token as usize]) - sum.ln();
        assert!((f64::from(f32::from_bits(bits)) - expected).abs() < 1e-6);
    };
    expect(4, words[0]);
    for (pair, token) in [1, 3, 0].into_iter().enumerate() {
        assert_eq!(words[1 + 2 * pair], token);
        expect(token, words[2 + 2 * pair]);
    }
    assert_eq!(words[7..], [0; LOGPROB_WORDS - 7]);
}

#[test]
fn a_row_goes_on_fills_its_window_or_fails() {
    let mut tokens = SlotTokens {
        occurred: &mut bitmap(&[], 40),
        ..no_tokens()
    };
    let mut row = SequenceState {
        status: SequenceStatus::At(0),
        ..GREEDY
    };
    let mut logits = [0.0; 40];
    logits[33] = 1.0;
    sample_host(&logits, &mut row, &mut tokens, 2);
    assert_eq!(
        (row.token, row.status, &*tokens.occurred),
        (33, SequenceStatus::At(1), &[0, 2][..])
    );
    logits[3] = 2.0;
    sample_host(&logits, &mut row, &mut tokens, 2);
    assert_eq!(
        (row.token, row.status, &*tokens.occurred),
        (3, SequenceStatus::WindowFull, &[8, 2][..])
    );
    let full = row;
    sample_host(&[1.0; 40], &mut row, &mut tokens, 2);
    assert_eq!(row, full);

    for logits in [
        vec![0.0, f32::NAN],
        vec![f32::INFINITY, 0.0],
        vec![f32::NEG_INFINITY; 3],
    ] {
        for row in [
            GREEDY,
            ALL,
            SequenceState { top_k: 2, ..ALL },
            SequenceState { top_p: 0.5, ..ALL },
            SequenceState { min_p: 0.5, ..ALL },
        ] {
            assert_eq!(chosen(&logits, row, &[]), None, "{logits:?} {row:?}");
        }
    }
}

/// Returns the tokens that top-k, top-p and min-p keep, computed in f64 on a stable sort.
fn kept_in_f64(logits: &[f32], row: &SequenceState) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..logits.len() as u32)
        .filter(|&token| logits[token as usize].is_finite())
        .collect();
    tokens.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    if row.top_k > 0 {
        tokens.truncate(row.top_k as usize);
    }
    if row.top_p < 1.0 {
        let weight = |token: u32| {
            (f64::from(logits[token as usize] - logits[tokens[0] as usize])
                / f64::from(row.temperature))
            .exp()
        };
        let enough = f64::from(row.top_p) * tokens.iter().map(|&token| weight(token)).sum::<f64>();
        let mut sum = 0.0;
        let mut kept = 0;
        while kept < tokens.len() && (kept == 0 || sum < enough) {
            sum += weight(tokens[kept]);
            kept += 1;
        }
        tokens.truncate(kept);
    }
    if let Some(&most_likely) = tokens.first() {
        let ratio = |token: u32| {
            (f64::from(logits[token as usize] - logits[most_likely as usize])
                / f64::from(row.temperature))
            .exp()
        };
        tokens.retain(|&token| ratio(token) >= f64::from(row.min_p));
    }
    tokens
}

#[test]
fn top_k_top_p_and_min_p_keep_what_they_keep_in_f64() {
    let mut rng = marlin_testing::rng();
    for _ in 0..300 {
        let vocab = rng.random_range(1..300);
        // Logits are multiples of a quarter, so that many are equal.
        let mut logits: Vec<f32> = (0..vocab)
            .map(|_| rng.random_range(-20..20) as f32 / 4.0)
            .collect();
        if rng.random_range(0..3) == 0 {
            logits[rng.random_range(0..vocab)] = f32::NEG_INFINITY;
        }
        let top_k = rng.random_range(0..vocab as u32 + 2);
        let top_p = if rng.random_range(0..3) == 0 {
            1.0
        } else {
            rng.random_range(0.01..1.0)
        };
        // Min-p is sometimes 1, and ranges down to values that keep all tokens.
        let min_p = if rng.random_range(0..3) == 0 {
            0.0
        } else {
            (-rng.random_range(0.0f32..30.0).max(1.0) + 1.0).exp()
        };
        let row = SequenceState {
            top_k,
            top_p,
            min_p,
            temperature: rng.random_range(0.3..3.0),
            ..ALL
        };
        let mut found = candidates(&logits, &row, &no_tokens()).unwrap();
        filter(&mut found, &row);
        let found: Vec<u32> = found.into_iter().map(|candidate| candidate.token).collect();
        assert_eq!(found, kept_in_f64(&logits, &row), "{row:?} {logits:?}");
    }
}
