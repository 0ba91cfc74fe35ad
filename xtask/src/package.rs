//! The packages of the published crates: builds them as their users will, their documentation as
//! docs.rs will, and compares their API with the last release.

use crate::process::{Error, cargo, in_workspace, output, run, show, step, target};
use serde::Deserialize;
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The version of cargo-semver-checks.
const SEMVER_CHECKS: &str = "0.51.0";
/// The size in bytes that a package must stay below: the registry's own limit.
const MAX_BYTES: u64 = 10_000_000;
/// The features with which packages are built: those that take neither LLVM nor a CubeCL runtime.
/// The tests of the workspace build the other features.
const BUILT: &str = "autodiff,flex,sandbox";
/// The features with which the documentation is built: those of `[package.metadata.docs.rs]`,
/// which take no LLVM.
const DOCUMENTED: &str = "autodiff,flex,sandbox,vulkan";

const NO_ARGUMENTS: [&str; 0] = [];

/// The output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

/// A package of the workspace.
#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    /// The registries that the package may be published to; `None` for all.
    publish: Option<Vec<String>>,
    rust_version: Option<String>,
    description: Option<String>,
    documentation: Option<String>,
    readme: Option<String>,
    keywords: Vec<String>,
    categories: Vec<String>,
    /// The table `package.metadata`.
    #[serde(default)]
    metadata: Value,
}

/// Makes the packages of all published crates and checks them. If `verify` is false, the packages
/// are not built, and neither are the documentation and the API.
pub fn run_all(verify: bool) -> Result<(), Error> {
    let packages = published()?;
    for package in &packages {
        package.expect_metadata()?;
    }
    step("packages", || make(&packages, verify))?;
    sizes(&packages)?;
    if verify {
        step("documentation", || document(&packages))?;
        step("API", || compare(&packages))?;
    }
    Ok(())
}

/// Returns the packages of the workspace that can be published.
fn published() -> Result<Vec<Package>, Error> {
    let mut command = cargo(["metadata", "--no-deps", "--format-version", "1"]);
    let text = output(command.stderr(Stdio::inherit()))?;
    let metadata: Metadata = serde_json::from_str(&text)
        .map_err(|error| Error::Needs(format!("`{}`: {error}", show(&command))))?;
    let mut packages = metadata.packages;
    packages.retain(|package| package.publish.is_none());
    Ok(packages)
}

impl Package {
    /// Checks that the manifest has everything that the page of the crate shows, and what docs.rs
    /// builds the documentation with.
    fn expect_metadata(&self) -> Result<(), Error> {
        let docs = self.metadata.pointer("/docs/rs");
        let missing: Vec<&str> = [
            ("description", self.description.is_some()),
            ("documentation", self.documentation.is_some()),
            ("readme", self.readme.is_some()),
            ("keywords", !self.keywords.is_empty()),
            ("categories", !self.categories.is_empty()),
            ("rust-version", self.rust_version.is_some()),
            ("package.metadata.docs.rs", docs.is_some()),
        ]
        .into_iter()
        .filter_map(|(field, is_there)| (!is_there).then_some(field))
        .collect();
        if missing.is_empty() {
            return self.expect_documented_features(docs.unwrap_or(&Value::Null));
        }
        Err(Error::Needs(format!(
            "the manifest of {} has no {}; add it, or set `publish.workspace = true` there",
            self.name,
            missing.join(", ")
        )))
    }

    /// Checks that [`document`] builds the documentation with the features of
    /// `[package.metadata.docs.rs]`.
    fn expect_documented_features(&self, docs: &Value) -> Result<(), Error> {
        let features = docs["features"].as_array().into_iter().flatten();
        // A feature of CubeCL's runtimes is what they have in common.
        let is_built = |feature: &&str| {
            *feature == "cubecl-runtime" || DOCUMENTED.split(',').any(|built| built == *feature)
        };
        match features
            .filter_map(Value::as_str)
            .find(|feature| !is_built(feature))
        {
            None => Ok(()),
            Some(feature) => Err(Error::Needs(format!(
                "docs.rs builds {} with the feature {feature}, and this task without it; add it \
                 to `DOCUMENTED` in xtask/src/package.rs, if it builds without LLVM",
                self.name
            ))),
        }
    }

    /// Returns the file of the package.
    fn file(&self) -> PathBuf {
        target().join(format!("package/{}-{}.crate", self.name, self.version))
    }
}

/// Returns the arguments that select packages.
fn selection(packages: &[Package]) -> impl Iterator<Item = &str> {
    packages
        .iter()
        .flat_map(|package| ["--package", package.name.as_str()])
}

/// Makes the packages, and builds each from its package alone, against the packages of the others,
/// with the oldest supported Rust.
///
/// Cargo keeps what it builds in the target folder, so that a second run builds only these crates.
fn make(packages: &[Package], verify: bool) -> Result<(), Error> {
    let mut command = match packages
        .iter()
        .find_map(|package| package.rust_version.as_deref())
    {
        Some(version) if verify => oldest_cargo(version)?,
        _ => cargo(NO_ARGUMENTS),
    };
    command.args(["package", "--locked", "--allow-dirty"]);
    command.args(selection(packages));
    match verify {
        true => command.args(["--no-default-features", "--features", BUILT]),
        false => command.arg("--no-verify"),
    };
    run(&mut command)
}

/// Returns cargo of the Rust version `version`: the one that runs this task if it has that version,
/// otherwise the one of rustup's toolchain of that name.
fn oldest_cargo(version: &str) -> Result<Command, Error> {
    let own = output(&mut cargo(["--version"]))?;
    if own.starts_with(&format!("cargo {version}.")) {
        return Ok(cargo(NO_ARGUMENTS));
    }
    let install = ["toolchain", "install", version, "--profile", "minimal"];
    run(in_workspace("rustup").args(install))?;
    let mut command = in_workspace("rustup");
    command.args(["run", version, "cargo"]);
    Ok(command)
}

/// Prints the size of each package, and checks it.
fn sizes(packages: &[Package]) -> Result<(), Error> {
    for package in packages {
        let file = package.file();
        let bytes = fs::metadata(&file).map_err(Error::file(&file))?.len();
        println!("{:>8.1} kB  {}", bytes as f64 / 1000.0, file.display());
        if bytes >= MAX_BYTES {
            return Err(Error::Needs(format!(
                "{} has {bytes} bytes, the limit is {MAX_BYTES}; `cargo package --list` shows its files, `exclude` in its manifest leaves files out",
                file.display()
            )));
        }
    }
    Ok(())
}

/// Builds the documentation as docs.rs does: with `--cfg docsrs`, unstable features of rustdoc,
/// neither CUDA nor a network, and the features of `[package.metadata.docs.rs]`. Broken links are
/// errors.
fn document(packages: &[Package]) -> Result<(), Error> {
    let mut command = cargo(["doc", "--no-deps", "--offline", "--locked", "--lib"]);
    command.args(selection(packages));
    command.args(["--no-default-features", "--features", DOCUMENTED]);
    command.env("RUSTDOC", unstable_rustdoc()?);
    command.env(
        "RUSTDOCFLAGS",
        "--cfg docsrs --deny rustdoc::broken_intra_doc_links",
    );
    run(command.env_remove("CUDA_PATH"))
}

/// Writes a script that runs rustdoc with unstable features, and returns its path. Cargo does not
/// see the variable that permits them: if it did, build scripts would run again, and most
/// dependencies would be built anew.
fn unstable_rustdoc() -> Result<PathBuf, Error> {
    let tools = target().join("tools");
    fs::create_dir_all(&tools).map_err(Error::file(&tools))?;
    let path = tools.join("rustdoc");
    let script = "#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc \"$@\"\n";
    fs::write(&path, script).map_err(Error::file(&path))?;
    let permissions = Permissions::from_mode(0o755);
    fs::set_permissions(&path, permissions).map_err(Error::file(&path))?;
    Ok(path)
}

/// Compares the API with that of the last tag, by cargo-semver-checks.
fn compare(packages: &[Package]) -> Result<(), Error> {
    let mut describe = in_workspace("git");
    describe.args(["describe", "--tags", "--abbrev=0", "--match", "v*"]);
    let Ok(tag) = output(describe.stderr(Stdio::null())) else {
        println!("xtask: no tag, so there is no release to compare the API with");
        return Ok(());
    };
    let tools = target().join("tools");
    let program = tools.join("bin/cargo-semver-checks");
    let installed = output(Command::new(&program).args(["semver-checks", "--version"]));
    if !installed.is_ok_and(|version| version.trim().ends_with(SEMVER_CHECKS)) {
        let mut install = cargo(["install", "cargo-semver-checks", "--locked", "--quiet"]);
        run(install
            .args(["--version", SEMVER_CHECKS, "--root"])
            .arg(&tools))?;
    }
    let mut check = in_workspace(program);
    check.args([
        "semver-checks",
        "check-release",
        "--baseline-rev",
        tag.trim(),
    ]);
    check.args(["--only-explicit-features", "--features", "flex"]);
    run(check.args(selection(packages)))
}

#[cfg(test)]
mod tests {
    use super::Package;
    use serde_json::json;

    #[test]
    fn a_manifest_without_a_field_of_the_page_is_refused() {
        let full = json!({
            "name": "a", "version": "0.22.0", "publish": null, "rust_version": "1.95",
            "description": "A.", "documentation": "https://docs.rs/a", "readme": "README.md",
            "keywords": ["a"], "categories": ["science"],
            "metadata": { "docs": { "rs": { "features": ["flex"] } } },
        });
        let package = |value| serde_json::from_value::<Package>(value).unwrap();
        package(full.clone()).expect_metadata().unwrap();
        for (field, empty) in [
            ("readme", json!(null)),
            ("keywords", json!([])),
            ("metadata", json!(null)),
        ] {
            let mut without = full.clone();
            without[field] = empty;
            let error = package(without).expect_metadata().unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
        let mut other = full;
        other["metadata"]["docs"]["rs"]["features"] = json!(["flex", "cuda"]);
        let error = package(other).expect_metadata().unwrap_err().to_string();
        assert!(error.contains("a with the feature cuda"), "{error}");
    }
}
