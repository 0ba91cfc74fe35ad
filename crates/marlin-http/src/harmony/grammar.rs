//! Grammars of answers, in the Lark syntax of `llguidance`.
//!
//! An answer may begin with one message of reasoning.

use std::fmt::Write;

use marlin_serve::grammar::GrammarSource;
use marlin_text::harmony::{ASSISTANT, CHANNEL, CONSTRAIN, END, MESSAGE, START, continues_body};

use crate::tools::grammar::{literal, marker};
use crate::tools::{ToolGrammarError, ToolSchema};

/// Returns the grammar of an answer to `prompt` whose content follows `content`. `token_id` is the
/// token of a marker, `None` if the vocabulary has none, and the marker is then written as text.
pub(crate) fn final_grammar(
    prompt: &str,
    content: &GrammarSource,
    token_id: impl Fn(&str) -> Option<u32>,
) -> GrammarSource {
    if continues_body(prompt) {
        return content.clone();
    }
    let [channel, message] = [CHANNEL, MESSAGE].map(|text| marker(text, &token_id));
    let (analysis, content) = (analysis(token_id), content.lark_expression());
    GrammarSource::Lark(format!(
        "start: analysis? answer\n{analysis}answer: {channel} \"final\" {message} content\n\
         content: {content}\n"
    ))
}

/// Returns the grammar of an answer to `prompt` that calls one of `tools`. A model waits for the
/// result of a call, so that no other call follows.
///
/// # Errors
/// See [`ToolGrammarError`].
pub(crate) fn calls_grammar(
    prompt: &str,
    tools: &[ToolSchema<'_>],
    token_id: impl Fn(&str) -> Option<u32>,
) -> Result<GrammarSource, ToolGrammarError> {
    if tools.is_empty() {
        return Err(ToolGrammarError::NoTools);
    }
    let [channel, constrain, message, end, start] =
        [CHANNEL, CONSTRAIN, MESSAGE, END, START].map(|text| marker(text, &token_id));
    let mut grammar = String::from("start: ");
    if continues_body(prompt) {
        let _ = write!(grammar, "{end} {start} \"{ASSISTANT}\" ");
    }
    let calls: Vec<_> = (0..tools.len())
        .map(|index| format!("call_{index}"))
        .collect();
    let _ = write!(
        grammar,
        "analysis? call\n{}call: {}\ntype: \" \"? {constrain} \"json\" | \" json\"\n",
        analysis(&token_id),
        calls.join(" | ")
    );
    for (index, tool) in tools.iter().enumerate() {
        // The recipient is after the role or after the channel: models write both.
        let recipient = format!(" to=functions.{}", tool.checked_name()?);
        let in_channel = literal(&format!("commentary{recipient}"));
        let _ = writeln!(
            grammar,
            "call_{index}: header_{index} type? {message} arguments_{index}\n\
             header_{index}: {channel} {in_channel} | {} {channel} \"commentary\"\n\
             arguments_{index}: %json {}",
            literal(&recipient),
            tool.schema()?
        );
    }
    Ok(GrammarSource::Lark(grammar))
}

/// Returns the rules of a message of reasoning, up to the role of the next message.
fn analysis(token_id: impl Fn(&str) -> Option<u32>) -> String {
    let [channel, message, start] = [CHANNEL, MESSAGE, START].map(|text| marker(text, &token_id));
    let thought = match token_id(END) {
        Some(id) => format!("thought: TEXT? <[{id}]>\nTEXT: /(?s:.+)/"),
        None => format!("thought[suffix={}]: /(?s:.*)/", literal(END)),
    };
    format!(
        "analysis: {channel} \"analysis\" {message} thought {start} \"{ASSISTANT}\"\n{thought}\n"
    )
}
