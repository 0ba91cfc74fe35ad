//! A server of the shipped model, with so few pages that sequences are pre-empted, and prompts that
//! share prefixes.

use super::open;
use super::prompts::{dtype_on, gap_of, heldout_tokens, worst_gap};
use crate::llama::quantised;
use burn::tensor::{Device, FloatDType};
use futures_lite::StreamExt;
use futures_lite::future::block_on;
use marlin_serve::model::{ModelExecutor, ModelOptions, start};
use marlin_serve::server::{
    EndReason, Executor, GenerationRequest, NewSequence, RowOutput, SamplingParams, TokenEvent,
    TokenMask,
};
use marlin_serve::{Request, Scheduler, SchedulerConfig};
use std::time::Duration;

/// Sequences over pages of 64 positions, in steps that are started ahead. In f16 on tensor cores a
/// token that is nearly as likely as the host's may be chosen: each must be within 0.05 of the
/// host's greatest logit after the same tokens.
pub(super) fn over_few_pages(device: &Device) {
    let (_guard, folder) = quantised();
    let dtype = dtype_on(device);
    let llama = open(&folder, device, dtype);
    let tokens = heldout_tokens(&llama);
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
    // At the end of the process nothing may use the device any more: Vulkan's driver crashes.
    server.shutdown(Duration::ZERO);
    block_on(server.stopped());
    let host = open(&folder, &Device::flex(), FloatDType::F32);
    let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
    let worst = worst_gap(&host.model, &sequences, &lengths, 50);
    assert!(worst < gap_of(dtype));
}

/// A step whose rows wait for masks, and a request of it that ends meanwhile: the other row is
/// computed, and chooses the token that its mask allows.
pub(super) fn without_an_ended_request(device: &Device) {
    let (_guard, folder) = quantised();
    let llama = open(&folder, device, dtype_on(device));
    let mut options = ModelOptions::default();
    options.max_sequences = 2;
    options.pages = Some(4);
    let mut executor =
        ModelExecutor::new(llama.model.clone(), &options).unwrap_or_else(|error| panic!("{error}"));
    let mut scheduler =
        Scheduler::new(SchedulerConfig::new(4)).unwrap_or_else(|error| panic!("{error}"));
    let prompts = [[1u32, 2, 3], [4, 5, 6]];
    let requests = prompts.map(|prompt| {
        let request = Request::new(prompt.to_vec(), 8);
        let request = scheduler.submit(request, Duration::ZERO);
        request.unwrap_or_else(|error| panic!("{error}"))
    });
    let step = scheduler.schedule(Duration::ZERO).expect("two prompts");
    for (request, tokens) in requests.into_iter().zip(&prompts) {
        let added = executor.add(NewSequence {
            request,
            tokens,
            prompt: tokens.len(),
            params: &SamplingParams::default(),
            seed: 0,
            stop_tokens: &[],
        });
        added.unwrap_or_else(|error| panic!("{error}"));
    }
    let started = executor.start(&step, true);
    let mut started = started.unwrap_or_else(|error| panic!("{error}"));
    executor.remove(requests[0]);
    let mut allowed = vec![0; llama.model.config().vocab_size.div_ceil(32)];
    allowed[77 / 32] = 1 << (77 % 32);
    let masks = vec![TokenMask { row: 1, allowed }];
    let masked = executor.mask(&mut started, &step, masks);
    masked.unwrap_or_else(|error| panic!("{error}"));
    let outputs = executor.finish(started);
    let outputs = outputs.unwrap_or_else(|error| panic!("{error}"));
    let (token, logprobs) = (77, None);
    assert!(matches!(outputs[0], RowOutput::Failed(_)), "{outputs:?}");
    assert_eq!(outputs[1..], [RowOutput::Token { token, logprobs }]);
}
