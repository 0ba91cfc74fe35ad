//! The other routes, keys, and origins.

use crate::connections::wait;
use crate::support::client::{ask, get, post, send};
use crate::support::server::{TestOptions, TestServer};
use marlin_http::ApiOptions;
use serde_json::{Value, json};

#[test]
fn models_health_and_version() {
    let server = TestServer::start();
    let list = get(server.address, "/v1/models").json();
    assert_eq!(list["object"], "list");
    let names: Vec<_> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| &model["id"])
        .collect();
    assert_eq!(names, ["test/model", "alias"]);
    let model = get(server.address, "/v1/models/test/model").json();
    assert_eq!(model, list["data"][0]);
    assert_eq!(
        (&model["object"], &model["max_model_len"]),
        (&json!("model"), &json!(4096))
    );
    let unknown = get(server.address, "/v1/models/gpt-4");
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json()["error"]["code"], "model_not_found");
    let info = get(server.address, "/server_info").json();
    assert_eq!(info["served_model_name"], "test/model");
    assert_eq!(info["max_total_tokens"], 2048 * 64);
    let info = get(server.address, "/model_info").json();
    assert_eq!(info, json!({ "is_generation": true }));
    let health = get(server.address, "/health");
    assert_eq!(
        (health.status, health.json()),
        (200, json!({ "status": "ok" }))
    );
    let version = get(server.address, "/version").json();
    assert_eq!(version, json!({ "version": env!("CARGO_PKG_VERSION") }));
}

#[test]
fn tokens_of_a_text_and_back() {
    let server = TestServer::start();
    let answer = ask(server.address, "/tokenize", &json!({ "prompt": "hé" }));
    assert_eq!(
        answer,
        json!({ "count": 4, "max_model_len": 4096, "tokens": [256, 104, 0xc3, 0xa9] })
    );
    let request = json!({ "prompt": "h", "add_special_tokens": false });
    assert_eq!(
        ask(server.address, "/tokenize", &request)["tokens"],
        json!([104])
    );
    let messages = json!([{ "role": "user", "content": "h" }]);
    let answer = ask(
        server.address,
        "/tokenize",
        &json!({ "messages": messages }),
    );
    let back = ask(
        server.address,
        "/detokenize",
        &json!({ "tokens": answer["tokens"] }),
    );
    assert_eq!(back, json!({ "prompt": "[user]h[assistant]" }));
    for (path, body) in [
        ("/tokenize", json!({})),
        ("/tokenize", json!({ "prompt": "a", "messages": messages })),
        ("/tokenize", json!({ "prompt": "a", "what": 1 })),
        ("/detokenize", json!({ "tokens": [258] })),
        ("/detokenize", json!({ "tokens": "a" })),
    ] {
        let response = post(server.address, path, &body);
        assert_eq!(response.status, 400, "{body}");
        assert!(response.json()["error"]["message"].is_string());
    }
}

#[test]
fn metrics_have_the_names_of_vllm() {
    let server = TestServer::start();
    let body = json!({ "model": "alias", "prompt": "Hello", "max_tokens": 7 });
    ask(server.address, "/v1/completions", &body);
    // The engine publishes the counts of a step after its events.
    wait("the request is counted", || {
        server.engine.metrics().ended.length == 1
    });
    let response = get(server.address, "/metrics");
    let kind = response.header("content-type").unwrap();
    assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
    let text = response.text();
    let label = "model_name=\"test/model\"";
    for line in [
        format!("vllm:num_requests_running{{{label}}} 0.0"),
        format!("vllm:num_requests_waiting{{{label}}} 0.0"),
        format!("vllm:prompt_tokens_total{{{label}}} 6"),
        format!("vllm:generation_tokens_total{{{label}}} 7"),
        format!("vllm:time_to_first_token_seconds_count{{{label}}} 1"),
        format!("vllm:inter_token_latency_seconds_count{{{label}}} 6"),
        format!("vllm:request_generation_tokens_sum{{{label}}} 7.0"),
        "# TYPE vllm:e2e_request_latency_seconds histogram".to_string(),
        "# TYPE vllm:kv_cache_usage_perc gauge".to_string(),
    ] {
        assert!(text.lines().any(|own| own == line), "{line} in {text}");
    }
    let length = "vllm:request_success_total{";
    let line = text
        .lines()
        .find(|line| line.starts_with(length) && line.contains("\"length\""));
    assert!(line.unwrap().ends_with(" 1"), "{line:?}");
    let bucket = format!("vllm:request_generation_tokens_bucket{{{label},le=\"+Inf\"}} 1");
    assert!(text.lines().any(|line| line == bucket), "{text}");
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn paths_without_a_route_have_the_form_of_errors() {
    let server = TestServer::start();
    for (method, path, status, code) in [
        ("GET", "/nothing", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 501, "not_implemented"),
        ("POST", "/v1/audio/speech", 501, "not_implemented"),
        ("GET", "/v1/responses/resp_1", 501, "not_implemented"),
        ("GET", "/v1/files", 501, "not_implemented"),
    ] {
        let response = send(server.address, method, path, &[], &[]);
        assert_eq!(response.status, status, "{method} {path}");
        let error = &response.json()["error"];
        assert_eq!(error["code"], code);
        assert!(error["message"].as_str().unwrap().contains(path));
    }
    let response = send(server.address, "GET", "/v1/messages/batches", &[], &[]);
    assert_eq!(response.status, 501);
    let error = response.json();
    assert_eq!(
        (&error["type"], &error["error"]["type"]),
        (&json!("error"), &json!("api_error"))
    );
}

#[test]
fn every_answer_has_a_number() {
    let server = TestServer::start();
    let response = get(server.address, "/health");
    assert!(response.header("x-request-id").unwrap().starts_with("req_"));
    let response = send(
        server.address,
        "GET",
        "/health",
        &[("x-request-id", "mine-1")],
        &[],
    );
    assert_eq!(response.header("x-request-id"), Some("mine-1"));
    let long = "x".repeat(500);
    for own in [long.as_str(), "\u{e9}"] {
        let response = send(
            server.address,
            "GET",
            "/nothing",
            &[("x-request-id", own)],
            &[],
        );
        assert!(response.header("x-request-id").unwrap().starts_with("req_"));
    }
}

#[test]
fn keys_are_asked_for_where_there_are_some() {
    let mut api = ApiOptions::default();
    api.api_keys = vec!["first".into(), "second".into()];
    let server = TestServer::with(TestOptions {
        api,
        ..TestOptions::default()
    });
    let with =
        |headers: &[(&str, &str)], path: &str| send(server.address, "GET", path, headers, &[]);
    for header in [
        ("authorization", "Bearer first"),
        ("authorization", "bearer second"),
        ("x-api-key", "second"),
    ] {
        assert_eq!(with(&[header], "/v1/models").status, 200, "{header:?}");
    }
    for headers in [
        &[][..],
        &[("authorization", "Bearer third")],
        &[("authorization", "Bearer ")],
        &[("authorization", "first")],
        &[("authorization", "Basic first")],
        &[("x-api-key", "firs")],
        &[("x-api-key", "")],
    ] {
        let response = with(headers, "/v1/models");
        assert_eq!(response.status, 401, "{headers:?}");
        assert_eq!(response.json()["error"]["code"], "invalid_api_key");
        assert_eq!(response.header("www-authenticate"), Some("Bearer"));
        let response = send(server.address, "POST", "/v1/messages", headers, b"{}");
        assert_eq!(response.status, 401);
        assert_eq!(response.json()["error"]["type"], "authentication_error");
    }
    for path in ["/health", "/version", "/metrics"] {
        assert_eq!(with(&[], path).status, 200);
    }
    assert_eq!(with(&[], "/nothing").status, 404);
    assert_eq!(with(&[], "/v1/embeddings").status, 401);
}

#[test]
fn pages_of_other_origins_ask_only_where_they_may() {
    let preflight = |origins: &[&str], origin: &str| -> Option<String> {
        let mut api = ApiOptions::default();
        api.cors_origins = origins.iter().map(ToString::to_string).collect();
        api.api_keys = vec!["key".into()];
        let server = TestServer::with(TestOptions {
            api,
            ..TestOptions::default()
        });
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            (
                "access-control-request-headers",
                "authorization,content-type",
            ),
        ];
        let response = send(
            server.address,
            "OPTIONS",
            "/v1/chat/completions",
            &headers,
            &[],
        );
        let allowed = response
            .header("access-control-allow-origin")
            .map(Into::into);
        if allowed.is_some() {
            let headers = response.header("access-control-allow-headers");
            assert_eq!(headers, Some("authorization,content-type"));
        }
        // An error can be read by the page, too.
        let error = send(
            server.address,
            "GET",
            "/v1/models",
            &[("origin", origin)],
            &[],
        );
        assert_eq!(error.status, 401);
        assert_eq!(
            error.header("access-control-allow-origin").map(Into::into),
            allowed
        );
        allowed
    };
    assert_eq!(preflight(&[], "https://a.example"), None);
    let own = preflight(&["https://a.example"], "https://a.example");
    assert_eq!(own.as_deref(), Some("https://a.example"));
    assert_eq!(preflight(&["https://a.example"], "https://b.example"), None);
    assert_eq!(preflight(&["*"], "https://b.example").as_deref(), Some("*"));
}

#[test]
fn a_body_must_be_announced_as_json() {
    let server = TestServer::start();
    let body = json!({ "prompt": "a" }).to_string();
    for kind in [
        None,
        Some("text/plain"),
        Some("application/x-www-form-urlencoded"),
    ] {
        let headers: Vec<_> = kind
            .map(|kind| ("content-type", kind))
            .into_iter()
            .collect();
        let response = send(
            server.address,
            "POST",
            "/tokenize",
            &headers,
            body.as_bytes(),
        );
        assert_eq!(response.status, 415, "{kind:?}");
        let error: Value = response.json();
        assert_eq!(error["error"]["code"], "unsupported_media_type");
    }
    let headers = [("content-type", "Application/JSON; charset=utf-8")];
    let response = send(
        server.address,
        "POST",
        "/tokenize",
        &headers,
        body.as_bytes(),
    );
    assert_eq!(response.status, 200);
}
