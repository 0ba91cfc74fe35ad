//! The device properties on which the choice and the launch of a kernel depend.

#[cfg(feature = "cuda")]
mod clusters;
#[cfg(feature = "cuda")]
mod driver;

#[cfg(feature = "cuda")]
pub use driver::free_memory_of_card;

#[cfg(feature = "cuda")]
use cubecl_common::device::DeviceId;
#[cfg(feature = "cuda")]
use cubecl_cuda::CudaRuntime;
use std::fmt;
#[cfg(feature = "cubecl-runtime")]
use {
    cubecl::client::Client,
    std::collections::HashMap,
    std::sync::{LazyLock, PoisonError, RwLock},
};

/// The first compute capability (80 for 8.0) with `cp.async` and `mma.m16n8k16`.
pub const MIN_CAPABILITY: u32 = 80;

/// The only compute capability with `wgmma`: later cards do not have it.
pub const WGMMA_CAPABILITY: u32 = 90;
/// The first compute capability with products of e4m3 and conversions to it (8.9).
pub const FP8_CAPABILITY: u32 = 89;

/// The first compute capability with clusters of thread blocks.
pub const CLUSTER_CAPABILITY: u32 = 90;

/// The runtime that executes the kernels of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Runtime {
    /// CubeCL on NVIDIA's CUDA.
    Cuda,
    /// CubeCL on AMD's ROCm.
    Rocm,
    /// CubeCL on Vulkan, through wgpu.
    Vulkan,
    /// CubeCL on Apple's Metal.
    Metal,
    /// CubeCL on WebGPU, through wgpu.
    WebGpu,
    /// CubeCL's CPU runtime.
    Cpu,
    /// Burn's Flex backend: Rust on the CPU, no CubeCL.
    Flex,
    /// A CubeCL runtime that this version does not know by name.
    Other,
}

impl fmt::Display for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "CUDA",
            Self::Rocm => "ROCm",
            Self::Vulkan => "Vulkan",
            Self::Metal => "Metal",
            Self::WebGpu => "WebGPU",
            Self::Cpu => "CubeCL CPU",
            Self::Flex => "Flex",
            Self::Other => "this CubeCL runtime",
        })
    }
}

/// An NVIDIA card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Card {
    /// Compute capability, 80 for 8.0.
    pub capability: u32,
    /// The number of streaming multiprocessors.
    pub multiprocessors: usize,
    /// The maximum shared memory of a block, in bytes.
    pub shared_limit: usize,
    /// The number of clusters of each size that the card runs at the same time.
    pub clusters: ClustersAtOnce,
}

/// The number of clusters of each size that a card runs at the same time, with one block on each
/// multiprocessor.
///
/// All blocks of a cluster run on one GPC, and cards differ in which multiprocessors of a GPC are
/// disabled. Clusters that do not fit wait until others end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClustersAtOnce([u16; Self::MOST_BLOCKS]);

impl ClustersAtOnce {
    /// The largest cluster size, in blocks, that every card with clusters supports (CUDA C++
    /// Programming Guide, "Thread Block Clusters").
    pub const MOST_BLOCKS: usize = 8;

    /// Returns the assumption for a card that is not queried. The two multiprocessors of a TPC can
    /// always run a cluster of two blocks; larger clusters are assumed to leave a sixth of the
    /// multiprocessors idle.
    pub const fn assumed(multiprocessors: usize) -> Self {
        let mut clusters = [0; Self::MOST_BLOCKS];
        let mut blocks = 1;
        while blocks <= Self::MOST_BLOCKS {
            let room = if blocks > 2 {
                multiprocessors * 5 / 6
            } else {
                multiprocessors
            };
            clusters[blocks - 1] = (room / blocks) as u16;
            blocks += 1;
        }
        Self(clusters)
    }

    /// Returns the number of clusters of `blocks` blocks that run at the same time; 0 if a cluster
    /// cannot be that large.
    pub fn of(&self, blocks: usize) -> usize {
        blocks
            .checked_sub(1)
            .and_then(|index| self.0.get(index))
            .map_or(0, |&clusters| clusters.into())
    }
}

impl Card {
    /// Creates a card whose clusters are [assumed](ClustersAtOnce::assumed()).
    pub const fn assumed(capability: u32, multiprocessors: usize, shared_limit: usize) -> Self {
        Self {
            capability,
            multiprocessors,
            shared_limit,
            clusters: ClustersAtOnce::assumed(multiprocessors),
        }
    }

    /// Determines the card of a CubeCL client; `None` if its device is not an NVIDIA card.
    #[cfg(feature = "cubecl-runtime")]
    fn of(client: &Client) -> Option<Self> {
        if client.name() != "cuda" {
            return None;
        }
        let properties = client.properties();
        // CubeCL's CUDA runtime names the architecture that it compiles for: ptx_sm90.
        let capability = properties
            .identity
            .fingerprint
            .strip_prefix("ptx_sm")?
            .parse()
            .ok()?;
        let multiprocessors = properties.hardware.num_streaming_multiprocessors? as usize;
        let shared_limit = properties.hardware.max_shared_memory_size;
        let card = Self::assumed(capability, multiprocessors, shared_limit);
        #[cfg(feature = "cuda")]
        if capability >= CLUSTER_CAPABILITY {
            return Some(Self {
                clusters: clusters::at_once(client, multiprocessors, shared_limit),
                ..card
            });
        }
        Some(card)
    }
}

/// The properties of a device that decide which kernel runs. They are plain data, so the choice can
/// be tested without a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    /// The runtime.
    pub runtime: Runtime,
    /// The NVIDIA card; `Some` only on CUDA.
    pub card: Option<Card>,
}

impl Target {
    /// Burn's Flex backend.
    pub const FLEX: Self = Self {
        runtime: Runtime::Flex,
        card: None,
    };

    /// Returns the target of a CubeCL client. It is determined once for each device, and then kept
    /// until the process ends.
    #[cfg(feature = "cubecl-runtime")]
    pub fn of(client: &Client) -> Self {
        let device = client.service_id().device;
        // The servers of a card differ in the first number alone.
        let server = if client.name() == "cuda" {
            0
        } else {
            device.type_id
        };
        let key = (client.name(), server, device.index_id);
        let known = TARGETS.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(target) = known.get(&key) {
            return *target;
        }
        drop(known);
        let target = Self::determine(client);
        let mut known = TARGETS.write().unwrap_or_else(PoisonError::into_inner);
        *known.entry(key).or_insert(target)
    }

    #[cfg(feature = "cubecl-runtime")]
    fn determine(client: &Client) -> Self {
        let runtime = match client.name() {
            "cuda" => Runtime::Cuda,
            "hip" => Runtime::Rocm,
            "wgpu<spirv>" => Runtime::Vulkan,
            "wgpu<msl>" | "metal" => Runtime::Metal,
            "wgpu<wgsl>" => Runtime::WebGpu,
            "cpu" => Runtime::Cpu,
            _ => Runtime::Other,
        };
        Self {
            runtime,
            card: Card::of(client),
        }
    }

    /// Returns the compute capability of the NVIDIA card, 80 for 8.0; 0 on other devices.
    pub fn capability(&self) -> u32 {
        self.card.map_or(0, |card| card.capability)
    }
}

/// A device: the name of its runtime, and the numbers that CubeCL gives it.
#[cfg(feature = "cubecl-runtime")]
type DeviceKey = (&'static str, u16, u16);

/// The targets of the devices that have run a kernel.
#[cfg(feature = "cubecl-runtime")]
static TARGETS: LazyLock<RwLock<HashMap<DeviceKey, Target>>> = LazyLock::new(RwLock::default);

/// Returns the client of a further server of a CUDA card. The server has its own thread, streams
/// and memory, so its kernels are compiled at the same time as those of the card's other servers.
/// The same number gives the same server, which lives until the process ends. The result is `None`
/// on other runtimes, and beyond [`u16::MAX`] servers.
#[cfg(feature = "cubecl-runtime")]
#[cfg_attr(
    not(feature = "cuda"),
    allow(
        unused_variables,
        reason = "only CUDA's runtime has several servers of a card"
    )
)]
pub fn additional_server(client: &Client, number: usize) -> Option<Client> {
    #[cfg(feature = "cuda")]
    if client.name() == "cuda" {
        let card = client.service_id().device;
        // CubeCL identifies a server by both numbers of the device ID, while the CUDA runtime takes
        // the card from the second number alone.
        let further = DeviceId::new(u16::try_from(number + 1).ok()?, card.index_id);
        return Some(Client::load::<
            <CudaRuntime as cubecl_runtime::runtime::Runtime>::Server,
        >(further));
    }
    None
}
