//! Decode attention, launched on raw buffers. Caches are filled with NaN past each sequence,
//! outputs are filled with NaN, and lengths lie around every edge.

mod bench;
mod checks;
mod e4m3;
mod operands;
mod pages;
mod prompts;
mod refusals;

use crate::kernels::{bytes, client};
use crate::setup::{Named, computes, is_card, trial};
use bench::{Bench, KEYS, OUT, QKV, STATE, VALUES, state_bytes};
use burn::tensor::Device;
use checks::{check, check_outputs, check_repeats};
use libtest_mimic::Trial;
use marlin_kernels::ActivationDtype;
use marlin_nn::CacheShape;
use marlin_nn::kernels::SequenceStatus;
use marlin_nn::kernels::attention::{AttentionPass, AttentionShape};
use operands::{Operands, row_at};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    if device.name == "flex" {
        return;
    }
    let mut add = |name: &str, body: fn(&Device, bool, u64)| {
        tests.push(trial(
            device,
            &format!("decode::attention::{name}"),
            move |device| body(device, is_card(device), seed),
        ));
    };
    add("agrees_with_f64", agrees);
    add("prompts_agree_with_f64", prompts::agree);
    add("long_prompts_agree_with_f64", prompts::long);
    add(
        "prompts_give_the_same_bits_a_hundred_times",
        prompts::repeats,
    );
    add("pages_agree_with_f64", pages::agree);
    add("pages_of_prompts_agree_with_f64", pages::prompts);
    if device.name != "vulkan" {
        add("e4m3_agrees_with_f64", e4m3::steps);
        add("e4m3_of_prompts_is_written_and_widened", e4m3::prompts);
    }
    add("grows_a_sequence", grows);
    add("skips_rows_outside_of_the_cache", skips);
    add("refuses_wrong_operands", refusals::refusals);
    add("agrees_with_f64_on_long_sequences", long);
    add("gives_the_same_bits_a_hundred_times", repeats);
}

/// Returns those of `dtypes` that a device computes, again and again.
fn dtypes(device: &Device, dtypes: &[ActivationDtype]) -> impl Iterator<Item = ActivationDtype> {
    let computed = dtypes
        .iter()
        .copied()
        .filter(|&dtype| computes(device, dtype));
    computed.collect::<Vec<_>>().into_iter().cycle()
}

/// Returns a shape with four more slots than rows, so that some slots belong to no row.
fn shape(
    rows: usize,
    [heads, kv_heads]: [usize; 2],
    head_dim: usize,
    max_len: usize,
    dtype: ActivationDtype,
) -> AttentionShape {
    AttentionShape {
        rows,
        heads,
        cache: CacheShape::from([rows + 4, kv_heads, max_len, head_dim]),
        rotary_dim: head_dim,
        max_positions: max_len + 3,
        window: None,
        has_sinks: false,
        norm_epsilon: None,
        dtype,
        pass: AttentionPass::Step,
    }
}

/// Returns a shape whose cache has this number of slots.
fn with_slots(slots: usize, shape: AttentionShape) -> AttentionShape {
    AttentionShape {
        cache: CacheShape {
            slots,
            ..shape.cache
        },
        ..shape
    }
}

/// Returns positions around the edges of tiles and splits, and an idle row.
fn edges(max_len: usize) -> Vec<Option<usize>> {
    let edges = [0, 1, 15, 63, 64, 65, 127, 128, 129, 1000, max_len - 1];
    edges
        .into_iter()
        .filter(|&position| position < max_len)
        .map(Some)
        .chain([None])
        .collect()
}

fn agrees(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let mut dtypes = [
        ActivationDtype::F16,
        ActivationDtype::BF16,
        ActivationDtype::F32,
    ]
    .into_iter()
    .filter(|&dtype| computes(device, dtype))
    .collect::<Vec<_>>()
    .into_iter()
    .cycle();
    let mut shapes = Vec::new();
    let max_len = if is_card { 2500 } else { 70 };
    let (head_dims, groups): (&[usize], &[usize]) = if is_card {
        (&[8, 64, 80, 96, 128, 256], &[1, 4, 7, 8, 12])
    } else {
        (&[16, 40], &[1, 4])
    };
    for &head_dim in head_dims {
        for &group in groups {
            let dtype = dtypes.next().unwrap_or(ActivationDtype::F32);
            let rows = if is_card { 12 } else { 6 };
            shapes.push(AttentionShape {
                has_sinks: group.is_multiple_of(4),
                ..shape(rows, [2 * group, 2], head_dim, max_len, dtype)
            });
        }
    }
    // The shapes have single rows, so that sequences are split into many parts. They have norms,
    // windows, and heads that are rotated in part or not at all.
    let (head_dim, groups) = if is_card { (128, [4, 1]) } else { (16, [4, 1]) };
    for group in groups {
        let mut plain = || {
            shape(
                1,
                [2 * group, 2],
                head_dim,
                max_len,
                dtypes.next().unwrap_or(ActivationDtype::F32),
            )
        };
        shapes.push(plain());
        shapes.push(AttentionShape {
            norm_epsilon: Some(1e-6),
            ..plain()
        });
        shapes.push(AttentionShape {
            window: Some(40),
            has_sinks: true,
            rotary_dim: head_dim / 4 * 2 + 4,
            ..plain()
        });
        shapes.push(AttentionShape {
            window: Some(1),
            has_sinks: true,
            rotary_dim: 0,
            norm_epsilon: Some(1e-5),
            ..plain()
        });
    }
    for shape in shapes {
        if shape.rows > 1 {
            check(&client, &shape, &edges(max_len), seed);
        } else {
            edges(max_len)
                .iter()
                .for_each(|position| check(&client, &shape, &[*position], seed));
        }
    }
    // This shape takes more blocks than the device runs at once, so rows are not split.
    if is_card {
        check(
            &client,
            &shape(130, [8, 8], 128, 600, ActivationDtype::F16),
            &edges(600),
            seed,
        );
    }
}

fn long(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let [half, brain] = [ActivationDtype::F16, ActivationDtype::BF16].map(|dtype| {
        if computes(device, dtype) {
            dtype
        } else {
            ActivationDtype::F32
        }
    });
    let of_card = [
        (1, [4, 1], 131_072, half),
        (1, [8, 1], 131_072, brain),
        (3, [2, 2], 40_000, half),
        // A long sequence among many has splits of the greatest length.
        (40, [2, 2], 9_000, half),
    ];
    let of_host = [(1, [4, 1], 5_000, half)];
    for &(rows, heads, max_len, dtype) in if is_card { &of_card[..] } else { &of_host } {
        let shape = with_slots(rows, shape(rows, heads, 128, max_len, dtype));
        let mut positions = vec![Some(100); rows];
        positions[rows / 2] = Some(max_len - 1);
        check(&client, &shape, &positions, seed);
        let window = AttentionShape {
            window: Some(max_len / 3),
            has_sinks: true,
            ..shape
        };
        check(&client, &window, &positions, seed);
    }
}

/// Decodes two sequences from an empty cache, token by token, in the same buffers.
fn grows(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let steps = if is_card { 700 } else { 20 };
    let dtype = if computes(device, ActivationDtype::F16) {
        ActivationDtype::F16
    } else {
        ActivationDtype::F32
    };
    let head_dim = if is_card { 64 } else { 16 };
    let shape = with_slots(2, shape(2, [4, 2], head_dim, steps, dtype));
    let mut operands = Operands::random(&shape, &[Some(0)], seed);
    let mut bench = Bench::new(&client, &shape, &operands);
    for position in 0..steps {
        // The second row is one position behind the first.
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
    operands.rows[0] = row_at(Some(shape.cache.max_len), 0);
    operands.rows[1] = row_at(Some(3), shape.cache.slots);
    operands.rows[2].status = SequenceStatus::Failed;
    operands.rows[3].status = SequenceStatus::WindowFull;
    let bench = Bench::new(&client, &shape, &operands);
    let before = [KEYS, VALUES, OUT].map(|buffer| bench.read(buffer));
    bench.launch();
    assert!(
        [KEYS, VALUES, OUT].map(|buffer| bench.read(buffer)) == before,
        "seed {seed}: a row outside of the cache was written"
    );
}

/// Checks that runs give the same bits, regardless of the order in which blocks finish.
fn repeats(device: &Device, is_card: bool, seed: u64) {
    let client = client(device);
    let dtype = if computes(device, ActivationDtype::F16) {
        ActivationDtype::F16
    } else {
        ActivationDtype::F32
    };
    let lengths = if is_card { [30_000, 900] } else { [300, 90] };
    for (rows, heads, max_len) in [(1, [8, 2], lengths[0]), (16, [8, 8], lengths[1])] {
        let shape = shape(rows, heads, 128, max_len, dtype);
        let bench = Bench::new(
            &client,
            &shape,
            &Operands::random(&shape, &[Some(max_len - 1), Some(max_len / 2)], seed),
        );
        check_repeats(&bench, seed);
    }
}
