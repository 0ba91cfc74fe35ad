//! OpenAI- and Anthropic-compatible HTTP over an engine of `marlin-serve`.
