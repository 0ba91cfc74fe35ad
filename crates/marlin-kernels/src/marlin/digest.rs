//! Which kernels a measurement is of.

use sha2::{Digest, Sha256};

/// The kernel. The choice among its tiles is left out: a record names the tile of each row.
const SOURCES: [&str; 11] = [
    include_str!("../ptx.rs"),
    include_str!("../ptx/wgmma.rs"),
    include_str!("config.rs"),
    include_str!("copy.rs"),
    include_str!("epilogue.rs"),
    include_str!("exchange.rs"),
    include_str!("fragment.rs"),
    include_str!("kernel.rs"),
    include_str!("pipeline.rs"),
    include_str!("stripe.rs"),
    include_str!("warpgroup.rs"),
];

/// A digest of the kernels' sources without their comments. It changes where the code does, so that a record can be told from a stale one.
///
/// It is not of the CUDA text that CubeCL makes of them: that is in another order each time.
pub fn digest() -> String {
    let mut digest = Sha256::new();
    for line in SOURCES.iter().flat_map(|source| source.lines()).map(str::trim).filter(|line| !line.starts_with("//")) {
        digest.update(line);
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
