//! The ledger: a file for each card with figures on the machine code of every kernel.
//!
//! `ledger/<arch>.tsv` has a header, a line for each kernel, and the configurations that are not
//! compiled:
//!
//! ```text
//! # cubecl     0.11.3                                     the versions that texts and machine code are made with
//! # compiler   Build cuda_13.5.r13.5/compiler.37...
//! # rules      6a1f...                                    the digest of the rules
//! # sources    gemv    90c2...                            the digest of a routine's sources
//! name                               text     registers  shared  local  instructions  HMMA  ..
//! 8x64x512 mma.sync 8 stages ...     51b0...  96         49152   0      1104          64    ..
//! # left out   8x64x512 mma.sync     int4 g32 f16; ...
//! ```

use crate::kernel::Kernel;
use crate::toolchain::Compiled;
use crate::{Card, Coverage, root, tiles};
use marlin_kernels::inspect::KernelSource;
use source_digest::Routine;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The instructions that the rules read and that the ledger counts, each with the modifiers that
/// identify it.
const COUNTED: [(&str, &[&str]); 13] = [
    ("HMMA", &[]),
    ("HGMMA", &[]),
    ("WARPGROUP", &["DEPBAR"]),
    ("LDSM", &[]),
    ("LDGSTS", &[]),
    ("UBLKCP", &[]),
    ("UTMALDG", &[]),
    ("LDG", &[]),
    ("LOP3", &[]),
    ("PRMT", &[]),
    ("I2FP", &[]),
    ("LDL", &[]),
    ("STL", &[]),
];

/// The figures on a kernel's machine code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerRow {
    /// The digest of the kernel's CUDA text.
    pub text: String,
    /// The figures, in the order of [`columns`].
    pub figures: Vec<usize>,
}

/// Returns the names of the figures.
pub fn columns() -> Vec<String> {
    let counted = COUNTED
        .iter()
        .map(|(mnemonic, modifiers)| [&[*mnemonic], *modifiers].concat().join("."));
    let fixed = ["registers", "shared", "local", "instructions"].map(str::to_owned);
    fixed
        .into_iter()
        .chain(counted)
        .chain(["pairs".to_owned(), "early".to_owned()])
        .collect()
}

impl LedgerRow {
    /// Creates the row of a compiled kernel.
    pub fn new(kernel: &Kernel, source: &KernelSource, compiled: &Compiled) -> Self {
        let Compiled { usage, code, .. } = compiled;
        let local = usage.stack + usage.spills;
        let counted = COUNTED
            .iter()
            .map(|(mnemonic, modifiers)| code.count(mnemonic, modifiers));
        let last = [
            kernel.pairs(code),
            code.loads_before_wait().map_or(0, |loads| loads.len()),
        ];
        let fixed = [usage.registers, compiled.shared_bytes, local, code.len()];
        Self {
            text: source.digest(),
            figures: fixed.into_iter().chain(counted).chain(last).collect(),
        }
    }

    /// Returns the differences between this row and `found`, as messages.
    pub fn differences(&self, found: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        if self.text != found.text {
            differences.push("another text".to_owned());
        }
        let figures = columns()
            .into_iter()
            .zip(self.figures.iter().zip(&found.figures));
        differences.extend(
            figures
                .filter(|(_, (own, other))| own != other)
                .map(|(name, (own, other))| format!("{name} {own} -> {other}")),
        );
        differences
    }
}

/// The versions and digests that machine code depends on besides a kernel's text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Versions {
    /// The versions of CubeCL's crates.
    pub cubecl: String,
    /// The version of NVIDIA's compiler; `None` where there is none.
    pub compiler: Option<String>,
    /// The digest of the rules.
    pub rules: String,
    /// The digest of each routine's sources.
    pub sources: BTreeMap<Routine, String>,
}

/// The ledger of a card.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    /// The versions with which the rows were made.
    pub versions: Versions,
    /// The rows, by name of the kernel.
    pub rows: BTreeMap<String, LedgerRow>,
}

/// An error of reading or writing a ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    File { path: PathBuf, source: io::Error },
    /// A line does not have the format that [`Ledger::write`] produces.
    #[error("{path}:{line}: `{text}` is no line of a ledger; `cargo xtask proof --bless` writes it anew", path = path.display())]
    Line {
        path: PathBuf,
        line: usize,
        text: String,
    },
}

/// Returns the path of a card's ledger.
fn path(card: Card) -> PathBuf {
    root()
        .join("tests/sass/ledger")
        .join(format!("{}.tsv", card.arch))
}

impl Ledger {
    /// Reads the ledger of a card, or returns an empty ledger if there is no file.
    pub fn read(card: Card) -> Result<Self, LedgerError> {
        let path = path(card);
        match fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text, &path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(LedgerError::File { path, source }),
        }
    }

    fn parse(text: &str, path: &Path) -> Result<Self, LedgerError> {
        let mut ledger = Self::default();
        let mut lines = text.lines().enumerate();
        let broken = |(number, line): (usize, &str)| LedgerError::Line {
            path: path.into(),
            line: number + 1,
            text: line.into(),
        };
        for (number, line) in lines.by_ref() {
            let fields: Vec<&str> = line.split('\t').collect();
            match fields[..] {
                ["# cubecl", version] => ledger.versions.cubecl = version.into(),
                ["# compiler", version] => ledger.versions.compiler = Some(version.into()),
                ["# rules", digest] => ledger.versions.rules = digest.into(),
                ["# sources", routine, digest] => {
                    let routine = Routine::named(routine).ok_or_else(|| broken((number, line)))?;
                    ledger.versions.sources.insert(routine, digest.into());
                }
                ["name", "text", ..] => {
                    if !fields[2..].iter().copied().eq(columns()) {
                        return Ok(Self::default());
                    }
                    break;
                }
                _ => return Err(broken((number, line))),
            }
        }
        for (number, line) in lines.filter(|(_, line)| !line.starts_with('#')) {
            let mut fields = line.split('\t');
            let (Some(name), Some(text)) = (fields.next(), fields.next()) else {
                return Err(broken((number, line)));
            };
            let figures: Vec<usize> = fields
                .map(str::parse)
                .collect::<Result<_, _>>()
                .map_err(|_| broken((number, line)))?;
            if figures.len() != columns().len() {
                return Err(broken((number, line)));
            }
            ledger.rows.insert(
                name.into(),
                LedgerRow {
                    text: text.into(),
                    figures,
                },
            );
        }
        Ok(ledger)
    }

    /// Writes the ledger of a card.
    pub fn write(&self, card: Card) -> Result<(), LedgerError> {
        let path = path(card);
        let folder = path.parent().unwrap_or(Path::new("."));
        let result = fs::create_dir_all(folder).and_then(|()| fs::write(&path, self.text(card)));
        result.map_err(|source| LedgerError::File { path, source })
    }

    fn text(&self, card: Card) -> String {
        let Versions {
            cubecl,
            compiler,
            rules,
            sources,
        } = &self.versions;
        let mut text = format!("# cubecl\t{cubecl}\n");
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "# compiler\t{}",
            compiler.as_deref().unwrap_or_default()
        );
        let _ = writeln!(text, "# rules\t{rules}");
        for (routine, digest) in sources {
            let _ = writeln!(text, "# sources\t{}\t{digest}", routine.name());
        }
        let _ = writeln!(text, "name\ttext\t{}", columns().join("\t"));
        for (
            name,
            LedgerRow {
                text: digest,
                figures,
            },
        ) in &self.rows
        {
            let figures: Vec<String> = figures.iter().map(usize::to_string).collect();
            let _ = writeln!(text, "{name}\t{digest}\t{}", figures.join("\t"));
        }
        let all = tiles::by_tile(card)
            .into_iter()
            .chain(tiles::with_experts(card));
        for of_tile in all {
            let left_out: Vec<String> = of_tile
                .iter()
                .map(tiles::name)
                .filter(|name| !self.rows.contains_key(name))
                .collect();
            if let Some(unit) = of_tile
                .first()
                .map(tiles::unit)
                .filter(|_| !left_out.is_empty())
            {
                let short = left_out
                    .iter()
                    .map(|name| name.strip_prefix(&unit).unwrap_or(name).trim());
                let _ = writeln!(
                    text,
                    "# left out\t{unit}\t{}",
                    short.collect::<Vec<_>>().join("; ")
                );
            }
        }
        text
    }

    /// Returns the row of a kernel with the text digest `text`, if the row is still valid: the
    /// compiler and the rules have not changed.
    pub fn knows(&self, text: &str, versions: &Versions) -> Option<&LedgerRow> {
        let is_current = self.versions.rules == versions.rules && self.is_of_compiler(versions);
        is_current.then(|| self.rows.values().find(|row| row.text == text))?
    }

    /// Returns true if all rows of a routine are still valid: its sources, CubeCL, the compiler and
    /// the rules have not changed.
    pub fn is_fresh(&self, routine: Routine, versions: &Versions) -> bool {
        let is_same = self.versions.cubecl == versions.cubecl
            && self.versions.rules == versions.rules
            && self.is_of_compiler(versions);
        is_same && self.versions.sources.get(&routine) == versions.sources.get(&routine)
    }

    /// Returns true if the rows were made with the compiler of `versions`, or `versions` has no
    /// compiler.
    fn is_of_compiler(&self, versions: &Versions) -> bool {
        versions.compiler.is_none() || self.versions.compiler == versions.compiler
    }
}

/// Returns a description of the configurations that a card's ledger has.
pub fn coverage(card: Card) -> &'static str {
    match card.coverage {
        Coverage::Pairs => "every pair of values of a format",
        Coverage::SamePtx(_) => {
            "one configuration a tile, with the PTX of another card; every pair of values of a format for products of e4m3"
        }
        Coverage::One => "one configuration a tile",
    }
}
