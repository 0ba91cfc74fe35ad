//! Launches of a case on raw buffers, and comparison of the outputs with f64.

use crate::kernels::{Uploaded, args, bytes, client, uploaded_weight, values};
use burn::tensor::Device;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use marlin_format::{WeightLayout, WeightTensors};
use marlin_kernels::tile::Launch;
use marlin_kernels::{
    Card, Epilogue, EpilogueStage, Kernel, Operands as LaunchOperands, Plan, QuantProblem, Reason,
    Target, launch,
};
use marlin_testing::relative_error_of_terms;
use marlin_tests::{Case, Operands, tolerance};

/// A client and its card.
pub struct Bench {
    pub client: Client,
    pub card: Card,
}

/// The operands of a case on the device.
pub struct UploadedCase {
    x: Uploaded,
    weight: WeightTensors<Uploaded>,
    bias: Uploaded,
}

impl UploadedCase {
    /// Returns the operands of a launch.
    fn operands(&self, out: BufferArg) -> LaunchOperands {
        LaunchOperands {
            x: self.x.arg(),
            norm: None,
            weight: args(&self.weight),
            bias: Some(self.bias.arg()),
            out,
        }
    }
}

/// Returns the problem of a case, with its weight in the tile layout.
pub fn problem(case: &Case) -> QuantProblem {
    case.problem().in_layout(WeightLayout::Tile)
}

impl Bench {
    pub fn new(device: &Device) -> Self {
        let client = client(device);
        let card = Target::of(&client)
            .card
            .unwrap_or_else(|| panic!("the device is no NVIDIA card"));
        Self { client, card }
    }

    pub fn operands(&self, case: &Case, operands: &Operands, out: BufferArg) -> LaunchOperands {
        self.upload(case, operands).operands(out)
    }

    /// Uploads the operands of a case for several launches.
    pub fn upload(&self, case: &Case, operands: &Operands) -> UploadedCase {
        let client = &self.client;
        let floats =
            |values: &[f32]| Uploaded::new(client, &bytes(values, case.activations), values.len());
        UploadedCase {
            x: floats(&operands.x),
            weight: uploaded_weight(client, &problem(case).weight, operands.tiles().as_ref()),
            bias: floats(&operands.bias),
        }
    }

    /// Returns the plan of a launch.
    pub fn plan(&self, launch: Launch) -> Plan {
        Plan::product(
            Kernel::Marlin(launch),
            Reason::TensorCores {
                capability: self.card.capability,
            },
        )
    }

    /// Runs a case on an output filled with NaN, and returns the bytes of the output.
    pub(super) fn run(&self, case: &Case, operands: &Operands, launch: Launch) -> Vec<u8> {
        self.run_problem(&problem(case), case, operands, &self.plan(launch))
    }

    /// Runs the problem of a case with or without an epilogue on an output filled with NaN, and
    /// returns the bytes of the output.
    pub fn run_problem(
        &self,
        problem: &QuantProblem,
        case: &Case,
        operands: &Operands,
        plan: &Plan,
    ) -> Vec<u8> {
        self.run_uploaded(problem, &self.upload(case, operands), plan)
    }

    /// Runs a problem with uploaded operands on an output filled with NaN, and returns the bytes of
    /// the output.
    pub fn run_uploaded(
        &self,
        problem: &QuantProblem,
        operands: &UploadedCase,
        plan: &Plan,
    ) -> Vec<u8> {
        let outputs = problem.m * problem.outputs();
        let poison = self
            .client
            .create_from_slice(&bytes(&vec![f32::NAN; outputs], problem.activations));
        // SAFETY: the buffer was made for as many elements.
        let out = unsafe { BufferArg::from_raw_parts(poison.clone(), outputs) };
        launch(&self.client, problem, plan, operands.operands(out))
            .unwrap_or_else(|error| panic!("{problem}: {error}"));
        self.client
            .read_one(poison)
            .unwrap_or_else(|error| panic!("{problem}, {plan:?}: {error}"))
            .to_vec()
    }

    /// Runs a case with a gated epilogue, and compares it with f64.
    pub(super) fn check_gated(
        &self,
        case: &Case,
        epilogue: Epilogue,
        operands: &Operands,
        launch: Launch,
        seed: u64,
    ) {
        let problem = problem(case).with_epilogue(epilogue);
        let plan = Plan {
            epilogue: EpilogueStage::InKernel,
            ..self.plan(launch)
        };
        let found = values(
            &self.run_problem(&problem, case, operands, &plan),
            case.activations,
        );
        let (expected, magnitude) = operands.gated(case, problem.epilogue);
        let error = relative_error_of_terms(&found, &expected, &magnitude);
        assert!(
            error <= tolerance(case.activations),
            "{problem}, {launch:?}, seed {seed}: relative error {error:e}"
        );
    }

    pub(super) fn check(&self, case: &Case, operands: &Operands, launch: Launch, seed: u64) {
        let found = values(&self.run(case, operands, launch), case.activations);
        let error = relative_error_of_terms(&found, &operands.expected, &operands.magnitude);
        assert!(
            error <= tolerance(case.activations),
            "{case}, {launch:?}, seed {seed}: relative error {error:e}"
        );
    }
}
