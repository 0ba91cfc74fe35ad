//! The page in a browser.

use crate::support::server::{TestOptions, TestServer};
use marlin_http::ApiOptions;
use std::path::Path;
use std::process::Command;

/// Writes screenshots into `page-screenshots` in the target directory, to be looked at.
#[test]
#[ignore = "needs Chromium and Python, takes 20 s to 50 s: \
            cargo test -p marlin-http --test page -- --ignored"]
fn the_page_works_in_chromium() {
    const KEY: &str = "a-key-of-the-tests";
    let server = TestServer::start();
    let with_key = TestServer::with(TestOptions {
        api: api_options(KEY),
        ..TestOptions::default()
    });
    let screenshots = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page-screenshots");
    std::fs::create_dir_all(&screenshots).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/page/check_page.py");
    let status = Command::new("python3")
        .arg(script)
        .arg(format!("http://{}", server.address))
        .arg(format!("http://{}", with_key.address))
        .arg(KEY)
        .arg(&screenshots)
        .status()
        .unwrap();
    assert!(status.success(), "{status}; see {}", screenshots.display());
}

fn api_options(key: &str) -> ApiOptions {
    let mut options = ApiOptions::default();
    options.api_keys.push(key.into());
    options
}
