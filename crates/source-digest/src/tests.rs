use super::{Error, Sources};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// A test crate whose function `kernel::run` names everything in `KERNEL`, `helper.rs` and
/// `shapes/`, and nothing else.
const LIB: &str = "
    mod kernel; mod helper; mod shapes; mod other;
    pub use shapes::Shape;
    macro_rules! twice { ($x:expr) => { $x * 2 } }
";
const KERNEL: &str = "
    use crate::helper::*;
    use crate::{Shape, shapes as forms, shapes::Fault};
    pub fn run(shape: &Shape) -> u32 { let no = Fault::Empty; deep(shape.area()) + forms::edge::LENGTH + u32::measure() + inner() }
    fn inner() -> u32 { use crate::shapes::{edge::{self}, Turn}; let turned = TurnExpand::default(); twice!(3) }
";
const HELPER: &str = "
    pub fn deep(x: u32) -> u32 { deeper(x) }
    fn deeper(x: u32) -> u32 { x + 1 }
    pub trait Measure { fn measure() -> u32; }
    impl Measure for u32 { fn measure() -> u32 { 7 } }
";
const SHAPES: &str = "
    pub mod edge;
    pub struct Shape { side: Side }
    pub struct Side(pub u32);
    #[derive(CubeType)] pub struct Turn;
    #[derive(Debug, thiserror::Error)] pub enum Fault { #[error(\"{0}\")] Empty(Side) }
    impl Shape { pub fn area(&self) -> u32 { self.side.squared() } }
    impl Side { fn squared(&self) -> u32 { self.0 * self.0 } }
";
const EDGE: &str = "pub const LENGTH: u32 = 5;";
const OTHER: &str = "pub fn unused(shape: &crate::Shape) -> u32 { crate::kernel::run(shape) }";

fn write(files: &[(&str, &str)]) -> Result<TempDir, std::io::Error> {
    let folder = tempfile::tempdir()?;
    fs::create_dir(folder.path().join("shapes"))?;
    let all = [
        ("lib.rs", LIB),
        ("kernel.rs", KERNEL),
        ("helper.rs", HELPER),
        ("shapes/mod.rs", SHAPES),
        ("shapes/edge.rs", EDGE),
        ("other.rs", OTHER),
    ];
    for (name, text) in all.iter().chain(files) {
        fs::write(folder.path().join(name), text)?;
    }
    Ok(folder)
}

fn digest(folder: &Path) -> Result<String, Error> {
    Ok(Sources::read(&[("demo", &folder.join("lib.rs"))])?
        .reached_from(&["demo::kernel::run"])?
        .digest())
}

#[test]
fn every_item_that_is_named_changes_the_digest() -> Result<(), Box<dyn std::error::Error>> {
    let plain = digest(write(&[])?.path())?;
    let changes = [
        ("kernel.rs", KERNEL, "inner() }", "inner() + 1 }"),
        ("kernel.rs", KERNEL, "twice!(3)", "twice!(4)"),
        ("lib.rs", LIB, "$x * 2", "$x + $x"),
        ("helper.rs", HELPER, "x + 1", "1 + x"),
        ("helper.rs", HELPER, "{ 7 }", "{ 8 }"),
        ("shapes/mod.rs", SHAPES, "self.0 * self.0", "self.0.pow(2)"),
        (
            "shapes/mod.rs",
            SHAPES,
            "struct Side(pub u32)",
            "struct Side(pub u64)",
        ),
        ("shapes/mod.rs", SHAPES, "struct Turn", "struct Turn(u8)"),
        ("shapes/edge.rs", EDGE, "= 5", "= 6"),
    ];
    for (file, text, from, to) in changes {
        assert!(text.contains(from), "{from}");
        let changed = digest(write(&[(file, &text.replacen(from, to, 1))])?.path())?;
        assert_ne!(changed, plain, "`{from}` became `{to}` in {file}");
    }
    Ok(())
}

#[test]
fn comments_tests_order_and_what_is_not_named_do_not() -> Result<(), Box<dyn std::error::Error>> {
    let plain = digest(write(&[])?.path())?;
    let documented = HELPER.replace(
        "fn deeper",
        "/// Deep.\n // Why.\n #[allow(dead_code)] fn deeper",
    );
    let tested =
        format!("{SHAPES} #[cfg(test)] mod tests {{ fn area() {{}} }} #[test] fn area() {{}}");
    let (first, rest) = EDGE.split_at(0);
    let more = format!("{first}pub const WIDTH: u32 = 1; {rest}");
    let reversed = "fn deeper(x: u32) -> u32 { x + 1 } pub fn deep(x: u32) -> u32 { deeper(x) }
        impl Measure for u32 { fn measure() -> u32 { 7 } } pub trait Measure { fn measure() -> u32; }";
    let changes = [
        ("helper.rs", documented.as_str()),
        ("helper.rs", reversed),
        ("shapes/mod.rs", &tested),
        ("shapes/edge.rs", &more),
        ("shapes/mod.rs", &SHAPES.replace("Empty(Side)", "Full")),
        ("other.rs", "pub fn unused() {}"),
    ];
    for (file, text) in changes {
        assert_eq!(
            digest(write(&[(file, text)])?.path())?,
            plain,
            "{file}: {text}"
        );
    }
    Ok(())
}

#[test]
fn the_files_are_those_of_the_items() -> Result<(), Box<dyn std::error::Error>> {
    let folder = write(&[])?;
    let sources = Sources::read(&[("demo", &folder.path().join("lib.rs"))])?;
    let reached = sources.reached_from(&["demo::kernel::run"])?;
    let files: Vec<_> = reached
        .files()
        .into_iter()
        .filter_map(|file| file.strip_prefix(folder.path()).ok())
        .collect();
    assert_eq!(
        files,
        [
            "helper.rs",
            "kernel.rs",
            "lib.rs",
            "shapes/edge.rs",
            "shapes/mod.rs"
        ]
        .map(Path::new)
    );
    let whole = sources.reached_from(&["demo::other"])?;
    assert!(
        whole.names().contains("demo::other::unused")
            && whole.names().contains("demo::kernel::run"),
        "{:?}",
        whole.names()
    );
    Ok(())
}

#[test]
fn what_is_not_there_is_an_error_that_names_it() -> Result<(), Box<dyn std::error::Error>> {
    let folder = write(&[])?;
    let sources = Sources::read(&[("demo", &folder.path().join("lib.rs"))])?;
    assert!(
        matches!(sources.reached_from(&["demo::kernel::walk"]), Err(Error::NoRoot(name)) if name == "demo::kernel::walk")
    );
    assert!(
        matches!(digest(write(&[("other.rs", "fn (")])?.path()), Err(Error::Parse { path, .. }) if path.ends_with("other.rs"))
    );
    let missing = format!("{LIB} mod missing;");
    assert!(
        matches!(digest(write(&[("lib.rs", &missing)])?.path()), Err(Error::NoModule { module, .. }) if module == "missing")
    );
    Ok(())
}
