//! Parsers for the output of ptxas and nvdisasm.

use std::collections::{BTreeMap, BTreeSet};

/// The error for a text that is not the output for a compiled kernel.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListingError {
    /// The log lacks a line that ptxas prints for every kernel.
    #[error(
        "the log of ptxas has no line with `{0}`; its wording has changed, or nothing was compiled:\n{1}"
    )]
    NoLine(&'static str, String),
    /// The listing has no instructions.
    #[error(
        "the listing of nvdisasm has no instruction; its form has changed, or nothing was compiled"
    )]
    Empty,
    /// The listing has other functions than the kernels that were compiled.
    #[error(
        "the listing of nvdisasm has the functions {found:?} where the kernels {expected:?} were compiled; was one not inlined?"
    )]
    Functions {
        /// The names of the kernels that were compiled.
        expected: Vec<String>,
        /// The names of the functions in the listing.
        found: Vec<String>,
    },
}

/// Splits the output of `ptxas -v` for `kernels` that were compiled together. Each kernel gets the
/// lines after its name, and the lines before any name.
pub fn logs_of(log: &str, kernels: &[&str]) -> Vec<String> {
    let (mut common, mut logs, mut current) =
        (String::new(), vec![String::new(); kernels.len()], None);
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Compiling entry function '") {
            current = kernels
                .iter()
                .position(|kernel| name.split('\'').next() == Some(*kernel));
        }
        let part = current.map_or(&mut common, |kernel: usize| &mut logs[kernel]);
        part.push_str(line);
        part.push('\n');
    }
    logs.into_iter().map(|log| common.clone() + &log).collect()
}

/// Splits nvdisasm's listing of `kernels` that were compiled together into one listing for each
/// kernel.
pub fn listings_of(listing: &str, kernels: &[&str]) -> Result<Vec<String>, ListingError> {
    let (mut functions, mut current) = (BTreeMap::<&str, String>::new(), None);
    for line in listing.lines() {
        if line.starts_with("//---") {
            // The rule above the next section.
            current = None;
        } else if let Some(name) = line
            .strip_prefix(".text.")
            .and_then(|label| label.strip_suffix(':'))
        {
            current = Some(name);
        }
        if let Some(name) = current {
            let part = functions.entry(name).or_default();
            part.push_str(line);
            part.push('\n');
        }
    }
    if !functions
        .keys()
        .eq(&BTreeSet::from_iter(kernels.iter().copied()))
    {
        return Err(ListingError::Functions {
            expected: kernels.iter().map(ToString::to_string).collect(),
            found: functions.keys().map(ToString::to_string).collect(),
        });
    }
    Ok(kernels
        .iter()
        .filter_map(|kernel| functions.remove(kernel))
        .collect())
}

/// The resources of a kernel, as reported by ptxas.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Registers per thread.
    pub registers: usize,
    /// Static shared memory in bytes.
    pub static_shared: usize,
    /// Bytes of the stack frame.
    pub stack: usize,
    /// Bytes of spill stores and spill loads.
    pub spills: usize,
    /// Warnings and remarks on lost performance (C75xx), as whole lines.
    pub remarks: Vec<String>,
}

impl Usage {
    /// Parses the output of `ptxas -v` on a kernel. For several functions, `registers` is the
    /// maximum, and every other field is the sum.
    pub fn parse(log: &str) -> Result<Self, ListingError> {
        let missing = |what| ListingError::NoLine(what, log.to_owned());
        let (mut usage, mut frames) = (Self::default(), 0);
        for line in log.lines() {
            if let Some(stack) = before(line, " bytes stack frame") {
                frames += 1;
                usage.stack += stack;
                usage.spills += before(line, " bytes spill stores")
                    .ok_or_else(|| missing("bytes spill stores"))?;
                usage.spills += before(line, " bytes spill loads")
                    .ok_or_else(|| missing("bytes spill loads"))?;
            }
            usage.registers = usage
                .registers
                .max(before(line, " registers").unwrap_or_default());
            usage.static_shared += before(line, " bytes smem").unwrap_or_default();
            if line.contains("(C7") || line.contains("warning") {
                usage.remarks.push(line.to_owned());
            }
        }
        if frames == 0 {
            return Err(missing("bytes stack frame"));
        }
        if usage.registers == 0 {
            Err(missing("registers"))
        } else {
            Ok(usage)
        }
    }
}

/// Returns the number directly before `words`.
fn before(line: &str, words: &str) -> Option<usize> {
    let (head, _) = line.split_once(words)?;
    head.rsplit(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// The instructions of a kernel, in order.
#[derive(Debug)]
pub struct Code {
    instructions: Vec<Instruction>,
}

#[derive(Debug)]
struct Instruction {
    /// The mnemonic with its modifiers, as in `LDSM.16.M88.4`.
    opcode: String,
    operands: String,
}

impl Code {
    /// Parses a listing of nvdisasm, whose instructions are `/*offset*/ @predicate OPCODE operands
    /// ;`.
    pub fn parse(listing: &str) -> Result<Self, ListingError> {
        let instructions: Vec<_> = listing.lines().filter_map(instruction).collect();
        if instructions.is_empty() {
            Err(ListingError::Empty)
        } else {
            Ok(Self { instructions })
        }
    }

    /// Returns the number of instructions.
    pub fn len(&self) -> usize {
        self.instructions.len()
    }

    /// Returns the number of instructions with this mnemonic and all of these modifiers.
    pub fn count(&self, mnemonic: &str, modifiers: &[&str]) -> usize {
        let matches = |opcode: &str| {
            let mut parts = opcode.split('.');
            parts.next() == Some(mnemonic)
                && modifiers
                    .iter()
                    .all(|modifier| opcode.split('.').skip(1).any(|part| part == *modifier))
        };
        self.instructions
            .iter()
            .filter(|instruction| matches(&instruction.opcode))
            .count()
    }

    /// Returns the instructions of any kind that load from global memory before the first
    /// `griddepcontrol.wait`; `None` if there is no such wait.
    pub fn loads_before_wait(&self) -> Option<Vec<&str>> {
        let wait = self
            .instructions
            .iter()
            .position(|instruction| instruction.opcode.starts_with("ACQBULK"))?;
        let is_load = |opcode: &&str| {
            ["LDG", "LD.", "LDGSTS", "UBLKCP", "UTMALDG", "ATOMG", "RED."]
                .iter()
                .any(|load| opcode.starts_with(load))
        };
        Some(
            self.instructions[..wait]
                .iter()
                .map(|instruction| instruction.opcode.as_str())
                .filter(is_load)
                .collect(),
        )
    }

    /// Returns the number of LOP3 instructions whose truth table is a mask: `a & b`, in any order
    /// of operands.
    pub fn count_mask(&self) -> usize {
        let matches = |instruction: &&Instruction| {
            let mut operands = instruction.operands.split(',').map(str::trim);
            instruction.opcode == "LOP3.LUT"
                && operands.any(|operand| ["0xc0", "0xa0", "0x88"].contains(&operand))
        };
        self.instructions.iter().filter(matches).count()
    }

    /// Returns the number of LOP3 instructions that have `constant` as an operand.
    pub fn count_logic_with(&self, constant: &str) -> usize {
        let matches = |instruction: &&Instruction| {
            let mut operands = instruction.operands.split(',').map(str::trim);
            instruction.opcode == "LOP3.LUT" && operands.any(|operand| operand == constant)
        };
        self.instructions.iter().filter(matches).count()
    }

    /// Returns the number of LOP3 instructions that have `constant` as an operand and whose truth
    /// table is a mask and an or: `(a & b) | c`, in any order of operands.
    pub fn count_mask_or(&self, constant: &str) -> usize {
        let matches = |instruction: &&Instruction| {
            let mut operands = instruction.operands.split(',').map(str::trim);
            instruction.opcode == "LOP3.LUT"
                && operands.any(|operand| operand == constant)
                && operands.any(|operand| ["0xea", "0xec", "0xf8"].contains(&operand))
        };
        self.instructions.iter().filter(matches).count()
    }
}

fn instruction(line: &str) -> Option<Instruction> {
    let (offset, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    if offset.is_empty() || !offset.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut rest = rest.trim();
    if rest.starts_with('@') {
        rest = rest.split_once(' ')?.1.trim_start();
    }
    let rest = rest.split(';').next()?.trim_end();
    let (opcode, operands) = rest.split_once(' ').unwrap_or((rest, ""));
    (!opcode.is_empty()).then(|| Instruction {
        opcode: opcode.to_owned(),
        operands: operands.to_owned(),
    })
}
