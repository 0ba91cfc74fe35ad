use super::{generate_options, open};
use crate::args::ChatArgs;
use crate::error::CliError;
use crate::output;
use std::io::{self, BufRead};

/// How the turns of a conversation are told apart. The model's own chat template is not read.
const USER: &str = "User: ";
const ASSISTANT: &str = "Assistant:";

/// Reads a line, lets the model answer it, until the input ends.
pub fn run(args: &ChatArgs) -> Result<(), CliError> {
    let llama = open(&args.model, true)?;
    let mut options = generate_options(&llama, &args.sampling);
    let mut history = String::new();
    let mut lines = io::stdin().lock().lines();
    eprintln!("A line is a turn; an empty line or the end of input ends the conversation.");
    loop {
        output::text("> ")?;
        let line = lines.next().transpose().map_err(CliError::Input)?;
        let Some(line) = line.filter(|line| !line.trim().is_empty()) else { return Ok(()) };
        history.push_str(&format!("{USER}{line}\n{ASSISTANT}"));
        let mut answer = Answer::default();
        llama.generate(&history, &options, |text| answer.push(text))?;
        let text = answer.finish()?;
        output::line("")?;
        history.push_str(&text);
        history.push('\n');
        options.seed = options.seed.wrapping_add(1);
    }
}

/// Prints an answer as it comes, up to where the model begins the user's next turn.
struct Answer {
    text: String,
    printed: usize,
    /// The first failure to print.
    result: io::Result<()>,
}

impl Default for Answer {
    fn default() -> Self {
        Self { text: String::new(), printed: 0, result: Ok(()) }
    }
}

impl Answer {
    fn push(&mut self, piece: &str) {
        self.text.push_str(piece);
        let end = self.end();
        // What could be the beginning of the user's next turn waits.
        let safe = if end < self.text.len() { end } else { end - held_back(&self.text) };
        self.print_to(safe);
    }

    fn finish(mut self) -> io::Result<String> {
        let end = self.end();
        self.print_to(end);
        self.result?;
        self.text.truncate(end);
        Ok(self.text)
    }

    fn end(&self) -> usize {
        self.text.find(&format!("\n{}", USER.trim_end())).unwrap_or(self.text.len())
    }

    fn print_to(&mut self, end: usize) {
        if end > self.printed && self.result.is_ok() {
            self.result = output::text(&self.text[self.printed..end]);
            self.printed = end;
        }
    }
}

/// Bytes at the end of a text that could begin the user's next turn.
fn held_back(text: &str) -> usize {
    let turn = format!("\n{}", USER.trim_end());
    (1..=turn.len()).rev().find(|&length| text.ends_with(&turn[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_where_the_users_turn_begins() {
        let mut answer = Answer::default();
        for piece in [" Hello", " there\nUs", "er", ": more"] {
            answer.push(piece);
        }
        assert_eq!(answer.printed, " Hello there".len());
        assert_eq!(answer.finish().unwrap(), " Hello there");
    }

    #[test]
    fn a_beginning_that_leads_nowhere_is_printed() {
        let mut answer = Answer::default();
        answer.push("a\nUs");
        assert_eq!(answer.printed, 1);
        answer.push("e");
        answer.push(" it");
        assert_eq!(answer.finish().unwrap(), "a\nUse it");
    }
}
