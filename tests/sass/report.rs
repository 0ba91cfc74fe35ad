//! The printed report: one line for each kernel that was compiled, and a summary.

use crate::kernel::Kernel;
use crate::ledger::{LedgerRow, columns};
use crate::{CARDS, ledger};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The kernels that a run has compiled, and the number taken from the ledger.
#[derive(Default)]
pub struct Report {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The architecture and the printed line of each kernel.
    lines: Vec<(&'static str, String)>,
    refused: usize,
    fresh: usize,
    known: usize,
    texts: Duration,
}

impl Report {
    /// Adds a kernel that was compiled.
    pub fn add(&self, kernel: &Kernel, row: &LedgerRow, broken: &[String]) {
        let figures: Vec<String> = columns()
            .iter()
            .zip(&row.figures)
            .filter(|(_, count)| **count > 0)
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        let refused = if broken.is_empty() {
            String::new()
        } else {
            format!("  REFUSED: {}", broken.join("; "))
        };
        let line = format!(
            "{:6} {}: {}{refused}",
            kernel.card.arch,
            kernel.name,
            figures.join(", ")
        );
        self.change(|state| {
            state.lines.push((kernel.card.arch, line));
            state.refused += usize::from(!broken.is_empty());
        });
    }

    /// Adds to the number of kernels whose sources are unchanged since the ledger was written.
    pub fn add_fresh(&self, count: usize) {
        self.change(|state| state.fresh += count);
    }

    /// Adds to the number of kernels whose text is in the ledger.
    pub fn add_known(&self, count: usize) {
        self.change(|state| state.known += count);
    }

    /// Adds to the time spent on making texts.
    pub fn add_text_time(&self, time: Duration) {
        self.change(|state| state.texts += time);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Prints the lines in the order of the cards, and the summary.
    pub fn print(&self) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for card in CARDS {
            let of_card: Vec<_> = state
                .lines
                .iter()
                .filter(|(arch, _)| *arch == card.arch)
                .collect();
            of_card.iter().for_each(|(_, line)| println!("{line}"));
            if !of_card.is_empty() {
                println!(
                    "{}: {} kernels compiled ({})",
                    card.arch,
                    of_card.len(),
                    ledger::coverage(card)
                );
            }
        }
        let State {
            lines,
            refused,
            fresh,
            known,
            texts,
        } = &*state;
        println!(
            "proof: {} kernels compiled, {refused} refused; {fresh} of unchanged sources and {known} of a known text taken from the ledger; {:.0} s of texts",
            lines.len(),
            texts.as_secs_f64()
        );
    }
}
