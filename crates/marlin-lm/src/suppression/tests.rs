use super::*;

/// Returns the suppressed tokens for the choice after `unknown` tokens, in ascending order.
fn change(suppressed: &mut Suppressed, unknown: usize) -> Option<Vec<u32>> {
    suppressed.change(unknown).map(|mut tokens| {
        tokens.sort_unstable();
        tokens
    })
}

#[test]
fn options_without_effect_suppress_nothing() {
    let some = Suppression {
        min_new_tokens: 3,
        min_length: 3,
        ..Suppression::NONE
    };
    assert!(Suppressed::new(&Suppression::NONE, &[2], &[1]).is_none());
    assert!(
        Suppressed::new(&some, &[], &[1]).is_none(),
        "no stop tokens"
    );
    assert!(
        Suppressed::new(
            &Suppression {
                min_new_tokens: 0,
                ..some.clone()
            },
            &[2],
            &[1, 1, 1]
        )
        .is_none(),
        "a prompt that is long enough"
    );
    let stop_token_alone = Suppression {
        bad_words_ids: vec![vec![2]],
        ..Suppression::NONE
    };
    assert!(Suppressed::new(&stop_token_alone, &[2], &[1]).is_none());
    assert!(Suppressed::new(&stop_token_alone, &[3], &[1]).is_some());
    assert_eq!(some.validate(), Ok(()));
    let empty = Suppression {
        bad_words_ids: vec![vec![2], vec![]],
        ..Suppression::NONE
    };
    assert_eq!(
        empty.validate(),
        Err(SamplingError::EmptyBadWord { index: 1 })
    );
}

#[test]
fn changes_are_those_of_each_choice() {
    let options = Suppression {
        suppress_tokens: vec![9],
        bad_words_ids: vec![vec![8], vec![1, 2, 3], vec![2, 4], vec![6, 7]],
        min_new_tokens: 2,
        min_length: 3,
    };
    let mut suppressed = Suppressed::new(&options, &[5], &[1]).unwrap();
    assert!(suppressed.depends_on_tokens());
    assert_eq!(change(&mut suppressed, 0), Some(vec![5, 8, 9]));
    assert_eq!(change(&mut suppressed, 0), None);
    suppressed.push(2);
    assert_eq!(
        change(&mut suppressed, 0),
        Some(vec![3, 4, 5, 8, 9]),
        "words that begin in the prompt and after it"
    );
    suppressed.push(2);
    assert_eq!(
        change(&mut suppressed, 0),
        Some(vec![4, 8, 9]),
        "a stop token may come"
    );
    suppressed.push(0);
    assert_eq!(change(&mut suppressed, 0), Some(vec![8, 9]));
    assert_eq!(
        suppressed.last,
        [2, 0],
        "as many as a word has before its last one"
    );

    let mut by_number = Suppressed::new(
        &Suppression {
            min_new_tokens: 2,
            ..Suppression::NONE
        },
        &[5],
        &[1],
    )
    .unwrap();
    assert!(!by_number.depends_on_tokens());
    assert_eq!(change(&mut by_number, 1), Some(vec![5]));
    by_number.push(1);
    assert_eq!(change(&mut by_number, 1), Some(vec![]));
}
