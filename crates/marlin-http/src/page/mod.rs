//! The page at `/`: a chat with the model and a live view of the server.
//!
//! Its files are in the program. It loads nothing from elsewhere, and its policy forbids scripts
//! that are not among these files, and HTML from texts: what a model writes stays text. Like
//! `/metrics`, the page is open to clients without a key; it asks for the key of its requests.

use crate::state::ApiState;
use axum::Router;
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// What the page may do: load these files, and ask this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
     require-trusted-types-for 'script'; trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// The files below `/page`: name, content type, text.
const FILES: [(&str, &str, &str); 13] = [
    ("answer.js", SCRIPT, include_str!("answer.js")),
    ("app.js", SCRIPT, include_str!("app.js")),
    ("chart.js", SCRIPT, include_str!("chart.js")),
    ("client.js", SCRIPT, include_str!("client.js")),
    ("dom.js", SCRIPT, include_str!("dom.js")),
    ("icon.svg", SVG, include_str!("icon.svg")),
    ("live.js", SCRIPT, include_str!("live.js")),
    ("log.js", SCRIPT, include_str!("log.js")),
    ("markdown.js", SCRIPT, include_str!("markdown.js")),
    ("metrics.js", SCRIPT, include_str!("metrics.js")),
    ("settings.js", SCRIPT, include_str!("settings.js")),
    ("store.js", SCRIPT, include_str!("store.js")),
    ("style.css", CSS, include_str!("style.css")),
];

/// Returns the routes of the page and its files.
pub(crate) fn routes() -> Router<ApiState> {
    let index = get(async || file(HTML, include_str!("index.html")));
    let mut router = Router::new().route("/", index);
    for (name, content_type, text) in FILES {
        let handler = get(async move || file(content_type, text));
        router = router.route(&format!("/page/{name}"), handler);
    }
    router
}

/// Returns a response with a file of the page.
fn file(content_type: &'static str, text: &'static str) -> Response {
    const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
    let headers = [
        (header::CONTENT_TYPE, content_type),
        // A new version of the program has other files under the same names.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (OPENER_POLICY, "same-origin"),
    ];
    (headers, text).into_response()
}
