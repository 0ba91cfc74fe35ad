//! Connections to a server.

use crate::error::{Failure, LoadError};
use crate::options::LoadOptions;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{TcpStream, lookup_host};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// The most bytes of an answer that is not a stream.
const ANSWER_LIMIT: usize = 16 << 20;
/// The most characters of an answer in an error.
const MESSAGE_LIMIT: usize = 300;

/// A client of one server. Connections are used again.
pub(crate) struct Client {
    addresses: Vec<SocketAddr>,
    host_header: HeaderValue,
    /// The path of the base URL, without a slash at its end.
    base_path: String,
    authorization: Option<HeaderValue>,
    connect_timeout: Duration,
    idle: Mutex<Vec<Connection>>,
}

/// A connection with at most one request at a time. It is closed when it is dropped.
pub(crate) struct Connection {
    sender: SendRequest<Full<Bytes>>,
    driver: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Client {
    /// Returns the client of the server of a load test, whose host it resolves once.
    pub async fn new(options: &LoadOptions) -> Result<Self, LoadError> {
        let url = &options.base_url;
        let refuse = |reason: String| LoadError::Url {
            url: url.clone(),
            reason,
        };
        let uri: Uri = url.parse().map_err(|_| refuse("it is no URL".into()))?;
        if uri.scheme_str() != Some("http") {
            return Err(refuse("only http:// is supported".into()));
        }
        let authority = uri
            .authority()
            .ok_or_else(|| refuse("it has no host".into()))?;
        let host_header = HeaderValue::from_str(authority.as_str())
            .map_err(|_| refuse("its host is no header".into()))?;
        let authorization = options.api_key.as_deref().map(|key| {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))?;
            value.set_sensitive(true);
            Ok::<_, hyper::header::InvalidHeaderValue>(value)
        });
        let authorization = authorization.transpose().map_err(|_| LoadError::Option {
            option: "api_key",
            reason: "it has characters that a header cannot have".into(),
        })?;
        // Of `[::1]`, the address is without brackets.
        let host = authority.host().trim_matches(['[', ']']);
        let found = lookup_host((host, authority.port_u16().unwrap_or(80)));
        let found = timeout(options.connect_timeout, found).await;
        let found = found.map_err(|_| refuse("its host was not found in time".into()))?;
        let found = found.map_err(|error| refuse(format!("its host was not found: {error}")))?;
        let addresses: Vec<SocketAddr> = found.collect();
        let is_remote = |address: &&SocketAddr| !address.ip().to_canonical().is_loopback();
        if !options.allow_remote
            && let Some(remote) = addresses.iter().find(is_remote)
        {
            return Err(LoadError::Remote {
                host: host.to_string(),
                address: remote.ip(),
            });
        }
        Ok(Self {
            addresses,
            host_header,
            base_path: uri.path().trim_end_matches('/').to_string(),
            authorization,
            connect_timeout: options.connect_timeout,
            idle: Mutex::default(),
        })
    }

    /// Sends a request, and returns the answer once its head is there.
    pub async fn send(
        &self,
        method: &Method,
        path: &str,
        id: &str,
        body: Bytes,
    ) -> Result<(Connection, Response<Incoming>), Failure> {
        let idle = self.lock().pop();
        if let Some(mut connection) = idle
            && let Ok(answer) = self
                .send_on(&mut connection, method, path, id, &body)
                .await?
        {
            return Ok((connection, answer));
        }
        let mut connection = self.connect().await?;
        let answer = self
            .send_on(&mut connection, method, path, id, &body)
            .await?;
        let answer = answer.map_err(|error| Failure::Broken(error.to_string()))?;
        Ok((connection, answer))
    }

    /// Returns the error of the connection if the server has closed it, which it may do with an
    /// idle one at any time.
    async fn send_on(
        &self,
        connection: &mut Connection,
        method: &Method,
        path: &str,
        id: &str,
        body: &Bytes,
    ) -> Result<Result<Response<Incoming>, hyper::Error>, Failure> {
        let request = self.request(method, path, id, body.clone())?;
        match connection.sender.send_request(request).await {
            Err(error) if !(error.is_canceled() || error.is_incomplete_message()) => {
                Err(Failure::Broken(error.to_string()))
            }
            result => Ok(result),
        }
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        id: &str,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, Failure> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base_path))
            .header(HOST, &self.host_header)
            .header("x-request-id", id);
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if *method == Method::POST {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let request = request.body(Full::new(body));
        request.map_err(|error| Failure::Broken(error.to_string()))
    }

    async fn connect(&self) -> Result<Connection, Failure> {
        let socket = TcpStream::connect(self.addresses.as_slice());
        let socket = timeout(self.connect_timeout, socket).await;
        let socket = socket.map_err(|_| {
            Failure::Connect(format!("not established after {:?}", self.connect_timeout))
        })?;
        let connect = |error: &dyn std::error::Error| Failure::Connect(error.to_string());
        let socket = socket.map_err(|error| connect(&error))?;
        socket.set_nodelay(true).map_err(|error| connect(&error))?;
        let (sender, connection) = http1::handshake(TokioIo::new(socket))
            .await
            .map_err(|error| connect(&error))?;
        // The errors of a connection are those of its requests.
        let driver = tokio::spawn(async move { _ = connection.await });
        Ok(Connection { sender, driver })
    }

    /// Keeps a connection whose answer was read to its end for another request.
    pub fn give_back(&self, connection: Connection) {
        if !connection.sender.is_closed() {
            self.lock().push(connection);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, and returns the object of the answer.
    pub async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        limit: Duration,
    ) -> Result<T, Failure> {
        let answer = async {
            let (connection, answer) = self.send(&method, path, "setup", body).await?;
            let answer = check_status(answer).await?;
            let body = Limited::new(answer.into_body(), ANSWER_LIMIT)
                .collect()
                .await;
            let body = body
                .map_err(|error| Failure::Broken(error.to_string()))?
                .to_bytes();
            self.give_back(connection);
            serde_json::from_slice(&body).map_err(|error| Failure::Malformed(error.to_string()))
        };
        match timeout(limit, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(Failure::Timeout(limit)),
        }
    }
}

/// Returns an answer if its status is 200, otherwise a failure with the start of its body.
pub(crate) async fn check_status(
    answer: Response<Incoming>,
) -> Result<Response<Incoming>, Failure> {
    let status = answer.status();
    if status == StatusCode::OK {
        return Ok(answer);
    }
    // A body that is too long or broken has no start to show.
    let body = Limited::new(answer.into_body(), ANSWER_LIMIT)
        .collect()
        .await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let message = String::from_utf8_lossy(&body)
        .chars()
        .take(MESSAGE_LIMIT)
        .collect();
    Err(Failure::Status {
        status: status.as_u16(),
        message,
    })
}
