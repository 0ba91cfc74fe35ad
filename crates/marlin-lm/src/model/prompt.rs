use burn::tensor::{Bool, Device, FloatDType, Tensor};

use super::rope::{Rope, RopePositions};

/// The rotary tables and masks of positions `start..start + seq`, for attention of whole prompts.
pub(crate) struct Span {
    pub(crate) rope: RopePositions,
    /// The mask of layers whose queries attend to all positions before.
    causal: Option<Tensor<4, Bool>>,
    /// The mask of layers with a sliding window.
    windowed: Option<Tensor<4, Bool>>,
}

impl Span {
    /// Creates the rotary tables and masks. `window` is the sliding window of the layers that have
    /// one.
    ///
    /// # Panics
    /// Panics if `rope` has fewer than `start + seq` positions.
    pub(crate) fn new(
        rope: &Rope,
        start: usize,
        seq: usize,
        window: Option<usize>,
        dtype: FloatDType,
        device: &Device,
    ) -> Self {
        Self {
            rope: rope.positions(start, seq, dtype),
            causal: mask(start, seq, None, device),
            windowed: window.and_then(|window| mask(start, seq, Some(window), device)),
        }
    }

    /// Returns the mask [1, 1, seq, positions] of a layer with or without a window: true for a
    /// score that must not count. Returns `None` if every query attends to every position.
    pub(crate) fn mask(&self, window: Option<usize>) -> Option<&Tensor<4, Bool>> {
        if window.is_some() {
            self.windowed.as_ref()
        } else {
            self.causal.as_ref()
        }
    }
}

/// Returns the mask [1, 1, seq, start + seq] of queries `start..start + seq`: true for positions
/// after a query, and for positions before its window. Returns `None` if every query attends to
/// every position.
fn mask(
    start: usize,
    seq: usize,
    window: Option<usize>,
    device: &Device,
) -> Option<Tensor<4, Bool>> {
    let shape = [seq, start + seq];
    let later = (seq > 1).then(|| Tensor::<2, Bool>::tril_mask(shape, start as i64, device));
    let earlier = window.filter(|&window| window < start + seq).map(|window| {
        Tensor::<2, Bool>::triu_mask(shape, start as i64 + 1 - window as i64, device)
    });
    let mask = match (later, earlier) {
        (Some(later), Some(earlier)) => Some(later.bool_or(earlier)),
        (later, earlier) => later.or(earlier),
    };
    mask.map(|mask| mask.unsqueeze())
}
