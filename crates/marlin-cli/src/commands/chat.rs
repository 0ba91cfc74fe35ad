use super::{generate_options, open_model, read_text};
use crate::args::ChatArgs;
use crate::error::CliError;
use crate::output;
use marlin_lm::harmony::{MARKERS, Transcript};
use marlin_lm::{ChatTemplate, Message};
use std::io::{self, BufRead};
use std::ops::ControlFlow;

/// The prefixes of turns for a model that has no chat template.
const USER: &str = "User: ";
const ASSISTANT: &str = "Assistant:";
const SYSTEM: &str = "System: ";

/// Reads lines and lets the model answer each of them, until an empty line or the end of the input.
pub fn run(args: &ChatArgs) -> Result<(), CliError> {
    let system = args
        .system_file
        .as_deref()
        .map(read_text)
        .transpose()?
        .or_else(|| args.system.clone());
    let (dir, mut llama) = open_model(&args.model.dir, &args.model.hub, &args.model, true)?;
    let mut options = generate_options(&llama, &args.sampling);
    let template = ChatTemplate::open(&dir)?;
    // With a template, the answer is decoded as a separate text. With plain turns, it continues the
    // text after `Assistant:`.
    options.answer = template.is_some();
    #[cfg(feature = "cubecl-runtime")]
    {
        options.compile_ahead = crate::kernel_cache::is_empty();
    }
    match &template {
        Some(template) => options
            .stop_tokens
            .extend(template.stop_tokens(llama.tokenizer()?)),
        None => eprintln!(
            "The model has no chat template: its turns are plain `{}` and `{ASSISTANT}`.",
            USER.trim_end()
        ),
    }
    let is_harmony = template.as_ref().is_some_and(ChatTemplate::is_harmony);
    if is_harmony {
        // Decoding would skip the markers that divide an answer.
        let tokenizer = llama.tokenizer()?.clone();
        llama.tokenizer = Some(tokenizer.showing(&MARKERS)?);
    }
    let mut messages: Vec<Message> = system.iter().map(Message::system).collect();
    let mut lines = io::stdin().lock().lines();
    eprintln!("A line is a turn; an empty line or the end of input ends the conversation.");
    loop {
        output::text("> ")?;
        let line = lines.next().transpose().map_err(CliError::Input)?;
        let Some(line) = line.filter(|line| !line.trim().is_empty()) else {
            return Ok(());
        };
        messages.push(Message::user(line));
        // The tokens and the text of the conversation, up to the beginning of the answer.
        let (prompt, text) = match &template {
            Some(template) => {
                let text = template.render(&messages, true)?;
                (llama.tokenizer()?.encode_rendered(&text)?, text)
            }
            None => {
                let text = plain(&messages);
                (llama.tokenizer()?.encode(&text)?, text)
            }
        };
        let transcript = is_harmony.then(|| Transcript::new(&text));
        let mut answer = Answer::new(template.is_none(), transcript);
        llama.generate_from(prompt, &options, |text| answer.push(text))?;
        messages.push(Message::assistant(answer.finish()?));
        output::line("")?;
        options.seed = options.seed.wrapping_add(1);
        options.compile_ahead = false;
    }
}

/// Returns the text of a conversation for a model without a template.
fn plain(messages: &[Message]) -> String {
    let turn = |message: &Message| {
        let name = match message.role.as_str() {
            "user" => USER,
            "assistant" => ASSISTANT,
            _ => SYSTEM,
        };
        format!("{name}{}\n", message.content)
    };
    messages.iter().map(turn).collect::<String>() + ASSISTANT
}

/// Prints an answer as it is generated. Without a template the answer ends where the model begins
/// the user's next turn. In the harmony format, reasoning is printed under a heading, and is not a
/// part of the answer.
struct Answer {
    /// The text to print.
    text: String,
    printed: usize,
    plain: bool,
    transcript: Option<Transcript>,
    /// The first failure to print.
    result: io::Result<()>,
}

impl Answer {
    fn new(plain: bool, transcript: Option<Transcript>) -> Self {
        Self {
            text: String::new(),
            printed: 0,
            plain,
            transcript,
            result: Ok(()),
        }
    }

    /// Adds a piece of text. Breaks if the answer is complete, or if the output is closed.
    fn push(&mut self, piece: &str) -> ControlFlow<()> {
        match &mut self.transcript {
            Some(transcript) => self.text += &transcript.push(piece),
            None => self.text += piece,
        }
        let end = self.end();
        // Text that could be the beginning of the user's next turn is held back.
        let safe = if self.plain && end == self.text.len() {
            end - held_back(&self.text)
        } else {
            end
        };
        self.print_to(safe);
        if end < self.text.len() || self.result.is_err() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    /// Prints the rest, and returns the answer.
    fn finish(mut self) -> io::Result<String> {
        let content = self.transcript.take().map(|transcript| {
            let end = transcript.finish();
            self.text += &end.rest;
            end.content
        });
        let end = self.end();
        self.print_to(end);
        self.result?;
        self.text.truncate(end);
        Ok(content.unwrap_or(self.text))
    }

    fn end(&self) -> usize {
        let turn = self
            .plain
            .then(|| self.text.find(&format!("\n{}", USER.trim_end())))
            .flatten();
        turn.unwrap_or(self.text.len())
    }

    fn print_to(&mut self, end: usize) {
        if end > self.printed && self.result.is_ok() {
            self.result = output::text(&self.text[self.printed..end]);
            self.printed = end;
        }
    }
}

/// Returns the number of bytes at the end of a text that could begin the user's next turn.
fn held_back(text: &str) -> usize {
    let turn = format!("\n{}", USER.trim_end());
    (1..=turn.len())
        .rev()
        .find(|&length| text.ends_with(&turn[..length]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_where_the_users_turn_begins() {
        let mut answer = Answer::new(true, None);
        let steps =
            [" Hello", " there\nUs", "er", ": more"].map(|piece| answer.push(piece).is_break());
        assert_eq!(steps, [false, false, false, true]);
        assert_eq!(answer.printed, " Hello there".len());
        assert_eq!(answer.finish().unwrap(), " Hello there");
    }

    #[test]
    fn a_beginning_that_leads_nowhere_is_printed() {
        let mut answer = Answer::new(true, None);
        assert!(answer.push("a\nUs").is_continue());
        assert_eq!(answer.printed, 1);
        assert!(answer.push("e").is_continue() && answer.push(" it").is_continue());
        assert_eq!(answer.finish().unwrap(), "a\nUse it");
    }

    #[test]
    fn with_a_template_the_text_of_an_answer_is_free() {
        let mut answer = Answer::new(false, None);
        assert!(answer.push("as in\nUser: name").is_continue());
        assert_eq!(answer.finish().unwrap(), "as in\nUser: name");
    }

    #[test]
    fn reasoning_in_the_harmony_format_is_printed_but_no_part_of_the_answer() {
        let transcript = Transcript::new("<|start|>assistant");
        let mut answer = Answer::new(false, Some(transcript));
        for piece in [
            "<|channel|>analysis<|mess",
            "age|>Hm.<|end|><|start|>assistant",
            "<|channel|>final<|message|>Yes. <",
        ] {
            assert!(answer.push(piece).is_continue());
        }
        assert_eq!(answer.text, "[analysis]\nHm.\n\n[final]\nYes. ");
        assert_eq!(answer.printed, answer.text.len());
        assert_eq!(answer.finish().unwrap(), "Yes. <");
    }

    #[test]
    fn plain_turns_end_where_the_answer_begins() {
        let messages = [
            Message::system("Be brief."),
            Message::user("Hi"),
            Message::assistant(" Hello"),
            Message::user("Who?"),
        ];
        assert_eq!(
            plain(&messages),
            "System: Be brief.\nUser: Hi\nAssistant: Hello\nUser: Who?\nAssistant:"
        );
    }
}
