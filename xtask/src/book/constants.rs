//! The check of figures in pages and documentation that repeat a constant of the code.
//!
//! `constants.tsv` has a line for each figure: the file of the text; the words of the text, with `{}`
//! where the figure is; the file of the constant; the code before its value; the unit.

use crate::process::{Error, root};
use std::collections::HashMap;
use std::fs;

/// The table of figures, from the root folder of the repository.
const TABLE: &str = "xtask/src/book/constants.tsv";

/// A figure in a text, and the constant that it repeats.
#[derive(Clone, Copy)]
struct Figure<'t> {
    /// The file of the text.
    file: &'t str,
    /// The words of the text, with `{}` where the figure is.
    words: &'t str,
    /// The file of the constant.
    source: &'t str,
    /// The code before the value of the constant.
    before: &'t str,
    /// The unit of the figure in units of the constant.
    unit: f64,
}

impl<'t> Figure<'t> {
    /// Reads a line of the table.
    fn read(line: &'t str) -> Option<Self> {
        let [file, words, source, before, unit] =
            line.split('\t').collect::<Vec<_>>().try_into().ok()?;
        let unit = match unit {
            "1" => 1.0,
            "KiB" => 1024.0,
            "MiB" => 1024.0 * 1024.0,
            "GiB" => 1024.0 * 1024.0 * 1024.0,
            "GB" => 1e9,
            "million" => 1e6,
            "day" => 24.0 * 60.0 * 60.0,
            _ => return None,
        };
        Some(Self {
            file,
            words,
            source,
            before,
            unit,
        })
    }
}

/// Returns a line for each figure that is not that of its constant.
pub fn faults() -> Result<Vec<String>, Error> {
    let read = |file: &str| {
        let path = root().join(file);
        fs::read_to_string(&path).map_err(Error::file(&path))
    };
    let (table, mut texts, mut faults) = (read(TABLE)?, HashMap::new(), Vec::new());
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let figure = Figure::read(line)
            .ok_or_else(|| Error::Needs(format!("{TABLE}: `{line}` is no figure")))?;
        for file in [figure.file, figure.source] {
            if !texts.contains_key(file) {
                texts.insert(file, read(file)?);
            }
        }
        faults.extend(fault(figure, &texts[figure.file], &texts[figure.source]));
    }
    Ok(faults)
}

/// Returns a line if the text of a figure's file has not the figure that follows from the text of
/// its source.
fn fault(figure: Figure<'_>, text: &str, source: &str) -> Option<String> {
    let Figure {
        file,
        words,
        source: name,
        before,
        unit,
    } = figure;
    let Some(value) = value_after(source, before) else {
        return Some(format!(
            "{TABLE}: {name} has no number after `{before}`, of which {file} has `{words}`"
        ));
    };
    let expected = words.replace("{}", &shown(value / unit));
    (!plain(text).contains(&plain(&expected))).then(|| {
        format!("{file} has no `{expected}`, which follows from `{before}` in {name} ({TABLE})")
    })
}

/// Returns the value of the first number after `before` in a source: numbers with `*` or `<<`
/// between them.
fn value_after(source: &str, before: &str) -> Option<f64> {
    let mut found = source.match_indices(before).map(|(at, _)| at);
    found.find_map(|at| {
        let is_within_a_name = source[..at]
            .chars()
            .next_back()
            .is_some_and(|c| c.is_alphanumeric() || c == '_');
        let code = source[at + before.len()..]
            .split([';', ',', ')', '}', '\n'])
            .next()?;
        if is_within_a_name { None } else { value(code) }
    })
}

fn value(code: &str) -> Option<f64> {
    let product = |code: &str| {
        code.split('*').try_fold(1.0, |product, factor| {
            let factor: f64 = factor.trim().replace('_', "").parse().ok()?;
            Some(product * factor)
        })
    };
    match code.split_once("<<") {
        Some((number, bits)) => Some(product(number)? * product(bits)?.exp2()),
        None => product(code),
    }
}

/// Returns a number as texts show it: as it is up to three digits after the point, otherwise with
/// one.
fn shown(value: f64) -> String {
    let is_short = (value * 1000.0).fract() == 0.0;
    if is_short {
        value.to_string()
    } else {
        format!("{value:.1}")
    }
}

/// Returns a text in one line, without marks of comments and without commas between digits.
fn plain(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let line = line.trim();
        let marks = ["///", "//!", "//"];
        let mark = marks.iter().find_map(|mark| line.strip_prefix(mark));
        mark.unwrap_or(line)
    });
    let words: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
    let line: Vec<char> = words.join(" ").chars().collect();
    let is_digit = |at: Option<usize>| {
        at.and_then(|at| line.get(at))
            .is_some_and(char::is_ascii_digit)
    };
    let is_separator =
        |at: usize| line[at] == ',' && is_digit(at.checked_sub(1)) && is_digit(Some(at + 1));
    (0..line.len())
        .filter(|&at| !is_separator(at))
        .map(|at| line[at])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "const MAX_BYTES: u64 = 16 << 20;\nconst BYTES: usize = 2 * 1_000;\nDuration::from_secs(30 * 24);\nshare: 0.9,\n";

    #[test]
    fn values_are_read_from_code() {
        for (before, value) in [
            ("MAX_BYTES: u64 =", Some((16 << 20) as f64)),
            ("BYTES: usize =", Some(2000.0)),
            ("Duration::from_secs(", Some(720.0)),
            ("share:", Some(0.9)),
            // The end of another name.
            ("BYTES: u64 =", None),
            ("const", None),
        ] {
            assert_eq!(value_after(SOURCE, before), value, "{before}");
        }
        let shown = [16.0, 0.9, 1.702, 1.879048192].map(shown);
        assert_eq!(shown, ["16", "0.9", "1.702", "1.9"]);
    }

    #[test]
    fn a_figure_that_is_not_the_constant_is_a_fault() {
        let of = |line| Figure::read(line).unwrap_or_else(|| panic!("{line}"));
        let limit = of("page\tat most {} MiB of it\tcode\tMAX_BYTES: u64 =\tMiB");
        let count = of("page\t{} of them\tcode\tBYTES: usize =\t1");
        let page = "/// It reads at most\n    /// 16 MiB of it, 2,000 of them.";
        for figure in [limit, count] {
            assert_eq!(fault(figure, page, SOURCE), None);
        }
        let changed = SOURCE
            .replace("16 << 20", "32 << 20")
            .replace("1_000", "1_001");
        for (figure, words) in [(limit, "at most 32 MiB of it"), (count, "2002 of them")] {
            let fault = fault(figure, page, &changed).unwrap_or_default();
            assert!(fault.contains(words), "{fault}");
        }
        let gone = fault(limit, page, "").unwrap_or_default();
        assert!(
            gone.contains("no number after `MAX_BYTES: u64 =`"),
            "{gone}"
        );
    }

    #[test]
    fn every_figure_is_that_of_its_constant() {
        let faults = faults().unwrap_or_else(|error| panic!("{error}"));
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }
}
