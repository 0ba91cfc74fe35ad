use crate::{Problem, Runtime, Target};
use std::fmt;

/// Rows of activations up to which the host kernel multiplies straight from the packed weight.
///
/// Above it, dequantising once and calling the backend's own matmul is faster: a dense matmul of that many rows costs more than the unpacking.
const HOST_ROWS: usize = 8;

/// A routine of this crate, with its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// [`crate::portable`]: each unit computes `rows` rows of one output column.
    Portable {
        /// Rows of activations a unit multiplies with each unpacked weight.
        rows: usize,
    },
    /// [`crate::host`]: plain Rust, straight from the packed weight.
    Host,
    /// The weight is dequantised for the call, multiplied by the backend's own matmul, and dropped.
    DequantizeThenMatmul,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Portable { rows } => write!(f, "portable (rows {rows})"),
            Self::Host => f.write_str("host"),
            Self::DequantizeThenMatmul => f.write_str("dequantise, then matmul"),
        }
    }
}

/// Why a kernel was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The runtime has no tensor-core instructions that this crate can emit.
    NoTensorCores(Runtime),
    /// The card could run the tensor-core kernel, but layers do not hold weights in its layout yet.
    PlainLayout(Runtime),
    /// Flex does not run CubeCL kernels, and few rows are bound by reading the weight.
    FlexFewRows(usize),
    /// Flex does not run CubeCL kernels, and many rows are bound by arithmetic.
    FlexManyRows(usize),
    /// The layer is a `Linear` of Burn's that reads a converted weight, and the backend fuses no operations.
    NoFusion(Runtime),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoTensorCores(runtime) => write!(f, "{runtime} takes no inline PTX, which the tensor-core kernels need"),
            Self::PlainLayout(runtime) => {
                write!(f, "layers hold the plain layout, which the tensor-core kernel for {runtime} does not read")
            }
            Self::FlexFewRows(m) => write!(f, "Flex runs no CubeCL kernel; up to {HOST_ROWS} rows ({m}) read the packed weight as it is"),
            Self::NoFusion(runtime) => write!(f, "{runtime} fuses no operations, so Burn's Linear gets a float weight for the call"),
            Self::FlexManyRows(m) => {
                write!(f, "Flex runs no CubeCL kernel; above {HOST_ROWS} rows ({m}) its own matmul repays the unpacking")
            }
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

/// Chooses the kernel for a problem on a device. Pure: the same arguments give the same plan.
pub fn select(problem: &Problem, target: &Target) -> Plan {
    match target.runtime {
        Runtime::Flex if problem.m <= HOST_ROWS => Plan { kernel: Kernel::Host, reason: Reason::FlexFewRows(problem.m) },
        Runtime::Flex => Plan { kernel: Kernel::DequantizeThenMatmul, reason: Reason::FlexManyRows(problem.m) },
        runtime => {
            let rows = match problem.m {
                0..=1 => 1,
                2 => 2,
                3..=4 => 4,
                _ => 8,
            };
            let reason = match runtime {
                Runtime::Cuda => Reason::PlainLayout(runtime),
                _ => Reason::NoTensorCores(runtime),
            };
            Plan { kernel: Kernel::Portable { rows }, reason }
        }
    }
}

/// The plan for Burn's own `Linear` on a weight that was converted in place: [`select`]'s where the backend fuses operations.
pub fn select_converted(problem: &Problem, target: &Target) -> Plan {
    match target.runtime {
        Runtime::Flex => Plan { kernel: Kernel::DequantizeThenMatmul, reason: Reason::NoFusion(target.runtime) },
        _ => select(problem, target),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ActivationDtype;
    use marlin_format::{GroupSize, QuantSpec};

    fn problem(m: usize) -> Problem {
        let spec = QuantSpec::int4(GroupSize::G128);
        Problem { m, n: 4096, k: 4096, spec, activations: ActivationDtype::F16, scales: ActivationDtype::F16, permuted: false }
    }

    fn on(runtime: Runtime) -> Target {
        Target { runtime, name: "test".into() }
    }

    #[test]
    fn units_take_as_many_rows_as_there_are_up_to_eight() {
        for (m, rows) in [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 8), (4096, 8)] {
            assert_eq!(select(&problem(m), &on(Runtime::Vulkan)).kernel, Kernel::Portable { rows }, "M = {m}");
        }
    }

    #[test]
    fn flex_changes_kernel_behind_its_threshold() {
        assert_eq!(select(&problem(HOST_ROWS), &Target::flex()).kernel, Kernel::Host);
        assert_eq!(select(&problem(HOST_ROWS + 1), &Target::flex()).kernel, Kernel::DequantizeThenMatmul);
    }

    #[test]
    fn a_converted_linear_reads_the_packed_weight_where_operations_fuse() {
        assert_eq!(select_converted(&problem(1), &Target::flex()).kernel, Kernel::DequantizeThenMatmul);
        assert_eq!(select_converted(&problem(1), &on(Runtime::Cuda)).kernel, Kernel::Portable { rows: 1 });
    }

    #[test]
    fn the_reason_names_runtime_and_rows() {
        assert!(select(&problem(1), &on(Runtime::Vulkan)).reason.to_string().contains("Vulkan"));
        assert!(select(&problem(1), &on(Runtime::Cuda)).reason.to_string().contains("CUDA"));
        assert!(select(&problem(17), &Target::flex()).reason.to_string().contains("(17)"));
    }
}
