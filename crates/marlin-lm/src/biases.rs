//! The biases of a request: what is added to the logits of tokens.

use marlin_nn::{SlotTokens, TokenTable};

use crate::RequestParams;

/// Returns the rows of a slot of the [`TokenTable`] from [`TokenTable::GENERATED`] on: the bitmap
/// of the tokens that were generated so far, and the biases, which have the penalties on these
/// tokens. Returns `None` if the request has neither penalties nor a logit bias.
pub(crate) fn bias_rows(
    params: &RequestParams,
    generated: &[u32],
    vocab_size: usize,
) -> Option<Vec<u32>> {
    let (presence, frequency) = (
        params.sampling.presence_penalty,
        params.sampling.frequency_penalty,
    );
    if presence == 0.0 && frequency == 0.0 && params.logit_bias.is_empty() {
        return None;
    }
    let words = TokenTable::words(vocab_size);
    let mut rows = vec![0; (TokenTable::ROWS - TokenTable::GENERATED) * words];
    let (of_generated, biases) = rows.split_at_mut(words);
    for (&token, bias) in &params.logit_bias {
        biases[token as usize] = bias.to_bits();
    }
    let mut tokens = SlotTokens {
        occurred: &mut [],
        suppressed: &[],
        generated: of_generated,
        biases,
    };
    for &token in generated {
        tokens.generate(token, presence, frequency);
    }
    Some(rows)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use marlin_nn::bitmap;

    use super::*;
    use crate::Sampling;

    #[test]
    fn the_rows_of_generated_tokens_have_their_penalties() {
        let mut params = RequestParams {
            logit_bias: BTreeMap::from([(3, -100.0), (39, 1.5)]),
            ..RequestParams::default()
        };
        let rows = bias_rows(&params, &[], 40).unwrap();
        assert_eq!(rows.len(), 33 * 2);
        let bias = |rows: &[u32], token: usize| f32::from_bits(rows[2 + token]);
        assert_eq!([bias(&rows, 3), bias(&rows, 39)], [-100.0, 1.5]);
        assert_eq!(rows[..2], [0, 0]);

        params.sampling = Sampling {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            ..Sampling::GREEDY
        };
        let rows = bias_rows(&params, &[39, 7, 39], 40).unwrap();
        assert_eq!(rows[..2], bitmap(&[7, 39], 40));
        assert_eq!([bias(&rows, 7), bias(&rows, 39)], [-0.75, 0.5]);
        assert_eq!([bias(&rows, 3), bias(&rows, 0)], [-100.0, 0.0]);
    }

    #[test]
    fn a_request_without_penalties_and_bias_has_no_rows() {
        assert_eq!(bias_rows(&RequestParams::default(), &[1, 2], 40), None);
    }
}
