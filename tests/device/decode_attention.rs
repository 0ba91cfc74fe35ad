//! Decode attention, launched on raw buffers: caches filled with NaN past each sequence, outputs filled with NaN, lengths around every edge.

mod operands;
mod prompts;

use crate::kernels::{buffer, bytes, client, values};
use crate::setup::{Named, computes, is_card, trial};
use burn::tensor::Device;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use libtest_mimic::Trial;
use marlin_decode::kernels::attention::{AttentionArgs, AttentionPass, AttentionPlan, AttentionShape, AttentionTarget, attention};
use marlin_decode::kernels::flash::{FlashArgs, TILE_WORDS, flash, most_tiles, tiles};
use marlin_decode::kernels::{RopeCacheArgs, Row, RowState, rope_cache};
use marlin_kernels::{ActivationDtype, KernelError};
use marlin_tests::{relative_error, tolerance};
use operands::{Operands, cache_index, reference, row_at};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    if device.name == "flex" {
        return;
    }
    let mut add = |name: &str, body: fn(&Device, bool, u64)| {
        tests.push(trial(device, &format!("decode::attention::{name}"), move |device| body(device, is_card(device), seed)));
    };
    add("agrees_with_f64", agrees);
    add("prompts_agree_with_f64", prompts::agree);
    add("long_prompts_agree_with_f64", prompts::long);
    add("prompts_give_the_same_bits_a_hundred_times", prompts::repeats);
    add("grows_a_sequence", grows);
    add("skips_rows_outside_of_the_cache", skips);
    add("refuses_wrong_operands", refusals);
    add("agrees_with_f64_on_long_sequences", long);
    add("gives_the_same_bits_a_hundred_times", repeats);
}

/// Returns a shape with four more slots than rows, so that some slots belong to no row.
fn shape(rows: usize, [heads, kv_heads]: [usize; 2], head_dim: usize, max_len: usize, dtype: ActivationDtype) -> AttentionShape {
    AttentionShape {
        rows,
        heads,
        kv_heads,
        head_dim,
        rotary_dim: head_dim,
        slots: rows + 4,
        max_len,
        max_positions: max_len + 3,
        window: None,
        norm_epsilon: None,
        dtype,
        pass: AttentionPass::Step,
    }
}

/// The buffers of a shape, kept from launch to launch.
struct Bench {
    client: Client,
    shape: AttentionShape,
    buffers: [(Handle, usize); 13],
    prompts: PromptKernel,
}

/// The kernel that attends from the tokens of prompts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum PromptKernel {
    /// [`attention`], row by row.
    Rows,
    /// [`flash`].
    Flash,
}

// Positions in `Bench::buffers`.

const QKV: usize = 0;
const STATE: usize = 1;
const KEYS: usize = 2;
const VALUES: usize = 3;
const OUT: usize = 8;
const TICKETS: usize = 10;
const QUERIES: usize = 11;
const TILES: usize = 12;

impl Bench {
    fn new(client: &Client, shape: &AttentionShape, operands: &Operands) -> Self {
        let plan = AttentionPlan::new(shape, &AttentionTarget::of(client)).unwrap_or_else(|error| panic!("{error}"));
        let (dtype, outputs) = (shape.dtype, shape.rows * shape.heads * shape.head_dim);
        let make = |bytes: Vec<u8>, length: usize| (client.create_from_slice(&bytes), length);
        let floats = |values: &[f32]| make(bytes(values, dtype), values.len());
        let table = |values: &[f32]| make(bytes(&padded(values), ActivationDtype::F32), values.len());
        let buffers = [
            floats(&operands.qkv),
            make(state_bytes(&operands.rows), operands.rows.len() * Row::WORDS),
            floats(&operands.keys),
            floats(&operands.values),
            table(&operands.cos),
            table(&operands.sin),
            floats(&operands.norms[0]),
            floats(&operands.norms[1]),
            floats(&vec![f32::NAN; outputs]),
            make(bytes(&vec![f32::NAN; plan.partials()], ActivationDtype::F32), plan.partials()),
            make(vec![0; 4 * plan.tickets()], plan.tickets()),
            floats(&vec![f32::NAN; outputs]),
            make(tile_bytes(&operands.rows), most_tiles(shape.rows, shape.rows) * TILE_WORDS),
        ];
        Self { client: client.clone(), shape: *shape, buffers, prompts: PromptKernel::Rows }
    }

    fn arg(&self, buffer: usize) -> BufferArg {
        let (handle, length) = &self.buffers[buffer];
        // SAFETY: the buffer was made for these elements.
        unsafe { BufferArg::from_raw_parts(handle.clone(), *length) }
    }

    fn norm(&self, buffer: usize) -> Option<BufferArg> {
        self.shape.norm_epsilon.map(|_| self.arg(buffer))
    }

    /// The operands of [`attention`] on the output of the qkv projection, or on queries.
    fn args(&self, qkv: usize) -> AttentionArgs {
        AttentionArgs {
            qkv: self.arg(qkv),
            state: self.arg(STATE),
            keys: self.arg(KEYS),
            values: self.arg(VALUES),
            cos: self.arg(4),
            sin: self.arg(5),
            q_norm: self.norm(6),
            k_norm: self.norm(7),
            out: self.arg(OUT),
            partials: self.arg(9),
            tickets: self.arg(TICKETS),
        }
    }

    fn write(&mut self, buffer: usize, bytes: &[u8]) {
        self.buffers[buffer].0 = self.client.create_from_slice(bytes);
    }

    /// Launches the kernel of a step, or both kernels of prompts.
    fn launch(&self) {
        self.try_launch().unwrap_or_else(|error| panic!("{error}"));
    }

    fn try_launch(&self) -> Result<(), KernelError> {
        if self.shape.pass == AttentionPass::Step {
            return attention(&self.client, &self.shape, self.args(QKV));
        }
        let args = RopeCacheArgs {
            qkv: self.arg(QKV),
            state: self.arg(STATE),
            cos: self.arg(4),
            sin: self.arg(5),
            q_norm: self.norm(6),
            k_norm: self.norm(7),
            queries: self.arg(QUERIES),
            keys: self.arg(KEYS),
            values: self.arg(VALUES),
        };
        rope_cache(&self.client, &self.shape, args)?;
        if self.prompts == PromptKernel::Rows {
            return attention(&self.client, &self.shape, self.args(QUERIES));
        }
        flash(&self.client, &self.shape, self.flash_args())
    }

    fn flash_args(&self) -> FlashArgs {
        FlashArgs {
            queries: self.arg(QUERIES),
            state: self.arg(STATE),
            tiles: self.arg(TILES),
            keys: self.arg(KEYS),
            values: self.arg(VALUES),
            out: self.arg(OUT),
        }
    }

    fn read(&self, buffer: usize) -> Vec<u8> {
        self.client.read_one(self.buffers[buffer].0.clone()).unwrap_or_else(|error| panic!("{}: {error}", self.shape)).to_vec()
    }

    fn floats(&self, buffer: usize) -> Vec<f64> {
        values(&self.read(buffer), self.shape.dtype)
    }
}

/// Returns a table with at least one element, as a buffer cannot be empty.
fn padded(values: &[f32]) -> Vec<f32> {
    if values.is_empty() { vec![0.0] } else { values.to_vec() }
}

fn state_bytes(rows: &[Row]) -> Vec<u8> {
    rows.iter().flat_map(|row| row.to_words()).flat_map(i32::to_le_bytes).collect()
}

fn tile_bytes(rows: &[Row]) -> Vec<u8> {
    tiles(rows, most_tiles(rows.len(), rows.len())).into_iter().flat_map(i32::to_le_bytes).collect()
}

/// Checks a launch of a row of each sequence.
fn check(client: &Client, shape: &AttentionShape, positions: &[Option<usize>], seed: u64) {
    let operands = Operands::random(shape, positions, seed);
    check_launch(Bench::new(client, shape, &operands), operands, seed);
}

/// Launches once, and checks the outputs, the cache where it was written, and that nothing else was written.
fn check_launch(bench: Bench, mut operands: Operands, seed: u64) {
    let shape = &bench.shape;
    let before = [KEYS, VALUES].map(|cache| bench.read(cache));
    bench.launch();
    let name = format!("{shape}, window {:?}, norms {:?}, {:?}, seed {seed}", shape.window, shape.norm_epsilon, bench.prompts);
    check_outputs(&bench, &mut operands, &name);
    assert!(bench.read(TICKETS).iter().all(|&byte| byte == 0), "{name}: tickets are left");
    check_cache(&bench, &operands, before, &name);
}

/// Checks the outputs row by row, and writes each row's key and value to the cache of `operands`, where the rows after it find them.
fn check_outputs(bench: &Bench, operands: &mut Operands, name: &str) {
    let shape = &bench.shape;
    let out = bench.floats(OUT);
    for (row, out) in out.chunks_exact(shape.heads * shape.head_dim).enumerate() {
        let RowState::At(position) = operands.rows[row].state else {
            assert!(out.iter().all(|value| value.is_nan()), "{name}: idle row {row} was written");
            continue;
        };
        let (expected, magnitude) = reference(shape, operands, row, position as usize);
        let error = relative_error(out, &expected, &magnitude);
        assert!(error <= tolerance(shape.dtype), "{name}: row {row} at {position}: relative error {error:e}");
        operands.append(shape, row, position as usize);
    }
}

/// Checks that the cache has each token's rounded key and its value, and is otherwise as `before`.
fn check_cache(bench: &Bench, operands: &Operands, before: [Vec<u8>; 2], name: &str) {
    let shape = &bench.shape;
    let each = bytes(&[0.0], shape.dtype).len();
    let epsilon = match shape.dtype {
        ActivationDtype::F32 => 1e-6,
        ActivationDtype::F16 => f64::from(half::f16::EPSILON),
        ActivationDtype::BF16 => f64::from(half::bf16::EPSILON),
    };
    for (part, mut expected) in before.into_iter().enumerate() {
        let found = bench.read([KEYS, VALUES][part]);
        for (row, state) in operands.rows.iter().enumerate() {
            let RowState::At(position) = state.state else { continue };
            for head in 0..shape.kv_heads {
                let start = cache_index(shape, state.slot as usize, head, position as usize) * each;
                let place = start..start + shape.head_dim * each;
                let written = values(&found[place.clone()], shape.dtype);
                let exact = match part {
                    0 => operands.rotated(shape, row, 1, head, position as usize),
                    _ => operands.head(shape, row, 2, head).iter().map(|&value| f64::from(value)).collect(),
                };
                for (written, exact) in written.iter().zip(&exact) {
                    let allowed = if part == 0 { epsilon * exact.abs() + 1e-6 } else { 0.0 };
                    let difference = (written - exact).abs();
                    assert!(difference <= allowed, "{name}: row {row} at {position}: {written} in the cache, {exact} expected");
                }
                expected[place.clone()].copy_from_slice(&found[place]);
            }
        }
        assert!(found == expected, "{name}: the cache has changed elsewhere");
    }
}

/// Returns positions around the edges of tiles and splits, and an idle row.
fn edges(max_len: usize) -> Vec<Option<usize>> {
    let edges = [0, 1, 15, 63, 64, 65, 127, 128, 129, 1000, max_len - 1];
    edges.into_iter().filter(|&position| position < max_len).map(Some).chain([None]).collect()
}

fn agrees(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let mut dtypes = [ActivationDtype::F16, ActivationDtype::BF16, ActivationDtype::F32]
        .into_iter()
        .filter(|&dtype| computes(device, dtype))
        .collect::<Vec<_>>()
        .into_iter()
        .cycle();
    let mut shapes = Vec::new();
    let max_len = if is_card { 2500 } else { 70 };
    let (head_dims, groups): (&[usize], &[usize]) =
        if is_card { (&[8, 64, 80, 96, 128, 256], &[1, 4, 7, 8, 12]) } else { (&[16, 40], &[1, 4]) };
    for &head_dim in head_dims {
        for &group in groups {
            let dtype = dtypes.next().unwrap_or(ActivationDtype::F32);
            shapes.push(shape(if is_card { 12 } else { 6 }, [2 * group, 2], head_dim, max_len, dtype));
        }
    }
    // Single rows, so that sequences are split into many parts; with norms, windows, and heads that are rotated in part or not at all.
    let (head_dim, groups) = if is_card { (128, [4, 1]) } else { (16, [4, 1]) };
    for group in groups {
        let mut plain = || shape(1, [2 * group, 2], head_dim, max_len, dtypes.next().unwrap_or(ActivationDtype::F32));
        shapes.push(plain());
        shapes.push(AttentionShape { norm_epsilon: Some(1e-6), ..plain() });
        shapes.push(AttentionShape { window: Some(40), rotary_dim: head_dim / 4 * 2 + 4, ..plain() });
        shapes.push(AttentionShape { window: Some(1), rotary_dim: 0, norm_epsilon: Some(1e-5), ..plain() });
    }
    for shape in shapes {
        if shape.rows > 1 {
            check(&client, &shape, &edges(max_len), seed);
        } else {
            edges(max_len).iter().for_each(|position| check(&client, &shape, &[*position], seed));
        }
    }
    // More blocks than the device runs at once: rows are not split.
    if is_card {
        check(&client, &shape(130, [8, 8], 128, 600, ActivationDtype::F16), &edges(600), seed);
    }
}

fn long(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let [half, brain] =
        [ActivationDtype::F16, ActivationDtype::BF16].map(|dtype| if computes(device, dtype) { dtype } else { ActivationDtype::F32 });
    let of_card = [
        (1, [4, 1], 131_072, half),
        (1, [8, 1], 131_072, brain),
        (3, [2, 2], 40_000, half),
        // A long sequence among many: splits of the greatest length.
        (40, [2, 2], 9_000, half),
    ];
    let of_host = [(1, [4, 1], 5_000, half)];
    for &(rows, heads, max_len, dtype) in if is_card { &of_card[..] } else { &of_host } {
        let shape = AttentionShape { slots: rows, ..shape(rows, heads, 128, max_len, dtype) };
        let mut positions = vec![Some(100); rows];
        positions[rows / 2] = Some(max_len - 1);
        check(&client, &shape, &positions, seed);
        let window = AttentionShape { window: Some(max_len / 3), ..shape };
        check(&client, &window, &positions, seed);
    }
}

/// Decodes one sequence from an empty cache, token by token, in the same buffers.
fn grows(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let steps = if is_card { 700 } else { 20 };
    let dtype = if computes(device, ActivationDtype::F16) { ActivationDtype::F16 } else { ActivationDtype::F32 };
    let shape = AttentionShape { slots: 2, ..shape(2, [4, 2], if is_card { 64 } else { 16 }, steps, dtype) };
    let mut operands = Operands::random(&shape, &[Some(0)], seed);
    let mut bench = Bench::new(&client, &shape, &operands);
    for position in 0..steps {
        // The second row is one behind the first.
        let positions = [Some(position), position.checked_sub(1)];
        let fresh = Operands::random(&shape, &[None], seed + position as u64);
        operands.qkv = fresh.qkv;
        for (row, position) in operands.rows.iter_mut().zip(positions) {
            *row = row_at(position, row.slot as usize);
        }
        bench.write(QKV, &bytes(&operands.qkv, dtype));
        bench.write(STATE, &state_bytes(&operands.rows));
        bench.launch();
        check_outputs(&bench, &mut operands, &format!("{shape}, seed {seed}"));
    }
}

fn skips(device: &Device, _: bool, seed: u64) {
    let client = client(device);
    let shape = shape(4, [2, 1], 16, 24, ActivationDtype::F32);
    let mut operands = Operands::random(&shape, &[Some(5)], seed);
    operands.rows[0] = row_at(Some(shape.max_len), 0);
    operands.rows[1] = row_at(Some(3), shape.slots);
    operands.rows[2].state = RowState::Failed;
    operands.rows[3].state = RowState::WindowFull;
    let bench = Bench::new(&client, &shape, &operands);
    let before = [KEYS, VALUES, OUT].map(|buffer| bench.read(buffer));
    bench.launch();
    assert!([KEYS, VALUES, OUT].map(|buffer| bench.read(buffer)) == before, "seed {seed}: a row outside of the cache was written");
}

/// Checks that runs give the same bits, in whatever order blocks finish.
fn repeats(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let dtype = if computes(device, ActivationDtype::F16) { ActivationDtype::F16 } else { ActivationDtype::F32 };
    let lengths = if is_card { [30_000, 900] } else { [300, 90] };
    for (rows, heads, max_len) in [(1, [8, 2], lengths[0]), (16, [8, 8], lengths[1])] {
        let shape = shape(rows, heads, 128, max_len, dtype);
        let bench = Bench::new(&client, &shape, &Operands::random(&shape, &[Some(max_len - 1), Some(max_len / 2)], seed));
        check_repeats(&bench, seed);
    }
}

/// Launches a hundred times, and checks that every output has the bits of the first.
fn check_repeats(bench: &Bench, seed: u64) {
    bench.launch();
    let first = bench.read(OUT);
    for run in 1..100 {
        bench.launch();
        assert!(bench.read(OUT) == first, "{}, seed {seed}: run {run} differs", bench.shape);
    }
}

fn refusals(device: &Device, _: bool, seed: u64) {
    let client = client(device);
    let shape = shape(2, [4, 2], 16, 24, ActivationDtype::F32);
    let bench = Bench::new(&client, &shape, &Operands::random(&shape, &[Some(5)], seed));
    let short = || buffer(&client, &[0; 4], 1);
    let length = |args: AttentionArgs, expected: &str| {
        let result = attention(&client, &shape, args);
        assert!(matches!(&result, Err(KernelError::BufferLength { operand, .. }) if *operand == expected), "{expected}: {result:?}");
    };
    length(AttentionArgs { qkv: short(), ..bench.args(QKV) }, "qkv");
    length(AttentionArgs { state: short(), ..bench.args(QKV) }, "state");
    length(AttentionArgs { keys: short(), ..bench.args(QKV) }, "keys");
    length(AttentionArgs { values: short(), ..bench.args(QKV) }, "values");
    length(AttentionArgs { cos: short(), ..bench.args(QKV) }, "cosines");
    length(AttentionArgs { sin: short(), ..bench.args(QKV) }, "sines");
    length(AttentionArgs { out: short(), ..bench.args(QKV) }, "output");
    let result = attention(&client, &shape, AttentionArgs { q_norm: Some(short()), ..bench.args(QKV) });
    assert!(matches!(result, Err(KernelError::Presence { operand: "norm of q", .. })), "{result:?}");
    let normed = AttentionShape { norm_epsilon: Some(1e-6), ..shape };
    let result = attention(&client, &normed, bench.args(QKV));
    assert!(matches!(result, Err(KernelError::Presence { operand: "norm of q", .. })), "{result:?}");
    let result = attention(&client, &AttentionShape { rotary_dim: 5, ..shape }, bench.args(QKV));
    assert!(matches!(result, Err(KernelError::Shape { .. })), "{result:?}");
    // Tensor cores have no f32.
    let result = flash(&client, &AttentionShape { pass: AttentionPass::Prompt, ..shape }, bench.flash_args());
    assert!(matches!(result, Err(KernelError::Shape { .. })), "{result:?}");
    for buffer in [QKV, STATE, KEYS, VALUES, QUERIES] {
        let mut bench = Bench::new(&client, &shape, &Operands::random(&shape, &[Some(5)], seed));
        bench.shape.pass = AttentionPass::Prompt;
        bench.buffers[buffer].1 -= 1;
        let result = bench.try_launch();
        assert!(matches!(result, Err(KernelError::BufferLength { .. })), "buffer {buffer}: {result:?}");
    }
}
