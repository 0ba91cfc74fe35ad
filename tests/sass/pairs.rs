//! A choice of configurations in which every two values of a format occur together, in place of all
//! products of them.
//!
//! A kernel's branches depend on one or two values of its format. A fault of the machine code that
//! no pair shows would depend on three values. `cargo xtask proof --all` compiles the whole
//! product.

use libtest_mimic::Trial;
use marlin_format::{GroupSize, WeightValue};
use marlin_kernels::inspect::shared_limit;
use marlin_kernels::tile::Config;
use std::collections::BTreeSet;

/// The number of values of a configuration: those of the format, the cluster size and the order of
/// rows.
const FACTORS: usize = 7;

/// Returns the values of a configuration, each as a number. Sparsity is not among them, as it
/// belongs to the tile.
fn values(config: &Config) -> [usize; FACTORS] {
    let group = GroupSize::ALL
        .iter()
        .position(|group| *group == config.group)
        .unwrap_or_default();
    let value = WeightValue::ALL
        .iter()
        .position(|value| *value == config.value)
        .unwrap_or_default();
    [
        group,
        usize::from(config.zero_points),
        usize::from(config.bf16),
        config.epilogue as usize,
        value,
        config.tile.cluster,
        config.rows as usize,
    ]
}

/// The indices of two factors, each with its value.
type Pair = [(usize, usize); 2];

fn pairs(config: &Config) -> impl Iterator<Item = Pair> {
    let values = values(config);
    (0..FACTORS).flat_map(move |second| {
        (0..second).map(move |first| [(first, values[first]), (second, values[second])])
    })
}

/// Returns a subset of the configurations of one tile in which every pair of values occurs that
/// occurs in `configs`. The choice is greedy: each step takes the configuration with the most pairs
/// that have not occurred before.
pub fn cover(configs: &[Config]) -> Vec<Config> {
    let mut missing: BTreeSet<Pair> = configs.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let new = |config: &&Config| pairs(config).filter(|pair| missing.contains(pair)).count();
        // `max_by_key` returns the last of several maxima; `rev` makes that the first.
        let Some(best) = configs.iter().rev().max_by_key(new) else {
            break;
        };
        pairs(best).for_each(|pair| {
            missing.remove(&pair);
        });
        chosen.push(*best);
    }
    chosen
}

pub fn trials() -> Vec<Trial> {
    let trial = Trial::test("pairs::every_pair_is_covered_by_few", || {
        for capability in [80, 90] {
            let all = marlin_kernels::tile::configs(
                capability,
                shared_limit(capability),
                marlin_kernels::tile::RowOrder::InOrder,
            );
            for of_tile in crate::tiles::grouped(&all) {
                let chosen = cover(&of_tile);
                let [found, wanted] = [&chosen, &of_tile]
                    .map(|configs| configs.iter().flat_map(pairs).collect::<BTreeSet<Pair>>());
                assert_eq!(found, wanted);
                // Each configuration holds one pair of a group and another value, so eight pairs
                // need at least eight configurations.
                let first = of_tile.first().map(crate::tiles::unit).unwrap_or_default();
                assert!(
                    chosen.len() <= of_tile.len() && chosen.len() <= 40,
                    "{first}: {} of {}",
                    chosen.len(),
                    of_tile.len()
                );
            }
        }
        Ok(())
    });
    vec![trial]
}
