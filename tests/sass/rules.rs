//! The rules for the machine code of a configuration.

use crate::listing::{Code, Usage};
use crate::toolchain::Compiled;
use marlin_format::{GroupSize, WeightValue};
use marlin_kernels::inspect::shared_limit;
use marlin_kernels::tile::{Config, Product, RowOrder};

/// The number of registers of a quarter of a multiprocessor, on every card from compute capability
/// 8.0 to 9.0.
const REGISTERS: usize = 16384;
/// The maximum number of registers per thread.
const THREAD_REGISTERS: usize = 255;
/// The unit in which registers are allocated to the threads of a warp.
const REGISTER_STEP: usize = 8;

/// The counts of the instructions that matter for speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// `cp.async` of 16 bytes that bypass the first-level cache; for warpgroups `cp.async.bulk`.
    pub copies: usize,
    /// `ldmatrix.x4`.
    pub matrix_loads: usize,
    /// `mma.sync.m16n8k16`, or `wgmma.m64nNk16` where N is the tile's rows, in the configuration's
    /// dtype, with f32 sums. For a 2:4 weight, `mma.sp.m16n8k32` or `wgmma.sp.m64nNk32`; for e4m3
    /// by e4m3, `mma.sync.m16n8k32` or `wgmma.m64nNk32`.
    pub products: usize,
    /// Waits for `wgmma`.
    pub waits: usize,
    /// `lop3`.
    pub logic: usize,
    /// The number of pairs of weights that are converted to floats. A pair of 4 bits takes a
    /// `lop3`: a mask and an or, or only a mask if weights are multiplied as f16 in their stored
    /// form. A pair of 8 bits takes one `prmt`, or two for bf16. A pair of floats takes a mask, or
    /// a mask and an or, or on cards with `wgmma` an instruction from e4m3 to f16. A product of
    /// e4m3 takes the codes as they are.
    pub pairs: usize,
}

impl Counts {
    /// Counts the instructions of a kernel of `config`.
    pub fn of(config: &Config, code: &Code) -> Self {
        let rows = config.tile.rows();
        let (mnemonic, shape) = match config.tile.product {
            Product::MmaSync => ("HMMA", "16816".to_owned()),
            Product::SparseMmaSync => ("HMMA", "16832".to_owned()),
            Product::Fp8MmaSync => ("QMMA", "16832".to_owned()),
            Product::Wgmma => ("HGMMA", format!("64x{rows}x16")),
            Product::SparseWgmma => ("HGMMA", format!("64x{rows}x32")),
            Product::Fp8Wgmma => ("QGMMA", format!("64x{}x32", fp8_rows(config))),
        };
        let of = |modifiers: &[&str]| {
            let sparse: &[&str] = if config.tile.is_sparse() {
                &["SP"]
            } else {
                &[]
            };
            code.count(mnemonic, &[&[&shape, "F32"], sparse, modifiers].concat())
        };
        let (products, products_bf16) = (of(&[]), of(&["BF16"]));
        // The constant 1024 in f16 or 128 in bf16, twice: the nibble of each weight is or-ed into
        // it.
        let magic = if config.bf16 {
            "0x43004300"
        } else {
            "0x64006400"
        };
        // The masks of the exponents and mantissas of two floats, which are or-ed to their signs,
        // and of floats that are as f16 has them.
        let (magnitude, in_place) = match (config.value, config.bf16) {
            (WeightValue::E4m3, true) => ("0x7f007f0", "none"),
            (WeightValue::E4m3, false) => ("0x3f803f80", "none"),
            (_, true) => ("0x1c001c0", "none"),
            (_, false) => ("0xe000e00", "0x8e008e00"),
        };
        Self {
            copies: if config.tile.is_wgmma() {
                code.count("UBLKCP", &[])
            } else {
                code.count("LDGSTS", &["E", "BYPASS", "128"])
            },
            matrix_loads: code.count("LDSM", &["16", "M88", "4"]),
            products: if config.tile.is_fp8() {
                of(&["E4M3"])
            } else if config.bf16 {
                products_bf16
            } else {
                products - products_bf16
            },
            waits: code.count("WARPGROUP", &["DEPBAR"]),
            logic: code.count("LOP3", &[]),
            pairs: match config.value {
                WeightValue::Int8 => code.count("PRMT", &[]) / if config.bf16 { 2 } else { 1 },
                WeightValue::Int4 if config.multiplies_subnormals() && !config.bf16 => {
                    code.count_mask()
                }
                WeightValue::Int4 => code.count_mask_or(magic),
                WeightValue::E4m3 if config.tile.is_fp8() => 0,
                WeightValue::E4m3 if config.tile.is_wgmma() && !config.bf16 => {
                    code.count("F2FP", &["F16", "E4M3", "UNPACK_B"])
                }
                WeightValue::E2m1 | WeightValue::E4m3 => {
                    code.count_mask_or(magnitude) + code.count_logic_with(in_place)
                }
            },
        }
    }
}

/// Returns the rows of activations of a product of e4m3, which has half of a warp's outputs.
fn fp8_rows(config: &Config) -> usize {
    config.tile.rows() * config.tile.sub_tiles() / 2
}

/// Returns messages for uses of local memory, which are not allowed, and the remarks of ptxas.
pub fn local_memory(usage: &Usage, code: &Code) -> Vec<String> {
    let mut broken: Vec<String> = usage
        .remarks
        .iter()
        .map(|remark| format!("ptxas said: {}", remark.trim()))
        .collect();
    for (what, bytes) in [("a stack frame", usage.stack), ("spills", usage.spills)] {
        if bytes > 0 {
            broken.push(format!(
                "{what} of {bytes} bytes where there must be none ({} registers)",
                usage.registers
            ));
        }
    }
    for mnemonic in ["LDL", "STL"] {
        let count = code.count(mnemonic, &[]);
        if count > 0 {
            broken.push(format!(
                "{count} {mnemonic} where nothing may touch local memory"
            ));
        }
    }
    broken
}

/// Returns messages for loads before `griddepcontrol.wait` that may read data which the previous
/// kernel still writes, and for a missing wait. `is_there` returns true for a load of data that
/// existed before the pass, such as a weight.
pub fn early_loads(
    capability: u32,
    code: &Code,
    mut is_there: impl FnMut(&str) -> bool,
) -> Vec<String> {
    if capability < 90 {
        return Vec::new();
    }
    let Some(loads) = code.loads_before_wait() else {
        return vec!["no griddepcontrol.wait (ACQBULK)".to_owned()];
    };
    let early = loads.into_iter().filter(|load| !is_there(load));
    early.map(|load| format!("{load} before griddepcontrol.wait (ACQBULK), which reads what the kernel before may still write")).collect()
}

/// Returns messages for the rules that a compiled configuration breaks.
pub fn broken(capability: u32, config: &Config, compiled: &Compiled) -> Vec<String> {
    let Compiled {
        usage,
        code,
        shared_bytes,
    } = compiled;
    let tile = &config.tile;
    let mut broken = Vec::new();
    let mut rule = |holds: bool, message: String| {
        if !holds {
            broken.push(message);
        }
    };

    let (registers, warps) = (usage.registers, config.block_threads() / 32);
    rule(
        registers <= THREAD_REGISTERS,
        format!("{registers} registers a thread where at most {THREAD_REGISTERS} exist"),
    );
    let quarter = registers.next_multiple_of(REGISTER_STEP) * 32 * warps.div_ceil(4);
    rule(
        quarter <= REGISTERS,
        format!(
            "{quarter} registers for a quarter of {warps} warps where a quarter of a multiprocessor has {REGISTERS}"
        ),
    );
    let limit = shared_limit(capability);
    rule(
        *shared_bytes <= limit,
        format!("{shared_bytes} bytes of shared memory where a block may have {limit}"),
    );

    for message in local_memory(usage, code) {
        rule(false, message);
    }

    // With warpgroups, the producer starts copies of the weight before the wait. With sorted rows,
    // the routing is complete before the kernel starts, and is read past the first-level cache.
    for message in early_loads(capability, code, |load| {
        tile.is_wgmma() && load.starts_with("UBLKCP")
            || config.rows == RowOrder::Sorted
                && load.starts_with("LDG.E")
                && load.ends_with(".STRONG.GPU")
    }) {
        rule(false, message);
    }

    let counts = Counts::of(config, code);
    // A warp's share of one step is `columns` by `depth` of the weight, and the tile's rows by
    // `depth` of the activations.
    let (columns, depth) = (tile.columns() / tile.warps_n, tile.depth() / tile.warps_k);
    // A product takes 16 of a warp's columns by 16 stored rows of K, 32 of e4m3; mma.sync
    // multiplies them by 8 rows of activations, wgmma by all rows of the tile, or half of a warp's
    // outputs in e4m3. The loop over steps is not unrolled.
    let rows = match tile.product {
        Product::Fp8Wgmma => fp8_rows(config),
        Product::Wgmma | Product::SparseWgmma => tile.rows(),
        _ => 8,
    };
    let (stored, bits) = (tile.sparsity().stored_rows(depth), config.value.bits());
    let product_rows = if tile.is_fp8() { 32 } else { 16 };
    // One more for all 64 columns if the activations themselves are summed.
    let products = (columns / 16 + usize::from(config.multiplies_subnormals()))
        * (stored / product_rows)
        * (tile.rows() / rows);
    rule(
        counts.products == products,
        format!(
            "{} {} (HMMA, QMMA, HGMMA, QGMMA) where the tile takes {products}",
            counts.products, tile.product
        ),
    );
    // No matrix product has another instruction, shape or accumulator.
    let all: usize = ["HMMA", "QMMA", "HGMMA", "QGMMA"]
        .map(|mnemonic| code.count(mnemonic, &[]))
        .iter()
        .sum();
    rule(
        all == counts.products,
        format!(
            "{all} HMMA, QMMA, HGMMA and QGMMA of which only {} are in the tile's shape and dtype",
            counts.products
        ),
    );
    // One wait for each 16 stored rows of K, one for each group with a separate sum, and one at the
    // end. With e4m3, one for each half of a warp's outputs. ptxas inserts any further waits
    // between products.
    let groups = if config.multiplies_subnormals() {
        config.groups_in_chunk()
    } else {
        0
    };
    let waits = if tile.product == Product::Fp8Wgmma {
        products / (stored / product_rows)
    } else if tile.is_wgmma() {
        stored / 16 + groups + 1
    } else {
        0
    };
    rule(
        counts.waits == waits,
        format!(
            "{} waits for wgmma (WARPGROUP.DEPBAR) where the tile takes {waits}",
            counts.waits
        ),
    );
    // One ldmatrix.x4 loads 512 bytes; wgmma reads shared memory directly.
    let loads = if tile.is_wgmma() {
        0
    } else {
        tile.rows() * depth * tile.activation_bytes() / 512
    };
    rule(
        counts.matrix_loads >= loads,
        format!(
            "{} ldmatrix.x4 (LDSM.16.M88.4) where the tile takes {loads}",
            counts.matrix_loads
        ),
    );
    // A lane converts its weights in pairs.
    let pairs = if tile.is_fp8() {
        0
    } else {
        columns * stored / 32 / 2
    };
    rule(
        counts.pairs >= pairs,
        format!(
            "{} pairs of weights made by lop3 or prmt where the tile has {pairs}",
            counts.pairs
        ),
    );
    if tile.is_wgmma() {
        // The bulk copies of a row of chunks are four rows of tiles (eight for 8 bits, sixteen for
        // a chunk of 128 rows), two of metadata, and the scales and zero points of each group. A
        // box of activations is copied for each 128 bytes of a row. A producer starts all copies of
        // a step. Without a producer, each warp starts a quarter of the tiles and one of the other
        // copies. The compiler may have unrolled the loop around the copies.
        let groups = if config.group == GroupSize::Channel {
            0
        } else {
            config.groups_in_chunk()
        };
        let zeros = if config.zero_points { groups.max(1) } else { 0 };
        let (atoms, metadata) = (tile.atoms(), if tile.is_sparse() { 2 } else { 0 });
        let words = bits * stored / 64;
        let (boxes, bulk) = match config.has_producer() {
            true => (
                tile.warps_k * atoms,
                tile.warps_k * (words + metadata + groups + zeros),
            ),
            false => (atoms, words / 4 + metadata / 2 + groups + zeros),
        };
        let found = code.count("UTMALDG", &["2D"]);
        rule(
            found > 0 && found.is_multiple_of(boxes),
            format!("{found} copies of a box (UTMALDG.2D) where a step takes {boxes}"),
        );
        // With SwiGLU, gates and ups are copied separately.
        let (bulk, steps) = (bulk * config.epilogue.columns(), (found / boxes).max(1));
        // A producer copies the weights of the first stages in one loop and their activations in
        // another. ptxas may unroll one of them, for each stage.
        let (least, most) = if config.has_producer() {
            (1, steps + tile.stages - 1)
        } else {
            (steps, steps)
        };
        let (least, most) = (bulk * least, bulk * most);
        let are_whole =
            counts.copies.is_multiple_of(bulk) && (least..=most).contains(&counts.copies);
        rule(
            are_whole,
            format!(
                "{} bulk copies (UBLKCP) where {found} of a box come with {least} to {most}",
                counts.copies
            ),
        );
        let others = code.count("LDGSTS", &[]);
        rule(
            others == 0,
            format!("{others} cp.async (LDGSTS) where the copy engine copies everything"),
        );
    } else {
        // The minimum is the copies of the weight of one step, 16 bytes for each lane.
        let metadata = if tile.is_sparse() { 2 } else { 0 };
        let copies = columns * stored * bits / 8 / 512 + metadata;
        rule(
            counts.copies >= copies,
            format!(
                "{} cp.async of 16 bytes (LDGSTS.E.BYPASS.128) where one step takes {copies}",
                counts.copies
            ),
        );
    }
    broken
}
