//! The order of the bits of e2m1 in the words of tensor-core kernels.

use crate::WeightValue;

/// Some bits of a word, and the distance to the left by which [`scatter_bits`] moves them.
pub type BitMove = (u32, i32);

/// The sign, then exponent and mantissa, of the four e2m1 values of a half.
const E2M1: [BitMove; 8] = [
    (0x0008_0008, 12),
    (0x0007_0007, 9),
    (0x0080_0080, 5),
    (0x0070_0070, 2),
    (0x0800_0800, 3),
    (0x0700_0700, -5),
    (0x8000_8000, -2),
    (0x7000_7000, -12),
];

/// Returns the moves of [`scatter_bits`]; none for integers and e4m3, whose bits stay where they
/// are.
pub const fn bit_moves(value: WeightValue) -> &'static [BitMove] {
    match value {
        WeightValue::Int4 | WeightValue::Int8 | WeightValue::E4m3 => &[],
        WeightValue::E2m1 => &E2M1,
    }
}

/// Returns a word of e2m1 with its bits in the order of tensor-core kernels; a word of other values
/// as it is. [`gather_bits`] is the inverse.
///
/// A value has a sign `s`, and bits of exponent and mantissa, `x`. In f16, the sign belongs to bit
/// 15, and `x` to bits 11 to 9. In each half of a word, with values 0 to 3 from the lowest nibble
/// of the half:
///
/// | bits | 15 | 14 | 13 | 12 | 11 to 9 | 8 to 6 | 5 to 3 | 2 to 0 |
/// |---|---|---|---|---|---|---|---|---|
/// | hold | `s` 0 | `s` 2 | `s` 3 | `s` 1 | `x` 0 | `x` 1 | `x` 2 | `x` 3 |
///
/// A mask selects the first value of each half as f16. The same mask selects the second value after
/// a shift by 3 to the left. The others take a shift and a mask for each of their parts, as all
/// values would in their own order.
pub const fn scatter_bits(word: u32, value: WeightValue) -> u32 {
    let moves = bit_moves(value);
    if moves.is_empty() {
        return word;
    }
    let mut scattered = 0;
    let mut index = 0;
    while index < moves.len() {
        let (bits, by) = moves[index];
        scattered |= shifted(word & bits, by);
        index += 1;
    }
    scattered
}

/// Returns the word whose bits [`scatter_bits`] has moved.
pub const fn gather_bits(word: u32, value: WeightValue) -> u32 {
    let moves = bit_moves(value);
    if moves.is_empty() {
        return word;
    }
    let mut gathered = 0;
    let mut index = 0;
    while index < moves.len() {
        let (bits, by) = moves[index];
        gathered |= shifted(word, -by) & bits;
        index += 1;
    }
    gathered
}

/// Shifts a word to the left, or to the right if `by` is negative.
const fn shifted(word: u32, by: i32) -> u32 {
    if by < 0 { word >> -by } else { word << by }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bits of a word of e2m1 from the highest on, as bits of the word before.
    fn order() -> Vec<u32> {
        [16, 0]
            .into_iter()
            .flat_map(|half| {
                let signs = [0, 2, 3, 1].map(|nibble| half + 4 * nibble + 3);
                let rest = (0..4)
                    .flat_map(move |nibble| (0..3).rev().map(move |bit| half + 4 * nibble + bit));
                signs.into_iter().chain(rest)
            })
            .collect()
    }

    #[test]
    fn every_bit_moves_to_the_place_of_the_table() {
        let value = WeightValue::E2m1;
        for (index, from) in order().into_iter().enumerate() {
            let (from, to) = (1 << from, 1 << (31 - index));
            assert_eq!(scatter_bits(from, value), to, "{from:#x}");
            assert_eq!(gather_bits(to, value), from, "{to:#x}");
        }
        for value in WeightValue::ALL {
            for word in [0x0123_4567, 0x89ab_cdef, u32::MAX] {
                assert_eq!(gather_bits(scatter_bits(word, value), value), word);
            }
        }
    }
}
