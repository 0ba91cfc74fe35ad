//! The tests of the kernels against the ledger.

use crate::check::{Outcome, check};
use crate::kernel::Kernel;
use crate::ledger::{Ledger, LedgerRow, Versions};
use crate::report::Report;
use crate::toolchain::Toolchain;
use crate::{CARDS, Card, Coverage, kernel, sources};
use libtest_mimic::{Completion, Failed, Trial};
use marlin_kernels::inspect::KernelSource;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use source_digest::Routine;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The environment variable that names the mode, which `cargo xtask proof` sets.
const MODE: &str = "BURN_MARLIN_PROOF";
/// The number of kernels of all cards that are compiled in every run, even if the ledger has them.
const SAMPLE: usize = 40;
/// The environment variable that sets the seed of the sample.
const SEED: &str = "BURN_MARLIN_PROOF_SEED";

/// The choice of kernels that are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Kernels whose text is not in the ledger, and a sample.
    Changed,
    /// The kernels of `Changed`; then the ledger is rewritten.
    Bless,
    /// Every kernel of the ledger.
    Everything,
    /// Every kernel of the ledger, and every configuration that the ledger omits.
    All,
}

impl Mode {
    /// Reads the mode from the environment.
    pub fn from_env() -> Result<Self, String> {
        match std::env::var(MODE).as_deref() {
            Err(_) => Ok(Self::Changed),
            Ok("bless") => Ok(Self::Bless),
            Ok("everything") => Ok(Self::Everything),
            Ok("all") => Ok(Self::All),
            Ok(other) => Err(format!(
                "{MODE} is `{other}` where it may be bless, everything or all"
            )),
        }
    }
}

/// The state that the tests share.
pub struct Proof {
    mode: Mode,
    toolchain: Option<Toolchain>,
    versions: Versions,
    ledgers: BTreeMap<&'static str, Ledger>,
    /// The rows that were found in this run, by card and name.
    found: Mutex<BTreeMap<(&'static str, String), LedgerRow>>,
    /// The printed report.
    pub report: Report,
}

impl Proof {
    /// Reads the ledgers and the digests of the sources.
    pub fn new(
        mode: Mode,
        toolchain: Option<Toolchain>,
        report: Report,
    ) -> Result<Self, Box<dyn Error>> {
        let compiler = toolchain
            .as_ref()
            .map(|toolchain| toolchain.version().to_owned());
        let versions = Versions {
            compiler,
            ..sources::versions()?
        };
        let ledgers = CARDS
            .iter()
            .map(|&card| Ok((card.arch, Ledger::read(card)?)))
            .collect::<Result<_, Box<dyn Error>>>()?;
        Ok(Self {
            mode,
            toolchain,
            versions,
            ledgers,
            found: Mutex::default(),
            report,
        })
    }

    fn ledger(&self, card: Card) -> &Ledger {
        &self.ledgers[card.arch]
    }

    /// Writes the ledgers with the rows found in this run. `is_whole` must be true, which means
    /// that every test was run: rows of kernels that no longer exist are dropped.
    pub fn bless(&self, is_whole: bool) -> Result<(), Box<dyn Error>> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_whole || self.toolchain.is_none() {
            return Err(
                "the ledger is written only where every test was run, and with NVIDIA's compiler: `cargo xtask proof --bless`".into()
            );
        }
        for card in CARDS {
            let names: BTreeSet<String> = kernel::all(card, false)?
                .into_iter()
                .map(|kernel| kernel.name)
                .collect();
            let of_card = found
                .iter()
                .filter(|((arch, name), _)| *arch == card.arch && names.contains(name));
            let rows: BTreeMap<String, LedgerRow> = of_card
                .map(|((_, name), row)| (name.clone(), row.clone()))
                .collect();
            let missing = names
                .iter()
                .filter(|name| !rows.contains_key(*name))
                .count();
            if missing > 0 {
                return Err(format!(
                    "{}: {missing} kernels were not compiled, so the ledger was left as it was",
                    card.arch
                )
                .into());
            }
            Ledger {
                versions: self.versions.clone(),
                rows,
            }
            .write(card)?;
        }
        Ok(())
    }

    fn record(&self, card: Card, name: &str, row: &LedgerRow) {
        self.found
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert((card.arch, name.to_owned()), row.clone());
    }

    /// Checks kernels that are compiled together, and returns messages for all faults.
    fn prove(&self, card: Card, kernels: &[Arc<Kernel>]) -> Vec<String> {
        let ledger = self.ledger(card);
        let is_fresh = kernels
            .first()
            .is_some_and(|kernel| ledger.is_fresh(kernel.routine(), &self.versions));
        let has_row = |kernel: &Arc<Kernel>| ledger.rows.contains_key(&kernel.name);
        let takes_rows = matches!(self.mode, Mode::Changed | Mode::Bless);
        if takes_rows && is_fresh && kernels.iter().all(has_row) {
            for kernel in kernels {
                self.record(card, &kernel.name, &ledger.rows[&kernel.name]);
            }
            self.report.add_fresh(kernels.len());
            return Vec::new();
        }
        let (mut sources, mut wrong) = self.texts(kernels);
        if takes_rows {
            sources.retain(|(kernel, source)| {
                let Some(row) = ledger.knows(&source.digest(), &self.versions) else {
                    return true;
                };
                self.report.add_known(1);
                wrong.extend(self.compare(kernel, row));
                false
            });
        }
        wrong.extend(self.compile(card, sources));
        wrong
    }

    /// Compiles kernels, compares them with the ledger, and returns messages for all faults.
    fn compile(&self, card: Card, sources: Vec<(&Kernel, KernelSource)>) -> Vec<String> {
        let Some(toolchain) = &self.toolchain else {
            return sources
                .iter()
                .map(|(kernel, _)| {
                    format!(
                        "{}: not in the ledger, and there is no compiler",
                        kernel.name
                    )
                })
                .collect();
        };
        let mut wrong = Vec::new();
        for Outcome {
            kernel,
            row,
            broken,
        } in check(sources, card, toolchain)
        {
            wrong.extend(broken.iter().map(|rule| format!("{}: {rule}", kernel.name)));
            match row {
                Ok(row) => {
                    wrong.extend(self.compare(kernel, &row));
                    self.report.add(kernel, &row, &broken);
                }
                Err(error) => wrong.push(format!("{}: {error}", kernel.name)),
            }
        }
        wrong
    }

    /// Makes the CUDA texts of kernels. Returns the texts, and messages for the kernels that CubeCL
    /// refuses.
    fn texts<'a>(
        &self,
        kernels: &'a [Arc<Kernel>],
    ) -> (Vec<(&'a Kernel, KernelSource)>, Vec<String>) {
        let (clock, mut sources, mut wrong) = (Instant::now(), Vec::new(), Vec::new());
        for kernel in kernels {
            match kernel::source(kernel) {
                Ok(source) => sources.push((kernel.as_ref(), source)),
                Err(error) => wrong.push(format!("{}: {error}", kernel.name)),
            }
        }
        self.report.add_text_time(clock.elapsed());
        (sources, wrong)
    }

    /// Compares the row found for a kernel with its row in the ledger, and returns a message if
    /// they differ. Returns `None` in [`Mode::Bless`], where the ledger is rewritten.
    fn compare(&self, kernel: &Kernel, found: &LedgerRow) -> Option<String> {
        self.record(kernel.card, &kernel.name, found);
        match self.ledger(kernel.card).rows.get(&kernel.name) {
            _ if self.mode == Mode::Bless => None,
            Some(row) if row == found => None,
            Some(row) => Some(format!(
                "{}: the ledger says otherwise: {}",
                kernel.name,
                row.differences(found).join(", ")
            )),
            // The ledger omits this configuration.
            None if self.mode == Mode::All => None,
            None => Some(format!("{}: not in the ledger", kernel.name)),
        }
    }
}

/// Returns the tests of a card's kernels: one for each unit, one for the ledger as a whole, and one
/// for the sample.
pub fn trials(proof: &Arc<Proof>, card: Card, kernels: Vec<Arc<Kernel>>) -> Vec<Trial> {
    let mut units: BTreeMap<&str, Vec<Arc<Kernel>>> = BTreeMap::new();
    for kernel in &kernels {
        units.entry(&kernel.unit).or_default().push(kernel.clone());
    }
    let mut tests: Vec<Trial> = units
        .into_iter()
        .map(|(unit, kernels)| {
            let proof = proof.clone();
            trial(
                format!("{}::{}", card.arch, unit.replace(' ', "_")),
                proof.clone(),
                move || proof.prove(card, &kernels),
            )
        })
        .collect();
    tests.push(trial(format!("{}::ledger", card.arch), proof.clone(), {
        let (proof, kernels) = (proof.clone(), kernels.clone());
        move || ledger_is_whole(&proof, card, &kernels)
    }));
    if let Coverage::SamePtx(twin) = card.coverage {
        tests.push(Trial::test(
            format!("{}::configurations_are_those_of_{}", card.arch, twin.arch),
            move || {
                let mut own = crate::tiles::by_tile(card);
                own.retain(|of_tile| {
                    of_tile.iter().any(|config| {
                        matches!(card.coverage_of(&config.tile), Coverage::SamePtx(_))
                    })
                });
                if own == crate::tiles::by_tile(*twin) {
                    Ok(())
                } else {
                    Err(Failed::from(
                        "each configuration of this card has to be compiled for it",
                    ))
                }
            },
        ));
    }
    let proof = proof.clone();
    tests.push(trial(
        format!("{}::sample", card.arch),
        proof.clone(),
        move || sample(&proof, card, &kernels),
    ));
    tests
}

fn trial(
    name: String,
    proof: Arc<Proof>,
    body: impl FnOnce() -> Vec<String> + Send + 'static,
) -> Trial {
    Trial::ignorable_test(name, move || {
        if proof.toolchain.is_none() {
            return Ok(Completion::ignored_with(
                "needs NVIDIA's compiler: `cargo xtask proof` or `cargo xtask test` sets it up",
            ));
        }
        let wrong = body();
        match wrong.is_empty() {
            true => Ok(Completion::Completed),
            false => Err(Failed::from(format!(
                "{}\nif that is what it should be: `cargo xtask proof --bless`",
                wrong.join("\n")
            ))),
        }
    })
}

/// Returns messages for ledger rows whose kernels no longer exist, and for routines whose sources,
/// versions or rules differ from those of the ledger.
fn ledger_is_whole(proof: &Proof, card: Card, kernels: &[Arc<Kernel>]) -> Vec<String> {
    let ledger = proof.ledger(card);
    if proof.mode == Mode::Bless {
        return Vec::new();
    }
    let names: BTreeSet<&str> = kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    let gone = ledger
        .rows
        .keys()
        .filter(|name| !names.contains(name.as_str()))
        .map(|name| format!("{name}: in the ledger, and no kernel"));
    let of_card: BTreeSet<Routine> = kernels.iter().map(|kernel| kernel.routine()).collect();
    let changed = of_card
        .into_iter()
        .filter(|routine| !ledger.is_fresh(*routine, &proof.versions));
    gone.chain(changed.map(|routine| {
        format!(
            "{}: other sources, versions or rules than the ledger's",
            routine.name()
        )
    }))
    .collect()
}

/// Compiles the card's part of the sample, and compares it with the ledger.
fn sample(proof: &Proof, card: Card, kernels: &[Arc<Kernel>]) -> Vec<String> {
    if proof.mode != Mode::Changed {
        return Vec::new();
    }
    let seed = match std::env::var(SEED) {
        Ok(text) => match text.parse() {
            Ok(seed) => seed,
            Err(_) => return vec![format!("{SEED} is `{text}`, which is no number")],
        },
        // The seed is not that of other tests, which is fixed in CI: the same sample in every run
        // would find nothing.
        Err(_) => rand::rng().random(),
    };
    println!("{SEED}={seed} draws the sample of {}", card.arch);
    let all: usize = proof.ledgers.values().map(|ledger| ledger.rows.len()).sum();
    let share = (SAMPLE * kernels.len())
        .div_ceil(all.max(1))
        .min(kernels.len());
    let drawn: Vec<Arc<Kernel>> = kernels
        .sample(&mut StdRng::seed_from_u64(seed), share)
        .cloned()
        .collect();
    let (sources, mut wrong) = proof.texts(&drawn);
    wrong.extend(proof.compile(card, sources));
    wrong
}
