use crate::marlin::{self, Launch};
use crate::{ActivationDtype, Problem, Runtime, Target, WeightLayout};
use marlin_format::Bits;
use std::fmt;

/// A routine of this crate, with its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// [`crate::marlin`]: tensor cores.
    Marlin(Launch),
    /// [`crate::portable`]: each unit computes `rows` rows of one output column.
    Portable {
        /// Rows of activations a unit multiplies with each unpacked weight.
        rows: usize,
    },
    /// [`crate::host`]: Rust on all cores, straight from the packed weight.
    Host,
    /// The weight is dequantised for the call, multiplied by the backend's own matmul, and dropped.
    DequantizeThenMatmul,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Marlin(launch) => write!(f, "marlin ({})", launch.tile),
            Self::Portable { rows } => write!(f, "portable (rows {rows})"),
            Self::Host => f.write_str("host"),
            Self::DequantizeThenMatmul => f.write_str("dequantise, then matmul"),
        }
    }
}

/// Why a kernel was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The card's compute capability, 80 for 8.0, and dtypes are what the tensor-core kernel takes.
    TensorCores {
        /// Compute capability, 80 for 8.0.
        capability: u32,
    },
    /// The runtime has no tensor-core instructions that this crate can emit.
    NoTensorCores(Runtime),
    /// The card came before the instructions that the tensor-core kernel is made of.
    OldCard {
        /// Compute capability, 75 for 7.5.
        capability: u32,
    },
    /// The weight has another width than the 4 bits of the tensor-core kernel.
    Bits(Bits),
    /// Activations are in f32, which tensor cores would round.
    F32Activations,
    /// Activations and scales differ in dtype.
    DtypePair {
        /// Dtype of the activations.
        activations: ActivationDtype,
        /// Dtype of the scales.
        scales: ActivationDtype,
    },
    /// No tile of the tensor-core kernel fits the card's shared memory.
    NoTile,
    /// The tensor-core kernel would take it, but the weight was laid out for another dtype of activations.
    PlainLayout,
    /// Flex does not run CubeCL kernels.
    Flex,
    /// The layer is a `Linear` of Burn's that reads a converted weight, and the backend fuses no operations.
    NoFusion(Runtime),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = |capability: u32| format!("{}.{}", capability / 10, capability % 10);
        match *self {
            Self::TensorCores { capability } => write!(f, "tensor cores of compute capability {}", version(capability)),
            Self::NoTensorCores(runtime) => write!(f, "{runtime} takes no inline PTX, which the tensor-core kernels need"),
            Self::OldCard { capability } => {
                write!(f, "the tensor-core kernels need compute capability 8.0, the card has {}", version(capability))
            }
            Self::Bits(bits) => write!(f, "the tensor-core kernels take int4 weights, this one is {bits}"),
            Self::F32Activations => f.write_str("tensor cores take activations in f16 or bf16, these are in f32"),
            Self::DtypePair { activations, scales } => {
                write!(f, "the tensor-core kernels take activations and scales in one dtype, these are in {activations} and {scales}")
            }
            Self::NoTile => f.write_str("no tile of the tensor-core kernels fits the card's shared memory"),
            Self::PlainLayout => f.write_str("the weight was laid out for activations that tensor cores do not take"),
            Self::Flex => f.write_str("Flex runs no CubeCL kernel; the host kernel reads the packed weight as it is"),
            Self::NoFusion(runtime) => write!(f, "{runtime} fuses no operations, so Burn's Linear gets a float weight for the call"),
        }
    }
}

/// The kernel that runs a problem, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Plan {
    /// What runs.
    pub kernel: Kernel,
    /// Why.
    pub reason: Reason,
}

/// Chooses the kernel for a problem on a device that holds the weight in `layout`. Pure: the same arguments give the same plan.
pub fn select(problem: &Problem, layout: WeightLayout, target: &Target) -> Plan {
    match target.runtime {
        Runtime::Flex => Plan { kernel: Kernel::Host, reason: Reason::Flex },
        _ => {
            let reason = match tensor_cores(problem, target) {
                Ok((launch, reason)) if layout == WeightLayout::Tile => return Plan { kernel: Kernel::Marlin(launch), reason },
                Ok(_) => Reason::PlainLayout,
                Err(reason) => reason,
            };
            let rows = match problem.m {
                0..=1 => 1,
                2 => 2,
                3..=4 => 4,
                _ => 8,
            };
            Plan { kernel: Kernel::Portable { rows }, reason }
        }
    }
}

/// The launch on tensor cores, and why; or why not.
fn tensor_cores(problem: &Problem, target: &Target) -> Result<(Launch, Reason), Reason> {
    let card = target.card.ok_or(Reason::NoTensorCores(target.runtime))?;
    let Problem { spec, activations, scales, .. } = *problem;
    if card.capability < marlin::MIN_CAPABILITY {
        return Err(Reason::OldCard { capability: card.capability });
    }
    if spec.bits != Bits::Four {
        return Err(Reason::Bits(spec.bits));
    }
    if activations == ActivationDtype::F32 {
        return Err(Reason::F32Activations);
    }
    if activations != scales {
        return Err(Reason::DtypePair { activations, scales });
    }
    let launch = marlin::plan(problem, &card).ok_or(Reason::NoTile)?;
    Ok((launch, Reason::TensorCores { capability: card.capability }))
}

/// The layout in which a device should hold a weight for activations of the problem's dtype, whatever their rows.
pub fn layout_for(problem: &Problem, target: &Target) -> WeightLayout {
    match tensor_cores(problem, target) {
        Ok(_) => WeightLayout::Tile,
        Err(_) => WeightLayout::Plain,
    }
}

/// The plan for Burn's own `Linear` on a weight that was converted in place: [`select`]'s where the backend fuses operations.
pub fn select_converted(problem: &Problem, layout: WeightLayout, target: &Target) -> Plan {
    match target.runtime {
        Runtime::Flex => Plan { kernel: Kernel::DequantizeThenMatmul, reason: Reason::NoFusion(target.runtime) },
        _ => select(problem, layout, target),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::marlin::Card;
    use marlin_format::{GroupSize, QuantSpec};

    fn problem(m: usize) -> Problem {
        let spec = QuantSpec::int4(GroupSize::G128);
        Problem { m, n: 4096, k: 4096, spec, activations: ActivationDtype::F16, scales: ActivationDtype::F16, permuted: false }
    }

    fn on(runtime: Runtime) -> Target {
        Target { runtime, name: "test".into(), card: None }
    }

    fn cuda(capability: u32) -> Target {
        let card = Card { capability, multiprocessors: 108, shared_limit: 163 * 1024 };
        Target { card: Some(card), ..on(Runtime::Cuda) }
    }

    #[test]
    fn units_take_as_many_rows_as_there_are_up_to_eight() {
        for (m, rows) in [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 8), (4096, 8)] {
            let plan = select(&problem(m), WeightLayout::Plain, &on(Runtime::Vulkan));
            assert_eq!(plan, Plan { kernel: Kernel::Portable { rows }, reason: Reason::NoTensorCores(Runtime::Vulkan) }, "M = {m}");
        }
    }

    #[test]
    fn flex_reads_the_packed_weight_for_any_rows() {
        for m in [1, 8, 128, 2048] {
            assert_eq!(select(&problem(m), WeightLayout::Plain, &Target::flex()), Plan { kernel: Kernel::Host, reason: Reason::Flex });
        }
    }

    #[test]
    fn tensor_cores_take_what_they_were_laid_out_for() {
        for m in [1, 16, 4096] {
            let plan = select(&problem(m), WeightLayout::Tile, &cuda(80));
            assert!(matches!(plan.kernel, Kernel::Marlin(launch) if launch.blocks > 0), "M = {m}: {plan:?}");
            assert_eq!(plan.reason, Reason::TensorCores { capability: 80 }, "M = {m}");
        }
        assert_eq!(layout_for(&problem(1), &cuda(80)), WeightLayout::Tile);
    }

    #[test]
    fn what_tensor_cores_do_not_take_falls_back_and_says_why() {
        let f32 = Problem { activations: ActivationDtype::F32, ..problem(1) };
        let mixed = Problem { activations: ActivationDtype::BF16, ..problem(1) };
        let pair = Reason::DtypePair { activations: ActivationDtype::BF16, scales: ActivationDtype::F16 };
        let small = Target { card: Some(Card { capability: 80, multiprocessors: 1, shared_limit: 1024 }), ..on(Runtime::Cuda) };
        let wide = Problem { spec: QuantSpec::int8(GroupSize::G128), ..problem(1) };
        for (problem, target, reason) in [
            (wide, cuda(90), Reason::Bits(Bits::Eight)),
            (wide, on(Runtime::Vulkan), Reason::NoTensorCores(Runtime::Vulkan)),
            (f32, cuda(90), Reason::F32Activations),
            (mixed, cuda(90), pair),
            (problem(1), cuda(75), Reason::OldCard { capability: 75 }),
            (problem(1), small, Reason::NoTile),
            (problem(1), on(Runtime::Cpu), Reason::NoTensorCores(Runtime::Cpu)),
        ] {
            // A weight can come to such activations in either layout.
            for layout in [WeightLayout::Plain, WeightLayout::Tile] {
                assert_eq!(select(&problem, layout, &target), Plan { kernel: Kernel::Portable { rows: 1 }, reason });
            }
            assert_eq!(layout_for(&problem, &target), WeightLayout::Plain);
        }
        assert_eq!(select(&problem(1), WeightLayout::Plain, &cuda(90)).reason, Reason::PlainLayout);
    }

    #[test]
    fn a_converted_linear_reads_the_packed_weight_where_operations_fuse() {
        let kernel = |target: &Target| select_converted(&problem(1), WeightLayout::Plain, target).kernel;
        assert_eq!(kernel(&Target::flex()), Kernel::DequantizeThenMatmul);
        assert_eq!(kernel(&on(Runtime::Cpu)), Kernel::Portable { rows: 1 });
    }

    #[test]
    fn the_reason_names_what_decided() {
        let reason = |m, target: &Target| select(&problem(m), WeightLayout::Plain, target).reason.to_string();
        assert!(reason(1, &on(Runtime::Vulkan)).contains("Vulkan"));
        assert!(reason(1, &cuda(75)).contains("the card has 7.5"));
        let wide = Problem { spec: QuantSpec::int8(GroupSize::G128), ..problem(1) };
        assert!(select(&wide, WeightLayout::Plain, &cuda(90)).reason.to_string().contains("this one is int8"));
        assert!(reason(1, &Target::flex()).contains("Flex"));
    }
}
