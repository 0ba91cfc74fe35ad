//! The check of the book's code blocks: their width, and the files that they show.

use super::pages::{Block, Page};
use crate::process::{Error, root};
use std::fs;
use std::path::Path;

/// The widest line, in columns, that does not scroll sideways in mdBook's default theme: 750 pixels
/// of Source Code Pro with 14 pixels, as Chromium lays it out.
const COLUMNS: usize = 86;
/// The same of a block whose fence says `wide`, which `book/pages.css` shows in smaller letters.
const COLUMNS_WIDE: usize = 100;

/// The mark before a block that shows a file of the repository: `<!-- file: PATH -->`.
const MARK: &str = "<!-- file: ";

/// Returns a line for each line of code that is too wide for the book.
pub fn wide_lines(pages: &[Page]) -> Result<Vec<String>, Error> {
    let mut faults = Vec::new();
    for page in pages.iter().filter(|page| page.is_of_book()) {
        for block in &page.blocks {
            let is_wide = block.info.split(',').any(|word| word == "wide");
            let most = if is_wide { COLUMNS_WIDE } else { COLUMNS };
            for (index, line) in page.text[block.contents.clone()].lines().enumerate() {
                let shown = match line.strip_prefix("{{#include ") {
                    Some(include) => included(page, include)?,
                    None => line.into(),
                };
                let widths = shown.lines().filter(|line| !is_hidden(block, line));
                let columns = widths.map(|line| line.chars().count()).max();
                if let Some(columns) = columns.filter(|&columns| columns > most) {
                    faults.push(format!(
                        "{}:{}: {columns} columns of code; the book shows {most} without scrolling",
                        page.path.display(),
                        block.line + index
                    ));
                }
            }
        }
    }
    Ok(faults)
}

/// Returns the lines of a file that mdBook puts in the place of `{{#include FILE:ANCHOR}}`, given
/// the text after `{{#include `.
fn included(page: &Page, include: &str) -> Result<String, Error> {
    let (file, anchor) = include
        .split_once("}}")
        .and_then(|(include, _)| include.split_once(':'))
        .ok_or_else(|| Error::Needs(format!("{}: {include}: no anchor", page.path.display())))?;
    let folder = page.path.parent().unwrap_or(Path::new(""));
    let path = root().join(folder).join(file);
    let text = fs::read_to_string(&path).map_err(Error::file(&path))?;
    let part = text
        .split_once(&format!("ANCHOR: {anchor}\n"))
        .and_then(|(_, after)| after.split_once(&format!("ANCHOR_END: {anchor}\n")))
        .ok_or_else(|| Error::Needs(format!("{}: no anchor {anchor}", path.display())))?;
    Ok(part.0.into())
}

/// Returns true for a line of Rust that the book does not show.
fn is_hidden(block: &Block, line: &str) -> bool {
    let line = line.trim_start();
    block.info.starts_with("rust") && (line == "#" || line.starts_with("# "))
}

/// Returns a line for each block that is not equal to the file that it shows, after writing it anew
/// if `update` is true.
pub fn stale_files(pages: &[Page], update: bool) -> Result<Vec<String>, Error> {
    let mut faults = Vec::new();
    for page in pages {
        let mut text = page.text.clone();
        // From the last block on, so that the places of the others stay as they are.
        for block in page.blocks.iter().rev() {
            let Some(name) = file_of(page, block) else {
                continue;
            };
            let path = root().join(name);
            let file = fs::read_to_string(&path).map_err(Error::file(&path))?;
            if page.text[block.contents.clone()] == file {
                continue;
            }
            if update {
                text.replace_range(block.contents.clone(), &file);
            } else {
                faults.push(format!(
                    "{}:{}: the block is not equal to {name}; `cargo xtask book --update` writes \
                     it anew",
                    page.path.display(),
                    block.line
                ));
            }
        }
        if text != page.text {
            let path = root().join(&page.path);
            fs::write(&path, text).map_err(Error::file(&path))?;
        }
    }
    Ok(faults)
}

/// Returns the name of the file that a block shows, from the mark on the lines before its fence.
fn file_of<'a>(page: &'a Page, block: &Block) -> Option<&'a str> {
    let before = page.text[..block.contents.start].rsplit_once("```")?.0;
    let mark = before.trim_end().lines().next_back()?;
    mark.strip_prefix(MARK)?.strip_suffix(" -->")
}

#[cfg(test)]
mod tests {
    use super::{file_of, stale_files, wide_lines};
    use crate::book::pages::Page;
    use std::path::Path;

    #[test]
    fn wide_lines_are_found() {
        let (wide, hidden) = ("x".repeat(87), format!("# {}", "x".repeat(87)));
        let text = format!("```rust\n{hidden}\n{wide}\n```\n\n```text\n{hidden}\n```\n");
        let page = |path: &str| Page::parse(Path::new(path), text.clone());
        let pages = [page("book/src/a.md"), page("README.md")];
        let faults = wide_lines(&pages).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].starts_with("book/src/a.md:3: 87 columns"));
        assert!(faults[1].starts_with("book/src/a.md:7: 89 columns"));
    }

    #[test]
    fn included_lines_count() {
        let include = "{{#include ../../xtask/src/book/blocks.rs:columns}}";
        let page = |words: &str| {
            let text = format!("```rust,{words}\n{include}\n```\n");
            Page::parse(Path::new("book/src/a.md"), text)
        };
        let faults = |words: &str| {
            wide_lines(&[page(words)])
                .unwrap_or_else(|error| panic!("{error}"))
                .len()
        };
        assert_eq!((faults("ignore"), faults("ignore,wide")), (1, 0));
    }

    // ANCHOR: columns
    // This line has more columns than a block of the book shows, and fewer than a wide one of it.
    // ANCHOR_END: columns

    #[test]
    fn blocks_of_files_are_compared() {
        let mark = "<!-- file: xtask/src/none.rs -->\n\n";
        let page = |contents: &str| {
            let text = format!("{mark}```rust\n{contents}```\n").replace("none.rs", "book/mod.rs");
            Page::parse(Path::new("a.md"), text)
        };
        let equal = page(include_str!("mod.rs"));
        assert_eq!(
            file_of(&equal, &equal.blocks[0]),
            Some("xtask/src/book/mod.rs")
        );
        let faults = |page| stale_files(&[page], false).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(faults(equal), [""; 0]);
        let faults = faults(page("fn other() {}\n"));
        assert!(
            faults[0].starts_with("a.md:4: the block is not equal to xtask"),
            "{faults:?}"
        );
    }
}
