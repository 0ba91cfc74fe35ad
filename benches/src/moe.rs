//! Times layers of mixtures of experts: the router, the routing, the matmuls of gates and ups and
//! of down, and the weighted sums.

mod call;
mod layer;

use crate::BenchError;
use crate::operands::{Weights, activations, buffer};
use crate::record;
use crate::timing::time;
use call::Call;
use clap::Args;
use cubecl::client::Client;
use cubecl::cuda::CudaDevice;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use layer::{Layer, MoeModel};
use marlin_kernels::device::ClustersAtOnce;
use marlin_kernels::experts::{
    ExpertOperands, LayerPlan, RouteOperands, Routing, RowPlan, launches, multiply, plan, route,
    row_plan, tile_plan,
};
use marlin_kernels::matmul::float::{self, FloatOperands};
use marlin_kernels::matmul::gemv::CLUSTERS;
use marlin_kernels::tile::{Launch, RowOrder};
use marlin_kernels::{ActivationDtype, FloatProblem, Kernel, QuantProblem, Target};
use serde::Serialize;
use std::path::PathBuf;

/// The arguments of the bench of mixtures.
#[derive(Args)]
pub struct MoeArgs {
    /// The models whose layers to use.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "qwen3-30b-a3b,mixtral-8x7b,gpt-oss-20b"
    )]
    models: Vec<MoeModel>,
    /// Tokens.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64,256")]
    tokens: Vec<usize>,
    /// Time each matmul in every tile instead of the planned layer.
    #[arg(long)]
    every_tile: bool,
    /// Numbers of rows of the tiles that `--every-tile` times.
    #[arg(long, value_delimiter = ',', requires = "every_tile")]
    tile_rows: Vec<usize>,
    /// Time each layer in both plans, each row by itself and in tiles, and with each number of
    /// blocks that split K.
    #[arg(long)]
    every_plan: bool,
    /// Write a record of the run to this file.
    #[arg(long)]
    record: Option<PathBuf>,
}

/// The dtype of activations.
const DTYPE: ActivationDtype = ActivationDtype::BF16;
/// The number of layers in a graph, each with other activations and so with another routing.
const CALLS: usize = 24;

/// The times of a layer.
#[derive(Debug, Serialize)]
struct MoeFigure {
    /// The digest of the sources of a step's kernels: [`STEP_DIGEST`](record::STEP_DIGEST).
    digest: &'static str,
    routine: &'static str,
    model: &'static str,
    experts: usize,
    top_k: usize,
    format: String,
    tokens: usize,
    /// The kernels of the matmul of gates and ups, and of down.
    kernels: [String; 2],
    /// The time from the activations to the weighted sums in microseconds; `None` where the router
    /// has more rows than its kernel takes.
    layer_us: Option<f64>,
    /// The time of the router's matmul in microseconds.
    router_us: Option<f64>,
    /// The time of the routing in microseconds; `None` if it is a part of the matmuls.
    routing_us: Option<f64>,
    /// The time of both matmuls in microseconds.
    matmuls_us: f64,
    /// The time of the weighted sums in microseconds; `None` if they are a part of the matmuls.
    sums_us: Option<f64>,
    /// The time to read the distinct experts' bytes, or to compute the products.
    floor_us: Option<f64>,
}

/// Times the layers in the arguments, prints a line for each, and writes the record.
pub fn run(args: &MoeArgs) -> Result<(), BenchError> {
    let client = cubecl::Device::from(CudaDevice::new(0)).client();
    let name = client.properties().identity.name.clone();
    println!("{name}: {DTYPE}, random routing");
    println!(
        "{:16} {:>6}  {:>9} {:>7} {:>7} {:>9} {:>7} {:>9}  kernels",
        "layer", "tokens", "layer us", "router", "routing", "matmuls", "sums", "floor us"
    );
    let mut rows = Vec::new();
    for model in &args.models {
        let layer = model.layer();
        let bench = Bench::new(&client, layer);
        for &tokens in &args.tokens {
            if args.every_tile {
                bench.every_tile(tokens, &args.tile_rows)?;
                continue;
            }
            rows.push(bench.figure(tokens, &name)?);
            if args.every_plan {
                bench.every_plan(tokens, &name)?;
            }
        }
    }
    match &args.record {
        Some(path) => record::write(path, &name, &rows),
        None => Ok(()),
    }
}

/// A layer with its weights.
struct Bench<'a> {
    client: &'a Client,
    layer: Layer,
    router: Handle,
    gate_up: Weights,
    down: Weights,
}

impl<'a> Bench<'a> {
    fn new(client: &'a Client, layer: Layer) -> Self {
        let (gate_up, down) = layer.weights();
        Self {
            client,
            layer,
            router: activations(client, layer.experts, layer.hidden, DTYPE),
            gate_up: Weights::of(client, &gate_up, DTYPE),
            down: Weights::of(client, &down, DTYPE),
        }
    }

    /// Times each matmul in every tile of one of the numbers of rows, or of any if none is given,
    /// and prints a line for each.
    fn every_tile(&self, tokens: usize, tile_rows: &[usize]) -> Result<(), BenchError> {
        let Self { client, layer, .. } = *self;
        let card = Target::of(client).card.ok_or(BenchError::Card)?;
        let (gate_up, down) = layer.problems(tokens);
        let hidden = tokens * layer.top_k * layer.intermediate;
        for (what, problem, order, x_length) in [
            (
                "gate and up",
                gate_up,
                RowOrder::Gathered,
                tokens * layer.hidden,
            ),
            ("down", down, RowOrder::Sorted, hidden),
        ] {
            let x = activations(client, 1, x_length, DTYPE);
            let out = client.empty(problem.m * problem.outputs() * 2);
            for launch in launches(&problem, order, &card) {
                if !tile_rows.is_empty() && !tile_rows.contains(&launch.tile.rows()) {
                    continue;
                }
                let routings = self.routings(tokens, launch.tile.rows())?;
                let us = time(client, CALLS, |i| {
                    let x = buffer(&x, x_length);
                    let out = buffer(&out, problem.m * problem.outputs());
                    self.multiply(&problem, order, &launch, &routings[i], i, [x, out])
                })?;
                println!(
                    "{:16} {tokens:>6}  {us:>9.2}  {what}, {}",
                    layer.name, launch.tile
                );
            }
        }
        Ok(())
    }

    /// Launches the matmul of gates and ups, which gathers rows, or of down, of call `call`. `x`
    /// and the output are in `[x, out]`.
    fn multiply(
        &self,
        problem: &QuantProblem,
        order: RowOrder,
        launch: &Launch,
        routing: &Routing,
        call: usize,
        [x, out]: [BufferArg; 2],
    ) -> Result<(), BenchError> {
        let weights = match order {
            RowOrder::Gathered => &self.gate_up,
            _ => &self.down,
        };
        let operands = ExpertOperands {
            x,
            weight: weights.of_call(call, None),
            bias: None,
            out,
        };
        Ok(multiply(
            self.client,
            problem,
            order,
            launch,
            routing,
            operands,
        )?)
    }

    /// Returns random logits of each call.
    fn logits(&self, tokens: usize) -> Vec<Handle> {
        let count = tokens * self.layer.experts;
        let all = activations(self.client, CALLS, count, DTYPE);
        let of_call = |call: usize| {
            let logits = all.clone().offset_start((2 * call * count) as u64);
            logits.offset_end((2 * (CALLS - call - 1) * count) as u64)
        };
        (0..CALLS).map(of_call).collect()
    }

    /// Returns routings of random logits, each of others.
    fn routings(&self, tokens: usize, block_rows: usize) -> Result<Vec<Routing>, BenchError> {
        let logits = self.logits(tokens);
        let routing = |logits| self.route(tokens, block_rows, logits);
        logits.iter().map(routing).collect()
    }

    fn route(
        &self,
        tokens: usize,
        block_rows: usize,
        logits: &Handle,
    ) -> Result<Routing, BenchError> {
        let operands = self.route_operands(tokens, logits);
        let router = self.layer.router();
        Ok(route(self.client, router, tokens, block_rows, operands)?)
    }

    fn route_operands(&self, tokens: usize, logits: &Handle) -> RouteOperands {
        RouteOperands {
            logits: buffer(logits, tokens * self.layer.experts),
            dtype: DTYPE,
            correction: None,
            factor: 1.0,
        }
    }

    /// Times the layer with the plan for a number of tokens.
    fn figure(&self, tokens: usize, card: &str) -> Result<MoeFigure, BenchError> {
        let (gate_up, down) = self.layer.problems(tokens);
        let card_of = Target::of(self.client).card.ok_or(BenchError::Card)?;
        let plan = plan(&gate_up, &down, tokens, &card_of).ok_or(BenchError::NoTile)?;
        self.planned(tokens, plan, card)
    }

    /// Times the layer with every plan.
    fn every_plan(&self, tokens: usize, card: &str) -> Result<(), BenchError> {
        let (gate_up, down) = self.layer.problems(tokens);
        let card_of = Target::of(self.client).card.ok_or(BenchError::Card)?;
        let tiles = tile_plan(&gate_up, &down, tokens, &card_of).map(LayerPlan::Tiles);
        let mut plans: Vec<_> = tiles.into_iter().collect();
        if let Some(planned) = row_plan(&gate_up, &down, tokens, &card_of) {
            let most = ClustersAtOnce::MOST_BLOCKS;
            let up_to = |most: usize| CLUSTERS.into_iter().filter(move |&blocks| blocks <= most);
            for gate_up in up_to(most / 2) {
                plans.push(LayerPlan::Rows(RowPlan { gate_up, ..planned }));
            }
            for down in up_to(most / self.layer.top_k) {
                plans.push(LayerPlan::Rows(RowPlan { down, ..planned }));
            }
        }
        for plan in plans {
            if let Err(error) = self.planned(tokens, plan, card) {
                println!("{plan:?}: {error}");
            }
        }
        Ok(())
    }

    /// Times the layer with a plan.
    fn planned(&self, tokens: usize, plan: LayerPlan, card: &str) -> Result<MoeFigure, BenchError> {
        let Self { client, layer, .. } = *self;
        let target = Target::of(client);
        let (gate_up, down) = layer.problems(tokens);
        // Rows of different calls are different rows of the same random numbers.
        let x = activations(client, tokens * CALLS, layer.hidden, DTYPE);
        let row_bytes = (tokens * layer.hidden * 2) as u64;
        let x_of = |call: usize| {
            let start = row_bytes * call as u64;
            let end = row_bytes * (CALLS - call - 1) as u64;
            x.clone().offset_start(start).offset_end(end)
        };
        let call = Call {
            bench: self,
            plan,
            problems: (gate_up, down),
            gated: client.empty(layer.top_k * tokens * layer.intermediate * 2),
            rows: client.empty(layer.top_k * tokens * layer.hidden * 2),
            out: client.empty(tokens * layer.hidden * 2),
            logits: client.empty(tokens * layer.experts * 2),
        };
        let head = FloatProblem {
            m: tokens,
            k: layer.hidden,
            n: layer.experts,
            dtype: DTYPE,
        };
        let kernel = marlin_kernels::plan(head, &target).kernel;
        let router = |i: usize| {
            let x = buffer(&x_of(i), tokens * layer.hidden);
            let weight = buffer(&self.router, layer.experts * layer.hidden);
            let out = buffer(&call.logits, tokens * layer.experts);
            let operands = FloatOperands {
                x,
                weight,
                bias: None,
                out,
            };
            float::launch(client, &head, kernel, operands)
        };
        let has_router = matches!(
            kernel,
            Kernel::FloatGemv | Kernel::FewColumns | Kernel::LmHead(_)
        );
        let router_us = has_router
            .then(|| time(client, CALLS, |i| Ok(router(i)?)))
            .transpose()?;
        let layer_us = has_router
            .then(|| {
                time(client, CALLS, |i| {
                    router(i)?;
                    call.layer(i, &x_of(i), &call.logits)
                })
            })
            .transpose()?;
        let (routing_us, matmuls_us, sums_us) = match plan {
            LayerPlan::Rows(_) => {
                let logits = self.logits(tokens);
                let us = time(client, CALLS, |i| call.layer(i, &x_of(i), &logits[i]))?;
                (None, us, None)
            }
            LayerPlan::Tiles(plan) => {
                let routings = self.routings(tokens, plan.block_rows)?;
                let routing = time(client, CALLS, |_| {
                    self.route(tokens, plan.block_rows, &call.logits).map(drop)
                })?;
                let matmuls = time(client, CALLS, |i| {
                    call.matmuls(i, &x_of(i), &plan, &routings[i])
                })?;
                let sums = time(client, CALLS, |i| call.sums(&routings[i]))?;
                (Some(routing), matmuls, Some(sums))
            }
        };
        let floor_us = layer.floor(tokens, card);
        let kernels = match plan {
            LayerPlan::Rows(plan) => {
                [plan.gate_up, plan.down].map(|blocks| Kernel::Gemv { blocks }.to_string())
            }
            LayerPlan::Tiles(plan) => {
                [plan.gate_up, plan.down].map(|launch| launch.tile.to_string())
            }
        };
        println!(
            "{:16} {tokens:>6}  {:>9} {:>7} {:>7} {matmuls_us:>9.1} {:>7} {:>9}  {}; {}",
            layer.name,
            shown(layer_us),
            shown(router_us),
            shown(routing_us),
            shown(sums_us),
            shown(floor_us),
            kernels[0],
            kernels[1]
        );
        Ok(MoeFigure {
            digest: record::STEP_DIGEST,
            routine: "step",
            model: layer.name,
            experts: layer.experts,
            top_k: layer.top_k,
            format: layer.spec.to_string(),
            tokens,
            kernels,
            layer_us,
            router_us,
            routing_us,
            matmuls_us,
            sums_us,
            floor_us,
        })
    }
}

/// Returns the text of a time, or a dash.
fn shown(us: Option<f64>) -> String {
    us.map_or("-".into(), |us| format!("{us:.1}"))
}
