//! Tests of `run.sh` with a script in place of the binary.

use super::*;
use crate::process::{run, target};
use std::process::Output;

/// A script that lists and runs tests as libtest-mimic does. The tests pass, fail, kill their
/// process, or never end.
const BINARY_OF_TESTS: &str = r#"#!/usr/bin/env bash
exact="" ignored="" list="" filter="" code=0
while (($#)); do
    case $1 in
        --list) list=1 ;;
        --ignored) ignored=1 ;;
        --exact) exact=1 ;;
        --device) device=$2 && shift ;;
        --logfile) events=$2 && shift ;;
        --format | --skip) shift ;;
        *) filter=$1 ;;
    esac
    shift
done
[[ $list || -d $MARLIN_TEST_FILES/logs-$device ]] || exit 3
for test in loading::passes loading::fails decode::attention::passes gemv::passes::g32 gemv::crashes gemv::runs_on marlin::is_ignored marlin::tiles::int4_g32_f16::{agree,split_columns::{1,2}}; do
    name=$device::$test event=ok
    if [[ $list ]]; then
        [[ $ignored && $test != marlin::is_ignored ]] || echo "$name: test"
        continue
    fi
    [[ $test == marlin::is_ignored && ! $ignored ]] && continue
    if [[ $exact ]]; then [[ $name == "$filter" ]] || continue; else [[ $name == *"$filter"* ]] || continue; fi
    echo "{ \"type\": \"test\", \"event\": \"started\", \"name\": \"$name\" }" >>"$events"
    case $test in
        *::fails) event=failed code=101 ;;
        *::crashes) kill -ABRT $$ ;;
        *::runs_on) exec sleep 100 ;;
    esac
    echo "{ \"type\": \"test\", \"name\": \"$name\", \"event\": \"$event\" }" >>"$events"
done
exit $code
"#;

/// Creates a pack with the script as the binary; each test has its own pack.
fn pack_of_script(name: &str) -> Result<std::path::PathBuf, Error> {
    let folder = target().join("tmp").join(name);
    fs::create_dir_all(&folder).map_err(Error::file(&folder))?;
    install(&root().join("tests/device/run.sh"), &folder.join("run.sh"))?;
    let script = folder.join("script");
    fs::write(&script, BINARY_OF_TESTS).map_err(Error::file(&script))?;
    install(&script, &folder.join(BINARY))?;
    fs::write(folder.join("commit"), "0123 with uncommitted changes\n")
        .map_err(Error::file(&folder))?;
    Ok(folder)
}

/// Copies an executable in a separate process. A file that this process has open for writing cannot
/// be executed (ETXTBSY), and a child process that another test is starting inherits the files that
/// were open at the fork.
fn install(from: &Path, to: &Path) -> Result<(), Error> {
    run(Command::new("install").args(["-m", "755"]).args([from, to]))
}

fn run_tests(folder: &Path, args: &[&str]) -> Result<(Output, String), Error> {
    let mut command = Command::new(folder.join("run.sh"));
    let output = command.args(args).output().map_err(|source| Error::Start {
        command: show(&command),
        source,
    })?;
    let text = [&output.stdout, &output.stderr]
        .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        .concat();
    Ok((output, text))
}

#[test]
fn every_test_without_a_result_is_a_failure() -> Result<(), Error> {
    let folder = pack_of_script("run-whole")?;
    let (output, text) = run_tests(
        &folder,
        &["--device", "flex", "--jobs", "3", "--timeout", "1"],
    )?;
    assert_eq!(output.status.code(), Some(1), "{text}");
    for line in [
        "flex::gemv::crashes: no result, exit status 134",
        "flex::gemv::runs_on: no result, exit status 124",
        "flex::loading::fails: failed",
        "\"device\": \"flex\", \"commit\": \"0123\", \"uncommitted_changes\": true",
        "7 processes",
        "marlin::tiles::int4_g32_f16\n",
        "\"passed\": 7, \"failed\": 3",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(!text.contains("flex::marlin::is_ignored:"), "{text}");
    assert!(record::last_run(&text).is_ok(), "{text}");
    fs::remove_dir_all(&folder).map_err(Error::file(&folder))
}

#[test]
fn a_part_of_the_tests_is_no_record() -> Result<(), Error> {
    let folder = pack_of_script("run-part")?;
    let (output, text) = run_tests(&folder, &["--device", "flex", "attention"])?;
    assert!(
        output.status.success()
            && text.contains("decode::attention::passes")
            && !text.contains('{'),
        "{text}"
    );
    let wrong: [(&[&str], &str); 3] = [
        (&["--jobs"], "--jobs needs a value"),
        (&["--job", "3"], "unknown option --job"),
        (&["nothing"], "no test's name"),
    ];
    for (args, message) in wrong {
        let (output, text) = run_tests(&folder, args)?;
        assert!(
            output.status.code() == Some(2) && text.contains(message),
            "{text}"
        );
    }
    fs::remove_dir_all(&folder).map_err(Error::file(&folder))
}
