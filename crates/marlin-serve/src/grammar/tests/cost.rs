//! What masks cost.

use super::*;

/// Returns `count` tokens with lengths and characters like those of a byte-level BPE of English
/// text and code: words, half of them after a space, numbers, and punctuation.
fn made_up_tokens(rng: &mut StdRng, count: usize) -> BTreeSet<String> {
    const LETTERS: &str = "eeeeeeettttttaaaaaooooooiiiiinnnnnsssshhhhrrrrddllluucmmwfgypbvkjxqz";
    const MARKS: &str = "{}[]\":,.()=-_/\\ \n\t;<>*#'!?&|";
    let letters: Vec<char> = LETTERS.chars().collect();
    let marks: Vec<char> = MARKS.chars().collect();
    let mut tokens = BTreeSet::new();
    while tokens.len() < count {
        let mut token = String::new();
        match rng.random_range(0..20) {
            0 => (0..rng.random_range(1..4))
                .for_each(|_| token.push(marks[rng.random_range(0..marks.len())])),
            1 => token = rng.random_range(0..1000).to_string(),
            2 => (0..rng.random_range(1..4)).for_each(|_| token.push(rng.random_range('А'..='я'))),
            kind => {
                if kind % 2 == 0 {
                    token.push(' ');
                }
                for _ in 0..rng.random_range(2..11) {
                    token.push(letters[rng.random_range(0..letters.len())]);
                }
                if kind == 5 {
                    token = token.to_uppercase();
                }
            }
        }
        tokens.insert(token);
    }
    tokens
}

/// Prints what masks cost, with optimisation: `cargo test --release -p marlin-serve mask_cost --
/// --ignored --nocapture`. Takes 10 s.
#[test]
#[ignore = "a measurement"]
fn mask_cost() {
    let mut rng = rng();
    let text = json!({ "type": "string" });
    let person = schema(json!({
        "type": "object",
        "properties": {
            "name": text, "age": { "type": "integer" }, "tags": { "type": "array", "items": text },
            "kind": { "enum": ["person", "place", "thing"] },
            "address": { "type": "object", "properties": { "street": text, "city": text } },
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": false,
    }));
    let regex = GrammarSource::Regex(r"\d{4}-\d{2}-\d{2}: [A-Z][a-z ]{3,200}\.".into());
    let sources = [
        ("schema", person),
        ("object", GrammarSource::json_object()),
        ("regex", regex),
    ];
    for size in [32_000, 128_000] {
        let tokens = made_up_tokens(&mut rng, size - 265);
        let vocabulary = Vocabulary::of(tokens, CompilerOptions::default());
        let start = Instant::now();
        vocabulary.start(&GrammarSource::Regex("a".into()));
        println!("{size} tokens: first grammar {:.0?}", start.elapsed());
        for (name, source) in &sources {
            let start = Instant::now();
            let grammar = vocabulary.compiler.compile(source).unwrap();
            let compiled = start.elapsed();
            let start = Instant::now();
            let mut states: Vec<GrammarState> = (0..64).map(|_| grammar.start()).collect();
            let started = start.elapsed() / 64;
            let (mut costs, mut accepts) = (Vec::new(), Vec::new());
            for _ in 0..64 {
                for state in &mut states {
                    let start = Instant::now();
                    let mask = state.mask().unwrap();
                    costs.push(start.elapsed());
                    let allowed = |token: u32| mask[token as usize / 32] >> (token % 32) & 1 == 1;
                    let quote = 4 + u32::from(b'"');
                    let token = if allowed(quote) && rng.random_range(0..4) == 0 {
                        quote
                    } else {
                        let from = rng.random_range(0..size as u32);
                        (from..size as u32)
                            .chain(0..from)
                            .find(|&token| allowed(token))
                            .unwrap()
                    };
                    let start = Instant::now();
                    state.accept(token).unwrap();
                    accepts.push(start.elapsed());
                    if state.is_stopped() {
                        *state = grammar.start();
                    }
                }
            }
            // The first step's masks are those that the grammar was compiled with.
            let first = costs.drain(..64).sum::<Duration>() / 64;
            costs.sort();
            let total = |times: &[Duration]| times.iter().sum::<Duration>();
            println!(
                "{size} tokens, {name}: compiled {compiled:.0?}, start {started:.0?}, first mask {first:.0?}, mask median {:.0?} mean {:.0?} p99 {:.0?} most {:.0?}, accept {:.0?}; 64 masks {:.0?}",
                costs[costs.len() / 2],
                total(&costs) / costs.len() as u32,
                costs[costs.len() * 99 / 100],
                costs[costs.len() - 1],
                total(&accepts) / accepts.len() as u32,
                total(&costs) / 63,
            );
        }
    }
}
