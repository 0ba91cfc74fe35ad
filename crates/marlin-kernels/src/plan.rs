//! The choice of a kernel for every matmul of the project. This is host code that needs no device.

pub(crate) mod cache;

use crate::matmul::{few_columns, float_gemv, gemv, host, lm_head};
use crate::tile::{self, Launch};
use crate::{
    ActivationDtype, Card, Epilogue, FloatProblem, Problem, Prologue, QuantProblem, Runtime, Target,
};
use cache::PlanCache;
use marlin_format::{Sparsity, WeightDescriptor, WeightLayout};
use std::fmt;

/// A routine of [`matmul`](crate::matmul), with its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Tensor cores: [`mma_sync`](crate::matmul::mma_sync) or [`wgmma`](crate::matmul::wgmma),
    /// depending on the tile.
    Marlin(Launch),
    /// [`gemv`]: one row, with the prologue in the kernel, on clusters of blocks.
    Gemv {
        /// Number of blocks among which K is split.
        blocks: usize,
    },
    /// [`portable`](crate::matmul::portable): each unit computes `rows` rows of one output column.
    Portable {
        /// Rows of activations that a unit multiplies with each unpacked weight.
        rows: usize,
    },
    /// [`host`](crate::matmul::host): Rust on all cores, directly from the packed weight.
    Host,
    /// [`lm_head`]: a float weight whose columns are contiguous.
    LmHead(lm_head::LmHeadKernel),
    /// [`float_gemv`]: one row and a float weight, with the norm in the kernel.
    FloatGemv,
    /// [`few_columns`]: a float weight of few columns, such as a router's, or a few rows.
    FewColumns,
    /// The backend's own matmul of a float weight.
    FloatMatmul,
    /// The weight is dequantised for the call, multiplied by the backend's own matmul, and dropped.
    DequantizeThenMatmul,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Marlin(launch) => write!(f, "marlin ({})", launch.tile),
            Self::Gemv { blocks } => write!(f, "gemv (clusters of {blocks})"),
            Self::Portable { rows } => write!(f, "portable (rows {rows})"),
            Self::Host => f.write_str("host"),
            Self::LmHead(lm_head::LmHeadKernel::TensorCores) => f.write_str("head (tensor cores)"),
            Self::LmHead(lm_head::LmHeadKernel::Planes) => f.write_str("head (planes)"),
            Self::FloatGemv => f.write_str("float gemv"),
            Self::FewColumns => f.write_str("few columns"),
            Self::FloatMatmul => f.write_str("Burn's matmul"),
            Self::DequantizeThenMatmul => f.write_str("dequantise, then matmul"),
        }
    }
}

impl Kernel {
    /// Records a launch of this kernel as a trace event of the target `marlin_kernels::launch`,
    /// with the fields `kernel` and `problem`.
    ///
    /// Devices report faults at a later sync without the name of the kernel; the last event names
    /// it.
    pub fn trace(&self, problem: &impl fmt::Display) {
        tracing::trace!(target: "marlin_kernels::launch", kernel = %self, %problem, "launch");
    }
}

/// The reason why a kernel was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The tensor-core kernels support the card's compute capability, 80 for 8.0, and the dtypes.
    TensorCores {
        /// Compute capability, 80 for 8.0.
        capability: u32,
    },
    /// The runtime has no tensor-core instructions that this crate can emit.
    NoTensorCores(Runtime),
    /// The card lacks the instructions of the tensor-core kernels.
    OldCard {
        /// Compute capability, 75 for 7.5.
        capability: u32,
    },
    /// Activations are in f32, and tensor cores would round them.
    F32Activations,
    /// Activations and scales differ in dtype.
    DtypePair {
        /// Dtype of the activations.
        activations: ActivationDtype,
        /// Dtype of the scales.
        scales: ActivationDtype,
    },
    /// No tile of the tensor-core kernels fits in the card's shared memory.
    NoTile,
    /// The tensor-core kernels support the problem, but the weight is in the layout for another
    /// dtype of activations.
    PlainLayout,
    /// Flex does not run CubeCL kernels.
    Flex,
    /// The layer is Burn's `Linear` on a converted weight, and the backend does not fuse
    /// operations.
    NoFusion(Runtime),
    /// The weight is a float tensor.
    FloatWeight,
    /// The weight is a float tensor, and the problem has more rows than the lm_head kernels
    /// support.
    ManyRows,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = |capability: u32| format!("{}.{}", capability / 10, capability % 10);
        match *self {
            Self::TensorCores { capability } => write!(
                f,
                "tensor cores of compute capability {}",
                version(capability)
            ),
            Self::NoTensorCores(runtime) => write!(
                f,
                "{runtime} takes no inline PTX, which the tensor-core kernels need"
            ),
            Self::OldCard { capability } => {
                write!(
                    f,
                    "the tensor-core kernels need compute capability 8.0, the card has {}",
                    version(capability)
                )
            }
            Self::F32Activations => {
                f.write_str("tensor cores take activations in f16 or bf16, these are in f32")
            }
            Self::DtypePair {
                activations,
                scales,
            } => {
                write!(
                    f,
                    "the tensor-core kernels take activations and scales in one dtype, these are in {activations} and {scales}"
                )
            }
            Self::NoTile => {
                f.write_str("no tile of the tensor-core kernels fits the card's shared memory")
            }
            Self::PlainLayout => {
                f.write_str("the weight was laid out for activations that tensor cores do not take")
            }
            Self::Flex => f.write_str(
                "Flex runs no CubeCL kernel; the host kernel reads the packed weight as it is",
            ),
            Self::NoFusion(runtime) => write!(
                f,
                "{runtime} fuses no operations, so Burn's Linear gets a float weight for the call"
            ),
            Self::FloatWeight => f.write_str("the weight is a float tensor"),
            Self::ManyRows => f.write_str(
                "the weight is a float tensor, and Burn's matmul is faster for so many rows",
            ),
        }
    }
}

/// The stage that computes the prologue of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrologueStage {
    /// The problem has no such operation.
    None,
    /// The matmul's kernel computes it.
    InKernel,
    /// A separate kernel computes it before the matmul.
    Before,
}

/// The stage that computes the epilogue of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EpilogueStage {
    /// The problem has no such operation.
    None,
    /// The matmul's kernel computes it.
    InKernel,
    /// A separate kernel computes it after the matmul.
    After,
}

/// The kernel that runs a problem, and the reason for the choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Plan {
    /// The kernel that computes the product.
    pub kernel: Kernel,
    /// The stage that computes the prologue.
    pub prologue: PrologueStage,
    /// The stage that computes the epilogue.
    pub epilogue: EpilogueStage,
    /// The reason for the choice of the kernel.
    pub reason: Reason,
}

impl Plan {
    /// Creates the plan of a product without prologue and epilogue.
    pub const fn product(kernel: Kernel, reason: Reason) -> Self {
        Self {
            kernel,
            prologue: PrologueStage::None,
            epilogue: EpilogueStage::None,
            reason,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before = if self.prologue == PrologueStage::Before {
            "rms_norm, then "
        } else {
            ""
        };
        let after = if self.epilogue == EpilogueStage::After {
            ", then swiglu"
        } else {
            ""
        };
        write!(f, "{before}{}{after}", self.kernel)
    }
}

static PLANS: PlanCache<(Problem, Target), Plan> = PlanCache::new();

/// Chooses the kernel for a problem on a device. The same arguments give the same plan, which is
/// cached.
///
/// This function makes every choice of a kernel: [`launch`](crate::launch) and [`lm_head::launch`]
/// run its plan, and reports print it.
pub fn plan(problem: impl Into<Problem>, target: &Target) -> Plan {
    PLANS.get((problem.into(), *target), |(problem, target)| {
        choose(problem, target)
    })
}

fn choose(problem: &Problem, target: &Target) -> Plan {
    match problem {
        Problem::Quant(problem) => quant(problem, target),
        Problem::Float(problem) => float(problem, target),
    }
}

fn quant(problem: &QuantProblem, target: &Target) -> Plan {
    if let Some(plan) = one_row(problem, target) {
        return plan;
    }
    if problem.prologue == Prologue::AddRmsNorm {
        let plan = quant(&problem.with_prologue(Prologue::None), target);
        return Plan {
            prologue: match plan.kernel {
                // The norm is computed where the activations are rounded.
                Kernel::Marlin(launch) if launch.tile.is_fp8() => PrologueStage::InKernel,
                _ => PrologueStage::Before,
            },
            ..plan
        };
    }
    let launch = tensor_cores(problem, target);
    if let (Ok((launch, reason)), WeightLayout::Tile) = (launch, problem.weight.layout) {
        return Plan {
            epilogue: in_kernel(problem),
            ..Plan::product(Kernel::Marlin(launch), reason)
        };
    }
    if problem.epilogue != Epilogue::None {
        return Plan {
            epilogue: EpilogueStage::After,
            ..quant(&problem.with_epilogue(Epilogue::None), target)
        };
    }
    if target.runtime == Runtime::Flex {
        return Plan::product(Kernel::Host, Reason::Flex);
    }
    let reason = launch.err().unwrap_or(Reason::PlainLayout);
    let rows = match problem.m {
        0..=1 => 1,
        2 => 2,
        3..=4 => 4,
        _ => 8,
    };
    Plan::product(Kernel::Portable { rows }, reason)
}

/// Returns the plan with [`gemv`], or `None` if [`gemv`] does not support the problem. The kernel
/// computes the norm, and the epilogue if the number of columns allows it.
fn one_row(problem: &QuantProblem, target: &Target) -> Option<Plan> {
    let card = target.card?;
    let prologue = match problem.prologue {
        Prologue::None => PrologueStage::None,
        Prologue::AddRmsNorm => PrologueStage::InKernel,
    };
    let plan = |problem: &QuantProblem, epilogue| {
        let kernel = Kernel::Gemv {
            blocks: gemv::plan(problem, &card)?,
        };
        Some(Plan {
            prologue,
            epilogue,
            ..Plan::product(
                kernel,
                Reason::TensorCores {
                    capability: card.capability,
                },
            )
        })
    };
    plan(problem, in_kernel(problem))
        .or_else(|| plan(&problem.with_epilogue(Epilogue::None), EpilogueStage::After))
}

/// Returns the stage of the epilogue for a kernel that computes it.
fn in_kernel(problem: &QuantProblem) -> EpilogueStage {
    match problem.epilogue {
        Epilogue::None => EpilogueStage::None,
        Epilogue::SwiGlu | Epilogue::ClampedSwiGlu => EpilogueStage::InKernel,
    }
}

fn float(problem: &FloatProblem, target: &Target) -> Plan {
    if target.runtime == Runtime::Flex {
        return match problem.m <= host::lm_head::MAX_HEAD_ROWS {
            true => Plan::product(Kernel::Host, Reason::FloatWeight),
            false => Plan::product(Kernel::FloatMatmul, Reason::ManyRows),
        };
    }
    if float_gemv::supports(problem, target) {
        return Plan::product(Kernel::FloatGemv, Reason::FloatWeight);
    }
    if few_columns::supports(problem, target) {
        return Plan::product(Kernel::FewColumns, Reason::FloatWeight);
    }
    match lm_head::plan(problem, target) {
        Some(kernel) => Plan::product(Kernel::LmHead(kernel), Reason::FloatWeight),
        None => Plan::product(Kernel::FloatMatmul, Reason::ManyRows),
    }
}

/// Returns the launch on tensor cores and the reason for it, or the reason why there is none.
fn tensor_cores(problem: &QuantProblem, target: &Target) -> Result<(Launch, Reason), Reason> {
    let card: Card = target.card.ok_or(Reason::NoTensorCores(target.runtime))?;
    let QuantProblem {
        activations,
        scales,
        ..
    } = *problem;
    if card.capability < crate::device::MIN_CAPABILITY {
        return Err(Reason::OldCard {
            capability: card.capability,
        });
    }
    if activations == ActivationDtype::F32 {
        return Err(Reason::F32Activations);
    }
    if activations != scales {
        return Err(Reason::DtypePair {
            activations,
            scales,
        });
    }
    let launch = tile::plan(problem, &card).ok_or(Reason::NoTile)?;
    Ok((
        launch,
        Reason::TensorCores {
            capability: card.capability,
        },
    ))
}

/// Returns the descriptor of the weight as a device should hold it, for activations of the
/// problem's dtype and any number of rows. The weight is in the layout that the kernel reads. A 2:4
/// weight becomes dense if no kernel on the device supports its metadata.
pub fn device_layout(problem: &QuantProblem, target: &Target) -> WeightDescriptor {
    match tensor_cores(problem, target) {
        Ok(_) => problem.weight.in_layout(WeightLayout::Tile),
        Err(_) => {
            problem
                .in_layout(WeightLayout::Plain)
                .with_sparsity(Sparsity::Dense)
                .weight
        }
    }
}

/// Returns the plan for Burn's own `Linear` on a weight that was converted in place. If the backend
/// fuses operations, this is the plan of [`plan`].
pub fn plan_converted(problem: &QuantProblem, target: &Target) -> Plan {
    match target.runtime {
        Runtime::Flex => Plan::product(
            Kernel::DequantizeThenMatmul,
            Reason::NoFusion(target.runtime),
        ),
        _ => plan(*problem, target),
    }
}

#[cfg(test)]
mod tests;
