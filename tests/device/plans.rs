//! The kernels that a model's plans name, compared with those that its prompts and steps launch.

use crate::llama::quantised_to;
use crate::setup::{Named, trial};
use burn::tensor::{Device, FloatDType};
use burn_marlin::{GroupSize, QuantSpec};
use libtest_mimic::Trial;
use marlin_kernels::{Epilogue, EpilogueStage, Kernel, Problem, Prologue, PrologueStage};
use marlin_lm::{Engine, LanguageModel, Model, OpenOptions, RequestParams};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    // CubeCL's CPU runtime would take minutes to compile the kernels of a whole model.
    if device.name != "cpu" {
        tests.push(trial(
            device,
            "plans::steps_and_prompts_launch_what_is_planned",
            launched_as_planned,
        ));
    }
}

/// A format that no other test uses for the shipped model, because launches of all concurrent tests
/// are traced.
const SPEC: QuantSpec = QuantSpec::int4(GroupSize::G64);

/// A problem and the kernel that was launched for it, as text.
type Launch = (String, String);

/// A tracing layer that collects the launches of all threads of the process.
#[derive(Default)]
struct Launches(Arc<Mutex<Vec<Launch>>>);

impl<S: tracing::Subscriber> Layer<S> for Launches {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut launch = LaunchFields::default();
        event.record(&mut launch);
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((launch.problem, launch.kernel));
    }
}

#[derive(Default)]
struct LaunchFields {
    problem: String,
    kernel: String,
}

impl Visit for LaunchFields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "problem" => self.problem = format!("{value:?}"),
            "kernel" => self.kernel = format!("{value:?}"),
            _ => {}
        }
    }
}

static LAUNCHES: LazyLock<Arc<Mutex<Vec<Launch>>>> = LazyLock::new(|| {
    let launches = Launches::default();
    let collected = launches.0.clone();
    let filter = Targets::new().with_target("marlin_kernels::launch", LevelFilter::TRACE);
    Registry::default()
        .with(launches.with_filter(filter))
        .init();
    collected
});

/// Returns the launches so far with a quantised weight in [`SPEC`], each with its count.
fn launches() -> BTreeMap<Launch, usize> {
    let mut counts = BTreeMap::new();
    for launch in LAUNCHES
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .iter()
        .filter(|(problem, _)| problem.contains("int4 g64"))
    {
        *counts.entry(launch.clone()).or_default() += 1;
    }
    counts
}

/// Returns the planned launches with a quantised weight, each with its count, and the launch with
/// the head's float weight.
fn planned(model: &Model, rows: usize) -> (BTreeMap<Launch, usize>, Option<Launch>) {
    let (mut counts, mut head) = (BTreeMap::new(), None);
    for found in model.plans(rows) {
        let kernel = found.plan.kernel.to_string();
        match found.problem {
            Problem::Quant(problem) => {
                // A norm before the kernel is a separate launch, so the launched problem has no
                // norm.
                let norm_before = found.plan.prologue == PrologueStage::Before;
                let problem = if norm_before {
                    problem.with_prologue(Prologue::None)
                } else {
                    problem
                };
                // SwiGLU after the kernel is a separate launch, too.
                let swiglu_after = found.plan.epilogue == EpilogueStage::After;
                let problem = if swiglu_after {
                    problem.with_epilogue(Epilogue::None)
                } else {
                    problem
                };
                *counts.entry((problem.to_string(), kernel)).or_default() += 1;
            }
            Problem::Float(_) if found.plan.kernel == Kernel::FloatMatmul => {}
            Problem::Float(problem) => head = Some((problem.to_string(), kernel)),
        }
    }
    (counts, head)
}

fn launched_as_planned(device: &Device) {
    LazyLock::force(&LAUNCHES);
    let (_guard, folder) = quantised_to(&SPEC);
    let dtype = if device.supports_dtype(FloatDType::F16) {
        FloatDType::F16
    } else {
        FloatDType::F32
    };
    let options = OpenOptions {
        dtype: Some(dtype),
        max_len: Some(64),
        with_tokenizer: false,
        ..OpenOptions::default()
    };
    let llama =
        LanguageModel::open(&folder, device, &options).unwrap_or_else(|error| panic!("{error}"));
    // Three sequences run as four rows. If the device takes the tokens of prompts as rows, the
    // tokens of all prompts are the rows of one matmul, rounded up. Otherwise each prompt is a
    // separate matmul, and the last tokens of all prompts are another.
    for (sequences, tokens, step_rows, rows) in [(1, 38, 1, 48), (3, 22, 4, 96)] {
        let passes = match marlin_nn::takes_prompts(device, dtype) {
            true => BTreeSet::from([step_rows, rows]),
            false => BTreeSet::from([step_rows, tokens - 1, sequences]),
        };
        let before = launches();
        let mut engine =
            Engine::new(llama.model.clone(), sequences).unwrap_or_else(|error| panic!("{error}"));
        for seed in 0..sequences as u64 {
            let prompt = vec![3 + seed as u32; tokens];
            let options = RequestParams {
                seed,
                max_new_tokens: 4,
                ..RequestParams::default()
            };
            engine
                .add_request(&prompt, &options)
                .unwrap_or_else(|error| panic!("{error}"));
        }
        while engine.sequences() > 0 {
            engine.step().unwrap_or_else(|error| panic!("{error}"));
        }
        let mut found = launches();
        found.retain(|launch, count| {
            *count -= before.get(launch).copied().unwrap_or_default();
            *count > 0
        });
        for rows in passes {
            let (planned, head) = planned(&llama.model, rows);
            let times: BTreeSet<usize> = planned
                .iter()
                .map(|(launch, count)| found.remove(launch).unwrap_or_default() / count)
                .collect();
            assert!(
                times.len() == 1 && !times.contains(&0),
                "launches of {rows} rows, planned {planned:?}: each {times:?} times"
            );
            if let Some(head) = head.filter(|_| rows == step_rows) {
                let launched = LAUNCHES
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .contains(&head);
                assert!(launched, "the head {head:?} was not launched");
            }
            println!(
                "{} launches of {rows} rows",
                planned.values().sum::<usize>()
            );
        }
        assert!(found.is_empty(), "launched and not planned: {found:?}");
    }
}
