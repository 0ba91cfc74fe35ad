use rand::RngExt;
use rand::rngs::StdRng;

/// Returns values between `-size` and `size`.
pub fn random_values(count: usize, size: f32, rng: &mut StdRng) -> Vec<f32> {
    (0..count).map(|_| rng.random_range(-size..size)).collect()
}

/// Returns inputs [tokens, K] of a layer like those of a model: a few directions that most features
/// share, features whose sizes are between `exp(-spread)` and `exp(spread)`, and noise.
pub fn layer_inputs(tokens: usize, k: usize, spread: f32, rng: &mut StdRng) -> Vec<f32> {
    let directions = k / 4 + 1;
    let mix = random_values(directions * k, 1.0, rng);
    let sizes = random_values(k, 1.0, rng);
    let mut rows = Vec::with_capacity(tokens * k);
    for _ in 0..tokens {
        let strengths = random_values(directions, 1.0, rng);
        let noise = random_values(k, 1.0, rng);
        rows.extend((0..k).map(|feature| {
            let shared: f32 = strengths
                .iter()
                .enumerate()
                .map(|(i, strength)| strength * mix[i * k + feature])
                .sum();
            (spread * sizes[feature]).exp() * (shared + 0.3 * noise[feature])
        }));
    }
    rows
}
