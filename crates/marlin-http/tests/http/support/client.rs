//! A client of HTTP/1.1 that shows every byte.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// The longest time that a test waits for a server.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A response, with its body as it is decoded.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    /// The names are in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        let header = self.headers.iter().find(|(own, _)| own == name);
        header.map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in {:?}", self.text()))
    }

    /// The data of the server-sent events, with their names.
    pub fn events(&self) -> Vec<(Option<String>, String)> {
        let text = self.text();
        assert!(text.is_empty() || text.ends_with("\n\n"), "{text:?}");
        let events = text.split_terminator("\n\n").map(|event| {
            let (mut name, mut data) = (None, String::new());
            for line in event.lines() {
                match line.split_once(": ") {
                    Some(("event", value)) => name = Some(value.to_string()),
                    Some(("data", value)) => data += value,
                    _ => panic!("a line of no event: {line:?}"),
                }
            }
            (name, data)
        });
        events.collect()
    }

    /// The objects of the events of OpenAI's API, of which the last must be `[DONE]`.
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(
            events.pop().map(|(_, data)| data).as_deref(),
            Some("[DONE]")
        );
        let chunks = events.iter();
        chunks
            .map(|(_, data)| serde_json::from_str(data).unwrap())
            .collect()
    }
}

/// Connects to a server.
pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Returns the bytes of a request.
pub fn bytes(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut request = format!("{method} {path} HTTP/1.1\r\nhost: test\r\n");
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    if method == "POST" {
        request += &format!("content-length: {}\r\n", body.len());
    }
    request += "\r\n";
    [request.as_bytes(), body].concat()
}

/// Reads a response.
pub fn read(stream: &mut impl Read) -> std::io::Result<Response> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    let Some(status) = status else {
        return Err(std::io::Error::other(format!("no status in {line:?}")));
    };
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.to_string()));
    }
    let find = |wanted: &str| headers.iter().find(|(name, _)| name == wanted);
    let length = find("content-length").and_then(|(_, value)| value.parse().ok());
    let mut body = Vec::new();
    if find("transfer-encoding").is_some() {
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let length = usize::from_str_radix(line.trim_end(), 16)
                .map_err(|_| std::io::Error::other(format!("no length in {line:?}")))?;
            let mut chunk = vec![0; length + 2];
            reader.read_exact(&mut chunk)?;
            if length == 0 {
                break;
            }
            body.extend_from_slice(&chunk[..length]);
        }
    } else if let Some(length) = length {
        body.resize(length, 0);
        reader.read_exact(&mut body)?;
    }
    Ok(Response {
        status,
        headers,
        body,
    })
}

/// Sends a request on a connection of its own.
pub fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Response {
    let mut stream = connect(address);
    stream
        .write_all(&bytes(method, path, headers, body))
        .unwrap();
    read(&mut stream).unwrap()
}

/// Sends `GET`.
pub fn get(address: SocketAddr, path: &str) -> Response {
    send(address, "GET", path, &[], &[])
}

/// Sends an object with `POST`.
pub fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    let headers = [("content-type", "application/json")];
    send(address, "POST", path, &headers, body.to_string().as_bytes())
}

/// Sends an object with `POST`, and returns the answer, which must be 200.
pub fn ask(address: SocketAddr, path: &str, body: &Value) -> Value {
    let response = post(address, path, body);
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()
}
