//! A row's logits as the kernels read them: four tokens at a time, after the repetition penalty.

use super::floats::Floats;
use cubecl::prelude::*;

/// The logits, or places, of four tokens.
pub(super) type Four = Vector<f32, Const<4>>;

/// The places of a row's logits and of its slot's bitmap.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Logits {
    /// The row's first logit.
    pub first: u32,
    /// Logits of the row.
    pub vocab: u32,
    /// The first word of the bitmap.
    pub seen: u32,
    /// The repetition penalty.
    pub penalty: f32,
    pub floats: Floats,
}

#[cube]
impl Logits {
    /// The logits of `token`, a multiple of 4, and of the three that follow; minus infinity past the vocabulary.
    pub fn four<F: Float, N: Size>(&self, logits: &[Vector<F, N>], seen: &[u32], token: u32, #[comptime] lanes: usize) -> Four {
        let mut four = Four::new(f32::reinterpret(0xff80_0000u32.runtime()));
        if token < self.vocab {
            let word = seen[(self.seen + token / 32) as usize] >> (token % 32);
            if comptime!(lanes == 4) {
                let vector = logits[((self.first + token) / 4) as usize];
                #[unroll]
                for i in 0..4usize {
                    four.insert(i, self.penalised(f32::cast_from(vector.extract(i)), word >> comptime!(i as u32)));
                }
            } else {
                #[unroll]
                for i in 0..4usize {
                    if token + comptime!(i as u32) < self.vocab {
                        let logit = logits[(self.first + token + comptime!(i as u32)) as usize].extract(0usize);
                        four.insert(i, self.penalised(f32::cast_from(logit), word >> comptime!(i as u32)));
                    }
                }
            }
        }
        four
    }

    /// A logit after the repetition penalty; the word's lowest bit says whether the token occurred.
    fn penalised(&self, logit: f32, word: u32) -> f32 {
        let mut penalised = logit;
        if word & 1 == 1 {
            if logit > 0.0f32 {
                penalised = self.floats.divide(logit, self.penalty);
            } else {
                penalised = self.floats.rounded(logit * self.penalty);
            }
        }
        penalised
    }
}
