//! The operands of matmuls with experts, and their products in f64.

use super::host::HostRouting;
use super::logits;
use crate::kernels::{Uploaded, args, bytes, uploaded_weight};
use crate::marlin::Bench;
use cubecl::prelude::BufferArg;
use marlin_format::{QuantSpec, Sparsity, WeightDescriptor, WeightLayout, WeightTensors};
use marlin_kernels::experts::{ExpertOperands, Router, Routing, multiply};
use marlin_kernels::tile::{Launch, RowOrder};
use marlin_kernels::{ActivationDtype, Epilogue, QuantProblem};
use marlin_tests::{Case, Operands};

/// A launch of a matmul.
pub struct Launched<'a> {
    pub order: RowOrder,
    pub epilogue: Epilogue,
    pub launch: Launch,
    pub routing: &'a Routing,
}

/// The operands of matmuls with experts on the device.
pub struct UploadedExperts {
    x: Uploaded,
    weight: WeightTensors<Uploaded>,
    bias: Uploaded,
}

/// The weights of experts, activations of tokens, and all products in f64.
pub struct Experts {
    case: Case,
    /// The operands of each expert, with the activations of all tokens.
    experts: Vec<Operands>,
}

impl Experts {
    pub fn random(case: Case, experts: usize, seed: u64) -> Self {
        let mut all: Vec<Operands> = (0..experts)
            .map(|expert| Operands::random(&case, seed + expert as u64))
            .collect();
        let x = all[0].x.clone();
        for operands in &mut all[1..] {
            operands.x.clone_from(&x);
            operands.recompute(&case);
        }
        Self { case, experts: all }
    }

    pub fn descriptor(&self) -> WeightDescriptor {
        self.case
            .problem()
            .weight
            .in_layout(WeightLayout::Tile)
            .with_experts(self.experts.len())
    }

    /// Returns the tensors of all experts, one below the other.
    pub fn tensors(&self) -> WeightTensors<Vec<u8>> {
        stacked(&self.experts)
    }

    pub fn problem(&self, routing: &Routing, epilogue: Epilogue) -> QuantProblem {
        QuantProblem::new(routing.rows(), self.descriptor(), self.case.activations)
            .with_epilogue(epilogue)
    }

    /// Returns the activations of a matmul: of tokens, or of rows in the order of experts.
    pub fn x(&self, order: RowOrder, host: &HostRouting) -> Vec<f32> {
        let x = &self.experts[0].x;
        match order {
            RowOrder::Gathered => x.clone(),
            _ => {
                let of_token = |&token: &u32| &x[token as usize * self.case.k..][..self.case.k];
                host.tokens.iter().flat_map(of_token).copied().collect()
            }
        }
    }

    /// Returns the expected outputs in the order of experts, and their magnitudes.
    pub fn expected(&self, host: &HostRouting, epilogue: Epilogue) -> (Vec<f64>, Vec<f64>) {
        let of_expert: Vec<(Vec<f64>, Vec<f64>)> = self
            .experts
            .iter()
            .map(|operands| match epilogue {
                Epilogue::None => (operands.expected.clone(), operands.magnitude.clone()),
                _ => operands.gated(&self.case, epilogue),
            })
            .collect();
        let width = self.case.n / epilogue.columns();
        let (mut expected, mut magnitude) = (Vec::new(), Vec::new());
        for &[expert, first, count] in &host.blocks {
            let (values, sizes) = &of_expert[expert as usize];
            for token in &host.tokens[first as usize..][..count as usize] {
                let at = *token as usize * width;
                expected.extend(&values[at..][..width]);
                magnitude.extend(&sizes[at..][..width]);
            }
        }
        (expected, magnitude)
    }

    /// Uploads activations, weights and biases for several launches.
    pub fn upload(
        &self,
        bench: &Bench,
        weight: &WeightTensors<Vec<u8>>,
        x: &[f32],
    ) -> UploadedExperts {
        let client = &bench.client;
        let of_experts = self.experts.iter().flat_map(|operands| &operands.bias);
        let bias: Vec<f32> = of_experts.copied().collect();
        let floats = |values: &[f32]| {
            Uploaded::new(client, &bytes(values, self.case.activations), values.len())
        };
        UploadedExperts {
            x: floats(x),
            weight: uploaded_weight(client, &self.descriptor(), weight.as_ref()),
            bias: floats(&bias),
        }
    }

    /// Runs a matmul on an output filled with NaN, and returns its bytes.
    pub fn run(
        &self,
        bench: &Bench,
        uploaded: &UploadedExperts,
        launched: &Launched<'_>,
    ) -> Vec<u8> {
        let client = &bench.client;
        let Launched {
            order,
            epilogue,
            launch,
            routing,
        } = launched;
        let problem = self.problem(routing, *epilogue);
        let outputs = problem.m * problem.outputs();
        let poison =
            client.create_from_slice(&bytes(&vec![f32::NAN; outputs], self.case.activations));
        let operands = ExpertOperands {
            x: uploaded.x.arg(),
            weight: args(&uploaded.weight),
            bias: Some(uploaded.bias.arg()),
            // SAFETY: the buffer was made for as many elements.
            out: unsafe { BufferArg::from_raw_parts(poison.clone(), outputs) },
        };
        multiply(client, &problem, *order, launch, routing, operands)
            .unwrap_or_else(|error| panic!("{problem}, {launch:?}: {error}"));
        client
            .read_one(poison)
            .unwrap_or_else(|error| panic!("{problem}, {launch:?}: {error}"))
            .to_vec()
    }
}

/// Returns the tensors of experts in the tile layout, one below the other.
pub fn stacked(experts: &[Operands]) -> WeightTensors<Vec<u8>> {
    let mut all = experts[0].tiles().clone();
    for operands in &experts[1..] {
        let of = operands.tiles();
        all.qweight.extend(&of.qweight);
        all.scales.extend(&of.scales);
        if let (Some(all), Some(of)) = (&mut all.zero_points, &of.zero_points) {
            all.extend(of);
        }
    }
    all
}

pub fn case(spec: QuantSpec, [m, k, n]: [usize; 3]) -> Case {
    Case {
        m,
        k,
        n,
        spec,
        activations: ActivationDtype::from(spec.scales.dtype),
        permuted: false,
        sparsity: Sparsity::Dense,
    }
}

/// Logits that send tokens to experts as a test needs them.
#[derive(Debug, Clone, Copy)]
pub enum Spread {
    /// Experts of each token at random.
    Random,
    /// All tokens to the first experts; the others get none.
    First,
}

impl Spread {
    pub fn logits(self, router: &Router, tokens: usize, seed: u64) -> Vec<f32> {
        match self {
            Self::Random => logits(router, tokens, ActivationDtype::F32, seed & !1),
            Self::First => (0..tokens * router.experts)
                .map(|i| -((i % router.experts) as f32))
                .collect(),
        }
    }
}
