//! The check of the links between the pages of the repository. Addresses of other sites are not
//! tried.

use super::pages::Page;
use crate::process::root;
use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

/// The table of contents: mdBook builds the pages that it links to.
const SUMMARY: &str = "book/src/SUMMARY.md";

/// Returns a line for each link to a file or an anchor that does not exist, for each link of the
/// book to a page outside of it, and for each page of the book that is not in its table of
/// contents.
pub fn faults(pages: &[Page]) -> Vec<String> {
    let anchors: HashMap<&Path, &Page> = pages.iter().map(|page| (&*page.path, page)).collect();
    let mut faults = Vec::new();
    for page in pages {
        for link in &page.links {
            if let Some(fault) = fault(page, &link.destination, &anchors) {
                let (path, destination) = (page.path.display(), &link.destination);
                faults.push(format!("{path}:{}: `{destination}`: {fault}", link.line));
            }
        }
    }
    if let Some(summary) = anchors.get(Path::new(SUMMARY)) {
        let folder = Path::new("book/src");
        let is_listed = |page: &&Page| {
            let mut links = summary.links.iter();
            links.any(|link| join(folder, &link.destination) == page.path)
        };
        let unlisted = pages
            .iter()
            .filter(|page| page.is_of_book() && page.path != summary.path && !is_listed(page));
        faults.extend(unlisted.map(|page| format!("{} is not in {SUMMARY}", page.path.display())));
    }
    faults
}

fn fault(page: &Page, destination: &str, pages: &HashMap<&Path, &Page>) -> Option<String> {
    if destination.contains("://") || destination.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = destination.split_once('#').unwrap_or((destination, ""));
    let path = match file {
        "" => page.path.clone(),
        _ => join(page.path.parent().unwrap_or(Path::new("")), file),
    };
    if !root().join(&path).exists() {
        return Some(format!("there is no {}", path.display()));
    }
    if page.is_of_book() && !path.starts_with("book/src") {
        return Some("it is outside of the book".into());
    }
    let has_anchor = |target: &Page| anchor.is_empty() || target.anchors.contains(anchor);
    match pages.get(&*path) {
        Some(target) if !has_anchor(target) => {
            Some(format!("{} has no such heading", path.display()))
        }
        None if !anchor.is_empty() => Some(format!("{} is not a page", path.display())),
        _ => None,
    }
}

/// Joins two paths, and resolves the `..` of the second one.
fn join(folder: &Path, file: &str) -> PathBuf {
    let mut path = folder.to_path_buf();
    for component in Path::new(file).components() {
        match component {
            Component::ParentDir => {
                path.pop();
            }
            Component::CurDir => {}
            other => path.push(other),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::{faults, join};
    use crate::book::pages::Page;
    use std::path::{Path, PathBuf};

    #[test]
    fn broken_links_are_found() {
        let page = |path: &str, text: &str| Page::parse(Path::new(path), text.into());
        let pages = [
            page(
                "book/src/introduction.md",
                "# One\n\n[a](#one) [b](llama.md#two) [c](https://none.invalid/#x) [d](#three)\n\
                 [e](llama.md#three) [f](none.md) [g](../../README.md) [h](overview.svg)\n",
            ),
            page("book/src/llama.md", "## Two\n\n[a](../../README.md#none)"),
            page(
                "README.md",
                "[a](book/src/llama.md#two) [b](book/src/llama.md#one)",
            ),
        ];
        let found = faults(&pages);
        let expected = [
            "book/src/introduction.md:3: `#three`: book/src/introduction.md has no such heading",
            "book/src/introduction.md:4: `llama.md#three`: book/src/llama.md has no such heading",
            "book/src/introduction.md:4: `none.md`: there is no book/src/none.md",
            "book/src/introduction.md:4: `../../README.md`: it is outside of the book",
            "book/src/llama.md:3: `../../README.md#none`: it is outside of the book",
            "README.md:1: `book/src/llama.md#one`: book/src/llama.md has no such heading",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn pages_outside_of_the_contents_are_found() {
        let page = |path: &str, text: &str| Page::parse(Path::new(path), text.into());
        let pages = [
            page(
                "book/src/SUMMARY.md",
                "- [a](introduction.md)\n- [b](ladder/README.md)",
            ),
            page("book/src/introduction.md", ""),
            page("book/src/ladder/README.md", ""),
            page("book/src/glossary.md", ""),
            page("README.md", ""),
        ];
        let expected = ["book/src/glossary.md is not in book/src/SUMMARY.md"];
        assert_eq!(faults(&pages), expected);
    }

    #[test]
    fn parents_are_resolved() {
        let joined = join(Path::new("book/src/ladder"), "../../x/./y.md");
        assert_eq!(joined, PathBuf::from("book/x/y.md"));
    }
}
