//! Times the calibration of a folder in Llama's shape, with generated weights.

use crate::BenchError;
use crate::decode::{failed, value_name};
use crate::host::kilobytes;
use crate::preset::Preset;
use burn::tensor::Device;
use clap::Args;
use half::f16;
use marlin_format::checkpoint::{CheckpointWriter, Dtype, TensorSpec};
use marlin_format::{GroupSize, QuantSpec};
use marlin_lm::{Calibration, Method, ModelConfig, QuantizeOptions, RowOrder, quantize_folder};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rayon::prelude::*;
use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The arguments of the quantise bench: the model and the calibration documents.
#[derive(Args)]
pub struct QuantizeArgs {
    /// The model whose shape to use.
    #[arg(long, default_value = "llama-3-8b", value_enum)]
    model: Preset,
    /// The number of blocks of the model; by default all.
    #[arg(long)]
    blocks: Option<usize>,
    /// The number of documents.
    #[arg(long, default_value_t = 128)]
    samples: usize,
    /// The number of tokens of each document.
    #[arg(long, default_value_t = 2048)]
    max_len: usize,
    /// Group size: 32, 64, 128, or -1 for a whole column.
    #[arg(long, default_value = "128", allow_hyphen_values = true, value_parser = crate::group)]
    group: GroupSize,
    /// Compute activations in f32.
    #[arg(long)]
    f32: bool,
}

/// Writes a folder and quantises it. Prints a line for each layer, and the time and memory of each
/// block and of the whole run.
pub fn run(args: &QuantizeArgs) -> Result<(), BenchError> {
    let mut config = args.model.config()?;
    config.num_hidden_layers = args.blocks.unwrap_or(config.num_hidden_layers);
    config.tie_word_embeddings = true;
    let dir = tempfile::tempdir().map_err(|source| BenchError::File {
        path: std::env::temp_dir(),
        source,
    })?;
    let (source, target) = (dir.path().join("source"), dir.path().join("target"));
    let start = Instant::now();
    write(&source, &config)?;
    println!(
        "{}: {} blocks written in {:.1} s",
        value_name(args.model),
        config.num_hidden_layers,
        start.elapsed().as_secs_f64()
    );

    let device = Device::cuda(0);
    let mut rng = StdRng::seed_from_u64(1);
    let samples = (0..args.samples)
        .map(|_| {
            (0..args.max_len)
                .map(|_| rng.random_range(0..config.vocab_size as u32))
                .collect()
        })
        .collect();
    let dtype = args.f32.then_some(burn::tensor::FloatDType::F32);
    let calibration = Calibration {
        samples,
        device: device.clone(),
        dtype,
        route_all: false,
    };
    let method = Method::Gptq {
        order: RowOrder::default(),
        damping: 0.01,
        awq: false,
        calibration,
    };
    let options = QuantizeOptions {
        method,
        ..QuantizeOptions::default()
    };
    let watch = MemoryWatch::start(device);
    let (start, mut last, mut last_block, mut all) = (
        Instant::now(),
        Instant::now(),
        Instant::now(),
        Memory::default(),
    );
    let report = quantize_folder(
        &source,
        &target,
        &QuantSpec::int4(args.group),
        &options,
        |progress| {
            println!(
                "{:6.1} s {:6.1} s  {}",
                start.elapsed().as_secs_f64(),
                last.elapsed().as_secs_f64(),
                progress.tensor
            );
            last = Instant::now();
            // This is the last layer of a block. The rest of the block's calibration counts towards
            // the next block.
            if progress.tensor.ends_with("mlp.down_proj") {
                let most = watch.take();
                println!(
                    "         {:6.1} s  a block; at most {most}",
                    last_block.elapsed().as_secs_f64()
                );
                (last_block, all) = (last, all.max(most));
            }
            ControlFlow::Continue(())
        },
    )
    .map_err(failed)?;
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{} layers in {seconds:.1} s; at most {}",
        report.quantized.len(),
        all.max(watch.stop())
    );
    Ok(())
}

/// The peak memory over some time, in bytes.
#[derive(Clone, Copy, Default)]
struct Memory {
    /// The memory of tensors on the device.
    in_use: u64,
    /// The memory reserved on the device for tensors.
    reserved: u64,
    /// The memory of this process, without the pages of mapped files and without the driver's
    /// pinned memory.
    host: u64,
    /// The memory of the whole machine: the decrease in available memory since the start, which
    /// includes pinned memory and other processes.
    machine: u64,
}

impl Memory {
    /// Returns the maximum of each figure.
    fn max(self, other: Self) -> Self {
        Self {
            in_use: self.in_use.max(other.in_use),
            reserved: self.reserved.max(other.reserved),
            host: self.host.max(other.host),
            machine: self.machine.max(other.machine),
        }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [in_use, reserved, host, machine] =
            [self.in_use, self.reserved, self.host, self.machine].map(|bytes| bytes as f64 / 1e9);
        write!(
            f,
            "{in_use:.2} GB in use on the device, {reserved:.2} GB reserved; {host:.2} GB of the process on the host, {machine:.2} GB of the machine"
        )
    }
}

/// A thread that samples the memory every ten milliseconds.
struct MemoryWatch {
    most: Arc<Mutex<Memory>>,
    watcher: JoinHandle<()>,
}

impl MemoryWatch {
    /// Starts to sample the memory in a thread.
    fn start(device: Device) -> Self {
        let most = Arc::new(Mutex::new(Memory::default()));
        let available = kilobytes("/proc/meminfo", "MemAvailable:").unwrap_or(0);
        // The thread has only a weak reference, and ends when the caller's reference is dropped.
        let seen = Arc::downgrade(&most);
        let watcher = thread::spawn(move || {
            while let Some(most) = seen.upgrade() {
                let usage = device.memory_pool_usage();
                let now = Memory {
                    in_use: usage.as_ref().map_or(0, |usage| usage.bytes_in_use),
                    reserved: usage.map_or(0, |usage| usage.bytes_reserved),
                    host: 1024 * kilobytes("/proc/self/status", "RssAnon:").unwrap_or(0),
                    machine: 1024
                        * available.saturating_sub(
                            kilobytes("/proc/meminfo", "MemAvailable:").unwrap_or(available),
                        ),
                };
                let mut most = most.lock().unwrap_or_else(PoisonError::into_inner);
                *most = most.max(now);
                drop(most);
                thread::sleep(Duration::from_millis(10));
            }
        });
        Self { most, watcher }
    }

    /// Returns the peak since the start, or since the last call of this function.
    fn take(&self) -> Memory {
        std::mem::take(&mut *self.most.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Stops the thread, and returns the peak since the last [`take`](Self::take).
    fn stop(self) -> Memory {
        let most = self.take();
        drop(self.most);
        drop(self.watcher.join());
        most
    }
}

/// Writes a float folder. Each weight is noise plus one direction that its rows share, with input
/// features of different sizes, so that the second moments have a decreasing spectrum.
fn write(dir: &Path, config: &ModelConfig) -> Result<(), BenchError> {
    const NOISE: usize = (1 << 20) - 3;
    let mut rng = StdRng::seed_from_u64(0);
    // The sum of three uniform values is close enough to a normal distribution.
    let noise: Vec<f32> = (0..NOISE)
        .map(|_| (0..3).map(|_| rng.random_range(-1.0f32..1.0)).sum())
        .collect();
    let (hidden, heads) = (
        config.hidden_size,
        config.num_attention_heads * config.head_dim,
    );
    let (kv, intermediate) = (
        config.num_key_value_heads * config.head_dim,
        config.intermediate_size,
    );
    let mut tensors = vec![(
        "model.embed_tokens.weight".to_owned(),
        vec![config.vocab_size, hidden],
    )];
    for block in 0..config.num_hidden_layers {
        let mut add = |name: &str, shape: Vec<usize>| {
            tensors.push((format!("model.layers.{block}.{name}.weight"), shape))
        };
        add("input_layernorm", vec![hidden]);
        add("self_attn.q_proj", vec![heads, hidden]);
        add("self_attn.k_proj", vec![kv, hidden]);
        add("self_attn.v_proj", vec![kv, hidden]);
        add("self_attn.o_proj", vec![hidden, heads]);
        add("post_attention_layernorm", vec![hidden]);
        add("mlp.gate_proj", vec![intermediate, hidden]);
        add("mlp.up_proj", vec![intermediate, hidden]);
        add("mlp.down_proj", vec![hidden, intermediate]);
    }
    tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
    let mut writer = CheckpointWriter::create(dir)?;
    writer.declare(
        tensors
            .iter()
            .map(|(name, shape)| TensorSpec::new(name, Dtype::F16, shape.clone())),
    )?;
    for (name, shape) in &tensors {
        let values: Vec<u8> = match shape[..] {
            [rows, columns] => {
                let size = 0.6 / (columns as f32).sqrt();
                let sizes: Vec<f32> = (0..columns)
                    .map(|_| size * (0.4 * noise[rng.random_range(0..NOISE)]).exp())
                    .collect();
                let direction: Vec<f32> = (0..columns)
                    .map(|_| noise[rng.random_range(0..NOISE)])
                    .collect();
                let rows: Vec<(usize, f32)> = (0..rows)
                    .map(|_| {
                        (
                            rng.random_range(0..NOISE - columns),
                            0.5 * noise[rng.random_range(0..NOISE)],
                        )
                    })
                    .collect();
                let mut bytes = vec![0; 2 * rows.len() * columns];
                bytes.par_chunks_exact_mut(2 * columns).zip(rows).for_each(
                    |(bytes, (start, strength))| {
                        let values = noise[start..start + columns]
                            .iter()
                            .zip(&direction)
                            .zip(&sizes);
                        for (bytes, ((noise, direction), size)) in
                            bytes.as_chunks_mut().0.iter_mut().zip(values)
                        {
                            *bytes =
                                f16::from_f32(size * (noise + strength * direction)).to_le_bytes();
                        }
                    },
                );
                bytes
            }
            _ => [f16::ONE.to_le_bytes()].repeat(shape[0]).concat(),
        };
        writer.write_tensor(name, &values)?;
    }
    writer.write_file("config.json", config.to_json().to_string().as_bytes())?;
    Ok(writer.finish()?)
}
