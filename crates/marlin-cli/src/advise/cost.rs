//! A model of the time of a decode step and of a prompt.
//!
//! The floor of matmuls is the time of their weights at the card's bandwidth, or of their products
//! at the rate of its tensor cores, whichever is longer. Attention of a decode step follows the
//! matmuls of each layer, so the floor of the step has the time of reading the cache, too. The
//! expected time is the floor of the matmuls divided by an efficiency, that of the cache divided by
//! [`CACHE_EFFICIENCY`], and a time for each layer and each pass that depends on neither.
//!
//! The efficiency of a decode step is that of the measured model whose layers are nearest in size,
//! in the same format with as many sequences: of the H200 for the H200, and of the H100 for all
//! other cards, whose bandwidth is closer to it. That of a prompt is the one of Llama 2 7B on the
//! H200. The efficiencies of a mixture are those of Qwen3-30B-A3B, which was measured on the H200.
//!
//! FP8 weights with activations in FP8 (W8A8) have the steps of FP8 weights: few rows are multiplied
//! in 16 bits. Of a prompt, tensor cores multiply FP8 twice as fast as f16, as the data sheets of
//! all cards have it; a prompt that would be slower than in 16 bits takes the time of 16 bits.

use super::Format;
use super::cards::{CardSpec, H100, H200};
use super::models::Model;
use super::records::{self, DECODE, NEW_TOKENS, PROMPTS, Record};
use marlin_lm::{KvCache, ModelConfig};
use serde::Serialize;

/// The milliseconds of a layer that depend neither on the card's rates nor on the sizes of its
/// weights: launches, and ramps of memory traffic. With [`PASS_MILLISECONDS`] and the efficiency it
/// is a fit to steps of one sequence in int4 on an H200: of Llama 2 7B and 70B
/// (`decode-models-h200.log`), and of the shipped model (`decode-train-tiny-llama-h200.json`).
const LAYER_MILLISECONDS: f64 = 0.0106;

/// The milliseconds of a pass besides its layers that do not depend on sizes: the embedding, the
/// choice of the next token. From the same fit as [`LAYER_MILLISECONDS`].
const PASS_MILLISECONDS: f64 = 0.044;

/// The read rate of an H200 as a fraction of its data sheet's: 4.37 of 4.8 TB/s
/// (`benches/README.md`). Attention of decode steps reaches it: steps of 8 to 128 sequences of
/// Llama 2 7B over 512 tokens, against steps over 64, take longer by the time of the additional
/// cache at 0.91 of the data sheet's rate, on average (`decode-llama-2-7b-h200.json`, int4).
const CACHE_EFFICIENCY: f64 = 0.91;

/// The models whose efficiencies decode steps of other models have: dense models those of dense
/// ones, and mixtures those of mixtures. That of the shipped model says nothing of large ones: its
/// steps are nearly all launches.
pub(super) const REFERENCES: [Model; 4] = [
    Model::Llama2Seven,
    Model::Llama3Eight,
    Model::Llama2Seventy,
    Model::Qwen3Thirty,
];

/// The basis of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    Measured,
    Modelled,
}

impl Basis {
    pub fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Modelled => "modelled",
        }
    }
}

/// The time of a pass.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// The shortest possible time.
    pub floor_milliseconds: f64,
    /// The expected time.
    pub milliseconds: f64,
    pub basis: Basis,
    /// The files in `benches/records` that have the time, or the times that it is modelled from.
    pub records: Vec<&'static str>,
}

/// An efficiency: the floor of matmuls as a fraction of their time.
#[derive(Debug, Clone)]
struct Efficiency {
    fraction: f64,
    records: Vec<&'static str>,
}

/// Returns the time of a decode step of `sequences` sequences after prompts of `prompt` tokens.
pub fn decode(
    config: &ModelConfig,
    format: Format,
    card: &CardSpec,
    sequences: usize,
    prompt: usize,
) -> Figure {
    let modelled = model_decode(config, format, card, sequences, prompt, &REFERENCES);
    match records::measured(DECODE, config, card, format, sequences) {
        Some(found) if prompt == records::PROMPT_TOKENS => modelled.replaced_by(found),
        _ => modelled,
    }
}

/// Returns the time to the first token of one prompt.
pub fn first_token(config: &ModelConfig, format: Format, card: &CardSpec, tokens: usize) -> Figure {
    let modelled = model_first_token(config, format, card, tokens);
    match records::measured(PROMPTS, config, card, format, tokens) {
        Some(found) => modelled.replaced_by(found),
        None => modelled,
    }
}

impl Figure {
    /// Returns the figure with a measured time.
    fn replaced_by(self, (milliseconds, file): (f64, &'static str)) -> Self {
        Self {
            milliseconds,
            basis: Basis::Measured,
            records: vec![file],
            ..self
        }
    }

    fn modelled(config: &ModelConfig, floor: Floor, efficiency: Efficiency) -> Self {
        Self {
            floor_milliseconds: floor.matmuls + floor.cache,
            milliseconds: floor.matmuls / efficiency.fraction + floor.besides(config),
            basis: Basis::Modelled,
            records: efficiency.records,
        }
    }
}

/// The shortest possible times of the parts of a pass, in milliseconds.
#[derive(Debug, Clone, Copy)]
struct Floor {
    matmuls: f64,
    cache: f64,
}

impl Floor {
    /// Returns the expected milliseconds of a pass besides its matmuls.
    fn besides(&self, config: &ModelConfig) -> f64 {
        self.cache / CACHE_EFFICIENCY
            + config.num_hidden_layers as f64 * LAYER_MILLISECONDS
            + PASS_MILLISECONDS
    }
}

/// Returns the modelled time of a decode step, with efficiencies of `references` alone.
pub(super) fn model_decode(
    config: &ModelConfig,
    format: Format,
    card: &CardSpec,
    sequences: usize,
    prompt: usize,
    references: &[Model],
) -> Figure {
    // Few rows of activations are multiplied in 16 bits.
    let format = match format {
        Format::Fp8W8A8 => Format::Fp8,
        format => format,
    };
    let floor = decode_floor(config, format, card, sequences, prompt);
    let steps = Steps {
        config,
        sequences,
        references,
    };
    Figure::modelled(config, floor, steps.efficiency(card, format))
}

/// Returns the modelled time to the first token.
pub(super) fn model_first_token(
    config: &ModelConfig,
    format: Format,
    card: &CardSpec,
    tokens: usize,
) -> Figure {
    let reference = match config.experts {
        Some(_) => Model::Qwen3Thirty,
        None => Model::Llama2Seven,
    };
    let modelled = |format| {
        let floor = prompt_floor(config, format, card, tokens);
        let efficiency = prompt_efficiency(reference, format, tokens);
        Figure::modelled(config, floor, efficiency)
    };
    if format != Format::Fp8W8A8 {
        return modelled(format);
    }
    // Activations are rounded where that is faster.
    let (rounded, in_16_bits) = (modelled(format), modelled(Format::Fp8));
    let is_rounded = format.fp8_products(config, &card.target(), tokens) > 0.0
        && rounded.milliseconds < in_16_bits.milliseconds;
    if is_rounded { rounded } else { in_16_bits }
}

/// Returns the floor of a decode step: the mean over [`NEW_TOKENS`] tokens.
fn decode_floor(
    config: &ModelConfig,
    format: Format,
    card: &CardSpec,
    sequences: usize,
    prompt: usize,
) -> Floor {
    let sizes = format.sizes(config);
    let weights = read(card, sizes.step_bytes(sequences) as f64);
    let products = multiply(card, sequences as f64 * products(config, format, 1.0, 0.0));
    let position = KvCache::size_bytes(config, 1, 1, records::DTYPE) as f64;
    let length = (prompt + NEW_TOKENS / 2) as f64;
    let positions = layers(config, |window| length.min(window)) / config.num_hidden_layers as f64;
    Floor {
        matmuls: weights.max(products),
        cache: read(card, sequences as f64 * position * positions),
    }
}

/// Returns the floor of a prompt; attention counts as matmuls.
fn prompt_floor(config: &ModelConfig, format: Format, card: &CardSpec, tokens: usize) -> Floor {
    let length = tokens as f64;
    // The pairs of a token and one that it attends to, in all layers. A pair takes a product with a
    // key and one with a value.
    let pairs = layers(config, |window| {
        let short = length.min(window);
        short * short / 2.0 + (length - short) * short
    });
    let attention = 4.0 * pairs * config.query_size() as f64;
    let weights = read(card, format.sizes(config).step_bytes(tokens) as f64);
    let fp8 = format.fp8_products(config, &card.target(), tokens);
    let products = products(config, format, length, fp8);
    Floor {
        matmuls: weights.max(multiply(card, products + attention)),
        cache: 0.0,
    }
}

/// Returns the floating-point operations of the projections of `tokens` tokens and of the head of
/// one, at the rate of dense tensor cores for f16: those of 2:4 weights take half of the time, and
/// so does the share `fp8` that is multiplied in FP8.
fn products(config: &ModelConfig, format: Format, tokens: f64, fp8: f64) -> f64 {
    let sizes = format.sizes(config);
    let kept = if format.is_two_four() {
        0.5
    } else {
        1.0 - 0.5 * fp8
    };
    2.0 * (tokens * kept * sizes.active_weights() as f64 + sizes.head_weights as f64)
}

/// Returns the sum over all layers of a function of the layer's window; infinite without one.
fn layers(config: &ModelConfig, of_window: impl Fn(f64) -> f64) -> f64 {
    let count = config.num_hidden_layers;
    let (full, window) = match config.sliding_window {
        Some(window) => (count - window.layers.count(count), window.size as f64),
        None => (count, f64::INFINITY),
    };
    full as f64 * of_window(f64::INFINITY) + (count - full) as f64 * of_window(window)
}

/// Returns the milliseconds in which a card reads bytes.
fn read(card: &CardSpec, bytes: f64) -> f64 {
    bytes / (card.bandwidth * 1e6)
}

/// Returns the milliseconds in which a card's tensor cores do floating-point operations.
fn multiply(card: &CardSpec, operations: f64) -> f64 {
    operations / (card.rate * 1e9)
}

/// Decode steps of a model whose efficiency is asked for.
#[derive(Clone, Copy)]
struct Steps<'a> {
    config: &'a ModelConfig,
    sequences: usize,
    references: &'a [Model],
}

impl Steps<'_> {
    /// Returns the efficiency on a card.
    ///
    /// A quantised format with no record on the H200 takes as many milliseconds more than its floor
    /// as int4 in groups of 128, and f16 has the efficiency of int4. A format with no record on the
    /// H100 has the efficiency of the H200, times the ratio of both cards in int4. Beyond the
    /// records of a format, the efficiency changes as that of int4 does on the H200, or as that of
    /// the same format does there.
    fn efficiency(self, card: &CardSpec, format: Format) -> Efficiency {
        let is_h200 = card.name == H200.name;
        let card = if is_h200 { &H200 } else { &H100 };
        let curve = self.curve(card, format);
        match curve.points.last() {
            _ if is_h200 && format == Format::Int4 => curve.at(self.sequences),
            None if is_h200 => {
                let int4 = self.efficiency(card, Format::Int4);
                match format {
                    Format::F16 => int4,
                    _ => int4.with_loss_of(self.floor(Format::Int4), self.floor(format)),
                }
            }
            None => {
                // No mixture was measured on the H100.
                if self.config.experts.is_some() {
                    return self.efficiency(&H200, format);
                }
                let [over, under] = [card, &H200].map(|card| self.efficiency(card, Format::Int4));
                self.efficiency(&H200, format).scaled(over, under)
            }
            Some(&(last, _)) if self.sequences > last => {
                let guide = if is_h200 { Format::Int4 } else { format };
                let until = Self {
                    sequences: last,
                    ..self
                };
                curve.at(last).scaled(
                    self.efficiency(&H200, guide),
                    until.efficiency(&H200, guide),
                )
            }
            Some(_) => curve.at(self.sequences),
        }
    }

    /// Returns the floor of the matmuls of a step on an H200, in milliseconds.
    fn floor(self, format: Format) -> f64 {
        let (config, sequences) = (self.config, self.sequences);
        decode_floor(config, format, &H200, sequences, records::PROMPT_TOKENS).matmuls
    }

    /// Returns the efficiencies of the nearest reference that was measured with several numbers of
    /// sequences.
    fn curve(&self, card: &CardSpec, format: Format) -> Curve {
        let layer = |config: &ModelConfig| {
            let weights = format.sizes(config).active_weights() as f64;
            (weights / config.num_hidden_layers as f64).ln()
        };
        let distance = |model: Model| (layer(&model.config()) - layer(self.config)).abs();
        let is_alike =
            |model: &&Model| model.config().experts.is_some() == self.config.experts.is_some();
        let curves = self.references.iter().filter(is_alike).map(|&model| {
            let curve = curve(DECODE, card, model, format, |config, sequences| {
                decode_floor(config, format, card, sequences, records::PROMPT_TOKENS)
            });
            (distance(model), curve)
        });
        curves
            .filter(|(_, curve)| curve.points.len() > 1)
            .min_by(|(a, _), (b, _)| a.total_cmp(b))
            .map(|(_, curve)| curve)
            .unwrap_or_default()
    }
}

/// Returns the efficiency of a prompt. Prompts of several lengths were measured on the H200 in int4
/// alone, so this holds for all cards and all quantised formats; that of f16 is the one of 64 tokens
/// at any length. With FP8 activations it is that of int4 times the ratio of both at the one length
/// that was measured.
fn prompt_efficiency(reference: Model, format: Format, tokens: usize) -> Efficiency {
    let of_format = |format| {
        let floor = |config: &ModelConfig, tokens| prompt_floor(config, format, &H200, tokens);
        curve(PROMPTS, &H200, reference, format, floor)
    };
    match format {
        Format::F16 if reference == Model::Llama2Seven => of_format(Format::F16).at(tokens),
        Format::Fp8W8A8 => {
            let (rounded, int4) = (of_format(Format::Fp8W8A8), of_format(Format::Int4));
            match rounded.points.first() {
                Some(&(at, _)) => int4.at(tokens).scaled(rounded.at(at), int4.at(at)),
                None => int4.at(tokens),
            }
        }
        _ => of_format(Format::Int4).at(tokens),
    }
}

/// Efficiencies by the number of sequences or tokens, in ascending order.
#[derive(Default)]
struct Curve {
    points: Vec<(usize, f64)>,
    records: Vec<&'static str>,
}

/// Returns the efficiencies of a measured model. `floor` returns the floor of one of its passes.
fn curve(
    records: &'static [Record],
    card: &CardSpec,
    model: Model,
    format: Format,
    floor: impl Fn(&ModelConfig, usize) -> Floor,
) -> Curve {
    let config = model.config();
    let found: Vec<&Record> = records::of_model(records, card, model, format).collect();
    let times = found.iter().flat_map(|record| record.milliseconds);
    let efficiency = |&(number, time): &(usize, f64)| {
        let floor = floor(&config, number);
        (number, floor.matmuls / (time - floor.besides(&config)))
    };
    Curve {
        points: times.map(efficiency).collect(),
        records: found.iter().map(|record| record.file).collect(),
    }
}

impl Curve {
    /// Returns the efficiency for a number, linear between two points in the logarithm of the
    /// number. Outside of the points it is that of the nearest; of no points it is 1.
    fn at(&self, number: usize) -> Efficiency {
        let after = self.points.iter().position(|&(found, _)| found >= number);
        let fraction = match (after, self.points.as_slice()) {
            (Some(0), [(_, first), ..]) => *first,
            (Some(index), points) => {
                let ((low, from), (high, to)) = (points[index - 1], points[index]);
                let log = |number: usize| (number as f64).ln();
                let part = (log(number) - log(low)) / (log(high) - log(low));
                from + part * (to - from)
            }
            (None, [.., (_, last)]) => *last,
            (None, []) => 1.0,
        };
        Efficiency {
            fraction,
            records: self.records.clone(),
        }
    }
}

impl Efficiency {
    /// Returns the efficiency of matmuls with another floor that lose as many milliseconds as those
    /// of this efficiency.
    fn with_loss_of(self, floor: f64, other: f64) -> Self {
        let loss = floor / self.fraction - floor;
        Self {
            fraction: other / (other + loss),
            ..self
        }
    }

    /// Returns the efficiency times the ratio of two others, at most 1.
    fn scaled(mut self, over: Self, under: Self) -> Self {
        for file in over.records.into_iter().chain(under.records) {
            if !self.records.contains(&file) {
                self.records.push(file);
            }
        }
        Self {
            fraction: (self.fraction * over.fraction / under.fraction).min(1.0),
            ..self
        }
    }
}
