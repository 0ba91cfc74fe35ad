use marlin_kernels::inspect::{Routine, digest as digest_of_routine, digest_of};

/// The sources of the kernels outside the matmuls.
const SOURCES: [&str; 29] = [
    include_str!("attention/block.rs"),
    include_str!("attention/finish.rs"),
    include_str!("attention/kernel.rs"),
    include_str!("attention/lane_group.rs"),
    include_str!("attention/launch.rs"),
    include_str!("attention/plan.rs"),
    include_str!("attention/shape.rs"),
    include_str!("attention/softmax.rs"),
    include_str!("attention/stage.rs"),
    include_str!("cache.rs"),
    include_str!("embed.rs"),
    include_str!("flash/config.rs"),
    include_str!("flash/launch.rs"),
    include_str!("flash/mma_sync.rs"),
    include_str!("flash/softmax.rs"),
    include_str!("flash/tiles.rs"),
    include_str!("flash/wgmma.rs"),
    include_str!("glu.rs"),
    include_str!("likelihood.rs"),
    include_str!("norm.rs"),
    include_str!("rope_cache.rs"),
    include_str!("row.rs"),
    include_str!("sample/filter.rs"),
    include_str!("sample/floats.rs"),
    include_str!("sample/kernel.rs"),
    include_str!("sample/launch.rs"),
    include_str!("sample/logits.rs"),
    include_str!("sample/noise.rs"),
    include_str!("shape.rs"),
];

/// Returns a digest of all kernels of a decode step, including the matmuls; [`marlin_kernels::inspect::digest`] is that of one routine.
pub fn digest() -> String {
    let routines = Routine::ALL.map(digest_of_routine);
    let sources: Vec<&str> = SOURCES.into_iter().chain(routines.iter().map(String::as_str)).collect();
    digest_of(&sources)
}
