//! Tests that each choice has its own suppressed tokens, regardless of steps that are started
//! ahead.

use rand::RngExt;

use super::*;

/// A sequence: its prompt, its options, and the tokens that were chosen.
type Running = (Vec<u32>, RequestParams, Vec<u32>);

/// Returns the tokens that follow a prompt, up to a stop token, by transformers' definition of
/// suppressed tokens.
fn expected_but(prompt: &[u32], options: &RequestParams) -> Vec<u32> {
    let Suppression {
        suppress_tokens,
        bad_words_ids,
        min_new_tokens,
        min_length,
    } = &options.suppression;
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + options.max_new_tokens {
        let mut suppressed = suppress_tokens.clone();
        for word in bad_words_ids {
            let (last, before) = word.split_last().unwrap();
            if tokens.ends_with(before)
                && !(before.is_empty() && options.stop_tokens.contains(last))
            {
                suppressed.push(*last);
            }
        }
        if tokens.len() - prompt.len() < *min_new_tokens || tokens.len() < *min_length {
            suppressed.extend(&options.stop_tokens);
        }
        let token = next_but(&suppressed, &tokens);
        if options.stop_tokens.contains(&token) {
            break;
        }
        tokens.push(token);
    }
    tokens.split_off(prompt.len())
}

/// Creates options that suppress tokens which would otherwise follow a prompt: each option
/// suppresses a token that is chosen under the earlier options. Without words of several tokens,
/// steps run ahead.
fn suppressing(prompt: &[u32], has_words: bool, rng: &mut impl RngExt) -> RequestParams {
    let mut options = options(rng.random_range(6..30));
    for index in 0..10 {
        let tokens = [prompt, &expected_but(prompt, &options)].concat();
        let at = prompt.len() + 3 * index + rng.random_range(0..3);
        let (
            Some(&token),
            Suppression {
                suppress_tokens,
                bad_words_ids,
                min_new_tokens,
                min_length,
            },
        ) = (tokens.get(at), &mut options.suppression)
        else {
            break;
        };
        match rng.random_range(0..5) {
            0 => suppress_tokens.push(token),
            1 => bad_words_ids.push(vec![token]),
            2 if has_words => {
                bad_words_ids.push(tokens[at.saturating_sub(rng.random_range(1..5))..=at].to_vec())
            }
            _ => {
                options.stop_tokens.push(token);
                match rng.random_bool(0.5) {
                    true => *min_new_tokens = at + rng.random_range(0..4) - prompt.len(),
                    false => *min_length = at + rng.random_range(0..4),
                }
            }
        }
    }
    options
}

#[test]
fn suppressed_tokens_are_those_of_each_choice() {
    let mut rng = rng();
    for (mut engine, has_words) in [false, true].into_iter().flat_map(|words| {
        [scheduler(4, false), scheduler(4, true), mixing(4)].map(|scheduler| (scheduler, words))
    }) {
        let mut running: Vec<Option<Running>> = vec![None; 4];
        let mut finished = 0;
        while finished < 60 {
            while engine.sequences() < 4 && rng.random_bool(0.4) {
                let prompt = random_tokens(rng.random_range(1..700), VOCAB, &mut rng);
                let options = if rng.random_bool(0.2) {
                    options(9)
                } else {
                    suppressing(&prompt, has_words, &mut rng)
                };
                let slot = engine.add_request(&prompt, &options).unwrap();
                running[slot] = Some((prompt, options, Vec::new()));
            }
            for StepOutput { slot, token, end } in engine.step().unwrap() {
                running[slot].as_mut().unwrap().2.extend(token);
                if end.is_some() {
                    let (prompt, options, tokens) = running[slot].take().unwrap();
                    assert_eq!(
                        tokens,
                        expected_but(&prompt, &options),
                        "{options:?} after {} tokens",
                        prompt.len()
                    );
                    finished += 1;
                }
            }
        }
    }
}

#[test]
fn steps_wait_for_tokens_where_bad_words_have_several() {
    let with = |word: &[u32]| {
        let suppression = Suppression {
            bad_words_ids: vec![word.to_vec()],
            min_new_tokens: 3,
            ..Suppression::NONE
        };
        RequestParams {
            suppression,
            stop_tokens: vec![5],
            ..options(99)
        }
    };
    let mut engine = scheduler(2, true);
    engine.add_request(&prompt(3), &with(&[1])).unwrap();
    step(&mut engine);
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Start(vec![0]), Next(vec![0])])
    );
    engine.add_request(&prompt(4), &with(&[1, 2])).unwrap();
    step(&mut engine);
    for _ in 0..3 {
        assert_eq!(step(&mut engine), (vec![0, 1], vec![Start(vec![0, 1])]));
    }
    engine.abort(1);
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Start(vec![0]), Next(vec![0])])
    );
}
