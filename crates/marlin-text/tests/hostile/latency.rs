//! The time that a worker process adds to a conversation.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use marlin_text::{ChatTemplate, Message, TextStream, Tokenizer};

use crate::tokenizers::byte_level;

/// The longest time that a turn may take in addition to the model's own work.
const TURN: Duration = Duration::from_millis(5);

pub fn tests() -> Vec<Trial> {
    vec![Trial::test(
        "a_turn_costs_less_than_five_milliseconds",
        a_turn,
    )]
}

fn a_turn() -> Result<(), Failed> {
    const TURNS: usize = 50;
    const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>\n{% endfor %}";
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, byte_level().to_string())?;
    let start = Instant::now();
    let tokenizer = Tokenizer::open(&path)?;
    let template = ChatTemplate::compile(
        TEMPLATE,
        path,
        BTreeMap::from([("bos_token".to_string(), "<s>".to_string())]),
    )?;
    println!("open: {:?}", start.elapsed());
    let mut messages = Vec::new();
    let mut turns = Vec::new();
    for turn in 0..TURNS {
        messages.extend([
            Message::user(format!("Question {turn}, of a few words?")),
            Message::assistant("An answer."),
        ]);
        let start = Instant::now();
        tokenizer.encode_rendered(&template.render(&messages, true)?)?;
        turns.push(start.elapsed());
    }
    turns.sort();
    println!(
        "a turn of up to {TURNS}: median {:?}, slowest {:?}",
        turns[TURNS / 2],
        turns[TURNS - 1]
    );

    let tokens = tokenizer.encode(
        "A text of some hundred tokens, one by one. "
            .repeat(10)
            .as_str(),
    )?;
    let mut stream = TextStream::after(&tokenizer, &[])?;
    let start = Instant::now();
    for &token in &tokens {
        stream.push(token)?;
    }
    println!(
        "a token of a stream: {:?}",
        start.elapsed() / tokens.len() as u32
    );
    if turns[TURNS / 2] < TURN {
        Ok(())
    } else {
        Err(Failed::from(format!("{turns:?}")))
    }
}
