//! The scheduler on a simulated device, with and without look-ahead.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use rand::RngExt;

use super::*;
use crate::decoder::StopReason;
use crate::sampling::Sampling;
use crate::suppression::Suppression;
use crate::tests::support::{random_tokens, rng};

mod suppression;

const WINDOW: usize = 4000;
const VOCAB: usize = 1000;
/// Most tokens of prompts that a step reads while sequences are running.
const CHUNK: usize = 512;
/// The same while none is.
const LONG_CHUNK: usize = 800;

/// Work that a device was given.
#[derive(Debug, Clone, PartialEq)]
enum Work {
    /// Positions of a prompt, to a slot.
    Prefill(usize, Range<usize>),
    /// Those to the end of the prompt, and its first token.
    First(usize, Range<usize>),
    /// A step of the rows of these slots that the host gave.
    Start(Vec<u32>),
    /// A step of the rows that the device had.
    Next(Vec<u32>),
}

/// A device on which the next token follows from all tokens of a sequence. It checks that a step finds those of its own sequences.
struct Simulated {
    looks_ahead: bool,
    joins: bool,
    /// The tokens in the cache, by slot.
    cache: Vec<Vec<u32>>,
    /// The suppressed tokens, by slot.
    suppressed: Vec<Vec<u32>>,
    /// The rows of each number of rows, as the last step left them.
    rows: BTreeMap<usize, Vec<Row>>,
    work: Vec<Work>,
    unfinished: VecDeque<u64>,
    started: u64,
}

impl Simulated {
    fn run(&mut self, mut rows: Vec<Row>) -> (u64, Vec<Row>) {
        for row in &mut rows {
            let RowState::At(position) = row.state else { continue };
            let cache = &mut self.cache[row.slot as usize];
            assert_eq!(cache.len(), position as usize, "the tokens of slot {}", row.slot);
            cache.push(row.token);
            row.token = next_but(if row.suppresses { &self.suppressed[row.slot as usize] } else { &[] }, cache);
            row.state = if cache.len() == WINDOW { RowState::WindowFull } else { RowState::At(position + 1) };
        }
        self.started += 1;
        self.unfinished.push_back(self.started);
        (self.started, rows)
    }
}

impl Simulated {
    fn step(&mut self, rows: Vec<Row>) -> (u64, Vec<Row>) {
        let (id, rows) = self.run(rows);
        self.rows.insert(rows.len(), rows.clone());
        (id, rows)
    }
}

impl Engine for Simulated {
    type Step = (u64, Vec<Row>);

    fn chunk(&self, is_running: bool) -> usize {
        if is_running { CHUNK } else { LONG_CHUNK }
    }

    fn prefill(&mut self, chunks: &[PromptChunk]) -> Option<Self::Step> {
        assert!((1..=LONG_CHUNK).contains(&chunks.iter().map(|chunk| chunk.tokens.len()).sum()));
        let mut ends = Vec::new();
        for PromptChunk { tokens, position: CachePosition { slot, start }, end } in chunks {
            let (slot, start) = (*slot, *start);
            let (positions, is_end) = (start..start + tokens.len(), end.is_some());
            self.work.push(if is_end { First(slot, positions) } else { Prefill(slot, positions) });
            self.cache[slot].truncate(start);
            assert_eq!(self.cache[slot].len(), start, "the tokens of slot {slot}");
            // A step of the row adds the last token.
            self.cache[slot].extend(&tokens[..tokens.len() - usize::from(is_end)]);
            ends.extend(*end);
        }
        (!ends.is_empty()).then(|| self.run(ends))
    }

    fn joins(&self, _rows: &[Row]) -> bool {
        self.joins
    }

    fn set_seen(&mut self, slot: usize, tokens: &[u32]) {
        if tokens.len() == 1 {
            self.cache[slot].clear();
        }
    }

    fn set_suppressed(&mut self, slot: usize, tokens: &[u32]) {
        self.suppressed[slot] = tokens.to_vec();
    }

    fn start(&mut self, rows: &[Row]) -> Self::Step {
        self.work.push(Start(rows.iter().map(|row| row.slot).collect()));
        self.step(rows.to_vec())
    }

    fn start_next(&mut self, count: usize) -> Option<Self::Step> {
        let rows = self.rows.get(&count).filter(|_| self.looks_ahead)?.clone();
        self.work.push(Next(rows.iter().map(|row| row.slot).collect()));
        Some(self.step(rows))
    }

    fn finish(&mut self, (step, rows): Self::Step) -> Result<Vec<Row>, LlamaError> {
        assert_eq!(self.unfinished.pop_front(), Some(step), "steps are finished in their order");
        Ok(rows)
    }
}

fn next_token(tokens: &[u32]) -> u32 {
    next_but(&[], tokens)
}

/// The next token that is not suppressed.
fn next_but(suppressed: &[u32], tokens: &[u32]) -> u32 {
    let hash = tokens.iter().fold(17u32, |hash, &token| hash.wrapping_mul(31).wrapping_add(token));
    let in_turn = (0..VOCAB as u32).map(|later| (hash % VOCAB as u32 + later) % VOCAB as u32);
    in_turn.into_iter().find(|token| !suppressed.contains(token)).unwrap()
}

/// The tokens that follow a prompt decoded by itself.
fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        tokens.push(next_token(&tokens));
    }
    tokens.split_off(prompt.len())
}

fn scheduler(slots: usize, looks_ahead: bool) -> Scheduler<Simulated> {
    let (cache, suppressed) = (vec![Vec::new(); slots], vec![Vec::new(); slots]);
    let (rows, work, unfinished) = (BTreeMap::new(), Vec::new(), VecDeque::new());
    Scheduler::new(Simulated { looks_ahead, joins: false, cache, suppressed, rows, work, unfinished, started: 0 }, slots, WINDOW, VOCAB)
}

/// One whose passes of prompts continue the running sequences, too.
fn joining(slots: usize) -> Scheduler<Simulated> {
    let mut scheduler = scheduler(slots, true);
    scheduler.engine.joins = true;
    scheduler
}

fn options(max_new_tokens: usize) -> SequenceOptions {
    SequenceOptions { sampling: Sampling::GREEDY, suppression: Suppression::NONE, seed: 0, stop_tokens: Vec::new(), max_new_tokens }
}

/// A prompt of so many tokens.
fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|token| token * 7 % VOCAB as u32).collect()
}

/// Steps, and returns the slots that have a token, and the work that the step gave the device.
fn step(scheduler: &mut Scheduler<Simulated>) -> (Vec<usize>, Vec<Work>) {
    scheduler.engine.work.clear();
    let decoded = scheduler.step().unwrap();
    (decoded.into_iter().map(|decoded| decoded.slot).collect(), scheduler.engine.work.clone())
}

use Work::{First, Next, Prefill, Start};

#[test]
fn a_lone_prompt_is_read_in_one_step() {
    for looks_ahead in [false, true] {
        let mut scheduler = scheduler(2, looks_ahead);
        assert_eq!(scheduler.join(&prompt(1300), &options(9)).unwrap(), 0);
        assert_eq!((scheduler.sequences(), scheduler.waiting(), scheduler.engine.work.len()), (1, 1, 0));
        assert_eq!(step(&mut scheduler), (vec![0], vec![Prefill(0, 0..800), First(0, 800..1300)]));
        assert_eq!((scheduler.sequences(), scheduler.waiting()), (1, 0));
    }
}

#[test]
fn a_sequence_has_its_tokens_while_another_prompt_is_read() {
    let mut decoder = scheduler(2, false);
    decoder.join(&prompt(3), &options(99)).unwrap();
    step(&mut decoder);
    decoder.join(&prompt(1300), &options(99)).unwrap();
    assert_eq!(step(&mut decoder), (vec![0], vec![Prefill(1, 0..512), Start(vec![0])]));
    assert_eq!(step(&mut decoder), (vec![0], vec![Prefill(1, 512..1024), Start(vec![0])]));
    assert_eq!(decoder.waiting(), 1);
    assert_eq!(step(&mut decoder), (vec![0, 1], vec![First(1, 1024..1300), Start(vec![0])]));
    assert_eq!(step(&mut decoder), (vec![0, 1], vec![Start(vec![0, 1])]));

    // With look-ahead the step of each call was started by the call before.
    let mut decoder = scheduler(2, true);
    decoder.join(&prompt(3), &options(99)).unwrap();
    step(&mut decoder);
    assert_eq!(step(&mut decoder), (vec![0], vec![Start(vec![0]), Next(vec![0])]));
    decoder.join(&prompt(1300), &options(99)).unwrap();
    assert_eq!(step(&mut decoder), (vec![0], vec![Prefill(1, 0..512), Next(vec![0])]));
    assert_eq!(step(&mut decoder), (vec![0], vec![Prefill(1, 512..1024), Next(vec![0])]));
    assert_eq!(step(&mut decoder), (vec![0, 1], vec![First(1, 1024..1300)]));
    assert_eq!(step(&mut decoder), (vec![0, 1], vec![Start(vec![0, 1]), Next(vec![0, 1])]));
    assert_eq!(step(&mut decoder), (vec![0, 1], vec![Next(vec![0, 1])]));
}

#[test]
fn prompts_are_read_oldest_first_and_short_ones_together() {
    let mut decoder = scheduler(6, false);
    // A prompt of one token is as one that is read: steps take its last token.
    decoder.join(&prompt(1), &options(99)).unwrap();
    assert_eq!(step(&mut decoder), (vec![0], vec![Start(vec![0])]));
    for tokens in [200, 312, 2, 600, 5] {
        decoder.join(&prompt(tokens), &options(99)).unwrap();
    }
    assert_eq!(decoder.waiting(), 5);
    let first = vec![First(1, 0..200), First(2, 0..312), Start(vec![0])];
    assert_eq!(step(&mut decoder), (vec![0, 1, 2], first));
    // The next chunk does not fit beside the two tokens, and the prompt after it is younger.
    assert_eq!(step(&mut decoder), (vec![0, 1, 2, 3], vec![First(3, 0..2), Start(vec![0, 1, 2])]));
    assert_eq!(step(&mut decoder), (vec![0, 1, 2, 3], vec![Prefill(4, 0..512), Start(vec![0, 1, 2, 3])]));
    let last = vec![First(4, 512..600), First(5, 0..5), Start(vec![0, 1, 2, 3])];
    assert_eq!(step(&mut decoder), (vec![0, 1, 2, 3, 4, 5], last));
    assert_eq!(step(&mut decoder), (vec![0, 1, 2, 3, 4, 5], vec![Start(vec![0, 1, 2, 3, 4, 5])]));
}

#[test]
fn a_step_takes_the_last_token_that_a_chunk_has_no_room_for() {
    let mut decoder = scheduler(1, false);
    decoder.join(&prompt(LONG_CHUNK + 1), &options(99)).unwrap();
    assert_eq!(step(&mut decoder), (vec![0], vec![Prefill(0, 0..800), Start(vec![0])]));
}

#[test]
fn without_a_running_sequence_prompts_are_read_until_one_is() {
    let mut decoder = scheduler(3, false);
    for tokens in [900, 400, 330] {
        decoder.join(&prompt(tokens), &options(99)).unwrap();
    }
    let first = vec![Prefill(0, 0..800), First(0, 800..900), First(1, 0..400)];
    assert_eq!(step(&mut decoder), (vec![0, 1], first));
    assert_eq!(step(&mut decoder), (vec![0, 1, 2], vec![First(2, 0..330), Start(vec![0, 1])]));
}

#[test]
fn a_sequence_that_leaves_the_queue_is_dropped() {
    let mut decoder = scheduler(4, false);
    for tokens in [1, 900, 800] {
        decoder.join(&prompt(tokens), &options(99)).unwrap();
    }
    assert_eq!(step(&mut decoder), (vec![0], vec![Prefill(1, 0..512), Start(vec![0])]));
    decoder.leave(1);
    assert_eq!((decoder.sequences(), decoder.waiting()), (2, 1));
    // The slot is free again, and its new sequence is the youngest.
    assert_eq!(decoder.join(&prompt(40), &options(99)).unwrap(), 1);
    assert_eq!(step(&mut decoder), (vec![0], vec![Prefill(2, 0..512), Start(vec![0])]));
    let work = vec![First(2, 512..800), First(1, 0..40), Start(vec![0])];
    assert_eq!(step(&mut decoder), (vec![0, 1, 2], work));
    // A slot that no sequence has, and one that does not exist.
    decoder.leave(3);
    decoder.leave(99);
    assert_eq!(decoder.sequences(), 3);
}

#[test]
fn the_queue_may_become_empty_before_it_is_read() {
    let mut decoder = scheduler(2, true);
    decoder.join(&prompt(900), &options(9)).unwrap();
    decoder.leave(0);
    assert_eq!(step(&mut decoder), (vec![], vec![]));
    assert_eq!((decoder.sequences(), decoder.waiting()), (0, 0));
}

#[test]
fn a_step_that_is_under_way_for_nobody_holds_no_token_back() {
    let mut decoder = scheduler(2, true);
    decoder.join(&prompt(3), &options(99)).unwrap();
    step(&mut decoder);
    assert_eq!(step(&mut decoder).1.last(), Some(&Next(vec![0])));
    decoder.leave(0);
    assert_eq!(decoder.join(&prompt(1000), &options(99)).unwrap(), 0);
    assert_eq!(step(&mut decoder), (vec![0], vec![Prefill(0, 0..800), First(0, 800..1000)]));
}

#[test]
fn no_step_is_started_ahead_of_an_end() {
    let mut decoder = scheduler(1, true);
    decoder.join(&prompt(2), &options(4)).unwrap();
    assert_eq!(step(&mut decoder).1, [First(0, 0..2)]);
    assert_eq!(step(&mut decoder).1, [Start(vec![0]), Next(vec![0])]);
    assert_eq!(step(&mut decoder).1, [Next(vec![0])]);
    assert_eq!(step(&mut decoder), (vec![0], vec![]));
    assert_eq!((decoder.sequences(), decoder.ahead.is_none()), (0, true));
}

#[test]
fn running_sequences_go_on_in_the_passes_of_prompts() {
    let mut decoder = joining(3);
    for tokens in [900, 701] {
        decoder.join(&prompt(tokens), &options(99)).unwrap();
    }
    // Chunks are filled.
    assert_eq!(step(&mut decoder), (vec![0], vec![Prefill(0, 0..800), First(0, 800..900), Prefill(1, 0..700)]));
    // The last token of a prompt, which is left, is as a row that continues.
    assert_eq!(step(&mut decoder), (vec![0, 1], vec![Start(vec![0, 1]), Next(vec![0, 1])]));
    decoder.join(&prompt(600), &options(99)).unwrap();
    // The step that is under way comes first.
    assert_eq!(step(&mut decoder), (vec![0, 1], vec![]));
    assert_eq!(step(&mut decoder), (vec![0, 1], vec![First(0, 902..903), First(1, 702..703), Prefill(2, 0..510)]));
    assert_eq!(step(&mut decoder), (vec![0, 1, 2], vec![First(0, 903..904), First(1, 703..704), First(2, 510..600)]));
    assert_eq!(step(&mut decoder), (vec![0, 1, 2], vec![Start(vec![0, 1, 2]), Next(vec![0, 1, 2])]));
}

/// A sequence of a slot, and its tokens so far.
struct Running {
    prompt: Vec<u32>,
    max_new_tokens: usize,
    tokens: Vec<u32>,
}

#[test]
fn every_sequence_has_its_own_tokens_one_a_step_whoever_else_joins_and_leaves() {
    let slots = 7;
    for mut decoder in [scheduler(slots, false), scheduler(slots, true), joining(slots)] {
        let mut rng = rng();
        let mut running: Vec<Option<Running>> = (0..slots).map(|_| None).collect();
        let (mut ended, mut full) = (0, 0);
        for _ in 0..3000 {
            while rng.random_bool(0.3) && decoder.sequences() < slots {
                let longest = [1, 20, 700, WINDOW - 20][rng.random_range(0..4)];
                let length = if rng.random_bool(0.02) { WINDOW - 5 } else { rng.random_range(1..=longest) };
                let prompt = random_tokens(length, VOCAB, &mut rng);
                let max_new_tokens = rng.random_range(1..20);
                let slot = decoder.join(&prompt, &options(max_new_tokens)).unwrap();
                assert!(running[slot].replace(Running { prompt, max_new_tokens, tokens: Vec::new() }).is_none());
            }
            if rng.random_bool(0.05) {
                let slot = rng.random_range(0..slots);
                decoder.leave(slot);
                running[slot] = None;
            }
            let begun: Vec<usize> = (0..slots).filter(|&slot| running[slot].as_ref().is_some_and(|x| !x.tokens.is_empty())).collect();
            decoder.engine.work.clear();
            let decoded = decoder.step().unwrap();
            let with_token: Vec<usize> = decoded.iter().map(|decoded| decoded.slot).collect();
            assert!(begun.iter().all(|slot| with_token.contains(slot)), "{begun:?} had tokens, {with_token:?} have one now");
            assert!(running.iter().all(Option::is_none) || !with_token.is_empty(), "a step gave nobody a token");
            let lengths = decoder
                .engine
                .work
                .iter()
                .map(|work| if let Prefill(_, positions) | First(_, positions) = work { positions.len() } else { 0 });
            assert!(begun.is_empty() || lengths.sum::<usize>() <= CHUNK);
            for Decoded { slot, token, end } in decoded {
                running[slot].as_mut().unwrap().tokens.extend(token);
                let Some(end) = end else { continue };
                let Running { prompt, max_new_tokens, tokens } = running[slot].take().unwrap();
                let room = WINDOW - prompt.len() + 1;
                assert_eq!(tokens, expected(&prompt, max_new_tokens.min(room)));
                assert_eq!(end, Ok(if room < max_new_tokens { StopReason::CacheFull } else { StopReason::MaxNewTokens }));
                full += usize::from(end == Ok(StopReason::CacheFull));
                ended += 1;
            }
        }
        assert!(ended > 100 && full > 0, "{ended} sequences ended, {full} of them at the window");
    }
}
