//! NVIDIA cards, as their data sheets describe them.

use marlin_kernels::{Card, Runtime, Target};
use std::str::FromStr;

/// A card.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CardSpec {
    /// The name on the command line.
    pub name: &'static str,
    /// The name that the driver reports.
    pub title: &'static str,
    /// The memory in GB. Data sheets may mean GiB; it is counted as 10^9 bytes.
    memory: f64,
    /// The memory bandwidth in GB/s.
    pub bandwidth: f64,
    /// The rate in TFLOP/s of dense products of f16 matrices that tensor cores sum in f32.
    pub rate: f64,
    /// Compute capability, 80 for 8.0.
    capability: u32,
    /// The number of streaming multiprocessors.
    multiprocessors: usize,
    /// The data sheet that memory, bandwidth and rate are from.
    pub source: &'static str,
}

/// The card of most figures in `benches/records`.
///
/// Data sheet: 141 GB, 4.8 TB/s, 1979 TFLOP/s with sparsity.
pub const H200: CardSpec = CardSpec {
    name: "h200",
    title: "NVIDIA H200",
    memory: 141.0,
    bandwidth: 4800.0,
    rate: 989.5,
    capability: 90,
    multiprocessors: 132,
    source: "NVIDIA H200 Tensor Core GPU, data sheet, SXM",
};

/// A card that `benches/records` has decode on.
///
/// Data sheet: 80 GB, 3.35 TB/s, 1979 TFLOP/s with sparsity.
pub const H100: CardSpec = CardSpec {
    name: "h100-80gb",
    title: "NVIDIA H100 80GB HBM3",
    memory: 80.0,
    bandwidth: 3350.0,
    rate: 989.5,
    capability: 90,
    multiprocessors: 132,
    source: "NVIDIA H100 Tensor Core GPU, data sheet, SXM",
};

/// All cards, the oldest first.
///
/// The data sheets of L4, H100 PCIe and H200 give twice these rates, "with sparsity". GeForce cards
/// multiply twice as fast if they sum in f16, which no kernel here does.
pub const CARDS: [CardSpec; 11] = [
    CardSpec {
        name: "a100-40gb",
        title: "NVIDIA A100-SXM4-40GB",
        memory: 40.0,
        bandwidth: 1555.0,
        rate: 312.0,
        capability: 80,
        multiprocessors: 108,
        source: "NVIDIA A100 Tensor Core GPU, data sheet, 40GB SXM",
    },
    CardSpec {
        name: "a100-80gb",
        title: "NVIDIA A100-SXM4-80GB",
        memory: 80.0,
        bandwidth: 2039.0,
        rate: 312.0,
        capability: 80,
        multiprocessors: 108,
        source: "NVIDIA A100 Tensor Core GPU, data sheet, 80GB SXM",
    },
    CardSpec {
        name: "a100-80gb-pcie",
        title: "NVIDIA A100 80GB PCIe",
        memory: 80.0,
        bandwidth: 1935.0,
        rate: 312.0,
        capability: 80,
        multiprocessors: 108,
        source: "NVIDIA A100 Tensor Core GPU, data sheet, 80GB PCIe",
    },
    CardSpec {
        name: "rtx-3090",
        title: "NVIDIA GeForce RTX 3090",
        memory: 24.0,
        bandwidth: 936.0,
        rate: 71.0,
        capability: 86,
        multiprocessors: 82,
        source: "NVIDIA Ampere GA102 GPU Architecture, whitepaper, RTX 3090",
    },
    CardSpec {
        name: "rtx-4090",
        title: "NVIDIA GeForce RTX 4090",
        memory: 24.0,
        bandwidth: 1008.0,
        rate: 165.2,
        capability: 89,
        multiprocessors: 128,
        source: "NVIDIA Ada GPU Architecture, whitepaper, RTX 4090",
    },
    CardSpec {
        name: "l4",
        title: "NVIDIA L4",
        memory: 24.0,
        bandwidth: 300.0,
        rate: 121.0,
        capability: 89,
        multiprocessors: 58,
        source: "NVIDIA L4 Tensor Core GPU, data sheet",
    },
    CardSpec {
        name: "l40s",
        title: "NVIDIA L40S",
        memory: 48.0,
        bandwidth: 864.0,
        rate: 362.05,
        capability: 89,
        multiprocessors: 142,
        source: "NVIDIA L40S GPU, data sheet",
    },
    CardSpec {
        name: "h100-80gb-pcie",
        title: "NVIDIA H100 PCIe",
        memory: 80.0,
        bandwidth: 2000.0,
        rate: 756.5,
        capability: 90,
        multiprocessors: 114,
        source: "NVIDIA H100 Tensor Core GPU, data sheet, PCIe",
    },
    H100,
    H200,
    CardSpec {
        name: "rtx-5090",
        title: "NVIDIA GeForce RTX 5090",
        memory: 32.0,
        bandwidth: 1792.0,
        rate: 209.5,
        capability: 120,
        multiprocessors: 170,
        source: "NVIDIA RTX Blackwell GPU Architecture, whitepaper, RTX 5090",
    },
];

/// The name of a card that is not in the table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no card `{name}` is known; the cards are {}", names())]
pub struct UnknownCard {
    pub name: String,
}

/// Returns the names of all cards, for a message.
pub fn names() -> String {
    CARDS.map(|card| card.name).join(", ")
}

impl CardSpec {
    /// Returns the memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        (self.memory * 1e9) as usize
    }

    /// Returns the card with the name that the driver reports.
    pub fn of_title(title: &str) -> Result<Self, UnknownCard> {
        find(title, |card| card.title)
    }

    /// Returns the properties that decide which kernel runs on the card.
    pub fn target(&self) -> Target {
        // CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
        let shared_kilobytes = match self.capability {
            80 => 163,
            90 => 227,
            _ => 99,
        };
        Target {
            runtime: Runtime::Cuda,
            card: Some(Card::assumed(
                self.capability,
                self.multiprocessors,
                shared_kilobytes * 1024,
            )),
        }
    }
}

impl FromStr for CardSpec {
    type Err = UnknownCard;

    /// Finds a card by its name on the command line.
    fn from_str(name: &str) -> Result<Self, UnknownCard> {
        find(name, |card| card.name)
    }
}

fn find(name: &str, name_of: fn(&CardSpec) -> &'static str) -> Result<CardSpec, UnknownCard> {
    CARDS
        .into_iter()
        .find(|card| name_of(card).eq_ignore_ascii_case(name))
        .ok_or_else(|| UnknownCard { name: name.into() })
}
