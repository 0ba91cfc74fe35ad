//! Requests that an engine runs to their ends.

use marlin_lm::{Engine, RequestParams, StepOutput};

/// Runs requests, prompts with their options, in `slots` slots of an engine, and returns the new
/// tokens of each. The first `first` begin together, the others when a slot is free.
pub fn run(
    engine: &mut Engine,
    slots: usize,
    first: usize,
    requests: &[(Vec<u32>, RequestParams)],
) -> Vec<Vec<u32>> {
    let mut tokens = vec![Vec::new(); requests.len()];
    let (mut of_slot, mut limit) = (vec![0; slots], first);
    let mut waiting = requests.iter().enumerate();
    loop {
        while engine.sequences() < limit
            && let Some((index, (prompt, options))) = waiting.next()
        {
            let slot = engine
                .add_request(prompt, options)
                .unwrap_or_else(|error| panic!("{error}"));
            of_slot[slot] = index;
        }
        if engine.sequences() == 0 {
            return tokens;
        }
        limit = slots;
        for StepOutput { slot, token, end } in
            engine.step().unwrap_or_else(|error| panic!("{error}"))
        {
            tokens[of_slot[slot]].extend(token);
            assert!(!matches!(end, Some(Err(_))), "{end:?}");
        }
    }
}
