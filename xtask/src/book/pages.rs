//! The Markdown pages of the repository: their links, anchors and code blocks.

use crate::process::{Error, root};
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The folders with pages; the pages beside them in the root folder count, too.
const FOLDERS: [&str; 7] = [
    "benches", "book", "crates", "examples", "fuzz", "tests", "xtask",
];

/// A Markdown file.
pub struct Page {
    /// The path of the file, from the root folder of the repository.
    pub path: PathBuf,
    pub text: String,
    pub links: Vec<Link>,
    pub blocks: Vec<Block>,
    /// The anchors of the headings.
    pub anchors: HashSet<String>,
}

/// A link or an image.
pub struct Link {
    pub destination: String,
    /// The number of the line, from 1.
    pub line: usize,
}

/// A fenced code block.
pub struct Block {
    /// The words after the opening fence.
    pub info: String,
    /// The bytes of the contents in the page; the last one, if any, is a line feed.
    pub contents: Range<usize>,
    /// The number of the first line of the contents, from 1.
    pub line: usize,
}

impl Page {
    /// Reads a page at a path from the root folder of the repository.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let file = root().join(path);
        let text = fs::read_to_string(&file).map_err(Error::file(&file))?;
        Ok(Self::parse(path, text))
    }

    /// Parses the text of a page at a path from the root folder of the repository.
    pub fn parse(path: &Path, text: String) -> Self {
        let (mut links, mut blocks, mut anchors) = (Vec::new(), Vec::new(), Anchors::default());
        let mut heading: Option<String> = None;
        let mut block: Option<Block> = None;
        let line_of = |offset: usize| text[..offset].matches('\n').count() + 1;
        for (event, range) in Parser::new_ext(&text, Options::ENABLE_TABLES).into_offset_iter() {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    links.push(Link {
                        destination: dest_url.into_string(),
                        line: line_of(range.start),
                    });
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => anchors.add(&heading.take().unwrap_or_default()),
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(info))) => {
                    let fence = text[range.clone()].find('\n');
                    let start = fence.map_or(range.end, |length| range.start + length + 1);
                    block = Some(Block {
                        info: info.into_string(),
                        contents: start..start,
                        line: line_of(range.start) + 1,
                    });
                }
                Event::End(TagEnd::CodeBlock) => blocks.extend(block.take()),
                Event::Text(words) | Event::Code(words) => {
                    if let Some(block) = &mut block {
                        block.contents.end = range.end;
                    }
                    if let Some(heading) = &mut heading {
                        heading.push_str(&words);
                    }
                }
                _ => {}
            }
        }
        Self {
            path: path.to_path_buf(),
            links,
            blocks,
            anchors: anchors.found,
            text,
        }
    }

    /// Returns true if the page is one of the book.
    pub fn is_of_book(&self) -> bool {
        self.path.starts_with("book/src")
    }
}

/// The anchors of a page's headings, as mdBook and GitHub make them.
#[derive(Default)]
struct Anchors {
    found: HashSet<String>,
    counts: HashMap<String, usize>,
}

impl Anchors {
    fn add(&mut self, heading: &str) {
        let kept = heading.trim().to_lowercase();
        let anchor: String = kept
            .chars()
            .map(|c| if c.is_whitespace() { '-' } else { c })
            .filter(|&c| c.is_alphanumeric() || c == '-' || c == '_')
            .collect();
        let count = self.counts.entry(anchor.clone()).or_default();
        self.found.insert(match *count {
            0 => anchor,
            count => format!("{anchor}-{count}"),
        });
        *count += 1;
    }
}

/// Reads all pages of the repository, in the order of their paths.
pub fn all() -> Result<Vec<Page>, Error> {
    let mut paths = Vec::new();
    add_paths(&root(), false, &mut paths)?;
    for folder in FOLDERS {
        add_paths(&root().join(folder), true, &mut paths)?;
    }
    paths.sort();
    let page = |path: PathBuf| {
        let path = path.strip_prefix(root()).unwrap_or(&path).to_path_buf();
        Page::read(&path)
    };
    paths.into_iter().map(page).collect()
}

/// Adds the paths of the Markdown files of a folder, and of the folders in it if `deep` is true.
fn add_paths(folder: &Path, deep: bool, paths: &mut Vec<PathBuf>) -> Result<(), Error> {
    for entry in folder.read_dir().map_err(Error::file(folder))? {
        let path = entry.map_err(Error::file(folder))?.path();
        if path.is_dir() {
            // Build outputs, and the environments of Python programs.
            let is_made = ["target", "venv", "node_modules"]
                .iter()
                .any(|name| path.ends_with(name));
            if deep && !is_made {
                add_paths(&path, deep, paths)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "md") {
            paths.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Page;
    use std::path::Path;

    const TEXT: &str = "# Run `generate`, or chat\n\n[a](b.md#c)\n\n## Twice\n\n## Twice\n\n```rust,no_run\nlet a = 1;\n\nlet b = 2;\n```\n";

    #[test]
    fn links_anchors_and_blocks_are_found() {
        let page = Page::parse(Path::new("page.md"), TEXT.into());
        for anchor in ["run-generate-or-chat", "twice", "twice-1"] {
            assert!(
                page.anchors.contains(anchor),
                "{anchor}: {:?}",
                page.anchors
            );
        }
        assert_eq!(page.anchors.len(), 3);
        assert_eq!(page.links.len(), 1);
        assert_eq!(
            (&*page.links[0].destination, page.links[0].line),
            ("b.md#c", 3)
        );
        let block = &page.blocks[0];
        assert_eq!((&*block.info, block.line), ("rust,no_run", 10));
        let contents = &page.text[block.contents.clone()];
        assert_eq!(contents, "let a = 1;\n\nlet b = 2;\n");

        let empty = Page::parse(Path::new("page.md"), "```rust\n```\n".into());
        assert_eq!(empty.blocks[0].contents, 8..8);
    }
}
