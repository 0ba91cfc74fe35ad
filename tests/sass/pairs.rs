//! A choice of configurations in which every two values of a format occur together, in place of all
//! products of them.
//!
//! A kernel's branches depend on one value of its format or on two, so a fault of machine code that
//! no pair shows would need three. `cargo xtask proof --all` compiles the whole product.

use libtest_mimic::Trial;
use marlin_kernels::inspect::shared_limit;
use marlin_kernels::tile::Config;
use std::collections::BTreeSet;

/// The number of values that a format and a cluster have.
const FACTORS: usize = 6;

/// The values of a configuration, each as a number. Sparsity is the tile's.
fn values(config: &Config) -> [usize; FACTORS] {
    let group = marlin_format::GroupSize::ALL
        .iter()
        .position(|group| *group == config.group)
        .unwrap_or_default();
    [
        group,
        usize::from(config.zero_points),
        usize::from(config.bf16),
        usize::from(config.is_gated()),
        config.value.bits(),
        config.tile.cluster,
    ]
}

/// A value of two factors each.
type Pair = [(usize, usize); 2];

fn pairs(config: &Config) -> impl Iterator<Item = Pair> {
    let values = values(config);
    (0..FACTORS).flat_map(move |second| {
        (0..second).map(move |first| [(first, values[first]), (second, values[second])])
    })
}

/// Returns some of `configs`, those of a tile, in which every pair of values occurs that occurs in
/// `configs`: one after the other the one with the most pairs that have not occurred before.
pub fn cover(configs: &[Config]) -> Vec<Config> {
    let mut missing: BTreeSet<Pair> = configs.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let new = |config: &&Config| pairs(config).filter(|pair| missing.contains(pair)).count();
        // The first of several: `max_by_key` returns the last.
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
            let all = marlin_kernels::tile::configs(capability, shared_limit(capability));
            for of_tile in crate::tiles::grouped(&all) {
                let chosen = cover(&of_tile);
                let [found, wanted] = [&chosen, &of_tile]
                    .map(|configs| configs.iter().flat_map(pairs).collect::<BTreeSet<Pair>>());
                assert_eq!(found, wanted);
                // Eight pairs of a group and another value are in eight configurations at least.
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
