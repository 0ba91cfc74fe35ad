//! A server of the shipped model, with so few pages that sequences are pre-empted, and prompts that
//! share prefixes.

use super::open;
use super::prompts::worst_gap;
use crate::llama::{example, quantised};
use crate::setup::is_card;
use burn::tensor::{Device, FloatDType};
use futures_lite::StreamExt;
use futures_lite::future::block_on;
use marlin_serve::model::{ModelOptions, start};
use marlin_serve::server::{EndReason, GenerationRequest, SamplingParams, TokenEvent};

/// Sequences over pages of 64 positions, in steps that are started ahead. In f16 on tensor cores a
/// token that is nearly as likely as the host's may be chosen: each must be within 0.05 of the
/// host's greatest logit after the same tokens.
pub(super) fn over_few_pages(device: &Device) {
    let (_guard, folder) = quantised();
    let dtype = if is_card(device) {
        FloatDType::F16
    } else {
        FloatDType::F32
    };
    let llama = open(&folder, device, dtype);
    let text = std::fs::read_to_string(example().join("heldout.txt"))
        .unwrap_or_else(|error| panic!("{error}"));
    let tokens = llama
        .tokenizer()
        .and_then(|tokenizer| Ok(tokenizer.encode(&text)?))
        .unwrap_or_else(|error| panic!("{error}"));
    // The first 130 tokens of every second prompt are the same.
    let prompts: Vec<Vec<u32>> = [5, 150, 1, 140, 64, 199, 2, 131]
        .into_iter()
        .enumerate()
        .map(|(i, length)| match i % 2 {
            0 => tokens[200 * i..][..length].to_vec(),
            _ => [&tokens[..130], &tokens[200 * i..][..length - 130]].concat(),
        })
        .collect();
    let mut options = ModelOptions::default();
    options.max_sequences = 6;
    options.pages = Some(8);
    options.max_step_tokens = Some(100);
    let server = start(&llama, &options).unwrap_or_else(|error| panic!("{error}"));
    let request = |prompt: &Vec<u32>| GenerationRequest {
        max_tokens: Some(50),
        ignore_eos: true,
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        ..GenerationRequest::new(prompt.clone())
    };
    let streams: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let stream = server.submit(request(prompt));
            stream.unwrap_or_else(|error| panic!("{error}"))
        })
        .collect();
    let mut sequences = prompts.clone();
    for (sequence, mut stream) in sequences.iter_mut().zip(streams) {
        while let Some(event) = block_on(stream.next()) {
            match event {
                TokenEvent::Token { token, .. } => sequence.push(token),
                TokenEvent::End { reason, .. } => assert_eq!(reason, EndReason::Length),
                other => panic!("{other:?}"),
            }
        }
    }
    let metrics = server.metrics();
    println!("{metrics:?}");
    let host = open(&folder, &Device::flex(), FloatDType::F32);
    let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
    let worst = worst_gap(&host.model, &sequences, &lengths, 50);
    assert!(worst < if dtype == FloatDType::F16 { 0.05 } else { 1e-3 });
}
