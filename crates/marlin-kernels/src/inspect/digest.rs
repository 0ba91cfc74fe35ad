//! The version of the kernels that a measurement is of.

use sha2::{Digest, Sha256};

/// A routine whose figures are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Routine {
    /// [`mma_sync`](crate::matmul::mma_sync).
    MmaSync,
    /// [`wgmma`](crate::matmul::wgmma).
    Wgmma,
    /// [`gemv`](crate::matmul::gemv).
    Gemv,
    /// [`head`](crate::matmul::head).
    Head,
}

/// Sources that the tile kernels share.
const TILE: [&str; 8] = [
    include_str!("../tile/config.rs"),
    include_str!("../tile/epilogue.rs"),
    include_str!("../tile/exchange.rs"),
    include_str!("../tile/fragment.rs"),
    include_str!("../tile/lengths.rs"),
    include_str!("../tile/outputs.rs"),
    include_str!("../tile/stripe.rs"),
    include_str!("../tile/workspace.rs"),
];

impl Routine {
    /// Every routine.
    pub const ALL: [Self; 4] = [Self::MmaSync, Self::Wgmma, Self::Gemv, Self::Head];

    /// The name of its folder.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MmaSync => "mma_sync",
            Self::Wgmma => "wgmma",
            Self::Gemv => "gemv",
            Self::Head => "head",
        }
    }

    /// The routine of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|routine| routine.name() == name)
    }

    /// The sources of its kernels. The choice among tiles is left out: a record names the tile of each row.
    fn sources(self) -> Vec<&'static str> {
        match self {
            Self::MmaSync => [
                &TILE[..],
                &[
                    include_str!("../matmul/mma_sync/copy.rs"),
                    include_str!("../matmul/mma_sync/kernel.rs"),
                    include_str!("../matmul/mma_sync/multiply.rs"),
                    include_str!("../matmul/mma_sync/multiply_sparse.rs"),
                    include_str!("../ptx/copy.rs"),
                    include_str!("../ptx/half.rs"),
                    include_str!("../ptx/matrix.rs"),
                    include_str!("../ptx/memory.rs"),
                    include_str!("../ptx/mod.rs"),
                ],
            ]
            .concat(),
            Self::Wgmma => [
                &TILE[..],
                &[
                    include_str!("../matmul/wgmma/kernel.rs"),
                    include_str!("../matmul/wgmma/pipeline.rs"),
                    include_str!("../matmul/wgmma/warpgroup.rs"),
                    include_str!("../ptx/barrier.rs"),
                    include_str!("../ptx/copy.rs"),
                    include_str!("../ptx/half.rs"),
                    include_str!("../ptx/memory.rs"),
                    include_str!("../ptx/mod.rs"),
                    include_str!("../ptx/warpgroup.rs"),
                ],
            ]
            .concat(),
            Self::Gemv => vec![
                include_str!("../matmul/gemv/config.rs"),
                include_str!("../matmul/gemv/input.rs"),
                include_str!("../matmul/gemv/kernel.rs"),
                include_str!("../matmul/gemv/output.rs"),
                include_str!("../matmul/gemv/plan.rs"),
                include_str!("../matmul/gemv/weight.rs"),
                include_str!("../ptx/cluster.rs"),
                include_str!("../ptx/half.rs"),
                include_str!("../ptx/matrix.rs"),
                include_str!("../ptx/memory.rs"),
                include_str!("../ptx/mod.rs"),
                include_str!("../tile/epilogue.rs"),
                include_str!("../tile/fragment.rs"),
            ],
            Self::Head => vec![
                include_str!("../matmul/head/mod.rs"),
                include_str!("../matmul/head/planes.rs"),
                include_str!("../matmul/head/tensor_cores.rs"),
                include_str!("../ptx/matrix.rs"),
                include_str!("../ptx/memory.rs"),
                include_str!("../ptx/mod.rs"),
            ],
        }
    }
}

/// A digest of a routine's sources without their comments. It changes with the code, so that a stale record can be recognised.
///
/// It is not of the CUDA text that CubeCL makes of them: that is in another order each time.
pub fn digest(routine: Routine) -> String {
    digest_of(&routine.sources())
}

/// A digest of sources without their comments.
pub fn digest_of(sources: &[&str]) -> String {
    let mut digest = Sha256::new();
    for line in sources.iter().flat_map(|source| source.lines()).map(str::trim).filter(|line| !line.starts_with("//")) {
        digest.update(line);
    }
    digest.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}
