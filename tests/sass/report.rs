//! The printed report: one line for each configuration, and a summary for each card.

use crate::Card;
use crate::batch::Kernel;
use crate::listing::Usage;
use crate::rules::Counts;
use marlin_kernels::inspect::shared_limit;
use marlin_kernels::tile::Config;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The timed steps, in order.
const STEPS: [&str; 4] = ["CUDA text", "NVRTC", "ptxas", "nvdisasm"];

/// The result for one configuration on one card.
pub struct Proof {
    card: Card,
    config: Config,
    shared: usize,
    usage: Usage,
    counts: Counts,
    instructions: usize,
    /// The rules that it breaks.
    pub broken: Vec<String>,
}

impl Proof {
    /// Makes the result of a configuration.
    pub fn new(card: Card, kernel: Kernel<Config>, broken: Vec<String>) -> Self {
        let (shared, counts) = (kernel.shared_bytes(), Counts::of(&kernel.of, &kernel.code));
        Self { card, config: kernel.of, shared, usage: kernel.usage, counts, instructions: kernel.code.len(), broken }
    }

    fn line(&self) -> String {
        let Counts { copies, matrix_loads, products, logic, pairs, .. } = self.counts;
        format!(
            "{}: {:3} registers, {:6} B shared, {} stages, copies {copies}, ldmatrix {matrix_loads}, mma {products}, lop3 {logic}, pairs {pairs}, {} instructions{}",
            name(self.card, &self.config),
            self.usage.registers,
            self.shared,
            self.config.tile.stages,
            self.instructions,
            if self.broken.is_empty() { String::new() } else { format!("  REFUSED: {}", self.broken.join("; ")) }
        )
    }
}

/// Returns the name of a configuration: card, tile, width, group, dtype, zero points.
pub fn name(card: Card, config: &Config) -> String {
    let tile = config.tile;
    let cluster = if tile.is_clustered() { format!(" / {}", tile.cluster) } else { String::new() };
    let size = format!("{}x{}x{} {}{cluster}", tile.rows(), tile.columns(), tile.depth(), tile.product);
    let dtype = if config.bf16 { "bf16" } else { "f16" };
    let zeros = if config.zero_points { "zeros" } else { "no zeros" };
    let epilogue = if config.is_gated() { " swiglu" } else { "" };
    format!("{:6} {size:24} {} {:7} {dtype:4} {zeros:8}{epilogue}", card.arch, config.bits, config.group)
}

/// The results of this run, and the number of configurations that had passed before.
#[derive(Default)]
pub struct Report {
    proofs: Mutex<Vec<Proof>>,
    times: Mutex<[Duration; STEPS.len()]>,
    cached: AtomicUsize,
}

impl Report {
    /// Adds a result.
    pub fn add(&self, proof: Proof) {
        self.proofs.lock().unwrap_or_else(PoisonError::into_inner).push(proof);
    }

    /// Adds the times of compiling some configurations, in the order of [`STEPS`].
    pub fn add_times(&self, times: [Duration; STEPS.len()]) {
        let mut sums = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        sums.iter_mut().zip(times).for_each(|(sum, time)| *sum += time);
    }

    /// Counts configurations whose text has passed before.
    pub fn add_cached(&self, count: usize) {
        self.cached.fetch_add(count, Ordering::Relaxed);
    }

    /// Prints a line for each configuration and one for each card, in the order of `cards`, if anything was compiled.
    pub fn print(&self, cards: &[Card]) {
        let proofs = self.proofs.lock().unwrap_or_else(PoisonError::into_inner);
        for &card in cards {
            proofs.iter().filter(|proof| proof.card == card).for_each(|proof| println!("{}", proof.line()));
        }
        for &card in cards {
            let of_card: Vec<&Proof> = proofs.iter().filter(|proof| proof.card == card).collect();
            let registers = of_card.iter().map(|proof| proof.usage.registers);
            let (Some(least), Some(most)) = (registers.clone().min(), registers.max()) else { continue };
            let shared = of_card.iter().map(|proof| proof.shared).max().unwrap_or_default();
            let refused = of_card.iter().filter(|proof| !proof.broken.is_empty()).count();
            println!(
                "{}: {} configurations compiled, {refused} refused; {least} to {most} registers, at most {shared} of {} B shared",
                card.arch,
                of_card.len(),
                shared_limit(card.capability)
            );
        }
        let cached = self.cached.load(Ordering::Relaxed);
        if cached > 0 {
            println!("{cached} configurations have passed before, with the same sources or text, toolchain and rules");
        }
        if !proofs.is_empty() {
            let sums = self.times.lock().unwrap_or_else(PoisonError::into_inner);
            let times: Vec<_> = STEPS.iter().zip(*sums).map(|(step, time)| format!("{step} {:.0} s", time.as_secs_f64())).collect();
            println!("time over all threads: {}", times.join(", "));
        }
    }
}
