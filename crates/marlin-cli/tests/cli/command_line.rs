//! The page of the book with all commands and options.

use clap_markdown::{MarkdownOptions, help_markdown_command_custom};
use marlin_testing::expect_page;

#[test]
fn the_page_of_the_command_line_has_all_commands_and_options() {
    let options = MarkdownOptions::new()
        .title("Command line".into())
        .show_footer(false);
    expect_page("command-line.md", |_| {
        help_markdown_command_custom(&marlin_cli::command(), &options)
    });
}
