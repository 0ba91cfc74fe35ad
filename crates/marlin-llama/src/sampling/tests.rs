use super::*;

const ALL: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

/// How often each token comes in `draws` draws.
fn frequencies(sampling: Sampling, logits: &[f32], history: &[u32], draws: usize) -> Vec<f64> {
    let seed = rand::random();
    println!("seed {seed}");
    let mut sampler = Sampler::new(sampling, seed).unwrap();
    let mut counts = vec![0.0; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(logits, history).unwrap() as usize] += 1.0 / draws as f64;
    }
    counts
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let sum: f64 = logits.iter().map(|x| x.exp()).sum();
    logits.iter().map(|x| x.exp() / sum).collect()
}

/// Five standard deviations of a frequency over 20000 draws are below 0.018.
fn assert_close(found: &[f64], expected: &[f64]) {
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 0.018, "{found} instead of {expected}");
    }
}

#[test]
fn greedy_takes_the_largest_and_of_equals_the_first() {
    let mut sampler = Sampler::new(Sampling::GREEDY, 0).unwrap();
    assert_eq!(sampler.sample(&[0.5, 2.0, -1.0, 2.0], &[]).unwrap(), 1);
    assert_eq!(sampler.sample(&[f32::NEG_INFINITY, -70000.0], &[]).unwrap(), 1);
}

#[test]
fn temperature_divides_logits() {
    let logits = [1.0, 0.0, -1.0, 2.0];
    for temperature in [0.5, 1.0, 3.0] {
        let expected = softmax(&logits.map(|x| f64::from(x / temperature)));
        assert_close(&frequencies(Sampling { temperature, ..ALL }, &logits, &[], 20_000), &expected);
    }
}

#[test]
fn top_k_keeps_exactly_the_largest() {
    let logits = [0.0, 3.0, 1.0, 2.0, -5.0];
    let found = frequencies(Sampling { top_k: Some(2), ..ALL }, &logits, &[], 20_000);
    let [second, first] = [softmax(&[2.0, 3.0])[0], softmax(&[2.0, 3.0])[1]];
    assert_close(&found, &[0.0, first, 0.0, second, 0.0]);
    assert_eq!((found[0], found[2], found[4]), (0.0, 0.0, 0.0));

    let one = frequencies(Sampling { top_k: Some(1), ..ALL }, &logits, &[], 100);
    assert!((one[1] - 1.0).abs() < 1e-9);
    let more_than_there_are = frequencies(Sampling { top_k: Some(100), ..ALL }, &logits, &[], 20_000);
    assert_close(&more_than_there_are, &softmax(&logits.map(f64::from)));
}

#[test]
fn top_p_keeps_the_token_that_crosses_it() {
    // Probabilities 0.4, 0.3, 0.2, 0.1, in another order.
    let logits = [0.2f32, 0.4, 0.1, 0.3].map(f32::ln);
    for (top_p, expected) in [
        (0.35, [0.0, 1.0, 0.0, 0.0]),
        (0.65, [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]),
        (0.85, [2.0 / 9.0, 4.0 / 9.0, 0.0, 3.0 / 9.0]),
        (1e-6, [0.0, 1.0, 0.0, 0.0]),
    ] {
        let found = frequencies(Sampling { top_p, ..ALL }, &logits, &[], 20_000);
        assert_close(&found, &expected);
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(*found == 0.0, expected == 0.0, "top_p {top_p}");
        }
    }
}

#[test]
fn repetition_penalty_pushes_down_what_was_there_once() {
    let mut sampler = Sampler::new(Sampling { repetition_penalty: 2.0, ..Sampling::GREEDY }, 0).unwrap();
    // 3.0 becomes 1.5, not 0.75, although the token was there twice.
    assert_eq!(sampler.sample(&[1.4, 3.0, 1.0], &[1, 1]).unwrap(), 1);
    assert_eq!(sampler.sample(&[1.6, 3.0, 1.0], &[1, 1]).unwrap(), 0);
    // Negative logits are multiplied; tokens outside the vocabulary do not matter.
    assert_eq!(sampler.sample(&[-1.0, -1.5], &[0, 7000]).unwrap(), 1);
}

#[test]
fn the_seed_decides() {
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
    let run = |seed| {
        let mut sampler = Sampler::new(ALL, seed).unwrap();
        (0..40).map(|_| sampler.sample(&logits, &[]).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn broken_logits_are_refused() {
    for sampling in [Sampling::GREEDY, ALL] {
        let mut sampler = Sampler::new(sampling, 0).unwrap();
        assert!(matches!(sampler.sample(&[0.0, f32::NAN], &[]), Err(SamplingError::Logit { token: 1, value }) if value.is_nan()));
        assert_eq!(sampler.sample(&[f32::INFINITY], &[]), Err(SamplingError::Logit { token: 0, value: f32::INFINITY }));
        assert_eq!(sampler.sample(&[f32::NEG_INFINITY; 3], &[]), Err(SamplingError::NoToken { tokens: 3 }));
        assert_eq!(sampler.sample(&[], &[]), Err(SamplingError::NoToken { tokens: 0 }));
    }
}

#[test]
fn options_outside_their_range_are_refused() {
    for (sampling, name) in [
        (Sampling { temperature: -0.1, ..ALL }, "temperature"),
        (Sampling { temperature: f32::NAN, ..ALL }, "temperature"),
        (Sampling { top_k: Some(0), ..ALL }, "top_k"),
        (Sampling { top_p: 0.0, ..ALL }, "top_p"),
        (Sampling { top_p: 1.1, ..ALL }, "top_p"),
        (Sampling { top_p: f32::NAN, ..ALL }, "top_p"),
        (Sampling { repetition_penalty: 0.0, ..ALL }, "repetition_penalty"),
        (Sampling { repetition_penalty: f32::INFINITY, ..ALL }, "repetition_penalty"),
    ] {
        assert!(matches!(Sampler::new(sampling, 0), Err(SamplingError::Option { option, .. }) if option == name), "{sampling:?}");
    }
}
