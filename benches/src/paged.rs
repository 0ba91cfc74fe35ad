//! Times decoding over a KV cache of pages.

use crate::BenchError;
use crate::decode::{Times, failed};
use marlin_lm::{
    BatchEngine, BatchOutput, CacheFormat, DecodeToken, Model, Pages, PromptPart, RequestParams,
};
use std::sync::Arc;
use std::time::Instant;

/// Decodes once to compile and record all passes, and a second time to measure, as
/// [`decode`](crate::decode) does without pages. The pages of the sequences are interleaved.
pub fn time(
    model: &Arc<Model>,
    [batch, prompt_tokens, new_tokens]: [usize; 3],
    page_size: usize,
    format: CacheFormat,
) -> Result<Times, BenchError> {
    let columns = (prompt_tokens + new_tokens).div_ceil(page_size);
    let (count, size) = (batch * columns, page_size);
    let mut engine =
        BatchEngine::new(model.clone(), batch, Pages { count, size }, format).map_err(failed)?;
    let of_slot = |slot: usize| (0..columns).map(move |page| (page * batch + slot) as u32);
    let pages: Vec<Vec<u32>> = (0..batch).map(|slot| of_slot(slot).collect()).collect();
    let params = RequestParams::default();
    let vocab = model.config().vocab_size;
    let mut times = Times {
        first: 0.0,
        step: 0.0,
    };
    for (round, steps) in [(0, 3), (1, new_tokens)] {
        let token = |sequence: usize, i: usize| (i * 7919 + sequence * 104_729 + round) % vocab;
        let prompts: Vec<Vec<u32>> = (0..batch)
            .map(|slot| (0..prompt_tokens).map(|i| token(slot, i) as u32).collect())
            .collect();
        let start = Instant::now();
        for (slot, prompt) in prompts.iter().enumerate() {
            let added = engine.add(slot, prompt, prompt_tokens, &params, None);
            added.map_err(failed)?;
        }
        let parts: Vec<PromptPart<'_>> = prompts
            .iter()
            .enumerate()
            .map(|(slot, tokens)| PromptPart {
                slot,
                start: 0,
                tokens,
                pages: &pages[slot],
                ends: true,
            })
            .collect();
        let step = engine.start(&parts, &[], Vec::new()).map_err(failed)?;
        let mut last = tokens(engine.finish(step).map_err(failed)?)?;
        times.first = start.elapsed().as_secs_f64();
        let start = Instant::now();
        // The next step is started before the last one is finished.
        let mut flight = None;
        for step in 1..steps {
            let decoded: Vec<DecodeToken<'_>> = (0..batch)
                .map(|slot| DecodeToken {
                    slot,
                    token: flight.is_none().then(|| last[slot]),
                    position: prompt_tokens + step - 1,
                    pages: &pages[slot],
                })
                .collect();
            let next = engine.start(&[], &decoded, Vec::new()).map_err(failed)?;
            if let Some(step) = flight.replace(next) {
                last = tokens(engine.finish(step).map_err(failed)?)?;
            }
        }
        if let Some(step) = flight {
            tokens(engine.finish(step).map_err(failed)?)?;
        }
        times.step = start.elapsed().as_secs_f64() / (steps.max(2) - 1) as f64;
        (0..batch).for_each(|slot| engine.remove(slot));
    }
    Ok(times)
}

/// Returns the tokens of a step's outcomes.
fn tokens(outputs: Vec<BatchOutput>) -> Result<Vec<u32>, BenchError> {
    let token = |output| match output {
        BatchOutput::Token { token, .. } => Ok(token),
        other => Err(BenchError::Model(format!(
            "a sequence has no token: {other:?}"
        ))),
    };
    outputs.into_iter().map(token).collect()
}
