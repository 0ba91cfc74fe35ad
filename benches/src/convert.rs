//! Times the reading of checkpoint layers in every format, from a file to the plain layout.

use crate::{BenchError, ConvertArgs};
use half::f16;
use marlin_format::checkpoint::{
    Checkpoint, CheckpointWriter, Dtype, GptqFormat, GptqVersion, LayerFormat, Marlin24Names,
    PackQuantizedFormat, TensorData, TensorSpec, layer_tensors, read_layer,
};
use marlin_format::{QuantSpec, WeightValue};
use rand::rngs::SmallRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, RngExt, SeedableRng};
use std::hint::black_box;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::Instant;

/// The values of K and N of a layer.
const FEATURES: usize = 8192;
/// The number of timed reads of a layer, after one that is not timed.
const READS: usize = 15;
/// A number of bytes that exceeds the caches of a host.
const CACHE_BYTES: usize = 256 << 20;
const LAYER: &str = "layer";

/// Reads a layer of every format several times, and prints a line for each format: bytes of the
/// layer's tensors, median time, gigabytes per second.
pub fn run(args: &ConvertArgs) -> Result<(), BenchError> {
    println!(
        "K = N = {FEATURES}, {}, {} cores",
        args.group,
        available_parallelism().map_or(1, usize::from)
    );
    println!("{:46} {:>8} {:>8} {:>8}", "format", "MB", "ms", "GB/s");
    for format in formats(QuantSpec::int4(args.group)) {
        let text = format.to_string();
        if args.words.iter().all(|word| text.contains(word)) {
            let (bytes, seconds) = time(&format)?;
            println!(
                "{text:46} {:8.1} {:8.1} {:8.2}",
                bytes / 1e6,
                seconds * 1e3,
                bytes / 1e9 / seconds
            );
        }
    }
    Ok(())
}

/// Returns the bytes of a layer's tensors, and the median time in seconds to read the tensors as a
/// loader does: from mapped files that are not in the processor's caches, into the memory of the
/// previous weight.
fn time(format: &LayerFormat) -> Result<(f64, f64), BenchError> {
    let parent = tempfile::tempdir().map_err(|source| BenchError::File {
        path: std::env::temp_dir(),
        source,
    })?;
    let checkpoint = written(&parent.path().join("model"), &tensors_of(format))?;
    let mut times = Vec::with_capacity(READS + 1);
    let mut other = vec![0u8; CACHE_BYTES];
    for read in 0..=READS {
        other.fill(read as u8);
        black_box(&other);
        let start = Instant::now();
        let weight = read_layer(&checkpoint, LAYER, format)?;
        times.push(start.elapsed().as_secs_f64());
        layer_tensors(&checkpoint, LAYER, format)
            .iter()
            .for_each(|tensor| checkpoint.release(tensor));
        checkpoint.recycle(weight);
    }
    let timed = &mut times[1..];
    timed.sort_by(f64::total_cmp);
    Ok((checkpoint.size_bytes() as f64, timed[READS / 2]))
}

fn written(dir: &Path, tensors: &[TensorData]) -> Result<Checkpoint, BenchError> {
    let mut writer = CheckpointWriter::create(dir)?;
    writer.declare(tensors.iter().map(|tensor| tensor.spec.clone()))?;
    for tensor in tensors {
        writer.write_tensor(&tensor.spec.name, &tensor.bytes)?;
    }
    writer.finish()?;
    Ok(Checkpoint::open(dir)?)
}

/// Returns every format, with every kind of weight that it supports.
fn formats(int4: QuantSpec) -> Vec<LayerFormat> {
    let int8 = int4.with_value(WeightValue::Int8);
    let specs = [int4, int4.with_zero_points(), int8, int8.with_zero_points()];
    let with_order = |format: fn(QuantSpec, bool) -> LayerFormat| {
        specs.map(|spec| [false, true].map(|act_order| format(spec, act_order)))
    };
    let gptq = with_order(|spec, act_order| {
        LayerFormat::Gptq(GptqFormat {
            spec,
            version: GptqVersion::V1,
            act_order,
        })
    });
    let pack_quantized = with_order(|spec, act_order| {
        LayerFormat::PackQuantized(PackQuantizedFormat { spec, act_order })
    });
    let awq = [int4, int4.with_zero_points()].map(LayerFormat::Awq);
    let sparse = [Marlin24Names::CompressedTensors, Marlin24Names::Gptq]
        .map(|names| [int4, int8].map(|spec| LayerFormat::Marlin24(spec, names)));
    [
        gptq.as_flattened(),
        pack_quantized.as_flattened(),
        &awq,
        &[LayerFormat::Marlin(int4)],
        sparse.as_flattened(),
    ]
    .concat()
}

/// Creates the tensors of a layer with random values in this format.
fn tensors_of(format: &LayerFormat) -> Vec<TensorData> {
    let Some(spec) = format.spec() else {
        return Vec::new();
    };
    let (k, n, groups, per_word) = (
        FEATURES,
        FEATURES,
        spec.scales.group.count(FEATURES),
        spec.value.per_word(),
    );
    let (weight, weight_shape, zero_points, zero_points_shape, scales, scales_shape) = match format
    {
        LayerFormat::Gptq(_) => (
            "qweight",
            [k / per_word, n],
            "qzeros",
            [groups, n / per_word],
            "scales",
            [groups, n],
        ),
        LayerFormat::Awq(_) => (
            "qweight",
            [k, n / 8],
            "qzeros",
            [groups, n / 8],
            "scales",
            [groups, n],
        ),
        LayerFormat::PackQuantized(_) => (
            "weight_packed",
            [n, k / per_word],
            "weight_zero_point",
            [n / per_word, groups],
            "weight_scale",
            [n, groups],
        ),
        LayerFormat::Marlin24(_, Marlin24Names::Gptq) => (
            "B_24",
            [k / 32, 16 * n / per_word],
            "",
            [0, 0],
            "s",
            [groups, n],
        ),
        LayerFormat::Marlin24(..) => (
            "weight_packed",
            [k / 32, 16 * n / per_word],
            "",
            [0, 0],
            "scale_packed",
            [groups, n],
        ),
        _ => ("B", [k / 16, 2 * n], "", [0, 0], "s", [groups, n]),
    };

    let rng = &mut SmallRng::seed_from_u64(1);
    let tensor = |name: &str, dtype, shape: &[usize], bytes| TensorData {
        spec: TensorSpec::new(format!("{LAYER}.{name}"), dtype, shape),
        bytes,
    };
    let mut bytes = vec![0; 4 * weight_shape[0] * weight_shape[1]];
    rng.fill_bytes(&mut bytes);
    let mut tensors = vec![tensor(weight, Dtype::I32, &weight_shape, bytes)];
    if spec.has_zero_points() || matches!(format, LayerFormat::Gptq(_)) {
        let mut bytes = vec![0; 4 * zero_points_shape[0] * zero_points_shape[1]];
        rng.fill_bytes(&mut bytes);
        // GPTQ's version 1 cannot represent the largest zero point.
        bytes.iter_mut().for_each(|byte| *byte &= 0x77);
        tensors.push(tensor(zero_points, Dtype::I32, &zero_points_shape, bytes));
    }
    let bytes = (0..groups * n)
        .flat_map(|_| f16::from_f32(rng.random_range(0.002..0.02)).to_le_bytes())
        .collect();
    tensors.push(tensor(scales, Dtype::F16, &scales_shape, bytes));

    let mut group_index: Vec<i32> = (0..k)
        .map(|row| (row / spec.scales.group.rows(k)) as i32)
        .collect();
    if format.act_order() {
        group_index.shuffle(rng);
    }
    let group_index: Vec<u8> = group_index
        .iter()
        .flat_map(|group| group.to_le_bytes())
        .collect();
    match format {
        LayerFormat::Gptq(_) => tensors.push(tensor("g_idx", Dtype::I32, &[k], group_index)),
        LayerFormat::PackQuantized(format) => {
            tensors.push(tensor(
                "weight_shape",
                Dtype::I64,
                &[2],
                [n as i64, k as i64].map(i64::to_le_bytes).concat(),
            ));
            if format.act_order {
                tensors.push(tensor("weight_g_idx", Dtype::I32, &[k], group_index));
            }
        }
        LayerFormat::Marlin24(_, names) => {
            // A nibble names the two stored rows of every four, so a byte describes eight rows.
            let pairs = [4, 8, 9, 12, 13, 14];
            let mut pair = || *pairs.choose(rng).unwrap_or(&4u8);
            let bytes = (0..k * n / 8).map(|_| pair() | (pair() << 4)).collect();
            tensors.push(tensor(
                if *names == Marlin24Names::Gptq {
                    "B_meta"
                } else {
                    "meta"
                },
                Dtype::I16,
                &[k / 32, 2 * n],
                bytes,
            ));
        }
        _ => {}
    }
    tensors
}
