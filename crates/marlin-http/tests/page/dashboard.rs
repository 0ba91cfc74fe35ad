//! The Grafana dashboard of the book.

use crate::support::client::{ask, get};
use crate::support::server::TestServer;
use serde_json::{Value, json};
use std::collections::BTreeSet;

fn dashboard() -> Value {
    serde_json::from_str(include_str!("../../../../book/grafana/burn-marlin.json")).unwrap()
}

fn array<'a>(value: &'a Value, key: &str) -> &'a Vec<Value> {
    value[key]
        .as_array()
        .unwrap_or_else(|| panic!("{key} of {value}"))
}

/// Returns the expressions of all panels, and the queries of the variables.
fn expressions(dashboard: &Value) -> Vec<String> {
    let panels = array(dashboard, "panels").iter();
    let targets = panels
        .filter_map(|panel| panel["targets"].as_array())
        .flatten();
    let variables = array(&dashboard["templating"], "list").iter();
    targets
        .map(|target| target["expr"].as_str().unwrap().to_string())
        .chain(variables.filter_map(|variable| variable["query"]["query"].as_str().map(Into::into)))
        .collect()
}

/// Returns the names in a text that begin with `vllm:`.
fn names(text: &str) -> impl Iterator<Item = String> {
    text.split("vllm:").skip(1).map(|rest| {
        let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
        let end = rest.find(|character| !is_part(character));
        format!("vllm:{}", &rest[..end.unwrap_or(rest.len())])
    })
}

/// Returns the names of the labels that expressions select and divide by.
fn labels(expression: &str) -> BTreeSet<String> {
    let mut labels = BTreeSet::new();
    for part in expression.split('{').skip(1) {
        let matchers = part.split('}').next().unwrap();
        labels.extend(matchers.split(',').map(|matcher| {
            let name = matcher.split(['=', '!', '~']).next().unwrap();
            name.trim().to_string()
        }));
    }
    for part in expression.split(" by (").skip(1) {
        let names = part.split(')').next().unwrap();
        labels.extend(names.split(',').map(|name| name.trim().to_string()));
    }
    labels
}

#[test]
fn every_metric_of_the_dashboard_is_served() {
    let server = TestServer::start();
    let body = json!({ "model": "alias", "prompt": "Hello", "max_tokens": 7 });
    ask(server.address, "/v1/completions", &body);
    let metrics = get(server.address, "/metrics");
    let series: BTreeSet<String> = metrics
        .text()
        .lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(|line| names(line).take(1).collect::<Vec<_>>())
        .collect();
    let expressions = expressions(&dashboard());
    let used: BTreeSet<_> = expressions.iter().flat_map(|text| names(text)).collect();
    assert!(used.len() > 25, "{used:?}");
    let unknown: Vec<_> = used.difference(&series).collect();
    assert!(unknown.is_empty(), "{unknown:?} are not among {series:?}");
    // Prometheus adds `instance` to the labels of the server.
    let known = ["model_name", "instance", "finished_reason", "le"];
    for expression in &expressions {
        for label in labels(expression) {
            assert!(known.contains(&label.as_str()), "{label} in {expression}");
            let served = metrics.text().contains(&format!("{label}=\""));
            assert!(served || label == "instance", "{label} is not served");
        }
    }
    // All metrics are shown.
    let shown = |name: &String| {
        let name = name.trim_end_matches("_bucket").trim_end_matches("_sum");
        let name = name.trim_end_matches("_count");
        used.iter().any(|used| used.starts_with(name))
    };
    let hidden: Vec<_> = series.iter().filter(|name| !shown(name)).collect();
    assert!(hidden.is_empty(), "{hidden:?} have no panel");
}

#[test]
fn panels_have_places_and_targets() {
    let dashboard = dashboard();
    assert_eq!(dashboard["uid"], "burn-marlin");
    assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 36);
    let panels = array(&dashboard, "panels");
    let ids: BTreeSet<_> = panels
        .iter()
        .map(|panel| panel["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids.len(), panels.len(), "an id twice");
    let mut taken = BTreeSet::new();
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        let place = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        let (x, y, width, height) = (place("x"), place("y"), place("w"), place("h"));
        assert!(x + width <= 24, "{title} is beside the grid");
        for cell in (x..x + width).flat_map(|x| (y..y + height).map(move |y| (x, y))) {
            assert!(
                taken.insert(cell),
                "{title} covers another panel at {cell:?}"
            );
        }
        if panel["type"] == "row" {
            continue;
        }
        assert!(
            panel["description"]
                .as_str()
                .is_some_and(|text| !text.is_empty()),
            "{title}"
        );
        let targets = array(panel, "targets");
        let references: BTreeSet<_> = targets
            .iter()
            .map(|target| target["refId"].as_str().unwrap())
            .collect();
        assert!(
            !targets.is_empty() && references.len() == targets.len(),
            "{title}"
        );
        for target in targets {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
            let expression = target["expr"].as_str().unwrap();
            let count = |character| expression.matches(character).count();
            assert_eq!(count('('), count(')'), "{expression}");
            assert_eq!(count('{'), count('}'), "{expression}");
        }
    }
    let variables = array(&dashboard["templating"], "list").iter();
    let variables: Vec<_> = variables
        .map(|variable| variable["name"].as_str().unwrap())
        .collect();
    assert_eq!(variables, ["datasource", "model", "instance"]);
}
