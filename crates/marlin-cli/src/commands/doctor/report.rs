//! The results of checks.

use serde::Serialize;
use std::fmt;

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Nothing to do.
    Ok,
    /// The program runs, but not all of it, or more slowly.
    Warning,
    /// The program or the folder cannot be used.
    Error,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// A thing that was checked.
#[derive(Debug, Serialize)]
pub struct Check {
    pub name: String,
    pub status: Status,
    /// What was found.
    pub message: String,
    /// The command that installs or repairs it, or what else to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Check {
    pub fn ok(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            status: Status::Ok,
            message: message.into(),
            fix: None,
        }
    }

    pub fn warning(
        name: impl Into<String>,
        message: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            status: Status::Warning,
            fix: Some(fix.into()),
            ..Self::ok(name, message)
        }
    }

    pub fn error(
        name: impl Into<String>,
        message: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            status: Status::Error,
            ..Self::warning(name, message, fix)
        }
    }
}

/// The checks of one part of the machine.
#[derive(Debug, Serialize)]
pub struct Section {
    pub name: &'static str,
    pub checks: Vec<Check>,
}

impl Section {
    /// Returns the number of checks with this outcome.
    pub fn count(&self, status: Status) -> usize {
        self.checks
            .iter()
            .filter(|check| check.status == status)
            .count()
    }

    /// Returns the lines of the section: its name, and a line for each check.
    pub fn lines(&self) -> Vec<String> {
        let names = self.checks.iter().map(|check| check.name.chars().count());
        let width = names.max().unwrap_or(0);
        let check = |check: &Check| {
            let (status, name, message) = (check.status, &check.name, &check.message);
            let fix = check.fix.as_ref().map(|fix| format!("; fix: {fix}"));
            let fix = fix.unwrap_or_default();
            format!("  {status:7}  {name:width$}  {message}{fix}")
        };
        std::iter::once(self.name.to_owned())
            .chain(self.checks.iter().map(check))
            .collect()
    }
}
