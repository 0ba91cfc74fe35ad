//! Tests of the zero points of both GPTQ versions, by the words in their files.

use marlin_format::checkpoint::{CheckpointError, Dtype, GptqVersion};
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, Scales, WeightValue};

use super::{format, read};
use crate::common::{tensor, words};

/// Returns the weights of K = 32, N = 8 with one group, every q = 0 and scales of 1. These weights
/// are the negated zero points.
fn zero_points_of(
    word: u32,
    spec: QuantSpec,
    version: GptqVersion,
) -> Result<Vec<f32>, CheckpointError> {
    let words_of_zero_points: &[u32] = if spec.value == WeightValue::Int4 {
        &[word]
    } else {
        &[word, word]
    };
    let per_word = spec.value.per_word();
    let tensors = [
        tensor(
            "qweight",
            Dtype::I32,
            &[32 / per_word, 8],
            &vec![0; 4 * 8 * 32 / per_word],
        ),
        tensor(
            "qzeros",
            Dtype::I32,
            &[1, 8 / per_word],
            &words(words_of_zero_points),
        ),
        tensor(
            "scales",
            Dtype::F16,
            &[1, 8],
            Scales::from_f32(&[1.0; 8], ScaleDtype::F16).as_bytes(),
        ),
    ];
    read(&tensors, &format(spec, version)).map(|weight| {
        weight.dequantize()[..8]
            .iter()
            .map(|value| -value)
            .collect()
    })
}

#[test]
fn zero_points_at_the_edges() {
    let asymmetric = QuantSpec::int4(GroupSize::Channel).with_zero_points();
    // Zero points 0, 7, 8, 15, 15, 8, 7, 0, lowest nibble first.
    assert_eq!(
        zero_points_of(0x078f_f870, asymmetric, GptqVersion::V2).unwrap(),
        [0.0, 7.0, 8.0, 15.0, 15.0, 8.0, 7.0, 0.0]
    );
    // Zero points 1, 7, 8, 15, 15, 8, 7, 1: each stored minus 1.
    assert_eq!(
        zero_points_of(0x067e_e760, asymmetric, GptqVersion::V1).unwrap(),
        [1.0, 7.0, 8.0, 15.0, 15.0, 8.0, 7.0, 1.0]
    );

    // Zero points 0, 8, 8, 8, 8, 8, 8, 8, where the 0 borrows from the 8 above. Then several zeros,
    // of which the highest has nothing to borrow from. Then zeros only.
    let eights = [0.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0];
    for (word, expected) in [
        (0x7777_776f, eights),
        (
            0x0888_8880u32.wrapping_sub(0x1111_1111),
            [0.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 0.0],
        ),
        (0xeeee_eeef, [0.0; 8]),
    ] {
        assert_eq!(
            zero_points_of(word, asymmetric, GptqVersion::V1).unwrap(),
            expected,
            "{word:#x}"
        );
        // If the config declares symmetric weights, stored zero points are ignored.
        assert_eq!(
            zero_points_of(word, QuantSpec::int4(GroupSize::Channel), GptqVersion::V1).unwrap(),
            [8.0; 8]
        );
    }
    assert_eq!(
        zero_points_of(0x7777_776f, asymmetric, GptqVersion::V2).unwrap()[0],
        15.0
    );

    let asymmetric = QuantSpec::int8(GroupSize::Channel).with_zero_points();
    let edges = [0.0, 127.0, 128.0, 255.0];
    assert_eq!(
        zero_points_of(0xff80_7f00, asymmetric, GptqVersion::V2).unwrap(),
        [edges, edges].concat()
    );
    let edges = [1.0, 127.0, 128.0, 255.0];
    assert_eq!(
        zero_points_of(0xfe7f_7e00, asymmetric, GptqVersion::V1).unwrap(),
        [edges, edges].concat()
    );
    let edges = [0.0, 127.0, 0.0, 255.0];
    assert_eq!(
        zero_points_of(
            0xff00_7f00u32.wrapping_sub(0x0101_0101),
            asymmetric,
            GptqVersion::V1
        )
        .unwrap(),
        [edges, edges].concat()
    );
    // Symmetric files of version 1 store 127, and some store 128; the stored values are ignored.
    for stored in [0x7f7f_7f7f, 0x8080_8080, 0] {
        assert_eq!(
            zero_points_of(stored, QuantSpec::int8(GroupSize::Channel), GptqVersion::V1).unwrap(),
            [128.0; 8]
        );
    }
}
