//! Tests across modules: folders of random models, opened and run on Flex, against a reference that
//! shares no code with the model.

mod architectures;
mod awq;
mod bad_input;
mod calibrate;
mod engine;
mod evaluate;
mod folder;
mod generate;
mod golden;
#[cfg(feature = "hub")]
mod hub;
mod joined;
mod mixtures;
mod model;
mod overrides;
mod parallel;
mod perplexity;
mod quantize;
mod reference;
mod samples;
mod stacked;
pub(crate) mod support;
