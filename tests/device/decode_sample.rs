//! Sampling on the device, compared with the same sampling on the host: every option, edge values,
//! and rows of all kinds in one launch.

mod step;

use crate::kernels::{buffer, bytes, client, words};
use crate::setup::{Named, computes, is_card, trial};
use burn::tensor::Device;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use libtest_mimic::Trial;
use marlin_kernels::{ActivationDtype, KernelError};
use marlin_nn::kernels::sample::{
    LOGPROB_WORDS, LogprobArgs, SampleArgs, SampleShape, TokenTable, bitmap, check_device,
    logprobs, sample, workspace_words,
};
use marlin_nn::kernels::{RowsShape, SequenceState, SequenceStatus};
use rand::SeedableRng;
use rand::rngs::StdRng;
use step::Step;

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    if device.name == "flex" {
        return;
    }
    for dtype in [
        ActivationDtype::F32,
        ActivationDtype::F16,
        ActivationDtype::BF16,
    ] {
        if computes(&device.device, dtype) {
            let name = format!("decode::sample_chooses_as_the_host::{dtype}");
            tests.push(trial(device, &name, move |device| {
                agrees(device, dtype, is_card(device), seed)
            }));
        }
    }
    tests.push(trial(
        device,
        "decode::sample_keeps_exactly_k_of_equal_logits",
        equal_logits,
    ));
    tests.push(trial(
        device,
        "decode::sample_refuses_wrong_operands",
        refusals,
    ));
}

/// The buffers of a step on the device.
struct Buffers {
    shape: SampleShape,
    logits: Handle,
    state: Handle,
    token_table: Handle,
    workspace: Handle,
}

impl Buffers {
    fn new(client: &Client, step: &Step) -> Self {
        let little_endian = |words: &mut dyn Iterator<Item = u32>| {
            words.flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
        };
        let state = little_endian(
            &mut step
                .rows
                .iter()
                .flat_map(|row| row.to_words())
                .map(|word| word as u32),
        );
        Self {
            shape: step.shape,
            logits: client.create_from_slice(&bytes(&step.logits, step.shape.dtype)),
            state: client.create_from_slice(&state),
            token_table: client
                .create_from_slice(&little_endian(&mut step.token_table.iter().copied())),
            workspace: client.create_from_slice(&vec![0xa5; workspace_words(&step.shape) * 4]),
        }
    }

    fn sample(&self, client: &Client) {
        let shape = &self.shape;
        // SAFETY: the buffers were made for these elements.
        let arg = |handle: &Handle, elements| unsafe {
            BufferArg::from_raw_parts(handle.clone(), elements)
        };
        let args = SampleArgs {
            logits: arg(&self.logits, shape.rows * shape.vocab),
            state: arg(&self.state, shape.rows * SequenceState::WORDS),
            token_table: arg(&self.token_table, shape.table_words()),
            workspace: arg(&self.workspace, workspace_words(shape)),
        };
        sample(client, shape, args).unwrap_or_else(|error| panic!("{shape}: {error}"));
    }

    fn read(client: &Client, handle: &Handle) -> Vec<u32> {
        let bytes = client
            .read_one(handle.clone())
            .unwrap_or_else(|error| panic!("{error}"));
        bytes
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }

    fn rows(&self, client: &Client) -> Vec<SequenceState> {
        let words = Self::read(client, &self.state);
        words
            .chunks_exact(SequenceState::WORDS)
            .map(|row| SequenceState::from_words(std::array::from_fn(|i| row[i] as i32)))
            .collect()
    }
}

/// Checks two consecutive steps, where the second step reads the tokens of the first.
fn agrees(device: &Device, dtype: ActivationDtype, large: bool, seed: u64) {
    let client = client(device);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut shapes = vec![
        (1, 12),
        (2, 12),
        (31, 12),
        (32, 12),
        (33, 12),
        (1000, 48),
        (4099, 8),
    ];
    if large {
        shapes.extend([
            (32000, 1),
            (32000, 64),
            (128_256, 1),
            (128_256, 128),
            (151_937, 16),
            (262_144, 8),
        ]);
    }
    for (vocab, rows) in shapes {
        let mut step = Step::random(vocab, rows, dtype, &mut rng);
        // A device with less shared memory than NVIDIA's returns an error for the largest
        // vocabularies.
        if client.properties().hardware.max_shared_memory_size < 48 * 1024 && vocab > 152_000 {
            let refused = check_device(&client, &step.shape);
            assert!(
                matches!(refused, Err(KernelError::Shape { .. })),
                "{}: {refused:?}",
                step.shape
            );
            continue;
        }
        let buffers = Buffers::new(&client, &step);
        for _ in 0..2 {
            let before = step.rows.clone();
            buffers.sample(&client);
            step.host();
            for ((before, expected), found) in
                before.iter().zip(&step.rows).zip(buffers.rows(&client))
            {
                assert_eq!(
                    found, *expected,
                    "{}, seed {seed}, from {before:?}",
                    step.shape
                );
            }
            assert!(
                Buffers::read(&client, &buffers.token_table) == step.token_table,
                "{}, seed {seed}: token table",
                step.shape
            );
            expect_logprobs(&client, &buffers, &step, seed);
        }
    }
}

/// Compares log probabilities of a step with those in f64. Rows without log probabilities are not
/// written.
fn expect_logprobs(client: &Client, buffers: &Buffers, step: &Step, seed: u64) {
    const POISON: u8 = 0xa5;
    let SampleShape {
        rows, vocab, dtype, ..
    } = step.shape;
    let out = client.create_from_slice(&vec![POISON; rows * LOGPROB_WORDS * 4]);
    // SAFETY: the buffers were made for these elements.
    let arg =
        |handle: &Handle, elements| unsafe { BufferArg::from_raw_parts(handle.clone(), elements) };
    let args = LogprobArgs {
        logits: arg(&buffers.logits, rows * vocab),
        state: arg(&buffers.state, rows * SequenceState::WORDS),
        out: arg(&out, rows * LOGPROB_WORDS),
    };
    let shape = RowsShape {
        rows,
        features: vocab,
        dtype,
    };
    logprobs(client, &shape, args).unwrap_or_else(|error| panic!("{shape}: {error}"));
    let written = Buffers::read(client, &out);
    let logits = step.logits.chunks_exact(vocab);
    for ((row, logits), found) in (step.rows.iter().zip(logits)).zip(written.chunks(LOGPROB_WORDS))
    {
        let has_token = matches!(
            row.status,
            SequenceStatus::At(_) | SequenceStatus::WindowFull
        );
        let poison = u32::from_le_bytes([POISON; 4]);
        let Some(count) = row.logprobs.filter(|_| has_token) else {
            assert!(found.iter().all(|&word| word == poison), "{row:?}");
            continue;
        };
        // A suppressed token may have a logit that is NaN or infinite, and a row whose window was
        // full before may have no logit above minus infinity.
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !largest.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
            continue;
        }
        let largest = f64::from(largest);
        let exponentials = logits
            .iter()
            .map(|&logit| (f64::from(logit) - largest).exp());
        let log_sum = exponentials.sum::<f64>().ln();
        let expect = |token: u32, found: u32| {
            let expected = f64::from(logits[token as usize]) - largest - log_sum;
            let found = f64::from(f32::from_bits(found));
            // The sum of f32 has a relative error of 1e-5 at most, and so has its exponential.
            let near = (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(
                near || found == expected,
                "token {token} of {shape}, seed {seed}: {found} instead of {expected}"
            );
        };
        expect(row.token, found[0]);
        let mut order: Vec<u32> = (0..vocab as u32).collect();
        order.sort_by(|&a, &b| {
            let [a, b] = [a, b].map(|token| logits[token as usize] + 0.0);
            b.total_cmp(&a)
        });
        let (pairs, _) = found[1..].as_chunks();
        for (i, &[token, logprob]) in pairs.iter().enumerate() {
            if i < count as usize {
                assert_eq!(token, order[i], "place {i} of {shape}, seed {seed}");
                expect(token, logprob);
            } else {
                assert_eq!([token, logprob], [poison; 2], "place {i}");
            }
        }
    }
}

/// Checks that top-k keeps the lowest tokens of equal logits: over many positions, exactly the
/// tokens below k are chosen.
fn equal_logits(device: &Device) {
    let client = client(device);
    let (vocab, rows) = (77, 64);
    let shape = SampleShape {
        rows,
        vocab,
        slots: rows,
        max_len: 1000,
        dtype: ActivationDtype::F32,
    };
    // If all logits are equal, min-p keeps all tokens.
    let five = [0, 1, 2, 3, 4].as_slice();
    let options = [
        (
            SequenceState {
                top_k: 5,
                ..SequenceState::IDLE
            },
            five,
        ),
        (
            SequenceState {
                top_k: 5,
                min_p: 1.0,
                ..SequenceState::IDLE
            },
            five,
        ),
        (
            SequenceState {
                top_p: 4.5 / 77.0,
                ..SequenceState::IDLE
            },
            five,
        ),
        (
            SequenceState {
                top_p: 4.5 / 77.0,
                min_p: 1.0,
                ..SequenceState::IDLE
            },
            five,
        ),
        (
            SequenceState {
                top_k: 7,
                suppresses: true,
                ..SequenceState::IDLE
            },
            &[0, 2, 3, 4, 6, 7, 8],
        ),
    ];
    for (options, expected) in options {
        let row = |i| SequenceState {
            status: SequenceStatus::At(i),
            slot: i,
            temperature: 1.0,
            ..options
        };
        let words = TokenTable::words(vocab);
        let mut table = vec![0; TokenTable::ROWS * words];
        table[TokenTable::SUPPRESSED * words..][..words]
            .copy_from_slice(&bitmap(&[1, 5, 76], vocab));
        let step = Step {
            shape,
            logits: vec![0.25; rows * vocab],
            rows: (0..rows as u32).map(row).collect(),
            token_table: table.repeat(rows),
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
    let shape = SampleShape {
        rows: 2,
        vocab: 40,
        slots: 3,
        max_len: 10,
        dtype: ActivationDtype::F32,
    };
    let run = |shape: &SampleShape, lengths: [usize; 4]| {
        let zeros = |length: usize| words(&client, std::iter::repeat_n(0, length));
        let [logits, state, token_table, workspace] = lengths.map(zeros);
        sample(
            &client,
            shape,
            SampleArgs {
                logits,
                state,
                token_table,
                workspace,
            },
        )
    };
    let right = [
        80,
        2 * SequenceState::WORDS,
        shape.table_words(),
        workspace_words(&shape),
    ];
    assert_eq!(run(&shape, right), Ok(()));
    for (i, name) in ["logits", "state", "token table", "workspace"]
        .into_iter()
        .enumerate()
    {
        let mut lengths = right;
        lengths[i] -= 1;
        let result = run(&shape, lengths);
        assert!(
            matches!(result, Err(KernelError::BufferLength { operand, .. }) if operand == name),
            "{result:?}"
        );
    }
    for vocab in [0, (1 << 18) + 1] {
        let result = run(&SampleShape { vocab, ..shape }, right);
        assert!(
            matches!(result, Err(KernelError::Vocabulary { found, .. }) if found == vocab),
            "{result:?}"
        );
    }
    let result = run(
        &SampleShape {
            slots: usize::MAX / 4,
            ..shape
        },
        right,
    );
    assert!(
        matches!(result, Err(KernelError::TooLarge { .. })),
        "{result:?}"
    );
    let alias = SampleArgs {
        logits: buffer(&client, &[0; 320], 80),
        state: BufferArg::alias(0, 2 * SequenceState::WORDS),
        token_table: words(&client, std::iter::repeat_n(0, right[2])),
        workspace: words(&client, std::iter::repeat_n(0, right[3])),
    };
    let result = sample(&client, &shape, alias);
    assert!(
        matches!(
            result,
            Err(KernelError::Alias {
                operand: "state",
                ..
            })
        ),
        "{result:?}"
    );
}
