//! Queries the driver for the number of thread block clusters that a card runs at the same time.

use super::{ClustersAtOnce, driver};
use cubecl::client::Client;
use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::{CudaContext, DriverError, LaunchConfig};
use cudarc::nvrtc::Ptx;
use std::fmt::Write;
use std::sync::Arc;

/// The number of threads of each block in the occupancy query. A block takes all of the shared
/// memory, so a multiprocessor holds one block whatever its thread count.
const THREADS: u32 = 128;

/// Asks the driver for the clusters that a card runs at the same time. If it does not answer, the
/// result is the assumption for a card of as many multiprocessors, and the reason is logged.
pub(super) fn at_once(
    client: &Client,
    multiprocessors: usize,
    shared_limit: usize,
) -> ClustersAtOnce {
    let what = "how many clusters the card runs at once";
    driver::ask(client, what, move |context| ask(context, shared_limit))
        .unwrap_or_else(|| ClustersAtOnce::assumed(multiprocessors))
}

/// Queries the driver for the number of resident clusters whose blocks take all of a
/// multiprocessor's shared memory (CUDA driver API, `cuOccupancyMaxActiveClusters`).
fn ask(context: Arc<CudaContext>, shared_limit: usize) -> Result<ClustersAtOnce, DriverError> {
    let module = context.load_module(Ptx::from_src(empty_kernels()))?;
    let stream = context.default_stream();
    let mut clusters = [0; ClustersAtOnce::MOST_BLOCKS];
    for (blocks, clusters) in (1..).zip(&mut clusters) {
        let kernel = module.load_function(&name(blocks))?;
        kernel.set_attribute(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            shared_limit as i32,
        )?;
        let launch = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: shared_limit as u32,
        };
        *clusters = kernel.occupancy_max_active_clusters(launch, &stream)? as u16;
    }
    Ok(ClustersAtOnce(clusters))
}

/// Returns the name of the kernel with clusters of `blocks` blocks.
fn name(blocks: u32) -> String {
    format!("clusters_of_{blocks}")
}

/// Returns the PTX of empty kernels, one for each cluster size (PTX ISA, `.reqnctapercluster`).
fn empty_kernels() -> String {
    let mut text = String::from(".version 7.8\n.target sm_90\n.address_size 64\n");
    for blocks in 1..=ClustersAtOnce::MOST_BLOCKS as u32 {
        let _ = writeln!(
            text,
            ".visible .entry {}() .reqnctapercluster {blocks} {{ ret; }}",
            name(blocks)
        );
    }
    text
}
