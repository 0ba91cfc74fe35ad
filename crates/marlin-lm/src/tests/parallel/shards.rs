//! Tests of what each rank has, and of models and devices that do not fit.

use std::convert::Infallible;

use proptest::prelude::*;

use super::*;
use crate::architectures::{FeedForwardShape, MixerShape, ProjectionShape};
use crate::parallel::{RowGroups, Shard};

/// Returns the shards of a config whose row-split layers all have these groups.
fn shards(
    config: &ModelConfig,
    count: usize,
    group: Option<GroupSize>,
) -> Result<Vec<Shard>, ParallelError> {
    let groups = RowGroups::of(config, |_| false, |_| Ok::<_, Infallible>(group));
    let Ok(groups) = groups;
    Shard::all(config, count, &groups)
}

/// Checks that the ranks' parts of a projection are disjoint and complete, but for heads that
/// several ranks have, and that rows begin groups of `group`.
fn check_parts(parts: &[ProjectionShape], whole: &ProjectionShape, group: usize, repeats: usize) {
    let splits_rows = whole.kind.is_residual();
    let mut row = 0;
    let mut columns = vec![0; whole.outputs.len()];
    for (rank, shape) in parts.iter().enumerate() {
        let part = shape.part.as_ref().unwrap();
        assert_eq!((part.k, &part.outputs), (whole.k, &whole.outputs));
        assert_eq!(shape.k, part.rows.len());
        let widths: Vec<usize> = part.columns.iter().map(ExactSizeIterator::len).collect();
        assert_eq!(shape.outputs, widths);
        if splits_rows {
            assert_eq!(part.rows.start, row);
            assert!(part.rows.start.is_multiple_of(group));
            row = part.rows.end;
            assert_eq!(shape.bias, whole.bias && rank == 0);
            continue;
        }
        assert_eq!(part.rows, 0..whole.k);
        for (output, (range, end)) in part.columns.iter().zip(&mut columns).enumerate() {
            // Keys and values are repeated.
            let is_new = output == 0 || rank.is_multiple_of(repeats) || whole.outputs.len() == 2;
            let expected = if is_new { *end } else { *end - range.len() };
            assert_eq!(range.start, expected, "rank {rank}, output {output}");
            *end = range.end;
        }
    }
    match splits_rows {
        true => assert_eq!(row, whole.k),
        false => assert_eq!(columns, whole.outputs),
    }
}

proptest! {
    #[test]
    fn parts_are_disjoint_complete_and_begin_groups(
        count in 2usize..9, heads in 1usize..5, kv in 1usize..9, groups in 1usize..40,
        rest in 0usize..32, bias: bool, tied: bool,
    ) {
        let (group, heads) = (32, heads * count);
        prop_assume!(heads.is_multiple_of(kv));
        let intermediate = groups * group - rest;
        let config = config_with(json!({
            "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 32,
            "intermediate_size": intermediate, "vocab_size": 300 + rest, "mlp_bias": bias,
            "attention_bias": bias, "tie_word_embeddings": tied,
        }));
        let found = shards(&config, count, Some(GroupSize::G32));
        if !kv.is_multiple_of(count) && !count.is_multiple_of(kv) {
            prop_assert!(matches!(found, Err(ParallelError::KeyValueHeads { .. })), "{found:?}");
            return Ok(());
        }
        if groups < count {
            prop_assert!(matches!(found, Err(ParallelError::Groups { .. })), "{found:?}");
            return Ok(());
        }
        let shards = found.unwrap();
        let whole = config.block(1);
        let blocks: Vec<_> = shards.iter().map(|shard| shard.block(1)).collect();
        for (index, whole) in whole.projections().enumerate() {
            let parts: Vec<_> = blocks
                .iter()
                .map(|block| block.projections().nth(index).unwrap().clone())
                .collect();
            check_parts(&parts, whole, group, (count / kv).max(1));
        }
        let mut token = 0;
        for shard in &shards {
            shard.config().validate().unwrap();
            let head = shard.head().unwrap();
            let part = head.part.unwrap();
            prop_assert_eq!(part.columns.len(), 1);
            prop_assert_eq!(part.columns[0].start, token);
            prop_assert_eq!(head.dims, [config.hidden_size, part.columns[0].len()]);
            prop_assert_eq!(head.name == "lm_head", !tied);
            token = part.columns[0].end;
        }
        prop_assert_eq!(token, config.vocab_size);
    }
}

#[test]
fn llama_2_7b_over_four_ranks_has_22_22_21_and_21_groups() {
    let config = config_with(json!({
        "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000,
    }));
    let groups: Vec<usize> = shards(&config, 4, Some(GroupSize::G128))
        .unwrap()
        .iter()
        .map(|shard| shard.config().intermediate_size / 128)
        .collect();
    assert_eq!(groups, [22, 22, 21, 21]);
}

#[test]
fn one_rank_has_the_whole_model() {
    for architecture in Architecture::ALL {
        let config = config_of(architecture, json!({}));
        let shards = shards(&config, 1, None).unwrap();
        assert_eq!(shards, [Shard::whole(&config)]);
        assert_eq!(shards[0].config(), &config);
        assert_eq!(shards[0].block(0), config.block(0));
    }
}

#[test]
fn experts_are_split_by_their_inner_width() {
    let config = config_of(
        Architecture::Qwen2Moe,
        json!({
            "head_dim": 32, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160,
        }),
    );
    let shards = shards(&config, 2, Some(GroupSize::G32)).unwrap();
    let found: Vec<_> = shards
        .iter()
        .map(|shard| {
            let block = shard.block(0);
            let (MixerShape::Attention(_), FeedForwardShape::Experts(experts)) =
                (block.mixer, block.feed_forward)
            else {
                panic!("a block without experts")
            };
            let part = experts.part.unwrap();
            let shared = experts.shared.unwrap().mlp.down.part.unwrap().rows;
            (
                part.features,
                part.intermediate,
                shared,
                part.has_down_biases,
            )
        })
        .collect();
    assert_eq!(
        found,
        [(0..64, 96, 0..96, true), (64..96, 96, 96..160, false)]
    );
}

#[test]
fn numbers_of_devices_that_do_not_fit_are_refused() {
    // Six query heads, two key and value heads.
    let config = config();
    let found = shards(&config, 4, None);
    assert_eq!(
        found,
        Err(ParallelError::Heads {
            heads: 6,
            count: 4,
            fitting: vec![1, 2, 6]
        })
    );
    assert!(
        found
            .unwrap_err()
            .to_string()
            .contains("numbers that fit: 1, 2, 6"),
        "the numbers are named"
    );
    let more_than_heads = shards(&config, 12, None);
    assert!(matches!(more_than_heads, Err(ParallelError::Heads { .. })));
    assert_eq!(
        shards(&config, 3, None),
        Err(ParallelError::KeyValueHeads {
            kv_heads: 2,
            count: 3,
            fitting: vec![1, 2, 6]
        })
    );
    // 52 rows of down are one group of 64, and 36 rows of o are one, too.
    let layer = |name: &str| format!("model.layers.0.{name}");
    assert_eq!(
        shards(&config, 2, Some(GroupSize::G64)),
        Err(ParallelError::Groups {
            layer: layer("mlp.down_proj"),
            groups: 1,
            rows: 64,
            count: 2
        })
    );
    assert_eq!(
        shards(&config, 2, Some(GroupSize::G32)),
        Err(ParallelError::Border {
            layer: layer("self_attn.o_proj"),
            rank: 1,
            count: 2,
            row: 18,
            group: 32
        })
    );
    assert_eq!(shards(&config, 0, None), Err(ParallelError::NoDevices));
}

#[test]
fn a_folder_that_cannot_be_split_is_refused_with_the_layer() {
    let mut rng = rng();
    let config = config();
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    let refusal = |dir: &Path, count| match open_split(dir, count) {
        Err(ModelError::Parallel(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(refusal(&dir, 0), ParallelError::NoDevices);
    assert!(matches!(refusal(&dir, 4), ParallelError::Heads { .. }));
    assert!(matches!(refusal(&dir, 12), ParallelError::Heads { .. }));
    let grouped = config_with(json!({ "head_dim": 32, "intermediate_size": 64 }));
    let (_parent, dir) = temporary();
    let weights = random_weights(&grouped, &mut rng);
    write_quantized(&dir, &grouped, &weights, |layer| {
        layer
            .ends_with("_proj")
            .then_some(QuantSpec::int4(GroupSize::G64))
    });
    let error = refusal(&dir, 2).to_string();
    assert!(error.contains("model.layers.0.mlp.down_proj"), "{error}");
}
