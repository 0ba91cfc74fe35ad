//! The check of figures in sentences: each is a number of a record that the page names.
//!
//! A mark before a paragraph, a list, a heading or a table has what its figures are from:
//!
//! ```text
//! <!-- figures: prompts-h200.json tokens=1024, prompts=1; start-h200.log generate, int4;
//! settings 64 -->
//! ```
//!
//! A source is a file of `benches/records` with the row that has the figure, in the form of
//! [`numbers`]. `settings` are numbers that nobody measured: sizes of a run, or bits of a format. A
//! number without a source is refused, and so is a source without a number.

use super::benchmarks::records::{number, numbers};
use super::pages::Page;
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::ops::Range;
use std::path::Path;

const MARK: &str = "<!-- figures: ";
/// The beginning and the end of a table that is made from records.
const TABLE: &str = "<!-- table: ";
const END: &str = "<!-- end -->";
/// The pages whose figures are checked.
const PAGES: [&str; 2] = ["README.md", "book/src/benchmarks.md"];
/// Words after which a number is part of a name.
const NAMES: [&str; 13] = [
    "Apache",
    "Burn",
    "CubeCL",
    "GPTQModel",
    "Humming",
    "LLVM",
    "Llama",
    "PyTorch",
    "Qwen",
    "Rust",
    "Zen",
    "capability",
    "llm-compressor",
];
/// Units of figures, and what a record's number is multiplied with for them if it is not in the
/// same unit.
const UNITS: [(&str, f64); 4] = [("%", 1e2), ("kB", 1e-3), ("MB", 1e-6), ("million", 1e-6)];

/// A number in a sentence.
struct Figure {
    text: String,
    value: f64,
    /// The digits after the point.
    digits: usize,
    /// What a number of a record may be multiplied with.
    scale: Option<f64>,
}

/// Where the figures of a block are from.
#[derive(Debug, PartialEq)]
enum Source<'a> {
    Settings(Vec<f64>),
    Row { file: &'a str, row: &'a str },
}

/// Returns a line for each figure of the checked pages that is not in the records.
pub fn faults(pages: &[Page]) -> Vec<String> {
    let checked = |page: &&Page| PAGES.iter().any(|path| page.path == Path::new(path));
    pages
        .iter()
        .filter(checked)
        .flat_map(faults_of_page)
        .collect()
}

fn faults_of_page(page: &Page) -> Vec<String> {
    let mut faults = Vec::new();
    let mut mark: Option<&str> = None;
    let mut is_generated = false;
    for block in blocks(&page.text) {
        let text = &page.text[block.range.clone()];
        let line = page.text[..block.range.start].matches('\n').count() + 1;
        if let Some(sources) = text.trim().strip_prefix(MARK) {
            mark = sources.strip_suffix("-->");
            continue;
        }
        if text.starts_with(TABLE) || text.starts_with(END) {
            is_generated = text.starts_with(TABLE);
            continue;
        }
        if is_generated {
            continue;
        }
        let of_block = faults_of_block(&block.words, mark.take().unwrap_or_default());
        faults.extend(
            of_block
                .into_iter()
                .map(|fault| format!("{}:{line}: {fault}", page.path.display())),
        );
    }
    faults
}

/// A block of a page: a paragraph, a heading, a list, a table, or a comment.
struct Block {
    range: Range<usize>,
    /// The text that readers see, without code, with that of pictures.
    words: String,
}

fn blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let (mut depth, mut words, mut is_code) = (0, String::new(), false);
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(tag) => {
                depth += 1;
                is_code |= matches!(tag, Tag::CodeBlock(_));
            }
            Event::End(tag) => {
                depth -= 1;
                is_code &= tag != TagEnd::CodeBlock;
                match tag {
                    _ if depth == 0 => blocks.push(Block {
                        range,
                        words: std::mem::take(&mut words),
                    }),
                    // A number is one of its cell, or of its item.
                    TagEnd::TableCell | TagEnd::Item | TagEnd::Paragraph => words.push_str(" | "),
                    _ => {}
                }
            }
            Event::Text(part) if !is_code => words.push_str(&part),
            // Part of a word, as in `M`-th.
            Event::Code(_) => words.push('`'),
            Event::SoftBreak | Event::HardBreak => words.push(' '),
            _ => {}
        }
    }
    blocks
}

fn faults_of_block(words: &str, mark: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let mut sources = Vec::new();
    for source in mark.split(';').map(str::trim).filter(|it| !it.is_empty()) {
        match Source::parse(source).and_then(|parsed| parsed.numbers()) {
            Ok((are_settings, found)) => sources.push((source, are_settings, found, false)),
            Err(fault) => faults.push(fault),
        }
    }
    for figure in figures(words) {
        let mut is_found = false;
        for (_, are_settings, numbers, is_used) in &mut sources {
            let has = numbers
                .iter()
                .any(|&number| figure.is(number, *are_settings));
            *is_used |= has;
            is_found |= has;
        }
        if !is_found {
            faults.push(format!(
                "the figure {} is in no record that the page names for it; `{MARK}FILE ROW -->` \
                 before the paragraph names one",
                figure.text
            ));
        }
    }
    let unused = sources.iter().filter(|(.., is_used)| !is_used);
    faults.extend(
        unused.map(|(source, ..)| format!("no figure of the paragraph is from `{source}`")),
    );
    faults
}

impl<'a> Source<'a> {
    fn parse(source: &'a str) -> Result<Self, String> {
        let (file, row) = source
            .split_once(char::is_whitespace)
            .ok_or_else(|| format!("`{source}` names no row"))?;
        if file != "settings" {
            return Ok(Self::Row {
                file,
                row: row.trim(),
            });
        }
        let numbers = row.split_whitespace().map(|word| {
            number(word).ok_or_else(|| format!("`{word}` of the settings is not a number"))
        });
        numbers.collect::<Result<_, _>>().map(Self::Settings)
    }

    /// Returns whether these are settings, and the numbers.
    fn numbers(self) -> Result<(bool, Vec<f64>), String> {
        match self {
            Self::Settings(numbers) => Ok((true, numbers)),
            Self::Row { file, row } => numbers(file, row)
                .map(|found| (false, found))
                .map_err(|error| error.to_string()),
        }
    }
}

/// Returns the numbers of a text that stand alone and are not part of a name.
fn figures(words: &str) -> Vec<Figure> {
    let words: Vec<&str> = words.split_whitespace().collect();
    let mut found = Vec::new();
    for (index, word) in words.iter().enumerate() {
        let is_name = index > 0 && NAMES.contains(&words[index - 1].trim_start_matches('('));
        let Some(value) = number(word).filter(|_| !is_name) else {
            continue;
        };
        let text = word.trim_matches(|c: char| !c.is_ascii_digit() && c != '-');
        let after = match word.ends_with('%') || word.ends_with("%)") {
            true => "%",
            false => words.get(index + 1).copied().unwrap_or_default(),
        };
        let unit = after.trim_matches(|c: char| ",.;:()".contains(c));
        found.push(Figure {
            text: text.into(),
            value,
            digits: text.split_once('.').map_or(0, |(_, digits)| digits.len()),
            scale: UNITS
                .iter()
                .find(|(name, _)| *name == unit)
                .map(|(_, scale)| *scale),
        });
    }
    found
}

impl Figure {
    /// Returns true if the figure is a number, rounded to its digits.
    fn is(&self, number: f64, is_exact: bool) -> bool {
        if is_exact {
            return self.value == number;
        }
        let half = 0.5 * 0.1_f64.powi(self.digits as i32) * (1.0 + 1e-9);
        let scales = [Some(1.0), self.scale];
        scales
            .into_iter()
            .flatten()
            .any(|scale| (number * scale - self.value).abs() <= half)
    }
}

#[cfg(test)]
mod tests {
    use super::{faults_of_page, figures};
    use crate::book::pages::Page;
    use std::path::Path;

    fn faults(text: &str) -> Vec<String> {
        faults_of_page(&Page::parse(Path::new("README.md"), text.into()))
    }

    #[test]
    fn names_and_code_have_no_figures() {
        let text = "Llama 2 7B (Qwen 3) on an H200 in 4-bit, 2:4, needs Rust 1.95; 64 rows, 5.4 %.";
        let found: Vec<f64> = figures(text).iter().map(|figure| figure.value).collect();
        assert_eq!(found, [64.0, 5.4]);
        assert_eq!(faults("# One\n\n`64` and\n\n```sh\nrun 64\n```\n"), [""; 0]);
    }

    #[test]
    fn figures_are_those_of_their_rows() {
        let mark = |source: &str| format!("<!-- figures: {source} -->\n");
        let row = "prompts-llama-2-70b-h200.json tokens=1024";
        let sentence = "A prompt of 1024 tokens takes 224 ms.\n";
        assert_eq!(faults(&(mark(row) + sentence)), [""; 0]);
        // Another figure, no source, a row that is not there, and a source without a figure.
        let wrong = faults(&(mark(row) + "It takes 225 ms for 1024 tokens.\n"));
        assert!(
            matches!(&wrong[..], [one] if one.starts_with("README.md:2: the figure 225 is in no")),
            "{wrong:?}"
        );
        assert_eq!(faults(sentence).len(), 2);
        let none = faults(&(mark("prompts-llama-2-70b-h200.json tokens=1") + sentence));
        assert!(none[0].contains("has no row"), "{none:?}");
        let unused = faults(&(mark(&format!("{row}; settings 7")) + sentence));
        assert!(
            matches!(&unused[..], [one] if one.ends_with("is from `settings 7`")),
            "{unused:?}"
        );
    }

    #[test]
    fn pictures_lists_and_logs_have_figures() {
        let mark = "<!-- figures: start-h200.log generate, int4 g128 5.35; settings 128 -->\n";
        let faults = |text: &str| faults(&format!("{mark}{text}"));
        assert_eq!(
            faults("![0.5 s after 5.35 s](a.svg)\n\n").len(),
            1,
            "of the settings"
        );
        assert_eq!(faults("- [128](a.md) tokens\n- in 0.5 s\n"), [""; 0]);
        assert_eq!(faults("| 128 | a |\n|---|---|\n| 0.49 | 0.6 |\n").len(), 1);
    }

    #[test]
    fn fractions_are_per_cent() {
        let mark = "<!-- figures: family-h100.json name=5m, parameters=4983552; \
                    family-h100.json name=24-int4-g128-magnitude, source=model -->\n";
        let sentence = "5.0 million parameters, 3638.8 kB, +223 %\n";
        assert_eq!(faults(&format!("{mark}{sentence}")), [""; 0]);
    }
}
