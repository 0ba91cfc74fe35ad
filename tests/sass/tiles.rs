//! The configurations of the Marlin kernels.

use crate::{Card, records};
use libtest_mimic::{Failed, Trial};
use marlin_format::{WeightValue, ZeroPoint};
use marlin_kernels::Epilogue;
use marlin_kernels::inspect::shared_limit;
use marlin_kernels::tile::{Config, RowOrder, Tile, configs};
use serde_json::Value;

/// The compute capability of the cards with records.
pub const RECORDED: u32 = 90;

/// Returns the name of a configuration: tile, cluster, stages, bit width, group, dtype, zero
/// points, epilogue.
pub fn name(config: &Config) -> String {
    let tile = &config.tile;
    let cluster = if tile.is_clustered() {
        format!(" clusters of {}", tile.cluster)
    } else {
        String::new()
    };
    format!(
        "{}{cluster} {} stages {}",
        unit(config),
        tile.stages,
        format(config)
    )
}

/// Returns the name of a configuration's format.
pub fn format(config: &Config) -> String {
    let dtype = if config.bf16 { "bf16" } else { "f16" };
    let zeros = if config.zero_points { " zeros" } else { "" };
    let epilogue = epilogue(config.epilogue);
    format!("{} {} {dtype}{zeros}{epilogue}", config.value, config.group)
}

/// Returns the end of a configuration's name that is its epilogue.
pub fn epilogue(epilogue: Epilogue) -> &'static str {
    match epilogue {
        Epilogue::None => "",
        Epilogue::SwiGlu => " swiglu",
        Epilogue::ClampedSwiGlu => " clamped swiglu",
    }
}

/// Returns the name of a tile, without its stages and cluster size.
pub fn unit(config: &Config) -> String {
    let tile = &config.tile;
    let order = match config.rows {
        RowOrder::InOrder => "",
        RowOrder::Gathered => " gathered",
        RowOrder::Sorted => " sorted",
    };
    format!(
        "{}x{}x{} {}{order}",
        tile.rows(),
        tile.columns(),
        tile.depth(),
        tile.product
    )
}

/// Returns every configuration of a card without experts, by tile.
pub fn by_tile(card: Card) -> Vec<Vec<Config>> {
    let limit = shared_limit(card.capability);
    grouped(&configs(card.capability, limit, RowOrder::InOrder))
}

/// Returns every configuration of a card with experts, by tile.
pub fn with_experts(card: Card) -> Vec<Vec<Config>> {
    let limit = shared_limit(card.capability);
    let orders = [RowOrder::Gathered, RowOrder::Sorted];
    grouped(
        &orders
            .map(|order| configs(card.capability, limit, order))
            .concat(),
    )
}

/// Groups configurations by tile, regardless of stages and cluster size.
pub fn grouped(configs: &[Config]) -> Vec<Vec<Config>> {
    let tile = |config: &Config| Tile {
        stages: 0,
        cluster: 1,
        ..config.tile
    };
    let mut groups: Vec<(Tile, Vec<Config>)> = Vec::new();
    for config in configs {
        match groups.iter_mut().find(|(of, _)| *of == tile(config)) {
            Some((_, group)) => group.push(*config),
            None => groups.push((tile(config), vec![*config])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Returns the configurations of a card for which `benches/records` has times. The ledger has their
/// digests, which show whether the times are stale.
pub fn recorded(card: Card) -> Result<Vec<Config>, String> {
    let mut found = Vec::new();
    if card.capability != RECORDED {
        return Ok(found);
    }
    let limit = shared_limit(card.capability);
    let all = configs(card.capability, limit, RowOrder::InOrder);
    for path in records::paths()? {
        for row in records::rows(&path)? {
            found.extend(all.iter().filter(|config| is_of(&row, config)).copied());
        }
    }
    Ok(found)
}

/// Returns true if a row of a record has the time of a configuration.
fn is_of(row: &Value, config: &Config) -> bool {
    !config.is_gated()
        && row["bits"] == config.value.bits()
        && match row["value"].as_str() {
            Some(value) => value == config.value.to_string(),
            None => !config.value.is_float(),
        }
        && row["group"] == config.group.as_i64()
        && row["zero_points"] == config.zero_points
        && row["dtype"] == config.dtype().name()
        && row["kernel"] == format!("marlin ({})", config.tile)
}

/// Returns a test that every format has a configuration on a card. The other tests would pass
/// without any configuration.
pub fn every_format(card: Card) -> Trial {
    Trial::test(
        format!("{}::every_format_has_a_configuration", card.arch),
        move || {
            let limit = shared_limit(card.capability);
            let configs = configs(card.capability, limit, RowOrder::InOrder);
            let values = WeightValue::ALL
                .into_iter()
                .flat_map(|bits| bits.sparsities().iter().map(move |&of| (bits, of)));
            for (bits, sparsity, group) in values.flat_map(|(bits, sparsity)| {
                bits.groups().iter().map(move |&of| (bits, sparsity, of))
            }) {
                for (zero_point, bf16) in bits
                    .zero_points()
                    .iter()
                    .flat_map(|&zero_point| [(zero_point, false), (zero_point, true)])
                {
                    let zero_points = zero_point == ZeroPoint::Integer;
                    let is_there = |config: &Config| {
                        let Config {
                            tile,
                            group: of,
                            value: width,
                            zero_points: zeros,
                            bf16: dtype,
                            ..
                        } = *config;
                        (of, width, zeros, dtype, tile.sparsity())
                            == (group, bits, zero_points, bf16, sparsity)
                    };
                    if !configs.iter().any(is_there) {
                        return Err(Failed::from(format!(
                            "no configuration of {sparsity} {bits} weights fits {limit} bytes of shared memory with group {group}, zero points \
                         {zero_points}, bf16 {bf16}"
                        )));
                    }
                }
            }
            Ok(())
        },
    )
}
