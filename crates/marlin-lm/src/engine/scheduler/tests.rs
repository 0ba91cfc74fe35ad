//! Tests of the scheduler on a simulated device, with and without look-ahead.

use rand::RngExt;

use self::simulated::Work::{First, Next, Prefill, Start};
use self::simulated::{Simulated, Work, expected, mixing, next_but, scheduler};
use super::*;
use crate::engine::StopReason;
use crate::suppression::Suppression;
use crate::tests::support::{random_tokens, rng};

mod simulated;
mod suppression;

const WINDOW: usize = 4000;
const VOCAB: usize = 1000;
/// The largest number of prompt tokens that a step reads while sequences are running.
const CHUNK: usize = 512;
/// The largest number of prompt tokens that a step reads while no sequence is running.
const LONG_CHUNK: usize = 800;

fn options(max_new_tokens: usize) -> RequestParams {
    RequestParams {
        max_new_tokens,
        ..RequestParams::default()
    }
}

/// Returns a prompt of `tokens` tokens.
fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32)
        .map(|token| token * 7 % VOCAB as u32)
        .collect()
}

/// Runs a step, and returns the slots that have a token and the work that the step gave the device.
fn step(scheduler: &mut Scheduler<Simulated>) -> (Vec<usize>, Vec<Work>) {
    scheduler.executor.work.clear();
    let decoded = scheduler.step().unwrap();
    (
        decoded.into_iter().map(|decoded| decoded.slot).collect(),
        scheduler.executor.work.clone(),
    )
}

#[test]
fn a_lone_prompt_is_read_in_one_step() {
    for looks_ahead in [false, true] {
        let mut scheduler = scheduler(2, looks_ahead);
        assert_eq!(
            scheduler.add_request(&prompt(1300), &options(9)).unwrap(),
            0
        );
        assert_eq!(
            (
                scheduler.sequences(),
                scheduler.waiting(),
                scheduler.executor.work.len()
            ),
            (1, 1, 0)
        );
        assert_eq!(
            step(&mut scheduler),
            (vec![0], vec![Prefill(0, 0..800), First(0, 800..1300)])
        );
        assert_eq!((scheduler.sequences(), scheduler.waiting()), (1, 0));
    }
}

#[test]
fn a_sequence_has_its_tokens_while_another_prompt_is_read() {
    let mut engine = scheduler(2, false);
    engine.add_request(&prompt(3), &options(99)).unwrap();
    step(&mut engine);
    engine.add_request(&prompt(1300), &options(99)).unwrap();
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Prefill(1, 0..512), Start(vec![0])])
    );
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Prefill(1, 512..1024), Start(vec![0])])
    );
    assert_eq!(engine.waiting(), 1);
    assert_eq!(
        step(&mut engine),
        (vec![0, 1], vec![First(1, 1024..1300), Start(vec![0])])
    );
    assert_eq!(step(&mut engine), (vec![0, 1], vec![Start(vec![0, 1])]));

    // With look-ahead the step of each call was started by the previous call.
    let mut engine = scheduler(2, true);
    engine.add_request(&prompt(3), &options(99)).unwrap();
    step(&mut engine);
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Start(vec![0]), Next(vec![0])])
    );
    engine.add_request(&prompt(1300), &options(99)).unwrap();
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Prefill(1, 0..512), Next(vec![0])])
    );
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Prefill(1, 512..1024), Next(vec![0])])
    );
    assert_eq!(step(&mut engine), (vec![0, 1], vec![First(1, 1024..1300)]));
    assert_eq!(
        step(&mut engine),
        (vec![0, 1], vec![Start(vec![0, 1]), Next(vec![0, 1])])
    );
    assert_eq!(step(&mut engine), (vec![0, 1], vec![Next(vec![0, 1])]));
}

#[test]
fn prompts_are_read_oldest_first_and_short_ones_together() {
    let mut engine = scheduler(6, false);
    // A prompt of one token counts as read: steps take its last token.
    engine.add_request(&prompt(1), &options(99)).unwrap();
    assert_eq!(step(&mut engine), (vec![0], vec![Start(vec![0])]));
    for tokens in [200, 312, 2, 600, 5] {
        engine.add_request(&prompt(tokens), &options(99)).unwrap();
    }
    assert_eq!(engine.waiting(), 5);
    let first = vec![First(1, 0..200), First(2, 0..312), Start(vec![0])];
    assert_eq!(step(&mut engine), (vec![0, 1, 2], first));
    // The next chunk does not fit beside the two tokens, and the prompt after it is younger.
    assert_eq!(
        step(&mut engine),
        (vec![0, 1, 2, 3], vec![First(3, 0..2), Start(vec![0, 1, 2])])
    );
    assert_eq!(
        step(&mut engine),
        (
            vec![0, 1, 2, 3],
            vec![Prefill(4, 0..512), Start(vec![0, 1, 2, 3])]
        )
    );
    let last = vec![First(4, 512..600), First(5, 0..5), Start(vec![0, 1, 2, 3])];
    assert_eq!(step(&mut engine), (vec![0, 1, 2, 3, 4, 5], last));
    assert_eq!(
        step(&mut engine),
        (vec![0, 1, 2, 3, 4, 5], vec![Start(vec![0, 1, 2, 3, 4, 5])])
    );
}

#[test]
fn a_step_takes_the_last_token_that_a_chunk_has_no_room_for() {
    let mut engine = scheduler(1, false);
    engine
        .add_request(&prompt(LONG_CHUNK + 1), &options(99))
        .unwrap();
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Prefill(0, 0..800), Start(vec![0])])
    );
}

#[test]
fn without_a_running_sequence_prompts_are_read_until_one_is() {
    let mut engine = scheduler(3, false);
    for tokens in [900, 400, 330] {
        engine.add_request(&prompt(tokens), &options(99)).unwrap();
    }
    let first = vec![Prefill(0, 0..800), First(0, 800..900), First(1, 0..400)];
    assert_eq!(step(&mut engine), (vec![0, 1], first));
    assert_eq!(
        step(&mut engine),
        (vec![0, 1, 2], vec![First(2, 0..330), Start(vec![0, 1])])
    );
}

#[test]
fn a_sequence_that_leaves_the_queue_is_dropped() {
    let mut engine = scheduler(4, false);
    for tokens in [1, 900, 800] {
        engine.add_request(&prompt(tokens), &options(99)).unwrap();
    }
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Prefill(1, 0..512), Start(vec![0])])
    );
    engine.abort(1);
    assert_eq!((engine.sequences(), engine.waiting()), (2, 1));
    // The slot is free again, and its new sequence is the youngest.
    assert_eq!(engine.add_request(&prompt(40), &options(99)).unwrap(), 1);
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Prefill(2, 0..512), Start(vec![0])])
    );
    let work = vec![First(2, 512..800), First(1, 0..40), Start(vec![0])];
    assert_eq!(step(&mut engine), (vec![0, 1, 2], work));
    // A slot without a sequence, and a slot that does not exist.
    engine.abort(3);
    engine.abort(99);
    assert_eq!(engine.sequences(), 3);
}

#[test]
fn the_queue_may_become_empty_before_it_is_read() {
    let mut engine = scheduler(2, true);
    engine.add_request(&prompt(900), &options(9)).unwrap();
    engine.abort(0);
    assert_eq!(step(&mut engine), (vec![], vec![]));
    assert_eq!((engine.sequences(), engine.waiting()), (0, 0));
}

#[test]
fn a_step_that_is_under_way_for_nobody_holds_no_token_back() {
    let mut engine = scheduler(2, true);
    engine.add_request(&prompt(3), &options(99)).unwrap();
    step(&mut engine);
    assert_eq!(step(&mut engine).1.last(), Some(&Next(vec![0])));
    engine.abort(0);
    assert_eq!(engine.add_request(&prompt(1000), &options(99)).unwrap(), 0);
    assert_eq!(
        step(&mut engine),
        (vec![0], vec![Prefill(0, 0..800), First(0, 800..1000)])
    );
}

#[test]
fn no_step_is_started_ahead_of_an_end() {
    let mut engine = scheduler(1, true);
    engine.add_request(&prompt(2), &options(4)).unwrap();
    assert_eq!(step(&mut engine).1, [First(0, 0..2)]);
    assert_eq!(step(&mut engine).1, [Start(vec![0]), Next(vec![0])]);
    assert_eq!(step(&mut engine).1, [Next(vec![0])]);
    assert_eq!(step(&mut engine), (vec![0], vec![]));
    assert_eq!((engine.sequences(), engine.ahead.is_none()), (0, true));
}

#[test]
fn running_sequences_go_on_in_the_passes_of_prompts() {
    let mut engine = mixing(3);
    for tokens in [900, 701] {
        engine.add_request(&prompt(tokens), &options(99)).unwrap();
    }
    // Chunks are filled.
    assert_eq!(
        step(&mut engine),
        (
            vec![0],
            vec![Prefill(0, 0..800), First(0, 800..900), Prefill(1, 0..700)]
        )
    );
    // The remaining last token of a prompt is a row like those that continue.
    assert_eq!(
        step(&mut engine),
        (vec![0, 1], vec![Start(vec![0, 1]), Next(vec![0, 1])])
    );
    engine.add_request(&prompt(600), &options(99)).unwrap();
    // The step that was already started comes first.
    assert_eq!(step(&mut engine), (vec![0, 1], vec![]));
    assert_eq!(
        step(&mut engine),
        (
            vec![0, 1],
            vec![First(0, 902..903), First(1, 702..703), Prefill(2, 0..510)]
        )
    );
    assert_eq!(
        step(&mut engine),
        (
            vec![0, 1, 2],
            vec![First(0, 903..904), First(1, 703..704), First(2, 510..600)]
        )
    );
    assert_eq!(
        step(&mut engine),
        (
            vec![0, 1, 2],
            vec![Start(vec![0, 1, 2]), Next(vec![0, 1, 2])]
        )
    );
}

/// The sequence in a slot, with its tokens so far.
struct Running {
    prompt: Vec<u32>,
    max_new_tokens: usize,
    tokens: Vec<u32>,
}

#[test]
fn every_sequence_has_its_own_tokens_one_a_step_whoever_else_joins_and_leaves() {
    let slots = 7;
    for mut engine in [
        scheduler(slots, false),
        scheduler(slots, true),
        mixing(slots),
    ] {
        let mut rng = rng();
        let mut running: Vec<Option<Running>> = (0..slots).map(|_| None).collect();
        let (mut ended, mut full) = (0, 0);
        for _ in 0..3000 {
            while rng.random_bool(0.3) && engine.sequences() < slots {
                let longest = [1, 20, 700, WINDOW - 20][rng.random_range(0..4)];
                let length = if rng.random_bool(0.02) {
                    WINDOW - 5
                } else {
                    rng.random_range(1..=longest)
                };
                let prompt = random_tokens(length, VOCAB, &mut rng);
                let max_new_tokens = rng.random_range(1..20);
                let slot = engine
                    .add_request(&prompt, &options(max_new_tokens))
                    .unwrap();
                assert!(
                    running[slot]
                        .replace(Running {
                            prompt,
                            max_new_tokens,
                            tokens: Vec::new()
                        })
                        .is_none()
                );
            }
            if rng.random_bool(0.05) {
                let slot = rng.random_range(0..slots);
                engine.abort(slot);
                running[slot] = None;
            }
            let begun: Vec<usize> = (0..slots)
                .filter(|&slot| running[slot].as_ref().is_some_and(|x| !x.tokens.is_empty()))
                .collect();
            engine.executor.work.clear();
            let decoded = engine.step().unwrap();
            let with_token: Vec<usize> = decoded.iter().map(|decoded| decoded.slot).collect();
            assert!(
                begun.iter().all(|slot| with_token.contains(slot)),
                "{begun:?} had tokens, {with_token:?} have one now"
            );
            assert!(
                running.iter().all(Option::is_none) || !with_token.is_empty(),
                "a step gave nobody a token"
            );
            let lengths = engine.executor.work.iter().map(|work| {
                if let Prefill(_, positions) | First(_, positions) = work {
                    positions.len()
                } else {
                    0
                }
            });
            assert!(begun.is_empty() || lengths.sum::<usize>() <= CHUNK);
            for StepOutput { slot, token, end } in decoded {
                running[slot].as_mut().unwrap().tokens.extend(token);
                let Some(end) = end else { continue };
                let Running {
                    prompt,
                    max_new_tokens,
                    tokens,
                } = running[slot].take().unwrap();
                let room = WINDOW - prompt.len() + 1;
                assert_eq!(tokens, expected(&prompt, max_new_tokens.min(room)));
                assert_eq!(
                    end,
                    Ok(if room < max_new_tokens {
                        StopReason::CacheFull
                    } else {
                        StopReason::MaxNewTokens
                    })
                );
                full += usize::from(end == Ok(StopReason::CacheFull));
                ended += 1;
            }
        }
        assert!(
            ended > 100 && full > 0,
            "{ended} sequences ended, {full} of them at the window"
        );
    }
}
