//! Times the calibration of a folder of a Llama's shape, with weights that are generated.

use crate::BenchError;
use crate::decode::{Model, failed, value_name};
use burn::tensor::Device;
use clap::Args;
use half::f16;
use marlin_format::checkpoint::{CheckpointWriter, Dtype, TensorSpec};
use marlin_format::{GroupSize, QuantSpec};
use marlin_llama::{Calibration, LlamaConfig, Method, QuantizeOptions, RowOrder, quantize_folder};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rayon::prelude::*;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The model and the text to time.
#[derive(Args)]
pub struct QuantizeArgs {
    /// The model whose shape to use.
    #[arg(long, default_value = "llama-3-8b", value_enum)]
    model: Model,
    /// Blocks of it; by default all.
    #[arg(long)]
    blocks: Option<usize>,
    /// Documents.
    #[arg(long, default_value_t = 128)]
    samples: usize,
    /// Tokens of each.
    #[arg(long, default_value_t = 2048)]
    max_len: usize,
    /// Group size: 32, 64, 128, or -1 for a whole column.
    #[arg(long, default_value = "128", allow_hyphen_values = true, value_parser = crate::group)]
    group: GroupSize,
    /// Activations in f32.
    #[arg(long)]
    f32: bool,
}

/// Writes a folder, quantises it, and prints a line for each block and the time of the whole.
pub fn run(args: &QuantizeArgs) -> Result<(), BenchError> {
    let mut config = args.model.config()?;
    config.num_hidden_layers = args.blocks.unwrap_or(config.num_hidden_layers);
    config.tie_word_embeddings = true;
    let dir = tempfile::tempdir().map_err(|source| BenchError::File { path: std::env::temp_dir(), source })?;
    let (source, target) = (dir.path().join("source"), dir.path().join("target"));
    let start = Instant::now();
    write(&source, &config)?;
    println!("{}: {} blocks written in {:.1} s", value_name(args.model), config.num_hidden_layers, start.elapsed().as_secs_f64());

    let device = Device::cuda(0);
    let mut rng = StdRng::seed_from_u64(1);
    let samples = (0..args.samples).map(|_| (0..args.max_len).map(|_| rng.random_range(0..config.vocab_size as u32)).collect()).collect();
    let dtype = args.f32.then_some(burn::tensor::FloatDType::F32);
    let calibration = Calibration { samples, device: device.clone(), dtype };
    let method = Method::Gptq { order: RowOrder::default(), damping: 0.01, awq: false, calibration };
    let options = QuantizeOptions { method, ..QuantizeOptions::default() };
    let host = HostMemory::watch();
    let (start, mut last, mut most) = (Instant::now(), Instant::now(), [0, 0]);
    let report = quantize_folder(&source, &target, &QuantSpec::int4(args.group), &options, |progress| {
        if let Some(usage) = device.memory_pool_usage() {
            most = [most[0].max(usage.bytes_in_use), most[1].max(usage.bytes_reserved)];
        }
        println!("{:6.1} s {:6.1} s  {}", start.elapsed().as_secs_f64(), last.elapsed().as_secs_f64(), progress.tensor);
        last = Instant::now();
        ControlFlow::Continue(())
    })
    .map_err(failed)?;
    let (seconds, host) = (start.elapsed().as_secs_f64(), host.most());
    println!(
        "{} layers in {seconds:.1} s; at most {:.2} GB in use on the device between layers, {:.2} GB reserved, {:.2} GB on the host",
        report.quantized.len(),
        most[0] as f64 / 1e9,
        most[1] as f64 / 1e9,
        host as f64 / 1e9
    );
    Ok(())
}

/// The most memory that this process has, without the pages of files that it maps.
struct HostMemory {
    most: Arc<AtomicUsize>,
    watcher: JoinHandle<()>,
}

impl HostMemory {
    /// Looks at it every ten milliseconds from now on.
    fn watch() -> Self {
        let most = Arc::new(AtomicUsize::new(0));
        // The thread has the only other reference: it ends when that of the caller is gone.
        let seen = Arc::downgrade(&most);
        let watcher = thread::spawn(move || {
            while let Some(most) = seen.upgrade() {
                most.fetch_max(anonymous_memory().unwrap_or(0), Ordering::Relaxed);
                drop(most);
                thread::sleep(Duration::from_millis(10));
            }
        });
        Self { most, watcher }
    }

    /// The most so far, in bytes.
    fn most(self) -> usize {
        let most = self.most.load(Ordering::Relaxed);
        drop(self.most);
        drop(self.watcher.join());
        most
    }
}

/// Bytes of this process that are not pages of files: Linux counts those apart.
fn anonymous_memory() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<usize>().ok());
    Some(1024 * field("RssAnon:")?)
}

/// Writes a float folder. Weights are noise on a few directions, with input features of different sizes: their second moments have a spectrum that falls.
fn write(dir: &Path, config: &LlamaConfig) -> Result<(), BenchError> {
    const NOISE: usize = (1 << 20) - 3;
    let mut rng = StdRng::seed_from_u64(0);
    // A sum of three is near enough to normal.
    let noise: Vec<f32> = (0..NOISE).map(|_| (0..3).map(|_| rng.random_range(-1.0f32..1.0)).sum()).collect();
    let (hidden, heads) = (config.hidden_size, config.num_attention_heads * config.head_dim);
    let (kv, intermediate) = (config.num_key_value_heads * config.head_dim, config.intermediate_size);
    let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![config.vocab_size, hidden])];
    for block in 0..config.num_hidden_layers {
        let mut add = |name: &str, shape: Vec<usize>| tensors.push((format!("model.layers.{block}.{name}.weight"), shape));
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
    writer.declare(tensors.iter().map(|(name, shape)| TensorSpec::new(name, Dtype::F16, shape.clone())))?;
    for (name, shape) in &tensors {
        let values: Vec<u8> = match shape[..] {
            [rows, columns] => {
                let size = 0.6 / (columns as f32).sqrt();
                let sizes: Vec<f32> = (0..columns).map(|_| size * (0.4 * noise[rng.random_range(0..NOISE)]).exp()).collect();
                let direction: Vec<f32> = (0..columns).map(|_| noise[rng.random_range(0..NOISE)]).collect();
                let rows: Vec<(usize, f32)> =
                    (0..rows).map(|_| (rng.random_range(0..NOISE - columns), 0.5 * noise[rng.random_range(0..NOISE)])).collect();
                let mut bytes = vec![0; 2 * rows.len() * columns];
                bytes.par_chunks_exact_mut(2 * columns).zip(rows).for_each(|(bytes, (start, strength))| {
                    let values = noise[start..start + columns].iter().zip(&direction).zip(&sizes);
                    for (bytes, ((noise, direction), size)) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                        *bytes = f16::from_f32(size * (noise + strength * direction)).to_le_bytes();
                    }
                });
                bytes
            }
            _ => [f16::ONE.to_le_bytes()].repeat(shape[0]).concat(),
        };
        writer.write_tensor(name, &values)?;
    }
    writer.write_file("config.json", config.to_json().to_string().as_bytes())?;
    Ok(writer.finish()?)
}
