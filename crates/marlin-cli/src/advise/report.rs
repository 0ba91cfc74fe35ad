//! The advice for a model on a card.

use super::cards::CardSpec;
use super::cost::{self, Basis, Figure};
use super::{Format, accuracy, records};
use crate::experts::ExpertsRow;
use marlin_kernels::Target;
use marlin_lm::{KvCache, MAX_SEQUENCES, ModelConfig, ModelSizes};
use serde::Serialize;

/// The bytes of memory that are kept free: for the driver, kernels, recorded steps and the
/// activations of a prompt's pass. A choice, not a measurement.
pub const RESERVE_BYTES: usize = 1_000_000_000;

/// The most cards that a model is split over: those of one host.
const MOST_CARDS: usize = 8;

/// What is asked of a model on a card.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    pub config: &'a ModelConfig,
    pub card: &'a CardSpec,
    /// The properties of the card that decide which kernels run.
    pub target: &'a Target,
    /// The bytes of the card's memory.
    pub memory: usize,
    /// Numbers of sequences that decode together.
    pub sequences: &'a [usize],
    /// The tokens of each prompt.
    pub prompt: usize,
    /// The positions of the cache of each sequence.
    pub positions: usize,
}

#[derive(Debug, Serialize)]
pub struct Advice {
    pub architecture: String,
    pub layers: usize,
    /// The experts of a mixture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsRow>,
    pub weights: usize,
    pub card: CardRow,
    pub prompt_tokens: usize,
    pub cache_positions: usize,
    pub cache_bytes_per_sequence: usize,
    /// The formats that the card's kernels take, the most accurate first.
    pub formats: Vec<FormatRow>,
    pub advice: String,
}

/// The card, and the source of its properties.
#[derive(Debug, Serialize)]
pub struct CardRow {
    pub name: &'static str,
    pub title: &'static str,
    pub memory_bytes: usize,
    pub reserve_bytes: usize,
    pub gigabytes_per_second: f64,
    pub teraflops: f64,
    pub source: &'static str,
}

#[derive(Debug, Serialize)]
pub struct FormatRow {
    pub format: Format,
    pub weight_bytes: usize,
    /// The number of sequences whose caches fit beside the weights, at most [`MAX_SEQUENCES`].
    pub most_sequences: usize,
    pub first_token: Figure,
    pub decode: Vec<DecodeRow>,
    pub accuracy: String,
}

/// Decode of a number of sequences.
#[derive(Debug, Serialize)]
pub struct DecodeRow {
    pub sequences: usize,
    pub cache_bytes: usize,
    /// True if weights and caches fit one card.
    pub fits: bool,
    /// The fewest of these cards that weights and caches fit if the model is split over them;
    /// `None` if those of one host are too few.
    pub cards: Option<usize>,
    pub step: Figure,
    pub floor_tokens_per_second: f64,
    pub tokens_per_second: f64,
}

impl Question<'_> {
    pub fn answer(&self) -> Advice {
        let formats: Vec<FormatRow> = Format::ALL
            .into_iter()
            .filter(|format| format.runs(self.config, self.target))
            .map(|format| self.format(format))
            .collect();
        let card = self.card;
        Advice {
            architecture: self.config.architecture.to_string(),
            layers: self.config.num_hidden_layers,
            experts: ExpertsRow::of(self.config),
            weights: Format::F16.sizes(self.config).bytes() / 2,
            card: CardRow {
                name: card.name,
                title: card.title,
                memory_bytes: self.memory,
                reserve_bytes: RESERVE_BYTES,
                gigabytes_per_second: card.bandwidth,
                teraflops: card.rate,
                source: card.source,
            },
            prompt_tokens: self.prompt,
            cache_positions: self.positions,
            cache_bytes_per_sequence: self.cache(1),
            advice: self.sentence(&formats),
            formats,
        }
    }

    /// Returns the bytes of the caches of a number of sequences.
    fn cache(&self, sequences: usize) -> usize {
        KvCache::size_bytes(self.config, sequences, self.positions, records::DTYPE)
    }

    /// Returns the fewest cards that the caches of a number of sequences fit with weights of these
    /// sizes.
    fn cards(&self, sizes: &ModelSizes, sequences: usize) -> Option<usize> {
        let heads = self.config.num_key_value_heads.max(1);
        let mut counts = (1..=MOST_CARDS).filter(|&count| self.config.splits_over(count));
        counts.find(|&count| {
            let cache = self.cache(sequences) / heads * self.config.rank_kv_heads(count);
            sizes
                .rank_bytes(count)
                .saturating_add(cache)
                .saturating_add(RESERVE_BYTES)
                <= self.memory
        })
    }

    fn format(&self, format: Format) -> FormatRow {
        let sizes = format.sizes(self.config);
        let weight_bytes = sizes.bytes();
        let room = self
            .memory
            .saturating_sub(weight_bytes)
            .saturating_sub(RESERVE_BYTES);
        let decode = self.sequences.iter().map(|&sequences| {
            let step = cost::decode(self.config, format, self.card, sequences, self.prompt);
            let rate = |milliseconds: f64| sequences as f64 * 1000.0 / milliseconds;
            let cards = self.cards(&sizes, sequences);
            DecodeRow {
                sequences,
                cache_bytes: self.cache(sequences),
                fits: cards == Some(1),
                cards,
                floor_tokens_per_second: rate(step.floor_milliseconds),
                tokens_per_second: rate(step.milliseconds),
                step,
            }
        });
        FormatRow {
            format,
            weight_bytes,
            most_sequences: (room / self.cache(1).max(1)).min(MAX_SEQUENCES),
            first_token: cost::first_token(self.config, format, self.card, self.prompt),
            decode: decode.collect(),
            accuracy: accuracy::note(format),
        }
    }

    /// Returns a sentence with the fastest and the most accurate format that fit, for the largest
    /// number of sequences with which any does.
    fn sentence(&self, formats: &[FormatRow]) -> String {
        let title = self.card.title;
        let fitting = |sequences: usize| {
            formats.iter().filter_map(move |row| {
                let of_number = |decode: &&DecodeRow| decode.sequences == sequences;
                let decode = row.decode.iter().find(of_number)?;
                decode.fits.then_some((row, decode))
            })
        };
        let rate = |decode: &DecodeRow| {
            let basis = decode.step.basis.name();
            format!("{:.0} tokens/s, {basis}", decode.tokens_per_second)
        };
        let faster = |a: &(_, &DecodeRow), b: &(_, &DecodeRow)| {
            a.1.tokens_per_second.total_cmp(&b.1.tokens_per_second)
        };
        let mut numbers = self.sequences.to_vec();
        numbers.sort_unstable();
        let found = numbers.into_iter().rev().find_map(|sequences| {
            let fastest = fitting(sequences).max_by(faster)?;
            Some((sequences, fastest, fitting(sequences).next()?))
        });
        let Some((sequences, (fast, fast_decode), (best, best_decode))) = found else {
            let split = formats.iter().filter_map(|row| {
                let cards = row.decode.iter().filter_map(|decode| decode.cards).min()?;
                Some((cards, row.format.name()))
            });
            // Of the formats that fit as few cards, the most accurate.
            let several = match split.min_by_key(|&(cards, _)| cards) {
                Some((cards, name)) => {
                    format!("; {name} fits {cards} of these cards, with --tensor-parallel {cards}")
                }
                None => String::new(),
            };
            return format!(
                "No format fits {title} with the cache that is asked for: take a card with more \
                 memory, or less of --max-len and --batch{several}."
            );
        };
        let dense = fitting(sequences).filter(|(row, _)| !row.format.is_two_four());
        let training = match (fast.format.is_two_four(), dense.max_by(faster)) {
            (true, Some((row, decode))) => format!(
                " if the model was trained 2:4, and otherwise {} ({})",
                row.format.name(),
                rate(decode)
            ),
            (true, None) => " if the model was trained 2:4".into(),
            (false, _) => String::new(),
        };
        let plural = if sequences == 1 { "" } else { "s" };
        format!(
            "With {sequences} sequence{plural} on {title} the fastest format that fits is {} \
             ({}){training}; the most accurate is {} ({}).",
            fast.format.name(),
            rate(fast_decode),
            best.format.name(),
            rate(best_decode),
        )
    }
}

impl Figure {
    /// Returns the basis of the figure and its records, for a person.
    pub fn origin(&self) -> String {
        let word = match self.basis {
            Basis::Measured => "",
            Basis::Modelled => " from",
        };
        format!("{}{word} {}", self.basis.name(), self.records.join(", "))
    }
}
