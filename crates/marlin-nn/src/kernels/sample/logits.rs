//! A row's logits as the kernels read them: four tokens at a time, after the repetition penalty,
//! plus the biases, and minus infinity for suppressed tokens.

use super::floats::Floats;
use cubecl::prelude::*;

/// The logits of four tokens.
pub(super) type Four = Vector<f32, Const<4>>;

/// The location of a row's logits and of its slot's data in the token table, and the row's
/// repetition penalty.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Logits {
    /// The index of the row's first logit.
    pub first: u32,
    /// The number of logits of the row.
    pub vocab: u32,
    /// The index of the first word of the bitmap of the tokens that occurred.
    pub occurred: u32,
    /// The index of the first word of the bitmap of the suppressed tokens.
    pub suppressed: u32,
    /// False if no token is suppressed, whatever the bitmap of suppressed tokens contains.
    pub suppresses: bool,
    /// The index of the first word of the bitmap of the generated tokens.
    pub generated: u32,
    /// The index of the bias of token 0.
    pub biases: u32,
    /// False if no bias is added, whatever the biases are.
    pub is_biased: bool,
    /// The repetition penalty.
    pub penalty: f32,
    pub floats: Floats,
}

#[cube]
impl Logits {
    /// Returns the logits of `token`, a multiple of 4, and of the three tokens that follow.
    /// Suppressed tokens and tokens past the vocabulary get minus infinity.
    pub fn four<F: Float, N: Size>(
        &self,
        logits: &[Vector<F, N>],
        token_table: &[u32],
        token: u32,
        #[comptime] lanes: usize,
    ) -> Four {
        let never = f32::reinterpret(0xff80_0000u32.runtime());
        let mut four = Four::new(never);
        if token < self.vocab {
            let word = token_table[(self.occurred + token / 32) as usize] >> (token % 32);
            if comptime!(lanes == 4) {
                let vector = logits[((self.first + token) / 4) as usize];
                #[unroll]
                for i in 0..4usize {
                    four.insert(
                        i,
                        self.penalised(
                            f32::cast_from(vector.extract(i)),
                            word >> comptime!(i as u32),
                        ),
                    );
                }
            } else {
                #[unroll]
                for i in 0..4usize {
                    if token + comptime!(i as u32) < self.vocab {
                        let logit = logits[(self.first + token + comptime!(i as u32)) as usize]
                            .extract(0usize);
                        four.insert(
                            i,
                            self.penalised(f32::cast_from(logit), word >> comptime!(i as u32)),
                        );
                    }
                }
            }
            if self.is_biased {
                // The biases of tokens past the vocabulary are 0.
                #[unroll]
                for i in 0..4usize {
                    let bias = token_table[(self.biases + token + comptime!(i as u32)) as usize];
                    four.insert(i, four.extract(i) + f32::reinterpret(bias));
                }
            }
            if self.suppresses {
                let word = token_table[(self.suppressed + token / 32) as usize] >> (token % 32);
                #[unroll]
                for i in 0..4usize {
                    if (word >> comptime!(i as u32)) & 1 == 1 {
                        four.insert(i, never);
                    }
                }
            }
        }
        four
    }

    /// Returns a logit after the repetition penalty. The lowest bit of `word` is set if the token
    /// occurred.
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
