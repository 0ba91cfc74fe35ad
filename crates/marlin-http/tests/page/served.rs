//! The files of the page, as they are served.

use crate::support::client::{get, send};
use crate::support::server::{TestOptions, TestServer};
use marlin_http::ApiOptions;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Returns the folder of the page's files.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/page")
}

/// Returns the names and texts of the page's files.
fn files() -> Vec<(String, String)> {
    let entries = std::fs::read_dir(folder()).unwrap();
    let mut files: Vec<_> = entries
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name() != "mod.rs")
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read_to_string(entry.path()).unwrap())
        })
        .collect();
    files.sort();
    files
}

fn html() -> String {
    std::fs::read_to_string(folder().join("index.html")).unwrap()
}

/// Returns the scripts, one after the other.
fn scripts() -> String {
    let files = files().into_iter();
    files
        .filter_map(|(name, text)| name.ends_with(".js").then_some(text))
        .collect()
}

/// Returns the texts between `before` and the next `after`.
fn between<'a>(text: &'a str, before: &str, after: char) -> Vec<&'a str> {
    let parts = text.split(before).skip(1);
    parts.filter_map(|part| part.split(after).next()).collect()
}

fn ids(html: &str) -> BTreeSet<&str> {
    between(html, " id=\"", '"').into_iter().collect()
}

#[test]
fn every_file_is_served_with_the_policy() {
    let server = TestServer::start();
    let files = files();
    assert!(files.len() > 10, "{files:?}");
    for (name, text) in &files {
        let (path, content_type) = match name.rsplit_once('.') {
            Some((_, "html")) => ("/".to_string(), "text/html; charset=utf-8"),
            Some((_, "js")) => (format!("/page/{name}"), "text/javascript; charset=utf-8"),
            Some((_, "css")) => (format!("/page/{name}"), "text/css; charset=utf-8"),
            Some((_, "svg")) => (format!("/page/{name}"), "image/svg+xml"),
            _ => panic!("{name} is of no kind that the page has"),
        };
        let response = get(server.address, &path);
        assert_eq!(response.status, 200, "{path}");
        assert!(response.text() == text, "{path} is not {name}");
        assert_eq!(response.header("content-type"), Some(content_type));
        assert_eq!(response.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(response.header("cache-control"), Some("no-cache"));
        let policy = response.header("content-security-policy").unwrap();
        let directives: BTreeSet<_> = policy.split("; ").map(str::trim).collect();
        for directive in [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        ] {
            assert!(directives.contains(directive), "{directive} in {policy}");
        }
        assert!(
            !policy.contains("unsafe") && !policy.contains('*'),
            "{policy}"
        );
    }
    for path in [
        "/page/",
        "/page/mod.rs",
        "/page/../page/app.js",
        "/index.html",
    ] {
        assert_eq!(get(server.address, path).status, 404, "{path}");
    }
    let posted = send(server.address, "POST", "/", &[], &[]);
    assert_eq!(posted.status, 405);
    assert_eq!(posted.json()["error"]["code"], "method_not_allowed");
}

#[test]
fn the_page_is_open_to_clients_without_a_key() {
    let mut api = ApiOptions::default();
    api.api_keys.push("key".into());
    let server = TestServer::with(TestOptions {
        api,
        ..TestOptions::default()
    });
    assert_eq!(get(server.address, "/v1/models").status, 401);
    for path in ["/", "/page/app.js", "/metrics"] {
        assert_eq!(get(server.address, path).status, 200, "{path}");
    }
}

#[test]
fn ids_that_scripts_use_are_in_the_page() {
    let (html, scripts) = (html(), scripts());
    let ids = ids(&html);
    assert_eq!(
        ids.len(),
        between(&html, " id=\"", '"').len(),
        "an id twice"
    );
    let mut used = between(&scripts, "byId(\"", '"');
    used.extend(between(&scripts, "number(\"", '"'));
    used.extend(between(&scripts, "show(\"", '"'));
    let cards = between(&scripts, "card(\"", '"');
    assert!(used.len() > 30 && cards.len() == 4, "{used:?} {cards:?}");
    for id in used {
        assert!(ids.contains(id), "`{id}` of a script is not in index.html");
    }
    for card in cards {
        for part in ["chart", "top"] {
            let id = format!("{card}-{part}");
            assert!(ids.contains(id.as_str()), "`{id}` is not in index.html");
        }
    }
    for attribute in ["for", "aria-labelledby", "aria-describedby"] {
        for id in between(&html, &format!(" {attribute}=\""), '"') {
            assert!(ids.contains(id), "{attribute}=\"{id}\"");
        }
    }
    for id in between(&html, "href=\"#", '"') {
        assert!(ids.contains(id), "#{id}");
    }
}

#[test]
fn every_field_of_the_page_has_a_label() {
    let html = html();
    let labels: BTreeSet<_> = between(&html, "<label for=\"", '"').into_iter().collect();
    let mut fields = 0;
    for tag in ["<input ", "<textarea ", "<select "] {
        for attributes in between(&html, tag, '>') {
            let id = between(attributes, "id=\"", '"')[0];
            assert!(labels.contains(id), "`{id}` has no label");
            fields += 1;
        }
    }
    assert_eq!(fields, 6);
}

#[test]
fn scripts_and_styles_are_files_of_the_page() {
    let html = html();
    let served: BTreeSet<String> = files().into_iter().map(|(name, _)| name).collect();
    for attribute in [" src=\"", " href=\""] {
        for path in between(&html, attribute, '"') {
            let file = path.strip_prefix("page/");
            let exists = file.is_some_and(|name| served.contains(name));
            assert!(exists || path.starts_with('#'), "{path}");
        }
    }
    for inline in [
        " style=",
        "<style",
        " onclick=",
        " onload=",
        "javascript:",
        "<script>",
    ] {
        assert!(!html.contains(inline), "{inline} is refused by the policy");
    }
    let scripts = scripts();
    for import in between(&scripts, "from \"", '"') {
        let name = import.strip_prefix("./").unwrap_or(import);
        assert!(served.contains(name), "{import} is imported, but no file");
    }
    for sink in [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ] {
        assert!(
            !scripts.contains(sink),
            "{sink} makes HTML or code of a text"
        );
    }
    for (name, text) in files() {
        let text = text.replace("http://www.w3.org/2000/svg", "");
        assert!(
            !text.contains("http://") && !text.contains("https://"),
            "{name}"
        );
    }
}

#[test]
fn metrics_that_the_live_view_reads_are_served() {
    let server = TestServer::start();
    let metrics = get(server.address, "/metrics");
    let scripts = scripts();
    let names = between(&scripts, "\"vllm:", '"');
    assert_eq!(names.len(), 6, "{names:?}");
    for name in names {
        let start = format!("vllm:{name}{{");
        assert!(
            metrics.text().lines().any(|line| line.starts_with(&start)),
            "vllm:{name} is not in {}",
            metrics.text()
        );
    }
}
