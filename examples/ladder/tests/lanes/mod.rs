//! Steps 4 and 5 on the host, lane by lane. The lanes of a warp load values at the positions that
//! the kernels' functions return. The products of tensor cores follow the tables of the PTX ISA.
//! Sums are in f64.

use half::f16;
use ladder::LadderError;
use ladder::data::Data;
use ladder::fragment::{CHUNK, WARPS, pair_place, row_tiles, run_place, scales_place, words_place};
use ladder::step_4_tensor_cores::{HIGH_FACTOR, HIGH_OFFSET, LOW_OFFSET, MAGIC};
use marlin_format::Scales;
use marlin_format::layout::ScaleLayout;

const LANES: usize = 32;

/// The two halves of a register.
type Pair = [f16; 2];
/// The two registers of fragment B, for each eight rows of activations.
type B = Vec<[Pair; 2]>;

/// A lane's operands of 16 rows of K: words and scales of 64 columns, activations of all rows.
struct Loaded {
    words: [u32; 4],
    scales: [f16; 8],
    b: B,
}

/// The operands as the device holds them.
struct Memory {
    words: Vec<u32>,
    scales: Vec<f16>,
    x: Vec<f16>,
    m: usize,
    k: usize,
    chunks_n: u32,
    tiles: usize,
}

impl Memory {
    fn new(data: &Data) -> Result<Self, LadderError> {
        let (m, k, n, spec) = (
            data.problem.m,
            data.problem.k(),
            data.problem.n(),
            data.problem.spec(),
        );
        let layout = data.problem.weight.tiles();
        let Scales::F16(scales) =
            ScaleLayout::new(&layout, spec.scales.group).pack(data.weight.scales())?
        else {
            panic!("scales are in f16")
        };
        let words = layout.pack(&data.weight)?;
        Ok(Self {
            words,
            scales,
            x: data.x.clone(),
            m,
            k,
            chunks_n: (n / CHUNK) as u32,
            tiles: row_tiles(m),
        })
    }

    fn words(&self, k_16: usize, chunk_n: u32, lane: usize) -> [u32; 4] {
        let place = 4 * words_place(k_16 as u32, chunk_n, self.chunks_n, lane as u32) as usize;
        [0, 1, 2, 3].map(|j| self.words[place + j])
    }

    fn scales(&self, chunk: usize, chunk_n: u32, lane: usize) -> [f16; 8] {
        let place =
            8 * scales_place(chunk as u32 / 2, chunk_n, self.chunks_n, lane as u32) as usize;
        [0, 1, 2, 3, 4, 5, 6, 7].map(|i| self.scales[place + i])
    }

    /// Computes a block's sums over chunks, in the order of its warps, as `multiply` and `write`
    /// do.
    fn product(&self, load: impl Fn(&Self, usize, u32) -> [Vec<Loaded>; 4]) -> Vec<f16> {
        let n = self.chunks_n as usize * CHUNK;
        let mut out = vec![0.0f64; self.m * n];
        for chunk_n in 0..self.chunks_n {
            for warp in 0..WARPS {
                for chunk in (warp..self.k / CHUNK).step_by(WARPS) {
                    for lanes in load(self, chunk, chunk_n) {
                        self.add_step(&lanes, chunk_n as usize, n, &mut out);
                    }
                }
            }
        }
        out.into_iter().map(f16::from_f64).collect()
    }

    /// Adds the products of 16 rows of K to `out`.
    fn add_step(&self, lanes: &[Loaded], chunk_n: usize, n: usize, out: &mut [f64]) {
        for j in 0..4 {
            let fragments: Vec<[Pair; 4]> = lanes
                .iter()
                .map(|lane| dequantize(lane.words[j], lane.scales[2 * j], lane.scales[2 * j + 1]))
                .collect();
            for tile in 0..self.tiles {
                let b: Vec<[Pair; 2]> = lanes.iter().map(|lane| lane.b[tile]).collect();
                for (lane, c) in mma_m16n8k16(&fragments, &b).into_iter().enumerate() {
                    for (element, sum) in c.into_iter().enumerate() {
                        let row = 8 * tile + lane % 4 * 2 + element % 2;
                        let column = CHUNK * chunk_n + 16 * j + lane / 4 + element / 2 * 8;
                        if row < self.m {
                            out[row * n + column] += sum;
                        }
                    }
                }
            }
        }
    }
}

/// Returns the result of step 4, with operands loaded from global memory.
pub fn step_4(data: &Data) -> Result<Vec<f16>, LadderError> {
    let load = |memory: &Memory, chunk: usize, chunk_n: u32| {
        [0, 1, 2, 3].map(|step| {
            let lane = |lane: usize| {
                let b = |tile: usize| {
                    let row = (8 * tile + lane / 4).min(memory.m - 1);
                    let pair = row * (memory.k / 2)
                        + pair_place(lane as u32) as usize
                        + chunk * 32
                        + 8 * step;
                    [pair, pair + 4].map(|pair| [memory.x[2 * pair], memory.x[2 * pair + 1]])
                };
                let (words, scales) = (
                    memory.words(4 * chunk + step, chunk_n, lane),
                    memory.scales(chunk, chunk_n, lane),
                );
                Loaded {
                    words,
                    scales,
                    b: (0..memory.tiles).map(b).collect(),
                }
            };
            (0..LANES).map(lane).collect()
        })
    };
    Ok(Memory::new(data)?.product(load))
}

/// Returns the result of step 5, with operands copied to a stage, and activations swizzled and read
/// by `ldmatrix`.
pub fn step_5(data: &Data) -> Result<Vec<f16>, LadderError> {
    let load = |memory: &Memory, chunk: usize, chunk_n: u32| {
        // The stage holds f16 values, and NaN where nothing was copied.
        let (mut scales, mut x) = (
            vec![f16::NAN; CHUNK],
            vec![f16::NAN; 8 * memory.tiles * CHUNK],
        );
        for lane in 0..LANES {
            if lane < 8 {
                scales[8 * lane..][..8].copy_from_slice(&memory.scales(chunk, chunk_n, 4 * lane));
            }
            for i in 0..2 * memory.tiles {
                let row = 4 * i + lane / 8;
                let from = 8 * (row.min(memory.m - 1) * (memory.k / 8) + chunk * 8 + lane % 8);
                let to = 8 * run_place(row as u32, lane as u32 % 8) as usize;
                x[to..][..8].copy_from_slice(&memory.x[from..][..8]);
            }
        }
        [0, 1, 2, 3].map(|step| {
            let (half, in_half) = (step / 2, step % 2);
            let lane = |lane: usize| {
                // Register i of ldmatrix.x4 holds pair lane % 4 of row lane / 4 of matrix i. Lane
                // 8i + r provides the address of row r of matrix i.
                let b = |tile: usize| {
                    [2 * in_half, 2 * in_half + 1].map(|matrix| {
                        let points = 8 * matrix + lane / 4;
                        let run = run_place(
                            (8 * tile + points % 8) as u32,
                            (4 * half + points / 8) as u32,
                        ) as usize;
                        [x[8 * run + lane % 4 * 2], x[8 * run + lane % 4 * 2 + 1]]
                    })
                };
                let own = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| scales[lane / 4 * 8 + i]);
                Loaded {
                    words: memory.words(4 * chunk + step, chunk_n, lane),
                    scales: own,
                    b: (0..memory.tiles).map(b).collect(),
                }
            };
            (0..LANES).map(lane).collect()
        })
    };
    Ok(Memory::new(data)?.product(load))
}

/// Dequantises a word as the kernels' `dequantize` does.
fn dequantize(word: u32, low_scale: f16, high_scale: f16) -> [Pair; 4] {
    let pair = |bits: u32| {
        [
            f16::from_bits(bits as u16),
            f16::from_bits((bits >> 16) as u16),
        ]
    };
    let [[low_offset, _], [factor, _], [offset, _]] =
        [LOW_OFFSET, HIGH_FACTOR, HIGH_OFFSET].map(pair);
    let half = |word: u32| {
        let low = pair((word & 0x000f_000f) | MAGIC).map(|value| (value - low_offset) * low_scale);
        // The product and the sum are exact in f32, so there is one rounding, as in `fma`.
        let high = pair((word & 0x00f0_00f0) | MAGIC).map(|value| {
            f16::from_f32(value.to_f32() * factor.to_f32() + offset.to_f32()) * high_scale
        });
        [low, high]
    };
    let [[a0, a1], [a2, a3]] = [half(word), half(word >> 8)];
    [a0, a1, a2, a3]
}

/// Returns the four sums of each lane of `mma.m16n8k16`, by the PTX ISA's tables of fragments.
fn mma_m16n8k16(a: &[[Pair; 4]], b: &[[Pair; 2]]) -> Vec<[f64; 4]> {
    let (mut left, mut right) = ([[f64::NAN; 16]; 16], [[f64::NAN; 8]; 16]);
    for lane in 0..LANES {
        let (g, t) = (lane / 4, lane % 4);
        for i in 0..2 {
            for (register, pair) in a[lane].iter().enumerate() {
                left[g + register % 2 * 8][2 * t + i + register / 2 * 8] = pair[i].to_f64();
            }
            for (register, pair) in b[lane].iter().enumerate() {
                right[2 * t + i + register * 8][g] = pair[i].to_f64();
            }
        }
    }
    let sum = |row: usize, column: usize| (0..16).map(|k| left[row][k] * right[k][column]).sum();
    (0..LANES)
        .map(|lane| {
            [0, 1, 2, 3].map(|element| sum(lane / 4 + element / 2 * 8, lane % 4 * 2 + element % 2))
        })
        .collect()
}
