//! The names and revisions of models.

use std::fmt;

use crate::HubError;

/// The name of a model on the hub: its owner and its own name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelName {
    pub owner: String,
    pub name: String,
}

impl ModelName {
    /// Parses `owner/name`. Returns `None` for a text that the hub does not allow as a name.
    pub fn parse(text: &str) -> Option<Self> {
        let (owner, name) = text.split_once('/')?;
        [owner, name].into_iter().all(is_part).then(|| Self {
            owner: owner.into(),
            name: name.into(),
        })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

/// Returns whether the hub allows a text as an owner or as the own name of a model.
fn is_part(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=96).contains(&text.len())
        && text.chars().all(allowed)
        && !text.starts_with(['-', '.'])
        && !text.ends_with(['-', '.'])
        && !text.contains("--")
        && !text.contains("..")
}

/// Checks that a revision is a path below the folder of refs.
pub(crate) fn check_revision(revision: &str) -> Result<(), HubError> {
    let is_part = |part: &str| !matches!(part, "" | "." | "..");
    if revision.split('/').all(is_part) && !revision.contains(['\\', '\0', ':']) {
        Ok(())
    } else {
        Err(HubError::Revision {
            revision: revision.into(),
        })
    }
}

/// Returns whether a text is a checksum as the hub writes it, with this number of digits.
pub(crate) fn is_hex(text: &str, digits: usize) -> bool {
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.len() == digits && text.bytes().all(is_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_two_parts_of_the_hubs_letters() {
        let name = ModelName::parse("Qwen/Qwen3-8B_AWQ.v1").unwrap();
        assert_eq!((&*name.owner, &*name.name), ("Qwen", "Qwen3-8B_AWQ.v1"));
        assert_eq!(name.to_string(), "Qwen/Qwen3-8B_AWQ.v1");
        for text in [
            "gpt2", "a/b/c", "/a", "a/", "./a", "../a", "~/a", "a b/c", "a--b/c", "a/b.", "a/..",
            "a\\b/c", "ä/b",
        ] {
            assert_eq!(ModelName::parse(text), None, "{text}");
        }
        assert_eq!(ModelName::parse(&format!("a/{}", "b".repeat(97))), None);
    }

    #[test]
    fn revisions_stay_below_the_folder_of_refs() {
        for revision in ["main", "refs/pr/1", "v1.0", "feature/x"] {
            check_revision(revision).unwrap();
        }
        for revision in ["", "..", "a/../b", "/etc", "a//b", "a\\b", "c:x", "."] {
            assert!(
                matches!(check_revision(revision), Err(HubError::Revision { .. })),
                "{revision}"
            );
        }
    }
}
