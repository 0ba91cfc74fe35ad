//! Changes valid requests, so that they are not valid in a few places.

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde_json::Value;

/// Values that fields do not expect.
const VALUES: [&str; 22] = [
    "null",
    "true",
    "-1",
    "0",
    "1e9",
    "1e999",
    "18446744073709551616",
    "-9223372036854775808",
    "0.5",
    "\"\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "[]",
    "{}",
    "[[]]",
    "[null]",
    "{\"\":{}}",
    "{\"type\":\"function\"}",
    "[{\"role\":\"user\"}]",
    "[{\"type\":\"text\",\"text\":\"a\"}]",
    "{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"a\",\"schema\":{\"$ref\":\"#\"}}}",
    "\"auto\"",
];

/// Changes the structure, the values and the bytes of a body in a few places. `others` are bodies
/// whose fields and values it may take.
pub fn mutate(body: &Value, others: &[(&str, Value)], random: &mut StdRng) -> Vec<u8> {
    let mut root = body.clone();
    // The texts of values that are marked in `root`, which need not be JSON.
    let mut texts = Vec::new();
    for _ in 0..random.random_range(1..4) {
        change(&mut root, others, &mut texts, random);
    }
    let mut body = root.to_string();
    for (index, text) in texts.iter().enumerate() {
        body = body.replace(&Value::String(mark(index)).to_string(), text);
    }
    let mut body = body.into_bytes();
    // Most bodies stay JSON, so that they get past the parser.
    if random.random_bool(0.2) {
        for _ in 0..random.random_range(1..4) {
            change_bytes(&mut body, random);
        }
    }
    body
}

/// The text that stands for the text with this index.
fn mark(index: usize) -> String {
    format!("\u{1f}{index}")
}

/// Changes a value, or the object or list that it is in.
fn change(
    root: &mut Value,
    others: &[(&str, Value)],
    texts: &mut Vec<String>,
    random: &mut StdRng,
) {
    let path = paths(root).choose(random).unwrap().clone();
    let other = &others.choose(random).unwrap().1;
    let other_path = paths(other).choose(random).unwrap().clone();
    let other = other.pointer(&other_path).unwrap().clone();
    let mut text = |text: String| {
        texts.push(text);
        mark(texts.len() - 1)
    };
    let value = root.pointer_mut(&path).unwrap();
    match random.random_range(0..8) {
        0 | 1 => {
            *value = Value::String(text((*VALUES.choose(random).unwrap()).into()));
            return;
        }
        2 => {
            *value = other;
            return;
        }
        3 => {
            *value = Value::String(text(long(random)));
            return;
        }
        4 => {
            let depth = random.random_range(1..3000);
            let (open, close) = *[("[", "]"), ("{\"a\":", "}")].choose(random).unwrap();
            let nested = format!("{}{value}{}", open.repeat(depth), close.repeat(depth));
            *value = Value::String(text(nested));
            return;
        }
        _ => {}
    }
    let Some((parent, name)) = path.rsplit_once('/') else {
        return;
    };
    match root.pointer_mut(parent).unwrap() {
        Value::Object(fields) => {
            let taken = fields.get(name).cloned();
            match random.random_range(0..3) {
                0 => _ = fields.remove(name),
                // A second field of the same name.
                1 => _ = fields.insert(text(Value::String(name.into()).to_string()), other),
                _ => {
                    fields.remove(name);
                    let name = other_path.rsplit('/').next().unwrap_or_default();
                    fields.insert(name.into(), taken.unwrap_or_default());
                }
            }
        }
        Value::Array(items) => {
            let index: usize = name.parse().unwrap();
            if random.random_bool(0.5) {
                items.remove(index);
            } else {
                let item = items[index].clone();
                // The body stays below the server's limit.
                let most = (1 << 20) / item.to_string().len();
                let count = *[1, 2, 20, 2000].choose(random).unwrap();
                items.extend(std::iter::repeat_n(item, count.min(most)));
            }
        }
        _ => unreachable!("{parent} has {name}"),
    }
}

/// Returns the text of a long value.
fn long(random: &mut StdRng) -> String {
    let length = random.random_range(1..20_000);
    match random.random_range(0..3) {
        0 => "9".repeat(length),
        1 => format!("0.{}", "3".repeat(length)),
        _ => {
            let part = ["a", "\\u0000", "é", "[", "{% for"].choose(random).unwrap();
            format!("\"{}\"", part.repeat(length))
        }
    }
}

/// Changes a byte or a few.
fn change_bytes(body: &mut Vec<u8>, random: &mut StdRng) {
    let at = random.random_range(0..=body.len());
    match random.random_range(0..6) {
        0 => body.truncate(at),
        1 => body.insert(at, random.random()),
        2 if at < body.len() => body[at] = random.random(),
        3 if at < body.len() => _ = body.remove(at),
        // UTF-8 that ends too early, and a surrogate.
        4 => {
            let broken = [&b"\xc3"[..], b"\xed\xa0\x80", b"\xff"];
            body.splice(at..at, broken.choose(random).unwrap().to_vec());
        }
        _ => {
            let depth = random.random_range(1..3000);
            let open = *[b"[".as_slice(), b"{\"a\":"].choose(random).unwrap();
            body.splice(at..at, open.repeat(depth));
        }
    }
}

/// Returns the pointers to all values.
fn paths(value: &Value) -> Vec<String> {
    let mut paths = Vec::new();
    collect_paths(value, &mut String::new(), &mut paths);
    paths
}

fn collect_paths(value: &Value, path: &mut String, paths: &mut Vec<String>) {
    let length = path.len();
    let mut visit = |name: &str, value: &Value| {
        *path += &format!("/{}", name.replace('~', "~0").replace('/', "~1"));
        collect_paths(value, path, paths);
        path.truncate(length);
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| visit(name, value)),
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(index, value)| visit(&index.to_string(), value));
        }
        _ => {}
    }
    paths.push(path.clone());
}
