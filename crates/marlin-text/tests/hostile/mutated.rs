//! Runs of the fuzz targets of `/fuzz` on mutated valid inputs: 200 inputs each, or as many as
//! `MARLIN_FUZZ_INPUTS`.

#[path = "../../../../fuzz/src/errors.rs"]
mod errors;
#[path = "../../../../fuzz/src/mutate.rs"]
mod mutate;
#[path = "../../../../fuzz/src/text.rs"]
mod text;

use libtest_mimic::{Failed, Trial};
use marlin_testing::seed;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use self::mutate::{JSON, inputs, mutated};
use self::text::{TokenizerFolder, template, template_seeds, tokenizer_seeds};

/// The tokens written into templates: Jinja's keywords and delimiters, and expressions whose result
/// can grow.
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
/// The tokens written into tokenizers, besides [`JSON`]: names of components, patterns, and
/// integers at limits.
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
        Trial::test("mutated_templates", || {
            run(&template_seeds(), &OF_TEMPLATES, template)
        }),
        Trial::test("mutated_tokenizers", || {
            let folder = TokenizerFolder::new();
            run(
                &tokenizer_seeds(),
                &[&JSON[..], &OF_TOKENIZERS].concat(),
                |data| folder.tokenizer(data),
            )
        }),
    ]
}

fn run(seeds: &[Vec<u8>], tokens: &[&str], target: impl Fn(&[u8]) -> bool) -> Result<(), Failed> {
    let (mut rng, inputs) = (StdRng::seed_from_u64(seed()), inputs(200));
    for seed in seeds {
        assert!(
            target(seed),
            "a seed is refused: {}",
            String::from_utf8_lossy(seed)
        );
    }
    let mut accepted = 0;
    for _ in 0..inputs {
        let seed = rng.random_range(0..seeds.len());
        let input = mutated(&mut rng, &seeds[seed], tokens);
        accepted += usize::from(target(&input));
    }
    println!("{inputs} inputs, {accepted} of them accepted");
    // Some mutations are refused, and some are not.
    assert!((1..inputs).contains(&accepted), "{accepted} of {inputs}");
    Ok(())
}
