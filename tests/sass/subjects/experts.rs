//! The lists of the kernels of mixtures of experts.

use super::gemv_name;
use crate::Card;
use crate::decode::Subject;
use marlin_format::{GroupSize, Sparsity, WeightValue, ZeroPoint};
use marlin_kernels::ActivationDtype::{BF16, F16, F32};
use marlin_kernels::experts::{Router, RouterScores};
use marlin_kernels::matmul::gemv::GemvConfig;
use marlin_kernels::matmul::gemv::experts::{ExpertGemvConfig, ExpertRows};
use marlin_kernels::{ActivationDtype, Epilogue, Prologue};

/// Returns the routing and the weighted sums of mixtures of experts.
pub fn routing() -> Vec<(String, Subject)> {
    let mut subjects = Vec::new();
    for (experts, top_k, scores, normalises, dtype) in [
        (8, 2, RouterScores::Softmax, true, F16),
        (60, 4, RouterScores::Softmax, false, BF16),
        (128, 8, RouterScores::Softmax, true, BF16),
        (256, 8, RouterScores::Sigmoid, true, F16),
    ] {
        let router = Router {
            experts,
            top_k,
            scores,
            normalises,
        };
        for (tokens, kernel, block_rows, of) in [
            (1, 0, 8, "routing of one token to"),
            (30, 0, 16, "routing to"),
            (300, 0, 32, "choice of"),
            (300, 1, 32, "sorting by"),
        ] {
            subjects.push((
                format!("{of} {top_k} of {experts} experts {dtype}"),
                Subject::Route {
                    router,
                    tokens,
                    kernel,
                    block_rows,
                    has_correction: scores == RouterScores::Sigmoid,
                    dtype,
                },
            ));
        }
        subjects.push((
            format!("sums of {top_k} of {experts} experts {dtype}"),
            Subject::Combine {
                top_k,
                has_beside: normalises,
                dtype,
            },
        ));
    }
    for (name, of_tokens, permutes, dtype) in [
        ("act-order of tokens", true, true, F16),
        ("act-order of rows", false, true, BF16),
        ("rows of tokens", true, false, BF16),
    ] {
        subjects.push((
            format!("{name} of experts {dtype}"),
            Subject::Gather {
                of_tokens,
                permutes,
                dtype,
            },
        ));
    }
    for (features, dtype) in [(2048, BF16), (2880, BF16), (4096, F16)] {
        subjects.push((
            format!("router of {features} features {dtype}"),
            Subject::FewColumns { features, dtype },
        ));
    }
    subjects
}

/// The router of Qwen3-30B-A3B.
const QWEN3: Router = Router {
    experts: 128,
    top_k: 8,
    scores: RouterScores::Softmax,
    normalises: true,
};
/// The router of gpt-oss-20b.
const GPT_OSS: Router = Router {
    experts: 32,
    top_k: 4,
    ..QWEN3
};
/// A router with all other properties.
const SIGMOID: Router = Router {
    experts: 60,
    top_k: 2,
    scores: RouterScores::Sigmoid,
    normalises: false,
};

/// Returns the matmuls of few rows of experts, for cards with clusters: every format, gathered in
/// one dtype and summed in the other.
pub fn few_rows(card: Card) -> Vec<(String, Subject)> {
    if card.capability < 90 {
        return Vec::new();
    }
    let mut subjects = Vec::new();
    for value in WeightValue::ALL {
        let groups = value.groups().iter();
        for &group in groups.filter(|&&group| group != GroupSize::Channel) {
            for &zeros in value.zero_points() {
                for (rows, blocks, bf16) in [
                    (ExpertRows::Gathered, 1, false),
                    (ExpertRows::Gathered, 2, true),
                    (ExpertRows::Summed, 1, zeros == ZeroPoint::None),
                ] {
                    let gemv = config(value, group, blocks, bf16, rows, &QWEN3);
                    let gemv = GemvConfig {
                        zero_points: zeros != ZeroPoint::None,
                        ..gemv
                    };
                    subjects.push(named(gemv, rows, QWEN3, "", None));
                }
            }
        }
    }
    for (rows, blocks) in [(ExpertRows::Gathered, 1), (ExpertRows::Summed, 2)] {
        for has_short_steps in [false, true] {
            let gemv = config(
                WeightValue::E2m1,
                GroupSize::G32,
                blocks,
                true,
                rows,
                &GPT_OSS,
            );
            let epilogue = match rows {
                ExpertRows::Gathered => Epilogue::ClampedSwiGlu,
                ExpertRows::Summed => Epilogue::None,
            };
            let gemv = GemvConfig {
                epilogue,
                has_short_steps,
                ..gemv
            };
            let steps = if has_short_steps {
                " in short steps"
            } else {
                ""
            };
            subjects.push(named(gemv, rows, GPT_OSS, steps, None));
        }
        let gemv = config(
            WeightValue::Int4,
            GroupSize::G64,
            blocks,
            false,
            rows,
            &SIGMOID,
        );
        subjects.push(named(gemv, rows, SIGMOID, " corrected", Some(F32)));
    }
    subjects
}

fn config(
    value: WeightValue,
    group: GroupSize,
    blocks: usize,
    bf16: bool,
    rows: ExpertRows,
    router: &Router,
) -> GemvConfig {
    let (epilogue, experts) = match rows {
        ExpertRows::Gathered => (Epilogue::SwiGlu, 1),
        ExpertRows::Summed => (Epilogue::None, router.top_k),
    };
    GemvConfig {
        blocks,
        group,
        value,
        zero_points: false,
        bf16,
        sparsity: Sparsity::Dense,
        prologue: Prologue::None,
        epilogue,
        experts: Some(experts),
        has_short_steps: false,
    }
}

/// Returns a matmul with its name; `logits` is the dtype of a router's logits if it is not that of
/// the activations, and its scores are corrected.
fn named(
    gemv: GemvConfig,
    rows: ExpertRows,
    router: Router,
    suffix: &str,
    logits: Option<ActivationDtype>,
) -> (String, Subject) {
    let what = match rows {
        ExpertRows::Gathered => "gathered",
        ExpertRows::Summed => "summed",
    };
    let Router { experts, top_k, .. } = router;
    let name = format!(
        "{what} {} of {top_k} of {experts} experts{suffix}",
        gemv_name(&gemv)
    );
    let of_activations = if gemv.bf16 { BF16 } else { F16 };
    let config = ExpertGemvConfig {
        gemv,
        rows,
        router,
        logits: logits.unwrap_or(of_activations),
    };
    (
        name,
        Subject::ExpertGemv {
            config,
            has_correction: logits.is_some(),
        },
    )
}
