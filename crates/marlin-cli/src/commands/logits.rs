use super::open;
use crate::args::LogitsArgs;
use crate::error::CliError;
use crate::output;
use burn::tensor::{Int, Tensor, TensorData};
use serde_json::json;

pub fn run(args: &LogitsArgs) -> Result<(), CliError> {
    let llama = open(&args.model, false)?;
    let (vocab_size, max_len) = (llama.model.config().vocab_size, llama.model.max_len());
    if let Some(&id) = args.ids.iter().find(|&&id| id as usize >= vocab_size) {
        return Err(CliError::TokenId { id, vocab_size });
    }
    if args.ids.len() > max_len {
        return Err(CliError::TooManyIds {
            found: args.ids.len(),
            max_len,
        });
    }
    let ids: Vec<i32> = args.ids.iter().map(|&id| id as i32).collect();
    let tokens = Tensor::<2, Int>::from_data(
        TensorData::new(ids, [1, args.ids.len()]),
        &llama.model.device(),
    );
    let logits = llama
        .model
        .forward_last(tokens, &mut llama.model.new_cache(1));
    let data = logits
        .try_into_data()
        .map_err(|error| CliError::Read(format!("{error:?}")))?;
    let logits: Vec<f32> = data.iter::<f32>().collect();
    // JSON has no NaN.
    if let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
        return Err(CliError::NotFinite {
            token,
            found: logits[token],
        });
    }
    output::json(&json!({ "ids": args.ids, "logits": logits }))
}
