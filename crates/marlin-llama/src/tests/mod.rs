//! Tests across modules: folders of random models, opened and run on Flex, against a reference that shares no code with the model.

mod bad_input;
mod folder;
mod generate;
mod model;
mod perplexity;
mod quantize;
mod reference;
pub(crate) mod support;
