//! The header of a message.

use super::MessageKind;

/// The number of bytes of the longest header. A longer one is text without a header.
const LONGEST: usize = 256;

/// The prefix of recipients that are tools of the request.
const FUNCTIONS: &str = "functions.";

/// The header of a message so far.
#[derive(Debug, Default)]
pub(super) struct Header {
    /// The text before the last channel.
    role: String,
    /// The text after the last `<|channel|>`, if there is one.
    channel: Option<String>,
    /// True if the role itself is not in `role`.
    has_role: bool,
    /// True if the last word is the type of the body, which is not used.
    has_type: bool,
}

impl Header {
    /// Returns the header after the role, which a prompt ends with.
    pub fn after_role() -> Self {
        Self {
            has_role: true,
            ..Self::default()
        }
    }

    /// Adds a character.
    pub fn push(&mut self, character: char) {
        self.channel
            .as_mut()
            .unwrap_or(&mut self.role)
            .push(character);
    }

    /// The name of a channel follows.
    pub fn start_channel(&mut self) {
        if let Some(channel) = self.channel.replace(String::new()) {
            self.role.push(' ');
            self.role.push_str(&channel);
        }
    }

    /// The type of the body follows.
    pub fn start_type(&mut self) {
        self.push(' ');
        self.has_type = true;
    }

    /// Returns true if the text is none of a header: it is too long, or stands where only a
    /// recipient can follow.
    pub fn is_text(&self) -> bool {
        let channel = self.channel.as_deref();
        if self.role.len() + channel.map_or(0, str::len) > LONGEST {
            return true;
        }
        let role = self.role.trim_start();
        self.has_role && channel.is_none() && !role.starts_with("to=") && !"to=".starts_with(role)
    }

    /// Returns what the body is, unless it is a call.
    pub fn kind(&self) -> MessageKind {
        let channel = self.channel.as_deref().unwrap_or_default();
        let name = channel.split_whitespace().find(|word| !is_recipient(word));
        match name {
            Some("analysis") => MessageKind::Reasoning,
            _ => MessageKind::Content,
        }
    }

    /// Returns the tool that the body calls, if it calls one. Recipients outside of `functions` are
    /// the model's built-in tools on the channel of the reasoning, and elsewhere tools whose prefix
    /// was left out.
    pub fn tool(&self) -> Option<&str> {
        let recipient = self.recipient()?;
        let name = recipient.strip_prefix(FUNCTIONS);
        let is_speaker = matches!(recipient, "assistant" | "user" | "all");
        let name = name.or_else(|| {
            (!is_speaker && self.kind() != MessageKind::Reasoning).then_some(recipient)
        });
        name.filter(|name| !name.is_empty())
    }

    fn recipient(&self) -> Option<&str> {
        let channel = self.channel.as_deref().unwrap_or_default();
        let mut words = channel
            .split_whitespace()
            .chain(self.role.split_whitespace());
        words.find_map(|word| word.strip_prefix("to="))
    }

    /// Returns the text that belongs to no header, if no body follows.
    pub fn stray(&self) -> &str {
        let has_type = self.has_type || self.recipient().is_some();
        // The name of the role or the channel, and the type.
        let (mut text, mut words) = match &self.channel {
            None if self.has_role => (self.role.as_str(), 0),
            None => (self.role.as_str(), 1),
            Some(channel) => (channel.as_str(), 1 + usize::from(has_type)),
        };
        while let Some(word) = text.split_whitespace().next() {
            if !is_recipient(word) {
                if words == 0 {
                    break;
                }
                words -= 1;
            }
            let rest = text.trim_start().strip_prefix(word);
            text = rest.unwrap_or_default();
        }
        text
    }
}

fn is_recipient(word: &str) -> bool {
    word.starts_with("to=")
}
