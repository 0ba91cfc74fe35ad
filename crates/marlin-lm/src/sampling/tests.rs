use super::*;

/// Options that are all different from the defaults.
const ALL: Sampling = Sampling {
    temperature: 0.8,
    top_k: Some(40),
    top_p: 0.9,
    min_p: 0.05,
    repetition_penalty: 1.1,
    presence_penalty: 0.2,
    frequency_penalty: -0.3,
};

#[test]
fn options_outside_their_range_are_refused() {
    assert_eq!(ALL.validate(), Ok(()));
    assert_eq!(Sampling::GREEDY.validate(), Ok(()));
    for (sampling, name) in [
        (
            Sampling {
                temperature: -0.1,
                ..ALL
            },
            "temperature",
        ),
        (
            Sampling {
                temperature: f32::NAN,
                ..ALL
            },
            "temperature",
        ),
        (
            Sampling {
                top_k: Some(0),
                ..ALL
            },
            "top_k",
        ),
        (Sampling { top_p: 0.0, ..ALL }, "top_p"),
        (Sampling { top_p: 1.1, ..ALL }, "top_p"),
        (
            Sampling {
                top_p: f32::NAN,
                ..ALL
            },
            "top_p",
        ),
        (Sampling { min_p: -0.1, ..ALL }, "min_p"),
        (Sampling { min_p: 1.1, ..ALL }, "min_p"),
        (
            Sampling {
                presence_penalty: f32::NAN,
                ..ALL
            },
            "presence_penalty",
        ),
        (
            Sampling {
                frequency_penalty: f32::INFINITY,
                ..ALL
            },
            "frequency_penalty",
        ),
        (
            Sampling {
                min_p: f32::NAN,
                ..ALL
            },
            "min_p",
        ),
        (
            Sampling {
                repetition_penalty: 0.0,
                ..ALL
            },
            "repetition_penalty",
        ),
        (
            Sampling {
                repetition_penalty: f32::INFINITY,
                ..ALL
            },
            "repetition_penalty",
        ),
    ] {
        assert!(
            matches!(sampling.validate(), Err(SamplingError::Option { option, .. }) if option == name),
            "{sampling:?}"
        );
    }
}

#[test]
fn a_row_holds_all_options_and_all_of_the_seed() {
    let row = ALL.row(7, 8, 9, 1 << 40 | 3);
    let expected = SequenceState {
        token: 7,
        status: SequenceStatus::At(8),
        slot: 9,
        seed: 1 << 8 | 3,
        top_k: 40,
        temperature: 0.8,
        top_p: 0.9,
        repetition_penalty: 1.1,
        min_p: 0.05,
        presence_penalty: 0.2,
        frequency_penalty: -0.3,
        ..SequenceState::IDLE
    };
    assert_eq!(row, expected);
    assert_eq!(Sampling::GREEDY.row(7, 8, 9, 0).top_k, 0);
}
