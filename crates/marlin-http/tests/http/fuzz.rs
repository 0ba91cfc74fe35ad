//! Runs of the fuzz targets of `/fuzz` on mutated valid inputs: 4000 bodies and 10,000 answers for
//! each target of those, or as many as `MARLIN_FUZZ_INPUTS`.

#[path = "../../../../fuzz/src/errors.rs"]
mod errors;
#[path = "../../../../fuzz/src/http.rs"]
mod http;
#[path = "../../../../fuzz/src/mutate.rs"]
mod mutate;

pub use self::http::requests;
use self::http::{answer, answer_seeds, body, body_seeds, tool_call, tool_call_seeds};
use self::mutate::{JSON, inputs, mutated};
use rand::RngExt;
use std::time::{Duration, Instant};

/// The longest time that an input may take.
const LIMIT: Duration = Duration::from_secs(5);

/// The texts written into bodies, besides [`JSON`]: names and values of fields.
const OF_BODIES: [&str; 20] = [
    "role",
    "content",
    "assistant",
    "tool",
    "tools",
    "tool_calls",
    "tool_choice",
    "required",
    "type",
    "function",
    "arguments",
    "parameters",
    "response_format",
    "json_schema",
    "include",
    "stream",
    "18446744073709551616",
    "\\ud800",
    "[[[[[[[[",
    "[1,[2]]",
];
/// The texts written into answers, besides [`JSON`]: the markers of their parts.
const OF_ANSWERS: [&str; 26] = [
    "<think>",
    "</think>",
    "<seed:think>",
    "</seed:think>",
    "<tool_call>",
    "</tool_call>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<function=",
    "<function=f>",
    "</function>",
    "<parameter=",
    "<parameter=i>",
    "</parameter>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "\n",
    "<",
    "\u{fffd}",
];

/// Runs a target on `count` inputs.
fn run(seeds: &[Vec<u8>], of_target: &[&str], count: usize, target: impl Fn(&[u8]) -> bool) {
    let mut rng = marlin_testing::rng();
    for seed in seeds {
        assert!(target(seed), "{}", String::from_utf8_lossy(seed));
    }
    let tokens = [&JSON[..], of_target].concat();
    let (count, mut accepted) = (inputs(count), 0);
    for _ in 0..count {
        let seed = &seeds[rng.random_range(0..seeds.len())];
        let input = mutated(&mut rng, seed, &tokens);
        let start = Instant::now();
        accepted += usize::from(target(&input));
        let elapsed = start.elapsed();
        assert!(
            elapsed < LIMIT,
            "{elapsed:?}: {}",
            String::from_utf8_lossy(&input)
        );
    }
    println!("{count} inputs, {accepted} of them accepted");
    // Some mutated inputs are accepted, and some are not.
    assert!((1..count).contains(&accepted), "{accepted} of {count}");
}

#[test]
fn bodies() {
    run(&body_seeds(), &OF_BODIES, 4000, body);
}

#[test]
fn calls_of_tools() {
    run(&tool_call_seeds(), &OF_ANSWERS, 10_000, tool_call);
}

#[test]
fn answers() {
    run(&answer_seeds(), &OF_ANSWERS, 10_000, answer);
}
