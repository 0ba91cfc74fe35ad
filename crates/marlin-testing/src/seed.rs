use rand::SeedableRng;
use rand::rngs::StdRng;
use std::time::{SystemTime, UNIX_EPOCH};

/// The environment variable that sets the seed.
const VARIABLE: &str = "MARLIN_TEST_SEED";
/// The seed if the environment variable `CI` is set: a failure in CI comes from the change under
/// test, not from the data drawn.
const CI_SEED: u64 = 1;

/// Returns the seed for random test data, and prints it. The seed is the value of
/// `MARLIN_TEST_SEED` if set, a fixed seed in CI, otherwise a seed from the clock.
pub fn seed() -> u64 {
    let seed = match std::env::var(VARIABLE) {
        Ok(text) => text.parse().unwrap_or_else(|_| {
            panic!(
                "{VARIABLE}: `{text}` is not an integer from 0 to {}",
                u64::MAX
            )
        }),
        Err(_) if std::env::var_os("CI").is_some() => CI_SEED,
        Err(_) => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos() as u64,
    };
    println!("{VARIABLE}={seed}");
    seed
}

/// Returns a random number generator with the [`seed`], which this call prints.
pub fn rng() -> StdRng {
    StdRng::seed_from_u64(seed())
}
