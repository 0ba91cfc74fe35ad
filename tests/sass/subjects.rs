//! The lists of the kernels of a decode step, each with its name.

mod experts;

use crate::decode::Subject;
use crate::{Card, tiles};
use marlin_format::{GroupSize, WeightValue};
use marlin_kernels::ActivationDtype::{BF16, F16, F32};
use marlin_kernels::device::FP8_CAPABILITY;
use marlin_kernels::matmul::gemv;
use marlin_kernels::{Epilogue, Prologue};
use marlin_nn::CacheFormat;
use marlin_nn::kernels::attention::AttentionPass;

/// Returns the kernels for a card, each with its name.
pub fn subjects(card: Card) -> Vec<(String, Subject)> {
    [
        rows(),
        fp8_rows(card),
        heads(),
        float_gemv(),
        gemv(card),
        experts::routing(),
        experts::few_rows(card),
        attention(),
        codes(),
        flash(),
    ]
    .concat()
}

/// Returns the norm and SwiGLU kernels of small and large models.
fn rows() -> Vec<(String, Subject)> {
    let mut subjects = Vec::new();
    for dtype in [F16, BF16, F32] {
        for features in [896, 4096, 8192, 16384] {
            subjects.push((
                format!("norm of {features} {dtype}"),
                Subject::Norm { features, dtype },
            ));
        }
        for (name, epilogue) in [
            ("gates", Epilogue::SwiGlu),
            ("clamped gates", Epilogue::ClampedSwiGlu),
        ] {
            subjects.push((
                format!("{name} in {dtype}"),
                Subject::Gates { epilogue, dtype },
            ));
        }
    }
    subjects
}

/// Returns the kernels that round rows of activations to e4m3, for cards with products of e4m3.
fn fp8_rows(card: Card) -> Vec<(String, Subject)> {
    let named = |(features, has_norm, dtype)| {
        let norm = if has_norm { " after a norm" } else { "" };
        (
            format!("e4m3 rows of {features} {dtype}{norm}"),
            Subject::Fp8Rows {
                features,
                has_norm,
                dtype,
            },
        )
    };
    let rows = [
        (128, false, F16),
        (4096, false, F16),
        (4096, true, F16),
        (14336, false, BF16),
        (8192, true, BF16),
        (28672, false, F16),
    ];
    let is_there = card.capability >= FP8_CAPABILITY;
    rows.into_iter().filter(|_| is_there).map(named).collect()
}

/// Returns the lm_head kernels from one row to the maximum number of rows.
fn heads() -> Vec<(String, Subject)> {
    let named = |(rows, features, dtype)| {
        (
            format!("head of {rows} rows of {features} {dtype}"),
            Subject::Head {
                rows,
                features,
                dtype,
            },
        )
    };
    let heads = [
        (1, 4096, F16),
        (2, 896, F16),
        (9, 4096, BF16),
        (17, 8192, F16),
        (32, 4096, F16),
        (33, 896, BF16),
        (64, 4096, F16),
    ];
    heads.map(named).into()
}

/// Returns the products of one row and a float weight, with and without a norm.
fn float_gemv() -> Vec<(String, Subject)> {
    let named = |(features, has_norm, dtype)| {
        let norm = if has_norm { " norm" } else { "" };
        (
            format!("float gemv of {features} {dtype}{norm}"),
            Subject::FloatGemv {
                features,
                has_norm,
                dtype,
            },
        )
    };
    let products = [
        (2048, true, BF16),
        (2880, true, BF16),
        (4096, false, BF16),
        (896, true, F16),
        (8192, false, F16),
        (8192, true, F16),
    ];
    products.map(named).into()
}

/// Returns the matmuls of one row, with and without the norm, for cards with clusters.
fn gemv(card: Card) -> Vec<(String, Subject)> {
    let mut subjects = Vec::new();
    if card.capability < 90 {
        return subjects;
    }
    for group in GroupSize::ALL {
        for (blocks, zero_points, bf16) in [
            (1, false, false),
            (2, true, false),
            (4, false, true),
            (8, true, true),
        ] {
            for (bits, sparsity) in WeightValue::ALL
                .into_iter()
                .filter(|bits| bits.groups().contains(&group))
                .filter(|bits| bits.zero_points().contains(&zero_points.into()))
                .flat_map(|bits| bits.sparsities().iter().map(move |&of| (bits, of)))
            {
                let operations = [
                    (Prologue::None, Epilogue::None),
                    (Prologue::AddRmsNorm, Epilogue::None),
                    (Prologue::AddRmsNorm, Epilogue::SwiGlu),
                ];
                for (prologue, epilogue) in operations
                    .into_iter()
                    .filter(|(_, epilogue)| blocks * epilogue.columns() <= 8)
                {
                    // Without a norm, K is split among at least two blocks.
                    let blocks = if prologue == Prologue::None {
                        blocks.max(2)
                    } else {
                        blocks
                    };
                    let config = gemv::GemvConfig {
                        blocks,
                        group,
                        value: bits,
                        zero_points,
                        bf16,
                        sparsity,
                        prologue,
                        epilogue,
                        experts: None,
                        has_short_steps: false,
                    };
                    if gemv::takes_format(&config) {
                        subjects.push((gemv_name(&config), Subject::Gemv(config)));
                    }
                }
            }
        }
    }
    subjects
}

fn gemv_name(config: &gemv::GemvConfig) -> String {
    let gemv::GemvConfig {
        blocks,
        group,
        value,
        zero_points,
        bf16,
        sparsity,
        prologue,
        epilogue,
        ..
    } = config;
    let dtype = if *bf16 { "bf16" } else { "f16" };
    let zeros = if *zero_points { " zeros" } else { "" };
    let norm = if *prologue == Prologue::AddRmsNorm {
        " norm"
    } else {
        ""
    };
    let gated = tiles::epilogue(*epilogue);
    format!("gemv of {blocks} blocks {sparsity} {value} {group} {dtype}{zeros}{norm}{gated}")
}

/// Returns the attention kernels for groups of one to eight heads, every kind of head_dim, with and
/// without norms and pages, in every dtype. Those of prompt rows follow.
fn attention() -> Vec<(String, Subject)> {
    let steps = [
        (128, 1, false, F16, None),
        (128, 4, false, F16, None),
        (128, 7, false, BF16, None),
        (128, 8, false, F16, None),
        (128, 4, true, BF16, None),
        (64, 8, false, BF16, None),
        (80, 1, false, F16, None),
        (96, 1, false, F16, None),
        (256, 4, true, F16, None),
        (128, 4, false, F32, None),
        (128, 1, false, F16, Some(64)),
        (128, 4, false, F16, Some(64)),
        (128, 8, false, F16, Some(64)),
        (64, 8, false, BF16, Some(16)),
        (256, 4, true, F16, Some(128)),
        (128, 4, false, F32, Some(64)),
    ];
    let prompts = [
        (128, 1, false, F32, None),
        (40, 4, false, BF16, None),
        (40, 4, false, BF16, Some(64)),
    ];
    let codes = [
        (128, 1, false, F16, Some(64)),
        (128, 4, false, BF16, Some(64)),
        (128, 8, false, F16, Some(64)),
        (64, 8, false, BF16, Some(16)),
        (256, 4, true, F16, Some(128)),
        (96, 1, false, BF16, None),
    ];
    // Those of gpt-oss.
    let with_sinks = [(64, 8, false, BF16, Some(64)), (64, 8, false, F16, None)];
    let named = |pass, format, has_sinks| {
        move |(head_dim, group, has_norm, dtype, page_size)| {
            let codes = match format {
                CacheFormat::Activations => "",
                CacheFormat::E4m3 => " over e4m3",
            };
            let norms = if has_norm { " with norms" } else { "" };
            let (pages, sinks) = (of_pages(page_size), of_sinks(has_sinks));
            let name = format!(
                "{pass:?} attention of {group} x {head_dim} in {dtype}{norms}{codes}{pages}{sinks}"
            )
            .to_lowercase();
            (
                name,
                Subject::Attention {
                    group,
                    head_dim,
                    has_norm,
                    has_sinks,
                    dtype,
                    pass,
                    page_size,
                    format,
                },
            )
        }
    };
    let (step, prompt) = (AttentionPass::Step, AttentionPass::Prompt);
    let (activations, e4m3) = (CacheFormat::Activations, CacheFormat::E4m3);
    steps
        .into_iter()
        .map(named(step, activations, false))
        .chain(prompts.into_iter().map(named(prompt, activations, false)))
        .chain(codes.into_iter().map(named(step, e4m3, false)))
        .chain(with_sinks.into_iter().map(named(step, activations, true)))
        .chain(with_sinks.into_iter().map(named(step, e4m3, true)))
        .collect()
}

/// Returns the kernels between a cache in e4m3 and the workspace of prompts.
fn codes() -> Vec<(String, Subject)> {
    let of = |(head_dim, dtype, page_size)| {
        [true, false].map(|stores| {
            let what = if stores { "written" } else { "read" };
            let name = format!(
                "cache of {head_dim} in e4m3 {what} in {dtype}{}",
                of_pages(page_size)
            );
            let subject = Subject::Codes {
                head_dim,
                page_size,
                dtype,
                stores,
            };
            (name, subject)
        })
    };
    let shapes = [
        (128, F16, Some(64)),
        (128, BF16, Some(64)),
        (80, F16, None),
        (256, BF16, Some(16)),
    ];
    shapes.into_iter().flat_map(of).collect()
}

/// Returns the attention kernels of prompts on tensor cores.
fn flash() -> Vec<(String, Subject)> {
    let named = |has_sinks| {
        move |(head_dim, dtype, page_size)| {
            let (pages, sinks) = (of_pages(page_size), of_sinks(has_sinks));
            let name = format!("flash attention of {head_dim} in {dtype}{pages}{sinks}");
            let subject = Subject::Flash {
                head_dim,
                page_size,
                has_sinks,
                dtype,
            };
            (name, subject)
        }
    };
    let plain = [
        (64, F16, None),
        (80, BF16, None),
        (96, F16, None),
        (128, F16, None),
        (128, BF16, None),
        (256, F16, None),
        (64, F16, Some(16)),
        (128, F16, Some(64)),
        (128, BF16, Some(128)),
        (256, F16, Some(64)),
    ];
    // Those of gpt-oss.
    let with_sinks = [(64, F16, None), (64, BF16, Some(64))];
    plain
        .into_iter()
        .map(named(false))
        .chain(with_sinks.into_iter().map(named(true)))
        .collect()
}

fn of_sinks(has_sinks: bool) -> &'static str {
    if has_sinks { " with sinks" } else { "" }
}

fn of_pages(page_size: Option<usize>) -> String {
    page_size.map_or(String::new(), |size| format!(" over pages of {size}"))
}
