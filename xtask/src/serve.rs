//! The checks of the server: clients in Python in every run, and the slower ones.

use crate::process::{Error, cargo, root, run, step, target};
use crate::{llvm, python};
use std::path::PathBuf;
use std::process::Command;

/// The environment variable with the number of requests.
const REQUESTS: &str = "MARLIN_SERVE_REQUESTS";
/// The environment variable with the number of mutated bodies.
const BODIES: &str = "MARLIN_HTTP_BODIES";
/// The folder of the scripts.
const SCRIPTS: &str = "crates/marlin-http/tests/clients";

/// The clients `openai` and `anthropic`, and their dependencies.
const CLIENTS: [&str; 17] = [
    "annotated-types==0.8.0",
    "anthropic==2.14.0",
    "anyio==4.16.0",
    "docstring_parser==0.18.0",
    "h11==0.16.0",
    "httpcore2==2.16.2",
    "httpx2==2.16.2",
    "idna==3.20",
    "jiter==0.19.0",
    "openai==3.57.0",
    "opentelemetry-api==1.45.2",
    "pydantic==2.14.4",
    "pydantic_core==2.50.5",
    "sniffio==1.3.1",
    "truststore==0.10.5",
    "typing_extensions==4.16.0",
    "typing-inspection==0.4.5",
];
/// SGLang's router, and its dependencies.
const ROUTER: [&str; 26] = [
    "aiohappyeyeballs==2.7.1",
    "aiohttp==3.14.5",
    "aiosignal==1.4.0",
    "annotated-doc==0.0.7",
    "annotated-types==0.8.0",
    "anyio==4.16.0",
    "attrs==26.1.0",
    "click==8.5.1",
    "fastapi==0.165.0",
    "frozenlist==1.8.0",
    "h11==0.16.0",
    "idna==3.20",
    "multidict==7.2.1",
    "opentelemetry-api==1.45.2",
    "orjson==3.13.0",
    "propcache==0.5.4",
    "pydantic==2.14.4",
    "pydantic_core==2.50.5",
    "setproctitle==1.3.8",
    "sglang-router==0.3.2",
    "sniffio==1.3.1",
    "starlette==1.10.0",
    "typing_extensions==4.16.0",
    "typing-inspection==0.4.5",
    "uvicorn==0.54.0",
    "yarl==1.25.1",
];

/// Checks that were not run, with the reason.
pub type Skipped = Option<String>;

/// Runs the clients against a server of a pseudo-model, and the tutorial of the book against one of
/// the shipped model: about 15 s.
pub fn run_clients() -> Result<Skipped, Error> {
    let python = match environment("clients", &CLIENTS) {
        Ok(python) => python,
        Err(skipped) => return Ok(Some(skipped)),
    };
    let [program, server] = build_programs()?;
    for script in ["openai_client.py", "anthropic_client.py"] {
        let script = root().join(SCRIPTS).join(script);
        run(Command::new(&python).arg(script).arg(&server))?;
    }
    let mut tutorial = Command::new(&python);
    tutorial
        .arg(root().join(SCRIPTS).join("tutorial.py"))
        .arg(root().join("book/src/tutorial-serve.md"))
        .arg(program);
    run(&mut tutorial)?;
    Ok(None)
}

/// Builds the program and the server of a pseudo-model.
fn build_programs() -> Result<[PathBuf; 2], Error> {
    // With an example, the dependencies have the features that the tests need, and are built.
    run(&mut cargo([
        "build",
        "--workspace",
        "--bin",
        "burn-marlin",
        "--example",
        "pseudo_server",
    ]))?;
    let names = ["debug/burn-marlin", "debug/examples/pseudo_server"];
    Ok(names.map(|name| target().join(name)))
}

/// Runs the slower checks: about ten minutes on two cores.
pub fn run_slow() -> Result<(), Error> {
    step("set-up", llvm::set_up)?;
    step("10,000 requests to the shipped model", || {
        let load = ["--test", "cli", "--", "serve_load", "--nocapture"];
        run(cargo(["test", "--workspace"])
            .args(load)
            .env(REQUESTS, "10000"))
    })?;
    step("1,000,000 simulated requests", || {
        let simulation = ["--test", "simulation", "--", "--nocapture"];
        run(cargo(["test", "--workspace"])
            .args(simulation)
            .env(REQUESTS, "1000000"))
    })?;
    step("100,000 mutated bodies", || {
        let bodies = ["--test", "http", "--", "bodies::", "--nocapture"];
        run(cargo(["test", "--workspace"])
            .args(bodies)
            .env(BODIES, "100000"))
    })?;
    step(
        "100,000 mutated texts of tool calls and of reasoning",
        || run(&mut cargo(["test", "--workspace", "--lib", "--", "pieces"])),
    )?;
    let page = step("page", run_page)?;
    let clients = step("clients", run_clients)?;
    let router = step("router", run_router)?;
    for skipped in [page, clients, router].into_iter().flatten() {
        println!("{skipped}");
    }
    Ok(())
}

/// Runs the tests of the page in Chromium.
fn run_page() -> Result<Skipped, Error> {
    let has = |name: &&str| {
        let mut version = Command::new(name);
        version.arg("--version").output().is_ok()
    };
    if !["chromium", "chromium-browser"].iter().any(has) {
        return Ok(Some(
            "skipped: the page in Chromium, which is not installed".into(),
        ));
    }
    run(&mut cargo([
        "test",
        "--workspace",
        "--test",
        "page",
        "--",
        "--ignored",
    ]))?;
    Ok(None)
}

/// Runs two servers behind SGLang's router. The logs are in `target/test-logs/router`.
fn run_router() -> Result<Skipped, Error> {
    let python = match environment("router", &ROUTER) {
        Ok(python) => python,
        Err(skipped) => return Ok(Some(skipped)),
    };
    let [program, _] = build_programs()?;
    let mut script = Command::new(python);
    script
        .arg(root().join(SCRIPTS).join("router.py"))
        .arg(program)
        .arg(root().join("examples/train-tiny-llama/model"))
        .arg(target().join("test-logs/router"));
    run(&mut script)?;
    Ok(None)
}

/// Returns the Python of the environment with these packages, which are installed if needed.
///
/// # Errors
/// If they cannot be installed, a message that says so: a machine without PyPI runs all other
/// checks.
fn environment(name: &str, packages: &[&str]) -> Result<PathBuf, String> {
    let environment = target().join("python").join(name);
    let what = format!("the {name} for the tests of the server");
    match python::install(&environment, packages, &what) {
        Ok(()) => Ok(environment.join("bin/python")),
        Err(error) => Err(format!(
            "skipped: {what}, which could not be installed: {error}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_is_pinned() {
        for package in CLIENTS.iter().chain(&ROUTER) {
            let version = package.split_once("==").map(|(_, version)| version);
            assert!(
                version.is_some_and(|version| !version.is_empty()),
                "{package}"
            );
        }
    }
}
