//! The page of the book with all commands and options.

use clap_markdown::{MarkdownOptions, help_markdown_command_custom};
use marlin_testing::repository_file;

/// The variable with which `cargo xtask book --update` asks for the page to be written.
const UPDATE: &str = "BURN_MARLIN_UPDATE_BOOK";

#[test]
fn the_page_of_the_command_line_has_all_commands_and_options() {
    let options = MarkdownOptions::new()
        .title("Command line".into())
        .show_footer(false);
    let expected = help_markdown_command_custom(&marlin_cli::command(), &options);
    let path = repository_file("book/src/command-line.md");
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "{} is not that of today's commands; `cargo xtask book --update` writes it anew",
        path.display()
    );
}
