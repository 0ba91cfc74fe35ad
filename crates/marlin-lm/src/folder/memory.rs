//! The memory that a model takes, before any of its tensors is read.

use std::collections::HashMap;

use burn::tensor::{DType, Device, FloatDType};
use burn_marlin::device::{device_name, free_memory, is_host};
use marlin_format::checkpoint::{Checkpoint, is_float};

use crate::ModelError;
use crate::model::KvCache;
use crate::parallel::{ParallelError, Shard};

/// The bytes that the part of a rank takes.
#[derive(Debug, Clone, Copy, Default)]
struct Needed {
    /// Those of the weights while they are loaded.
    weights: usize,
    /// Those of a cache of one sequence, and of the rotary tables.
    cache: usize,
}

/// Checks that each device has room for its part of the weights, a cache of one sequence, and the
/// rotary tables, and once more for the largest weight of a block's experts, which is there twice
/// while it is laid out for the device. Devices of the host share its memory. It is called before
/// any tensor is read, since a header and a config can declare any size.
pub(super) fn check_memory(
    shards: &[Shard],
    checkpoint: &Checkpoint,
    dtype: FloatDType,
    max_len: usize,
    devices: &[Device],
) -> Result<(), ModelError> {
    let needed = shards.iter().map(|shard| {
        // The tables hold cosines and sines in f32, half a head each.
        let config = shard.config();
        let tables = max_len.saturating_mul(config.head_dim).saturating_mul(4);
        let cache = KvCache::size_bytes(config, 1, max_len, dtype).saturating_add(tables);
        Needed {
            weights: weight_bytes(shard, checkpoint, dtype),
            cache,
        }
    });
    let needed: Vec<Needed> = match devices.first() {
        Some(first) if is_host(first) => {
            vec![needed.fold(Needed::default(), |all, of_rank| Needed {
                weights: all.weights.saturating_add(of_rank.weights),
                cache: all.cache.saturating_add(of_rank.cache),
            })]
        }
        _ => needed.collect(),
    };
    for (rank, (Needed { weights, cache }, device)) in needed.into_iter().zip(devices).enumerate() {
        let Some(free) = free_memory(device) else {
            continue;
        };
        if weights.saturating_add(cache) <= free {
            continue;
        }
        return Err(match shards.len() {
            1 => ModelError::TooLarge {
                weights,
                positions: max_len,
                cache,
                free,
            },
            _ => ModelError::Parallel(ParallelError::Memory {
                rank,
                device: device_name(device),
                weights,
                positions: max_len,
                cache,
                free,
            }),
        });
    }
    Ok(())
}

/// Returns the bytes of a rank's part of the weights while they are loaded.
fn weight_bytes(shard: &Shard, checkpoint: &Checkpoint, dtype: FloatDType) -> usize {
    let (size, shares) = (DType::from(dtype).size(), shares(shard, checkpoint));
    let bytes = |name: &str| {
        let info = checkpoint.info(name)?;
        let elements: usize = info.shape.iter().product();
        let bytes = elements.saturating_mul(if is_float(info.dtype) || is_scale(name) {
            size
        } else {
            info.dtype.bitsize().div_ceil(8)
        });
        Some(match share_of(name, &shares) {
            None => bytes,
            Some(share) => (bytes as f64 * share).ceil() as usize,
        })
    };
    let sizes = || {
        checkpoint
            .names()
            .filter_map(|name| Some((name, bytes(name)?)))
    };
    sizes()
        .map(|(_, bytes)| bytes)
        .fold(largest_experts(sizes()), usize::saturating_add)
}

/// Returns the share of each layer and each stack of experts that a rank has, by name; none of a
/// whole model.
fn shares(shard: &Shard, checkpoint: &Checkpoint) -> HashMap<String, f64> {
    let mut shares = HashMap::new();
    if shard.is_whole() {
        return shares;
    }
    for layer in shard
        .projections(|name| checkpoint.contains_layer(name))
        .flatten()
    {
        let Some(part) = &layer.part else {
            continue;
        };
        if let Some(stack) = layer.stack {
            shares.insert(stack.name, part.share());
        }
        // The rank has the whole embedding, and its rows of the head once more.
        let whole = if layer.name == "model.embed_tokens" {
            1.0
        } else {
            0.0
        };
        shares.insert(layer.name, whole + part.share());
    }
    shares
}

/// Returns the share of a tensor that a rank has; `None` for a whole tensor.
fn share_of(tensor: &str, shares: &HashMap<String, f64>) -> Option<f64> {
    let stack = ["_blocks", "_scales", "_bias"]
        .iter()
        .find_map(|end| tensor.strip_suffix(end));
    let layer = tensor.rsplit_once('.').map(|(layer, _)| layer);
    let names = [Some(tensor), stack, layer].into_iter().flatten();
    names.filter_map(|name| shares.get(name)).copied().next()
}

/// Returns true if a tensor holds scales, which on a device have the dtype of the activations
/// whatever the file has.
fn is_scale(name: &str) -> bool {
    [".scales", "_scale", "_scales"]
        .iter()
        .any(|end| name.ends_with(end))
}

/// Returns the size of the largest weight of all experts of a block: that of gates and ups, or that
/// of down. `tensors` are the names and sizes of the tensors of a checkpoint.
fn largest_experts<'a>(tensors: impl Iterator<Item = (&'a str, usize)>) -> usize {
    let mut sizes = HashMap::<(&str, bool), usize>::new();
    for (name, bytes) in tensors {
        let Some((block, layer)) = name.split_once(".experts.") else {
            continue;
        };
        let is_down = layer
            .split('.')
            .any(|part| part == "w2" || part.starts_with("down_proj"));
        let size = sizes.entry((block, is_down)).or_default();
        *size = size.saturating_add(bytes);
    }
    sizes.into_values().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{is_scale, largest_experts};

    #[test]
    fn scales_of_every_format_are_known_by_name() {
        let experts = "model.layers.0.mlp.experts";
        for name in [
            "model.layers.0.mlp.up_proj.scales".to_owned(),
            "model.layers.0.mlp.up_proj.weight_scale".to_owned(),
            format!("{experts}.gate_up_proj_scales"),
        ] {
            assert!(is_scale(&name), "{name}");
        }
        for end in [
            "gate_up_proj_blocks",
            "0.up_proj.weight_packed",
            "0.up_proj.qzeros",
        ] {
            assert!(!is_scale(&format!("{experts}.{end}")), "{end}");
        }
    }

    #[test]
    fn the_largest_experts_are_those_of_one_matmul_of_one_block() {
        let separate = [
            ("model.layers.0.mlp.experts.0.gate_proj.qweight", 100),
            ("model.layers.0.mlp.experts.0.up_proj.qweight", 100),
            ("model.layers.0.mlp.experts.0.down_proj.qweight", 150),
            ("model.layers.1.mlp.experts.0.gate_proj.qweight", 90),
            ("model.layers.1.mlp.gate.weight", 1000),
        ];
        assert_eq!(largest_experts(separate.into_iter()), 200);
        let mixtral = [
            ("model.layers.0.block_sparse_moe.experts.0.w1.weight", 7),
            ("model.layers.0.block_sparse_moe.experts.0.w2.weight", 20),
            ("model.layers.0.block_sparse_moe.experts.0.w3.weight", 7),
        ];
        assert_eq!(largest_experts(mixtral.into_iter()), 20);
        let stacked = [
            ("model.layers.0.mlp.experts.gate_up_proj_blocks", 64),
            ("model.layers.0.mlp.experts.gate_up_proj_scales", 4),
            ("model.layers.0.mlp.experts.down_proj_blocks", 32),
        ];
        assert_eq!(largest_experts(stacked.into_iter()), 68);
        assert_eq!(largest_experts([("model.norm.weight", 5)].into_iter()), 0);
    }
}
