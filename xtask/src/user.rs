//! A program of a user, in a package of its own: checks that an unoptimised build of it compiles no
//! arithmetic of these crates, and times a converted layer.
//!
//! The functions of a library that are generic are compiled in the program that calls them, at that
//! program's level of optimisation. The generic functions of these crates may therefore only call
//! others, which are compiled once, in the crates themselves.

use crate::process::{Error, cargo, root, run, target};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

const MANIFEST: &str = include_str!("../user-program/Cargo.toml");
const PROGRAM: &str = include_str!("../user-program/main.rs");
const NAME: &str = "user-program";
/// The word of the manifest that stands for the folder of the workspace.
const ROOT: &str = "ROOT";

/// The level of optimisation of dependencies that the book recommends.
pub const OPT_LEVEL: u8 = 3;

/// The start of the names of the crates of this workspace, as symbols have them.
const OWN: [&str; 2] = ["burn_marlin", "marlin_"];
/// The instructions of LLVM that compute floats, and those that take words apart.
const ARITHMETIC: [&str; 9] = [
    "fadd", "fsub", "fmul", "fdiv", "sitofp", "uitofp", "shl", "lshr", "ashr",
];
/// Parts of lines of LLVM with vectors and with calls of the processor's instructions.
const VECTORS: [&str; 6] = [
    " x float>",
    " x half>",
    " x i32>",
    "@llvm.fma",
    "@llvm.fmuladd",
    "@llvm.x86",
];

/// Builds the program without optimisation, with dependencies at `opt_level`; checks what was
/// compiled in the program's own crate, and runs it.
pub fn check(opt_level: u8) -> Result<(), Error> {
    let folder = target().join(NAME);
    let source = folder.join("src");
    fs::create_dir_all(&source).map_err(Error::file(&source))?;
    let manifest = MANIFEST.replace(ROOT, &root().display().to_string());
    write(&folder.join("Cargo.toml"), &manifest)?;
    write(&source.join("main.rs"), PROGRAM)?;
    // The versions of the workspace.
    let lock = root().join("Cargo.lock");
    let copy = folder.join("Cargo.lock");
    fs::copy(&lock, &copy).map_err(Error::file(&copy))?;
    let build = folder.join(format!("target-{opt_level}"));
    let level = format!("profile.dev.package.\"*\".opt-level={opt_level}");
    let mut command = cargo(["rustc", "--config", &level, "--manifest-path"]);
    command.arg(folder.join("Cargo.toml"));
    // One listing for the whole crate.
    command.args(["--", "--emit=llvm-ir,link", "-Ccodegen-units=1"]);
    run(command.env("CARGO_TARGET_DIR", &build))?;
    let built = build.join("debug");
    let faults = faults(&listing(&built.join("deps"))?);
    if !faults.is_empty() {
        return Err(Error::Needs(format!(
            "a user's program compiles arithmetic of these crates itself, without optimisation; \
             move it to functions that are not generic:\n{}",
            faults.join("\n")
        )));
    }
    run(&mut Command::new(built.join(NAME)))
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(Error::file(path))
}

/// Returns the newest listing of the program in a folder.
fn listing(folder: &Path) -> Result<String, Error> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::file(folder))? {
        let path = entry.map_err(Error::file(folder))?.path();
        if path.extension().is_some_and(|end| end == "ll") {
            let written = fs::metadata(&path).and_then(|metadata| metadata.modified());
            found.push((written.map_err(Error::file(&path))?, path));
        }
    }
    let Some((_, path)) = found.into_iter().max() else {
        let shown = folder.display();
        return Err(Error::Needs(format!("rustc wrote no listing to {shown}")));
    };
    fs::read_to_string(&path).map_err(Error::file(&path))
}

/// Returns a line for each function of these crates with arithmetic in a listing of LLVM, and a
/// line if the listing has no function of these crates at all, which would say that its form has
/// changed.
fn faults(listing: &str) -> Vec<String> {
    let (mut name, mut count, mut faults) = ("", 0, BTreeSet::new());
    for line in listing.lines() {
        // `; NAME`, `; Function Attrs: ..`, `define ..`
        if let Some(comment) = line.strip_prefix("; ") {
            if !comment.starts_with("Function Attrs") {
                name = comment;
            }
            continue;
        }
        let is_own = OWN.iter().any(|own| name.contains(own));
        if line.starts_with("define ") {
            count += usize::from(is_own);
        } else if line == "}" {
            name = "";
        } else if is_own && has_arithmetic(line) {
            faults.insert(format!("{name}:{line}"));
        }
    }
    if count == 0 {
        faults.insert("no function of these crates is in the listing".into());
    }
    faults.into_iter().collect()
}

fn has_arithmetic(line: &str) -> bool {
    let instruction = line
        .split_once(" = ")
        .and_then(|(_, code)| code.split(' ').next());
    instruction.is_some_and(|instruction| ARITHMETIC.contains(&instruction))
        || VECTORS.iter().any(|part| line.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "; burn_marlin::linear::QuantLinear::forward
; Function Attrs: nonlazybind
define internal void @forward(ptr align 8 %self) unnamed_addr #1 {
start:
  %x = fpext float %y to double
  call void @multiply(ptr %self)
}

; burn_nn::modules::linear::LinearConfig::new
define internal double @new() {
  %_4 = fdiv double 1.000000e+00, %_5
}
";

    #[test]
    fn only_arithmetic_of_these_crates_is_a_fault() {
        assert_eq!(faults(LISTING), Vec::<String>::new());
        for code in [
            "  %z = fmul float %x, %y",
            "  %z = lshr i32 %x, 4",
            "  %z = load <8 x float>, ptr %x",
            "  %z = call float @llvm.fma.f32(float %x, float %y, float %z)",
        ] {
            let call = "  call void @multiply(ptr %self)";
            let found = faults(&LISTING.replace(call, code));
            let expected = format!("burn_marlin::linear::QuantLinear::forward:{code}");
            assert_eq!(found, [expected]);
        }
        let other = LISTING.replace("; burn_marlin", "; other");
        assert_eq!(faults(&other).len(), 1);
        assert_eq!(faults("").len(), 1);
    }

    #[test]
    fn the_book_has_the_profile_of_the_program() {
        let book = root().join("book/src/getting-started.md");
        let book = fs::read_to_string(&book).unwrap_or_else(|error| panic!("{error}"));
        let (_, profile) = MANIFEST.split_once("\n[profile").unwrap_or_default();
        assert!(book.contains(&format!("[profile{profile}")));
        assert!(profile.ends_with(&format!("\nopt-level = {OPT_LEVEL}\n")));
    }
}
