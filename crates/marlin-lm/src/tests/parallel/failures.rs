//! Tests of ranks that are late and ranks that panic.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::parallel::RankState;
use crate::{Engine, Model, OpenOptions, RequestParams};

/// The bound of waits in these tests.
const BOUND: Duration = Duration::from_millis(500);
/// The time that a late rank sleeps.
const LATE: Duration = Duration::from_secs(3);

/// Opens a random model on two ranks whose waits are bounded by [`BOUND`].
fn split() -> Arc<Model> {
    let config = config();
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        &config,
        &random_weights(&config, &mut rng()),
        Dtype::F32,
    );
    let options = OpenOptions {
        rank_timeout: BOUND,
        ..options()
    };
    let devices = [Device::flex(), Device::flex()];
    let opened = LanguageModel::open_on(&dir, &devices, &options, |_| {});
    opened.unwrap().model
}

/// Adds a greedy request of a prompt of three tokens to an engine.
fn add(engine: &mut Engine) {
    let params = RequestParams {
        max_new_tokens: 6,
        ..RequestParams::GREEDY
    };
    engine.add_request(&[3, 1, 2], &params).unwrap();
}

/// Decodes a request in a new engine.
fn decode(model: &Arc<Model>) -> Result<Vec<u32>, ModelError> {
    let mut engine = Engine::new(model.clone(), 1)?;
    add(&mut engine);
    let mut tokens = Vec::new();
    while engine.sequences() > 0 {
        tokens.extend(engine.step()?.into_iter().filter_map(|output| output.token));
    }
    Ok(tokens)
}

/// Gives rank 1 a command before the work of the next pass.
fn on_rank_1(model: &Model, command: impl FnOnce(&mut RankState) + Clone + Send + 'static) {
    let ranks = model.ranks().unwrap();
    let session = ranks.session().unwrap();
    ranks.run(session, command, || ()).unwrap();
}

#[test]
fn a_late_rank_is_an_error_within_the_bound_and_a_new_engine_works() {
    let model = split();
    let expected = decode(&model).unwrap();
    let mut engine = Engine::new(model.clone(), 1).unwrap();
    add(&mut engine);
    on_rank_1(&model, |_| thread::sleep(LATE));
    let start = Instant::now();
    let error = engine.step().unwrap_err();
    // Rank 1 sleeps on, and the engine does not wait for it.
    assert!(start.elapsed() < LATE, "{:?}", start.elapsed());
    assert!(
        matches!(
            &error,
            ModelError::Parallel(ParallelError::Late {
                rank: 1,
                waiting: 0,
                ..
            })
        ),
        "{error}"
    );
    assert!(error.to_string().contains("rank 1"), "{error}");
    // The engine stays failed.
    let again = engine.step().unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
    // A new engine waits until rank 1 is idle; the wait is bounded, too.
    let found = loop {
        match decode(&model) {
            Ok(found) => break found,
            Err(ModelError::Parallel(ParallelError::Busy { rank: 1, .. })) => {}
            Err(error) => panic!("{error}"),
        }
        assert!(start.elapsed() < Duration::from_secs(60));
    };
    assert_eq!(found, expected);
    // The old engine is of the session that failed.
    let old = engine.step().unwrap_err();
    assert_eq!(old.to_string(), error.to_string());
}

#[test]
fn a_rank_that_panics_is_an_error_and_a_new_engine_works() {
    let model = split();
    let expected = decode(&model).unwrap();
    let mut engine = Engine::new(model.clone(), 1).unwrap();
    add(&mut engine);
    on_rank_1(&model, |_| panic!("a test of rank 1"));
    let error = engine.step().unwrap_err();
    assert!(
        matches!(
            &error,
            ModelError::Parallel(ParallelError::Panicked { rank: 1, reason, .. })
                if reason == "a test of rank 1"
        ),
        "{error}"
    );
    assert_eq!(decode(&model).unwrap(), expected);
}

#[test]
fn passes_without_an_engine_are_nan_after_a_failure_and_name_it() {
    let model = split();
    let tokens = [3, 1, 2, 5];
    let expected = full(&model, &tokens, 1);
    let mut cache = model.new_cache(1);
    on_rank_1(&model, |_| panic!("a test of a pass"));
    let input = || crate::tokens::token_tensor(&tokens, [1, 4], &model.device());
    let logits = model.forward(input(), &mut cache).try_into_vec_as::<f32>();
    let logits = logits.unwrap();
    assert_eq!(logits.len(), expected.len());
    assert!(logits.iter().all(|value| value.is_nan()));
    assert!(
        matches!(
            model.failure(),
            Some(ParallelError::Panicked { rank: 1, .. })
        ),
        "{:?}",
        model.failure()
    );
    // A pass without a cache begins anew, and the old cache stays lost.
    assert_eq!(full(&model, &tokens, 1), expected);
    assert_eq!(model.failure(), None);
    let mut again = model.new_cache(1);
    let logits = model.forward(input(), &mut again).try_into_vec_as::<f32>();
    assert!(relative_error(&logits.unwrap(), &expected) < TOLERANCE);
    let lost = model
        .forward_last(input(), &mut cache)
        .try_into_vec_as::<f32>();
    assert!(lost.unwrap().iter().all(|value| value.is_nan()));
}

#[test]
fn perplexity_reports_a_rank_that_fails() {
    let model = split();
    let tokens: Vec<u32> = (0..64).map(|index| index % 70).collect();
    on_rank_1(&model, |_| thread::sleep(LATE));
    let error = crate::perplexity(&model, &tokens, 8, |_| {}).unwrap_err();
    assert!(
        matches!(
            error,
            ModelError::Parallel(ParallelError::Late { rank: 1, .. })
        ),
        "{error}"
    );
}

#[test]
fn threads_end_with_the_last_clone_of_a_model() {
    let model = split();
    let alive = Arc::new(());
    let kept = alive.clone();
    on_rank_1(&model, move |state| state.keep(u64::MAX, kept));
    let clone = Model::clone(&model);
    drop(model);
    // The thread of rank 1 has the value until it ends.
    assert!(Arc::strong_count(&alive) > 1);
    drop(clone);
    assert_eq!(Arc::strong_count(&alive), 1);
}
