//! Tables, sizes and messages.

use marlin_format::{fold_layers, with_causes, without_control};
use serde::Serialize;
use std::io::{self, Write};

use crate::error::CliError;

/// Prints a text immediately, without a line break. `print!` would panic if the output is closed.
pub fn text(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Prints a line.
pub fn line(line: &str) -> io::Result<()> {
    text(&format!("{line}\n"))
}

/// Prints a value as JSON.
pub fn json(value: &impl Serialize) -> Result<(), CliError> {
    Ok(line(&serde_json::to_string_pretty(value)?)?)
}

/// Prints rows in columns. Text is aligned to the left, cells that begin with a digit to the right.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].len())
            .chain([header[column].len()])
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let row = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths).map(|(cell, &width)| {
            if cell.starts_with(|c: char| c.is_ascii_digit()) {
                format!("{cell:>width$}")
            } else {
                format!("{cell:width$}")
            }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let lines = rows
        .iter()
        .map(|cells| row(&mut cells.iter().map(String::as_str)));
    line(
        &std::iter::once(row(&mut header.iter().copied()))
            .chain(lines)
            .collect::<Vec<_>>()
            .join("\n"),
    )
}

/// Prints a [`table`] whose rows begin with the path of a layer or tensor. Equal rows of
/// consecutive layers are one row with their count, unless `all` is set.
pub fn layers(header: &[&str], rows: Vec<Vec<String>>, all: bool) -> io::Result<()> {
    if all {
        return table(header, &rows);
    }
    let layers = rows.into_iter().map(|mut row| {
        let rest = row.split_off(1);
        (row.concat(), rest)
    });
    let rows: Vec<_> = fold_layers(layers)
        .into_iter()
        .map(|run| [vec![run.path, run.count.to_string()], run.description].concat())
        .collect();
    let [first, rest @ ..] = header else {
        return Ok(());
    };
    table(&[&[*first, "count"], rest].concat(), &rows)
}

/// Formats an error and its causes. Text that comes from a file is escaped for the terminal and
/// limited in length.
pub fn message(error: &dyn std::error::Error) -> String {
    const SHOWN: usize = 4000;
    without_control(&with_causes(error))
        .chars()
        .take(SHOWN)
        .collect()
}

/// Formats a number of bytes for a person.
pub fn size(bytes: usize) -> String {
    match size_unit(bytes) {
        (1.0, unit) => format!("{bytes} {unit}"),
        (factor, unit) => format!("{:.1} {unit}", bytes as f64 / factor),
    }
}

/// Returns the unit for a number of bytes: the bytes in one unit, and its name.
pub fn size_unit(bytes: usize) -> (f64, &'static str) {
    match bytes {
        0..10_000 => (1.0, "B"),
        10_000..10_000_000 => (1e3, "kB"),
        10_000_000..10_000_000_000 => (1e6, "MB"),
        _ => (1e9, "GB"),
    }
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_change_unit_at_four_digits() {
        assert_eq!(size(9_999), "9999 B");
        assert_eq!(size(12_345), "12.3 kB");
        assert_eq!(size(12_345_678), "12.3 MB");
        assert_eq!(size(70_000_000_000), "70.0 GB");
    }
}
