/// Returns a row's RMSNorm in f64: `x / sqrt(mean(x^2) + epsilon) * weight`.
pub fn rms_norm<X, W>(x: &[X], weight: &[W], epsilon: f64) -> Vec<f64>
where
    X: Copy + Into<f64>,
    W: Copy + Into<f64>,
{
    let squares: f64 = x.iter().map(|&x| x.into().powi(2)).sum();
    let root = (squares / x.len() as f64 + epsilon).sqrt();
    let weighted = x.iter().zip(weight);
    weighted
        .map(|(&x, &weight)| x.into() / root * weight.into())
        .collect()
}

/// Rotates the first features of a head in f64: each feature of the first half with one of the
/// second, by the angle whose cosine and sine [rotary features / 2] are given.
pub fn rotate(x: &mut [f64], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for (i, (&cos, &sin)) in cos.iter().zip(sin).enumerate() {
        let (cos, sin) = (f64::from(cos), f64::from(sin));
        (x[i], x[i + half]) = (
            x[i] * cos - x[i + half] * sin,
            x[i + half] * cos + x[i] * sin,
        );
    }
}
