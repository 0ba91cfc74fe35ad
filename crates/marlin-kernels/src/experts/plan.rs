use crate::device::MIN_CAPABILITY;
use crate::matmul::gemv::experts::{self as gemv, ExpertRows};
use crate::plan::cache::PlanCache;
use crate::tile::candidates::Format;
use crate::tile::cost::{Work, estimate_of, format};
use crate::tile::operands::expect_dtypes;
use crate::tile::rows::{BLOCK_ROWS, RowOrder};
use crate::tile::{self, Launch, row_length};
use crate::{Card, QuantProblem};
use marlin_format::Sparsity;

/// The kernels of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerPlan {
    /// Each row is multiplied by itself: two launches.
    Rows(RowPlan),
    /// The rows are sorted by expert and multiplied in tiles: the routing, two matmuls, and the
    /// weighted sums.
    Tiles(TilePlan),
}

/// The numbers of blocks that split K in the [kernels for few rows](crate::matmul::gemv::experts).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowPlan {
    /// Those of gates and ups.
    pub gate_up: usize,
    /// Those of down.
    pub down: usize,
}

/// The launches of the matmuls of a layer, with tiles of as many rows, and so with one routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TilePlan {
    /// The rows of a block: the routing's.
    pub block_rows: usize,
    /// The matmul of gates and ups.
    pub gate_up: Launch,
    /// The matmul of down.
    pub down: Launch,
}

/// Returns the kernels that are expected to be the fastest for a layer, if `tokens` tokens choose
/// their `top_k` experts at random. The weights of both problems have the same number of experts,
/// and M is the number of rows, tokens x `top_k`. `None` if the card is too old, no kernel fits, or
/// the kernels do not take the dtypes, a 2:4 weight or a K that is not a multiple of 8. The same
/// arguments give the same plan, which is cached.
pub fn plan(
    gate_up: &QuantProblem,
    down: &QuantProblem,
    tokens: usize,
    card: &Card,
) -> Option<LayerPlan> {
    static PLANS: PlanCache<(QuantProblem, QuantProblem, usize, Card), Option<LayerPlan>> =
        PlanCache::new();
    PLANS.get((*gate_up, *down, tokens, *card), |key| {
        let (gate_up, down, tokens, card) = key;
        choose(gate_up, down, *tokens, card)
    })
}

fn choose(
    gate_up: &QuantProblem,
    down: &QuantProblem,
    tokens: usize,
    card: &Card,
) -> Option<LayerPlan> {
    let rows = row_plan(gate_up, down, tokens, card)
        .filter(|_| gate_up.m <= MAX_ROWS && gate_up.m * expert_bytes([gate_up, down]) <= MAX_BYTES)
        .map(LayerPlan::Rows);
    rows.or_else(|| tile_plan(gate_up, down, tokens, card).map(LayerPlan::Tiles))
}

/// The largest number of rows that are multiplied each by itself.
const MAX_ROWS: usize = 32;
/// The most bytes that these rows read. On an H200 this way takes 34 us and tiles take 39.5 us for
/// a layer of Qwen3-30B-A3B and four tokens (78 MB), 73 and 76 us of gpt-oss-20b and four tokens
/// (224 MB), 61 and 63 us of Mixtral 8x7B and one token (181 MB), and 107 and 91 us of the same and
/// two tokens (363 MB), of which some have an expert in common.
const MAX_BYTES: usize = 256 << 20;

/// Returns the number of bytes of the values of an expert, with a scale of 16 bits for each group.
fn expert_bytes(problems: [&QuantProblem; 2]) -> usize {
    let bytes = |problem: &QuantProblem| {
        let (spec, values) = (problem.weight.spec(), problem.k() * problem.n());
        values * spec.value.bits() / 8 + 2 * values / spec.scales.group.rows(problem.k()).max(1)
    };
    problems.map(bytes).iter().sum()
}

/// Returns the kernels for few rows of a layer, as [`plan`] describes its arguments; `None` if they
/// do not take the problems.
pub fn row_plan(
    gate_up: &QuantProblem,
    down: &QuantProblem,
    tokens: usize,
    card: &Card,
) -> Option<RowPlan> {
    let top_k = gate_up.m / tokens.max(1);
    Some(RowPlan {
        gate_up: gemv::plan(gate_up, ExpertRows::Gathered, top_k, card)?,
        down: gemv::plan(down, ExpertRows::Summed, top_k, card)?,
    })
}

/// Returns the launches that the model of [`tile`](crate::tile) expects to be the fastest for a
/// layer with tiles, as [`plan`] describes its arguments.
pub fn tile_plan(
    gate_up: &QuantProblem,
    down: &QuantProblem,
    tokens: usize,
    card: &Card,
) -> Option<TilePlan> {
    if ![gate_up, down].into_iter().all(is_taken) {
        return None;
    }
    let top_k = gate_up.m / tokens.max(1);
    let fastest = |problem: &QuantProblem, rows: RowOrder, block_rows: usize, row_blocks: usize| {
        let estimated = launches(problem, rows, card)
            .into_iter()
            .filter(|launch| launch.tile.rows() == block_rows)
            .map(|launch| {
                let work = Work {
                    row_blocks,
                    ..Work::new(problem, &launch.tile)
                };
                let gathers = rows == RowOrder::Gathered && launch.tile.is_wgmma();
                let before = if gathers {
                    gather_microseconds(problem)
                } else {
                    0.0
                };
                (
                    before + estimate_of(problem, &launch.tile, card, &work),
                    launch,
                )
            });
        estimated.min_by(|(a, _), (b, _)| a.total_cmp(b))
    };
    let plans = BLOCK_ROWS.into_iter().filter_map(|block_rows| {
        let blocks = expected_row_blocks(tokens, top_k, gate_up.weight.experts, block_rows);
        let blocks = blocks.ceil() as usize;
        let (first, gate_up) = fastest(gate_up, RowOrder::Gathered, block_rows, blocks)?;
        let (second, down) = fastest(down, RowOrder::Sorted, block_rows, blocks)?;
        let plan = TilePlan {
            block_rows,
            gate_up,
            down,
        };
        Some((first + second, plan))
    });
    plans
        .min_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, plan)| plan)
}

/// The microseconds in which a kernel gathers the rows of a problem: of every launch, and of each
/// value that it reads and writes at about 2 TB/s.
fn gather_microseconds(problem: &QuantProblem) -> f64 {
    2.0 + 2e-6 * (problem.m * problem.k()) as f64
}

/// Returns every launch of a problem with experts: tiles of `mma.sync` of up to 32 rows, and tiles
/// of `wgmma`, for which rows of tokens are gathered by a kernel of their own. The work is known on
/// the device only, so all multiprocessors take part.
pub fn launches(problem: &QuantProblem, rows: RowOrder, card: &Card) -> Vec<Launch> {
    if card.capability < MIN_CAPABILITY {
        return Vec::new();
    }
    let tiles = |rows| {
        of_problem(problem, rows)
            .configs(card.capability, card.shared_limit)
            .filter(|config| config.takes_columns(problem.n()))
            .map(|config| config.tile)
    };
    let gathered =
        tiles(RowOrder::Sorted).filter(move |tile| rows == RowOrder::Gathered && tile.is_wgmma());
    tiles(rows)
        .chain(gathered)
        .map(|tile| Launch {
            tile,
            blocks: card.multiprocessors.min(tile::MAX_BLOCKS),
        })
        .collect()
}

/// Returns true if the kernels take the dtypes and the format of a problem.
fn is_taken(problem: &QuantProblem) -> bool {
    expect_dtypes(problem).is_ok()
        && problem.weight.format.sparsity == Sparsity::Dense
        && row_length(problem.k()) == problem.k()
}

/// Returns the part of a configuration that a problem with experts determines.
pub(super) fn of_problem(problem: &QuantProblem, rows: RowOrder) -> Format {
    Format {
        rows,
        ..format(problem)
    }
}

/// Returns the expected number of blocks of rows if each of `tokens` tokens chooses `top_k` of
/// `experts` experts at random: an expert's number of rows has a binomial distribution.
pub fn expected_row_blocks(tokens: usize, top_k: usize, experts: usize, block_rows: usize) -> f64 {
    let chance = top_k as f64 / experts.max(1) as f64;
    let block_rows = block_rows.max(1);
    if chance >= 1.0 {
        return (experts * tokens.div_ceil(block_rows)) as f64;
    }
    // Logarithms, because the probability of no row is too small for many tokens.
    let mut log = tokens as f64 * (1.0 - chance).ln();
    let mut blocks = 0.0;
    for rows in 0..=tokens {
        blocks += log.exp() * rows.div_ceil(block_rows) as f64;
        log += ((tokens - rows) as f64 / (rows + 1) as f64 * chance / (1.0 - chance)).ln();
    }
    experts as f64 * blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ActivationDtype, Epilogue};
    use marlin_format::{GroupSize, QuantSpec, WeightDescriptor, WeightLayout, WeightValue};

    const H100: Card = Card::assumed(90, 132, 227 * 1024);
    const RTX_4090: Card = Card::assumed(89, 128, 99 * 1024);

    /// Returns the matmuls of a layer of Qwen3-30B-A3B.
    fn layer(tokens: usize) -> [QuantProblem; 2] {
        let weight = |k, n| {
            WeightDescriptor::plain(QuantSpec::int4(GroupSize::G128), k, n)
                .with_experts(128)
                .in_layout(WeightLayout::Tile)
        };
        [(2048, 1536, Epilogue::SwiGlu), (768, 2048, Epilogue::None)].map(|(k, n, epilogue)| {
            QuantProblem::new(8 * tokens, weight(k, n), ActivationDtype::F16)
                .with_epilogue(epilogue)
        })
    }

    #[test]
    fn tiles_have_more_rows_with_more_tokens() {
        for (card, most) in [(H100, 128), (RTX_4090, 32)] {
            for (tokens, rows) in [(1, 8), (16, 8), (4096, most)] {
                let [gate_up, down] = layer(tokens);
                let plan = tile_plan(&gate_up, &down, tokens, &card);
                let found = plan.map(|plan| {
                    [
                        plan.block_rows,
                        plan.gate_up.tile.rows(),
                        plan.down.tile.rows(),
                    ]
                });
                assert_eq!(found, Some([rows; 3]), "{tokens} tokens on {card:?}");
            }
        }
        let [gate_up, down] = layer(1);
        let old = Card::assumed(75, 40, 64 * 1024);
        assert_eq!(plan(&gate_up, &down, 1, &old), None);
    }

    #[test]
    fn most_experts_have_one_block() {
        let layer = |value, group, [experts, hidden, intermediate]: [usize; 3]| {
            move |rows: usize| {
                let weight = |k, n| {
                    WeightDescriptor::plain(QuantSpec::new(value, group), k, n)
                        .with_experts(experts)
                        .in_layout(WeightLayout::Tile)
                };
                let problem = |k, n| QuantProblem::new(rows, weight(k, n), ActivationDtype::F16);
                let gate_up = problem(hidden, 2 * intermediate);
                let down = problem(intermediate, hidden);
                [gate_up.with_epilogue(Epilogue::SwiGlu), down]
            }
        };
        let int4 = (WeightValue::Int4, GroupSize::G128);
        let qwen = layer(int4.0, int4.1, [128, 2048, 768]);
        let mixtral = layer(int4.0, int4.1, [8, 4096, 14336]);
        let gpt_oss = layer(WeightValue::E2m1, GroupSize::G32, [32, 2880, 2880]);
        // The fastest on an H200.
        for (name, [gate_up, down], tokens, rows) in [
            ("Mixtral", mixtral(2 * 64), 64, 24),
            ("Mixtral", mixtral(2 * 128), 128, 40),
            ("Mixtral", mixtral(2 * 256), 256, 80),
            ("Mixtral", mixtral(2 * 1024), 1024, 128),
            ("Qwen3", qwen(8 * 128), 128, 16),
            ("Qwen3", qwen(8 * 256), 256, 24),
            ("Qwen3", qwen(8 * 512), 512, 40),
            ("Qwen3", qwen(8 * 1024), 1024, 80),
            ("gpt-oss", gpt_oss(4 * 64), 64, 16),
            ("gpt-oss", gpt_oss(4 * 128), 128, 24),
            ("gpt-oss", gpt_oss(4 * 256), 256, 40),
        ] {
            let plan = tile_plan(&gate_up, &down, tokens, &H100);
            assert_eq!(
                plan.map(|plan| plan.block_rows),
                Some(rows),
                "{name}, {tokens} tokens"
            );
        }
    }

    #[test]
    fn few_rows_are_multiplied_each_by_itself() {
        let of = |tokens, card: &Card| {
            let [gate_up, down] = layer(tokens);
            plan(&gate_up, &down, tokens, card)
        };
        let rows = |gate_up, down| Some(LayerPlan::Rows(RowPlan { gate_up, down }));
        // All blocks are resident: 8 rows x 12 tiles x 2 gates and ups x 2 x 4 warps.
        assert_eq!(of(1, &H100), rows(2, 1));
        assert_eq!(of(4, &H100), rows(1, 1));
        assert!(matches!(of(5, &H100), Some(LayerPlan::Tiles(_))));
        assert!(
            matches!(of(1, &RTX_4090), Some(LayerPlan::Tiles(_))),
            "a card without clusters"
        );
        let of_mixtral = |tokens: usize| {
            let weight = |k, n| {
                WeightDescriptor::plain(QuantSpec::int4(GroupSize::G128), k, n)
                    .with_experts(8)
                    .in_layout(WeightLayout::Tile)
            };
            let problem = |k, n| QuantProblem::new(2 * tokens, weight(k, n), ActivationDtype::F16);
            let gate_up = problem(4096, 28672).with_epilogue(Epilogue::SwiGlu);
            plan(&gate_up, &problem(14336, 4096), tokens, &H100)
        };
        assert_eq!(of_mixtral(1), rows(1, 4));
        assert!(
            matches!(of_mixtral(2), Some(LayerPlan::Tiles(_))),
            "rows with an expert in common"
        );
    }

    #[test]
    fn expected_blocks_of_few_tokens_are_those_of_the_distinct_experts() {
        // 128 experts, of which a token has 8: 128 (1 - (1 - 1/16)^tokens) are distinct.
        for (tokens, distinct) in [(1, 8.0), (4, 29.12), (16, 82.42)] {
            let found = expected_row_blocks(tokens, 8, 128, 64);
            assert!((found - distinct).abs() < 0.01, "{tokens}: {found}");
        }
        assert_eq!(expected_row_blocks(17, 8, 8, 16), 16.0);
        // Every expert has 256 rows, 16 on either side of which are rare: one more block or none.
        let many = expected_row_blocks(4096, 8, 128, 32);
        assert!((128.0 * 8.3..128.0 * 8.7).contains(&many), "{many}");
    }
}
