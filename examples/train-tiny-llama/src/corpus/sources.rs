//! The source files of the dependencies that are used as training and held-out text.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::error::Error;

/// The maximum size of a file in bytes. Larger files are mostly tables.
const MAX_FILE_BYTES: u64 = 200_000;
/// The maximum length of a line in bytes. Files with longer lines were not written by hand.
const MAX_LINE_BYTES: usize = 500;
/// The maximum fraction of digits in a file. Tables of constants have more digits.
const MAX_DIGIT_SHARE: f64 = 0.15;
/// Crates of bindings to C, the operating system or the browser, in addition to crates named
/// `*-sys`. Their code is generated and repetitive.
const BINDINGS: [&str; 12] = [
    "ash",
    "cudarc",
    "glow",
    "khronos_api",
    "libc",
    "ntapi",
    "r-efi",
    "safe_arch",
    "tracel-ash",
    "tracel-rspirv",
    "winapi",
    "windows",
];
/// The name prefixes of further crates of bindings.
const BINDING_PREFIXES: [&str; 4] = ["icu_", "objc2", "windows", "winapi"];

/// A dependency from a registry.
#[derive(Debug, Clone, PartialEq)]
pub struct Package {
    /// Crate name.
    pub name: String,
    /// Version in its manifest.
    pub version: String,
    /// Licence expression in its manifest; empty if the manifest names a file instead.
    pub license: String,
    /// Folder of the unpacked sources.
    pub dir: PathBuf,
}

/// One file of a package.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceFile {
    /// Path inside the package, separated by `/`.
    pub path: String,
    /// The text, with `\n` as line ending.
    pub text: String,
}

/// Returns the registry packages that the workspace of the current directory depends on, with the
/// newest version of each, sorted by name.
pub fn packages() -> Result<Vec<Package>, Error> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--offline"])
        .output()
        .map_err(|error| Error::Metadata(error.to_string()))?;
    if !output.status.success() {
        return Err(Error::Metadata(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        ));
    }
    let metadata = serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::Metadata(error.to_string()))?;
    parse_metadata(&metadata)
}

fn parse_metadata(metadata: &Value) -> Result<Vec<Package>, Error> {
    let listed = metadata["packages"]
        .as_array()
        .ok_or_else(|| Error::Metadata("its answer has no `packages`".into()))?;
    let mut newest = BTreeMap::<String, Package>::new();
    for package in listed.iter().filter(|package| {
        package["source"]
            .as_str()
            .is_some_and(|source| source.starts_with("registry+"))
    }) {
        let field = |name: &str| {
            package[name]
                .as_str()
                .map(str::to_owned)
                .ok_or_else(|| Error::Metadata(format!("a package of its answer has no `{name}`")))
        };
        let manifest = PathBuf::from(field("manifest_path")?);
        let package = Package {
            name: field("name")?,
            version: field("version")?,
            license: package["license"].as_str().unwrap_or_default().to_owned(),
            dir: manifest.parent().unwrap_or(&manifest).to_owned(),
        };
        let newer = newest
            .get(&package.name)
            .is_none_or(|known| version_key(&known.version) < version_key(&package.version));
        if newer {
            newest.insert(package.name.clone(), package);
        }
    }
    Ok(newest.into_values().collect())
}

/// Returns the numbers of a version, which are used to compare versions. Build metadata and
/// pre-release names are ignored.
fn version_key(version: &str) -> Vec<u64> {
    let core = version.split(['-', '+']).next().unwrap_or(version);
    core.split('.')
        .map(|number| number.parse().unwrap_or(0))
        .collect()
}

/// Returns true if a crate consists of bindings.
pub fn is_binding(name: &str) -> bool {
    name.ends_with("-sys")
        || name.ends_with("_sys")
        || BINDINGS.contains(&name)
        || BINDING_PREFIXES
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

/// Returns the files of a package that pass [`accepts`]: sources first, then the other files, each
/// sorted by path.
///
/// `seen` holds the hashes of earlier texts; every text is returned once.
pub fn files(package: &Package, seen: &mut HashSet<u64>) -> Result<Vec<SourceFile>, Error> {
    let mut paths = Vec::new();
    walk(&package.dir, &mut paths)?;
    let mut files = Vec::new();
    for path in paths {
        let bytes = std::fs::read(&path).map_err(Error::io(&path))?;
        let Ok(text) = String::from_utf8(bytes) else {
            continue;
        };
        let text = text.trim_start_matches('\u{feff}').replace("\r\n", "\n");
        if accepts(&text) && seen.insert(hash(&text)) {
            let relative = path.strip_prefix(&package.dir).unwrap_or(&path);
            files.push(SourceFile {
                path: relative.to_string_lossy().replace('\\', "/"),
                text,
            });
        }
    }
    files.sort_by(|a, b| {
        (!a.path.starts_with("src/"), &a.path).cmp(&(!b.path.starts_with("src/"), &b.path))
    });
    Ok(files)
}

fn hash(text: &str) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// Collects Rust and Markdown files up to the maximum size, sorted by name.
fn walk(dir: &Path, paths: &mut Vec<PathBuf>) -> Result<(), Error> {
    let entries = std::fs::read_dir(dir).map_err(Error::io(dir))?;
    let mut entries = entries
        .collect::<Result<Vec<_>, _>>()
        .map_err(Error::io(dir))?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let metadata = entry.metadata().map_err(Error::io(&path))?;
        if metadata.is_dir() {
            walk(&path, paths)?;
        } else if metadata.is_file() && metadata.len() <= MAX_FILE_BYTES && is_text(&path) {
            paths.push(path);
        }
    }
    Ok(())
}

/// Returns true for Rust, and for Markdown other than change logs and licences.
fn is_text(path: &Path) -> bool {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .to_lowercase();
    let is_list = [
        "changelog",
        "changes",
        "release",
        "license",
        "licence",
        "contributors",
        "authors",
    ]
    .iter()
    .any(|list| name.starts_with(list));
    name.ends_with(".rs") || (name.ends_with(".md") && !is_list)
}

/// Returns true if a text appears to be written by hand: it has no marker of a generator, no very
/// long lines and no tables of numbers, and is mostly ASCII.
pub fn accepts(text: &str) -> bool {
    let head: String = text.chars().take(1000).collect::<String>().to_lowercase();
    let generated = [
        "@generated",
        "automatically generated",
        "auto-generated",
        "autogenerated",
        "generated by",
        "do not edit",
    ];
    let count = |matches: fn(&u8) -> bool| text.bytes().filter(matches).count() as f64;
    let size = text.len() as f64;
    text.len() >= 64
        && !generated.iter().any(|marker| head.contains(marker))
        && text.lines().all(|line| line.len() <= MAX_LINE_BYTES)
        && count(u8::is_ascii_digit) <= MAX_DIGIT_SHARE * size
        && count(|byte| !byte.is_ascii()) <= 0.1 * size
}

/// Returns the largest `share` for which the sum of `min(size, share)` is at most `budget`.
pub fn fair_share(sizes: &[usize], budget: usize) -> usize {
    let mut sorted = sizes.to_vec();
    sorted.sort_unstable();
    let mut left = budget;
    for (taken, size) in sorted.iter().enumerate() {
        let share = left / (sorted.len() - taken);
        if *size > share {
            return share;
        }
        left -= size;
    }
    usize::MAX
}

/// Returns the files that together fit into `share` bytes, in order. A file that does not fit is
/// skipped.
pub fn within(files: Vec<SourceFile>, share: usize) -> Vec<SourceFile> {
    let mut left = share;
    files
        .into_iter()
        .filter(|file| {
            let fits = file.text.len() <= left;
            if fits {
                left -= file.text.len();
            }
            fits
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_gives_the_newest_registry_version() {
        let registry = "registry+https://example.org/index";
        let package = |name: &str, version: &str, source: Value| {
            serde_json::json!({"name": name, "version": version, "source": source, "license": "MIT",
                "manifest_path": format!("/sources/{name}-{version}/Cargo.toml")})
        };
        let metadata = serde_json::json!({"packages": [
            package("syn", "2.0.119", registry.into()), package("syn", "10.0.0+spec-1", registry.into()), package("syn", "3.0.9", registry.into()),
            package("local", "1.0.0", Value::Null), package("anyhow", "1.0.0", registry.into()),
        ]});
        let found = parse_metadata(&metadata).unwrap();
        assert_eq!(
            found
                .iter()
                .map(|p| (p.name.as_str(), p.version.as_str()))
                .collect::<Vec<_>>(),
            [("anyhow", "1.0.0"), ("syn", "10.0.0+spec-1")]
        );
        assert_eq!(found[1].dir, Path::new("/sources/syn-10.0.0+spec-1"));
        assert!(matches!(
            parse_metadata(&Value::Null),
            Err(Error::Metadata(_))
        ));
        let nameless = serde_json::json!({"packages": [{"source": registry}]});
        assert!(
            matches!(parse_metadata(&nameless), Err(Error::Metadata(message)) if message.contains("manifest_path"))
        );
    }

    #[test]
    fn bindings_are_recognised() {
        for name in [
            "linux-raw-sys",
            "glutin_wgl_sys",
            "windows-core",
            "objc2-metal",
            "libc",
        ] {
            assert!(is_binding(name), "{name}");
        }
        for name in ["itertools", "sysinfo", "libm", "window"] {
            assert!(!is_binding(name), "{name}");
        }
    }

    #[test]
    fn filter_keeps_prose_and_drops_tables() {
        let code = "/// Returns the larger of two values.\npub fn larger(a: u32, b: u32) -> u32 {\n    if a > b { a } else { b }\n}\n";
        assert!(accepts(code));
        assert!(!accepts("fn main() {}\n"), "too short");
        assert!(!accepts(&format!("// @generated by a tool\n{code}")));
        assert!(!accepts(&format!("// DO NOT EDIT\n{code}")));
        assert!(accepts(&format!("{code}{}", code.repeat(20)) as &str));
        assert!(!accepts(&format!(
            "{code}// {}\n",
            "x".repeat(MAX_LINE_BYTES)
        )));
        assert!(!accepts(&format!(
            "{code}const TABLE: [u32; 40] = [{}];\n",
            "1234567, ".repeat(40)
        )));
        assert!(!accepts(&format!("{code}// {}\n", "ж".repeat(100))));
    }

    #[test]
    fn shares_are_fair_and_stay_in_the_budget() {
        assert_eq!(fair_share(&[10, 20, 30], 60), usize::MAX);
        assert_eq!(fair_share(&[30, 10, 20], 50), 20);
        assert_eq!(fair_share(&[100, 100], 50), 25);
        assert_eq!(fair_share(&[], 5), usize::MAX);
        let file = |size: usize| SourceFile {
            path: String::new(),
            text: "x".repeat(size),
        };
        let kept = within(vec![file(5), file(8), file(4)], 10);
        assert_eq!(
            kept.iter().map(|file| file.text.len()).collect::<Vec<_>>(),
            [5, 4]
        );
    }

    #[test]
    fn walks_a_package_in_order_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let text = |name: &str| {
            format!(
                "/// The function `{name}` does nothing at all, and is here to be read.\r\npub fn {name}() {{}}\r\n"
            )
        };
        write("README.md", &text("readme"));
        write("CHANGELOG.md", &text("changes"));
        write("src/lib.rs", &text("lib"));
        write("src/copy.rs", &text("lib"));
        write("src/data.bin", &text("data"));
        write("tests/all.rs", &text("all"));
        let package = Package {
            name: "p".into(),
            version: "1.0.0".into(),
            license: "MIT".into(),
            dir: dir.path().to_owned(),
        };
        let mut seen = HashSet::new();
        let found = files(&package, &mut seen).unwrap();
        assert_eq!(
            found
                .iter()
                .map(|file| file.path.as_str())
                .collect::<Vec<_>>(),
            ["src/copy.rs", "README.md", "tests/all.rs"]
        );
        assert!(!found[0].text.contains('\r'));
        assert!(
            files(&package, &mut seen).unwrap().is_empty(),
            "everything was seen"
        );
    }
}
