//! Sampling on the device, against the same sampling on the host: every option, edge values, rows of all kinds in one launch.

use crate::kernels::{buffer, bytes, client, values, words};
use crate::setup::{Named, computes, is_card, trial};
use burn::tensor::Device;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use libtest_mimic::Trial;
use marlin_decode::kernels::sample::{BITMAPS, SampleArgs, SampleShape, bitmap, check_device, sample, sample_host, workspace_words};
use marlin_decode::kernels::{Row, RowState};
use marlin_kernels::{ActivationDtype, KernelError};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    if device.name == "flex" {
        return;
    }
    for dtype in [ActivationDtype::F32, ActivationDtype::F16, ActivationDtype::BF16] {
        if computes(&device.device, dtype) {
            let name = format!("decode::sample_chooses_as_the_host::{dtype}");
            tests.push(trial(device, &name, move |device| agrees(device, dtype, is_card(device), seed)));
        }
    }
    tests.push(trial(device, "decode::sample_keeps_exactly_k_of_equal_logits", equal_logits));
    tests.push(trial(device, "decode::sample_refuses_wrong_operands", refusals));
}

/// A step's rows and their logits.
struct Step {
    shape: SampleShape,
    /// [rows, vocab], exact in the shape's dtype.
    logits: Vec<f32>,
    rows: Vec<Row>,
    /// [slots, [`BITMAPS`], words].
    bitmaps: Vec<u32>,
}

impl Step {
    fn random(vocab: usize, rows: usize, dtype: ActivationDtype, rng: &mut StdRng) -> Self {
        let shape = SampleShape { rows, vocab, slots: rows + 1, max_len: 100, dtype };
        let logits: Vec<f32> = (0..rows).flat_map(|_| random_logits(vocab, rng)).collect();
        let logits = values(&bytes(&logits, dtype), dtype).into_iter().map(|value| value as f32).collect();
        // The slot of a row differs from its index.
        let rows = (0..rows).map(|row| Row { slot: (row + 1) as u32, ..random_row(vocab as u32, rng) }).collect();
        let bitmaps = (0..shape.slots * BITMAPS * shape.bitmap_words()).map(|_| rng.random::<u32>() & rng.random::<u32>()).collect();
        Self { shape, logits, rows, bitmaps }
    }

    fn host(&mut self) {
        let (vocab, words) = (self.shape.vocab, self.shape.bitmap_words());
        for (row, logits) in self.rows.iter_mut().zip(self.logits.chunks_exact(vocab)) {
            let of_slot = &mut self.bitmaps[row.slot as usize * BITMAPS * words..][..BITMAPS * words];
            let (seen, suppressed) = of_slot.split_at_mut(words);
            sample_host(logits, row, seen, suppressed, self.shape.max_len as u32);
        }
    }
}

/// A step's buffers on the device.
struct Buffers {
    shape: SampleShape,
    logits: Handle,
    state: Handle,
    bitmaps: Handle,
    workspace: Handle,
}

impl Buffers {
    fn new(client: &Client, step: &Step) -> Self {
        let little_endian = |words: &mut dyn Iterator<Item = u32>| words.flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
        let state = little_endian(&mut step.rows.iter().flat_map(|row| row.to_words()).map(|word| word as u32));
        Self {
            shape: step.shape,
            logits: client.create_from_slice(&bytes(&step.logits, step.shape.dtype)),
            state: client.create_from_slice(&state),
            bitmaps: client.create_from_slice(&little_endian(&mut step.bitmaps.iter().copied())),
            workspace: client.create_from_slice(&vec![0xa5; workspace_words(&step.shape) * 4]),
        }
    }

    fn sample(&self, client: &Client) {
        let shape = &self.shape;
        // SAFETY: the buffers were made for these elements.
        let arg = |handle: &Handle, elements| unsafe { BufferArg::from_raw_parts(handle.clone(), elements) };
        let args = SampleArgs {
            logits: arg(&self.logits, shape.rows * shape.vocab),
            state: arg(&self.state, shape.rows * Row::WORDS),
            bitmaps: arg(&self.bitmaps, shape.slots * BITMAPS * shape.bitmap_words()),
            workspace: arg(&self.workspace, workspace_words(shape)),
        };
        sample(client, shape, args).unwrap_or_else(|error| panic!("{shape}: {error}"));
    }

    fn read(client: &Client, handle: &Handle) -> Vec<u32> {
        let bytes = client.read_one(handle.clone()).unwrap_or_else(|error| panic!("{error}"));
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    fn rows(&self, client: &Client) -> Vec<Row> {
        let words = Self::read(client, &self.state);
        words.chunks_exact(Row::WORDS).map(|row| Row::from_words(std::array::from_fn(|i| row[i] as i32))).collect()
    }
}

fn pick<T: Copy>(from: &[T], rng: &mut StdRng) -> T {
    from[rng.random_range(0..from.len())]
}

/// Draws the logits of a row: mostly from about a normal distribution; some with many equal ones, all equal, with minus infinity, or with NaN or infinity.
fn random_logits(vocab: usize, rng: &mut StdRng) -> Vec<f32> {
    let normal = |rng: &mut StdRng| (0..6).map(|_| rng.random_range(-1.0f32..1.0)).sum::<f32>();
    let kind = rng.random_range(0..12);
    let scale = pick(&[0.1f32, 2.0, 5.0], rng);
    let mut logits: Vec<f32> = match kind {
        0 => vec![normal(rng); vocab],
        1 | 2 => (0..vocab).map(|_| normal(rng).round()).collect(),
        _ => (0..vocab).map(|_| normal(rng) * scale).collect(),
    };
    match kind {
        3 | 4 => logits.iter_mut().filter(|_| rng.random_range(0..3) > 0).for_each(|logit| *logit = f32::NEG_INFINITY),
        5 => logits[rng.random_range(0..vocab)] = pick(&[f32::NAN, f32::INFINITY], rng),
        6 => logits = vec![f32::NEG_INFINITY; vocab],
        7 => logits[rng.random_range(0..vocab)] = -0.0,
        _ => {}
    }
    logits
}

fn random_row(vocab: u32, rng: &mut StdRng) -> Row {
    let states = [RowState::At(rng.random_range(0..99)), RowState::At(99), RowState::Idle, RowState::Failed, RowState::WindowFull];
    Row {
        token: rng.random_range(0..vocab),
        state: if rng.random_range(0..4) > 0 { states[0] } else { pick(&states, rng) },
        slot: 0,
        seed: rng.random(),
        top_k: pick(&[0, 0, 1, 2, 5, 50, 200, vocab.saturating_sub(1), vocab, vocab + 7], rng),
        temperature: pick(&[0.0, 0.1, 0.7, 1.0, 1.0, 3.0], rng),
        top_p: pick(&[1.0, 1.0, 0.999, 0.95, 0.5, 0.1, 1e-6], rng),
        repetition_penalty: pick(&[1.0, 1.1, 2.0, 0.7], rng),
        // The last of them count as 0.
        min_p: pick(&[0.0, 0.0, 0.0, 1.0, 0.5, 0.1, 1e-3, 1e-20, f32::MIN_POSITIVE, f32::MIN_POSITIVE / 2.0], rng),
        suppresses: rng.random(),
    }
}

/// Checks two consecutive steps, so that the second sees the tokens of the first.
fn agrees(device: &Device, dtype: ActivationDtype, large: bool, seed: u64) {
    let client = client(device);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut shapes = vec![(1, 12), (2, 12), (31, 12), (32, 12), (33, 12), (1000, 48), (4099, 8)];
    if large {
        shapes.extend([(32000, 1), (32000, 64), (128_256, 1), (128_256, 128), (151_937, 16), (262_144, 8)]);
    }
    for (vocab, rows) in shapes {
        let mut step = Step::random(vocab, rows, dtype, &mut rng);
        // A device with less shared memory than NVIDIA's returns an error for the largest vocabularies.
        if client.properties().hardware.max_shared_memory_size < 48 * 1024 && vocab > 152_000 {
            let refused = check_device(&client, &step.shape);
            assert!(matches!(refused, Err(KernelError::Shape { .. })), "{}: {refused:?}", step.shape);
            continue;
        }
        let buffers = Buffers::new(&client, &step);
        for _ in 0..2 {
            let before = step.rows.clone();
            buffers.sample(&client);
            step.host();
            for ((before, expected), found) in before.iter().zip(&step.rows).zip(buffers.rows(&client)) {
                assert_eq!(found, *expected, "{}, seed {seed}, from {before:?}", step.shape);
            }
            assert!(Buffers::read(&client, &buffers.bitmaps) == step.bitmaps, "{}, seed {seed}: bitmaps", step.shape);
        }
    }
}

/// Checks that of equal logits the lower tokens are kept: over many positions, exactly the tokens below k are chosen.
fn equal_logits(device: &Device) {
    let client = client(device);
    let (vocab, rows) = (77, 64);
    let shape = SampleShape { rows, vocab, slots: rows, max_len: 1000, dtype: ActivationDtype::F32 };
    // Of equal logits min-p keeps all.
    let five = [0, 1, 2, 3, 4].as_slice();
    let options = [
        (Row { top_k: 5, ..Row::IDLE }, five),
        (Row { top_k: 5, min_p: 1.0, ..Row::IDLE }, five),
        (Row { top_p: 4.5 / 77.0, ..Row::IDLE }, five),
        (Row { top_p: 4.5 / 77.0, min_p: 1.0, ..Row::IDLE }, five),
        (Row { top_k: 7, suppresses: true, ..Row::IDLE }, &[0, 2, 3, 4, 6, 7, 8]),
    ];
    for (options, expected) in options {
        let row = |i| Row { state: RowState::At(i), slot: i, temperature: 1.0, ..options };
        let suppressed = bitmap(&[1, 5, 76], vocab);
        let step = Step {
            shape,
            logits: vec![0.25; rows * vocab],
            rows: (0..rows as u32).map(row).collect(),
            bitmaps: [vec![0; suppressed.len()], suppressed].concat().repeat(rows),
        };
        let buffers = Buffers::new(&client, &step);
        buffers.sample(&client);
        let tokens: Vec<u32> = buffers.rows(&client).iter().map(|row| row.token).collect();
        let kept = bitmap(&tokens, vocab);
        assert_eq!(kept, bitmap(expected, vocab), "{options:?}: {tokens:?}");
    }
}

fn refusals(device: &Device) {
    let client = client(device);
    let shape = SampleShape { rows: 2, vocab: 40, slots: 3, max_len: 10, dtype: ActivationDtype::F32 };
    let run = |shape: &SampleShape, lengths: [usize; 4]| {
        let zeros = |length: usize| words(&client, std::iter::repeat_n(0, length));
        let [logits, state, bitmaps, workspace] = lengths.map(zeros);
        sample(&client, shape, SampleArgs { logits, state, bitmaps, workspace })
    };
    let right = [80, 2 * Row::WORDS, 12, workspace_words(&shape)];
    assert_eq!(run(&shape, right), Ok(()));
    for (i, name) in ["logits", "state", "bitmaps of tokens", "workspace"].into_iter().enumerate() {
        let mut lengths = right;
        lengths[i] -= 1;
        let result = run(&shape, lengths);
        assert!(matches!(result, Err(KernelError::BufferLength { operand, .. }) if operand == name), "{result:?}");
    }
    for vocab in [0, (1 << 18) + 1] {
        let result = run(&SampleShape { vocab, ..shape }, right);
        assert!(matches!(result, Err(KernelError::Vocabulary { found, .. }) if found == vocab), "{result:?}");
    }
    let result = run(&SampleShape { slots: usize::MAX / 4, ..shape }, right);
    assert!(matches!(result, Err(KernelError::TooLarge { .. })), "{result:?}");
    let alias = SampleArgs {
        logits: buffer(&client, &[0; 320], 80),
        state: BufferArg::alias(0, 2 * Row::WORDS),
        bitmaps: words(&client, std::iter::repeat_n(0, 12)),
        workspace: words(&client, std::iter::repeat_n(0, right[3])),
    };
    let result = sample(&client, &shape, alias);
    assert!(matches!(result, Err(KernelError::Alias { operand: "state", .. })), "{result:?}");
}
