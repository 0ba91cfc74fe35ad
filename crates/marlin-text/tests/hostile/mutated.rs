//! The fuzz targets of `/fuzz` on mutated valid inputs, from a seed that is printed: 200 inputs each, or `MARLIN_FUZZ_INPUTS`.

#[path = "../../../../fuzz/src/errors.rs"]
mod errors;
#[path = "../../../../fuzz/src/mutate.rs"]
mod mutate;
#[path = "../../../../fuzz/src/text.rs"]
mod text;

use libtest_mimic::{Failed, Trial};
use rand::rngs::{StdRng, SysRng};
use rand::{RngExt, SeedableRng, TryRng};

use self::mutate::{JSON, inputs, mutated};
use self::text::{TokenizerFolder, template, template_seeds, tokenizer_seeds};

/// The tokens written into templates: Jinja's words and signs, and what can grow.
const OF_TEMPLATES: [&str; 40] = [
    "{{",
    "}}",
    "{%",
    "%}",
    "{%-",
    "-%}",
    "{#",
    "#}",
    "[",
    "]",
    "(",
    ")",
    "'",
    "\"",
    "~",
    "+",
    "*",
    "|",
    ".",
    "-",
    "not ",
    "in ",
    "is ",
    "if true",
    "endif",
    "for x in messages",
    "endfor",
    "set ns = namespace()",
    "set ns.a = ns",
    "set a = [a, a]",
    "macro f()",
    "endmacro",
    "f()",
    "range(1000000)",
    "indent(1000000000)",
    "messages",
    "loop",
    "tojson",
    "[:9223372036854775807:-1]",
    "1e308",
];
/// The tokens written into tokenizers beside the signs of JSON: names of parts, patterns, and numbers at edges.
const OF_TOKENIZERS: [&str; 23] = [
    "4294967295",
    "4294967296",
    "18446744073709551615",
    "Sequence",
    "Replace",
    "Precompiled",
    "Split",
    "Regex",
    "String",
    "BPE",
    "Unigram",
    "WordPiece",
    "WordLevel",
    "TemplateProcessing",
    "ByteLevel",
    "ByteFallback",
    "Metaspace",
    "NFC",
    "Strip",
    "(a+)+$",
    "(?=",
    "{1000}",
    "\\\\p{L}*",
];

pub fn tests() -> Vec<Trial> {
    vec![
        Trial::test("mutated_templates", || run(&template_seeds(), &OF_TEMPLATES, template)),
        Trial::test("mutated_tokenizers", || {
            let folder = TokenizerFolder::new();
            run(&tokenizer_seeds(), &[&JSON[..], &OF_TOKENIZERS].concat(), |data| folder.tokenizer(data))
        }),
    ]
}

fn run(seeds: &[Vec<u8>], tokens: &[&str], target: impl Fn(&[u8]) -> bool) -> Result<(), Failed> {
    let inputs = inputs(200);
    let given = std::env::var("MARLIN_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = given.map_or_else(|| SysRng.try_next_u64(), Ok)?;
    println!("MARLIN_TEST_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for seed in seeds {
        assert!(target(seed), "a seed is refused: {}", String::from_utf8_lossy(seed));
    }
    let mut accepted = 0;
    for _ in 0..inputs {
        let seed = rng.random_range(0..seeds.len());
        let input = mutated(&mut rng, &seeds[seed], tokens);
        accepted += usize::from(target(&input));
    }
    println!("{inputs} inputs, {accepted} of them accepted");
    // Neither all changes are fatal, nor does every one go unseen.
    assert!((1..inputs).contains(&accepted), "{accepted} of {inputs}");
    Ok(())
}
