//! Connections: their number, their time-outs, TLS, and the shutdown.

use crate::options::ServeOptions;
use crate::router::router;
use crate::state::ApiState;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

/// The time after which the system asks a silent peer whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);
/// The time until the next try after the system refused to accept a connection, as it does while
/// the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The time that answers have to end after the engine has ended them.
const LAST_EVENTS: Duration = Duration::from_millis(500);

/// Serves the [router](crate::router) on a listener until `shutdown` completes.
///
/// From then on no connection is accepted and new requests are refused with 503. Requests in
/// progress may take until the [`drain_timeout`](ServeOptions::drain_timeout), then they are
/// cancelled. The engine is shut down in the same time.
///
/// Connections speak HTTP/1.1.
///
/// # Errors
/// If the listener has no address.
pub async fn serve(
    listener: TcpListener,
    state: ApiState,
    options: ServeOptions,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let address = listener.local_addr()?;
    tracing::info!(%address, tls = options.tls.is_some(), "listening");
    // The vocabulary takes up to a second, which the first request with a grammar would wait for.
    let grammars = state.grammars().clone();
    if state.engine().capabilities().masks {
        tokio::task::spawn_blocking(move || match grammars.prepare() {
            Ok(()) => {}
            Err(error) => tracing::warn!(%error, "there is no structured output"),
        });
    }
    let server = Arc::new(Server {
        service: router(state.clone()),
        http: http(&options),
        tls: options.tls.clone().map(TlsAcceptor::from),
        options,
    });
    let permits = Arc::new(Semaphore::new(server.options.max_connections));
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    tokio::pin!(shutdown);
    loop {
        let accept = async {
            // Never closed.
            let permit = permits.clone().acquire_owned().await.ok();
            (permit, listener.accept().await)
        };
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            Some(_) = connections.join_next() => {}
            (permit, accepted) = accept => match accepted {
                Ok((stream, _)) => {
                    let (server, watcher) = (server.clone(), graceful.watcher());
                    connections.spawn(async move {
                        let _permit = permit;
                        server.connection(stream, watcher).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    let deadline = server.options.drain_timeout;
    tracing::info!(
        deadline_s = deadline.as_secs_f64(),
        connections = connections.len(),
        "draining"
    );
    let engine = state.shut_down(deadline);
    let drained = async { tokio::join!(engine, graceful.shutdown()) };
    // The engine ends its requests at the deadline, and their last events are sent after it.
    let deadline = deadline + LAST_EVENTS;
    if tokio::time::timeout(deadline, drained).await.is_err() {
        tracing::warn!(
            connections = connections.len(),
            "closing connections at the deadline"
        );
    }
    connections.shutdown().await;
    Ok(())
}

/// What all connections share.
struct Server {
    service: Router,
    http: http1::Builder,
    tls: Option<TlsAcceptor>,
    options: ServeOptions,
}

impl Server {
    /// Serves a connection until it ends.
    async fn connection(&self, stream: TcpStream, watcher: Watcher) {
        if let Err(error) = prepare(&stream) {
            tracing::debug!(%error, "the options of a socket were not set");
        }
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.options.write_timeout));
        let stream = Box::pin(stream);
        let Some(tls) = &self.tls else {
            return self.http(TokioIo::new(stream), watcher).await;
        };
        match tokio::time::timeout(self.options.header_timeout, tls.accept(stream)).await {
            Ok(Ok(stream)) => self.http(TokioIo::new(stream), watcher).await,
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_) => tracing::debug!("a TLS handshake took too long"),
        }
    }

    async fn http<I>(&self, io: I, watcher: Watcher)
    where
        I: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let service = TowerToHyperService::new(self.service.clone());
        let connection = self.http.serve_connection(io, service);
        if let Err(error) = watcher.watch(connection).await {
            tracing::debug!(%error, "a connection ended");
        }
    }
}

/// Returns the options of HTTP.
fn http(options: &ServeOptions) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(options.header_timeout);
    http
}

/// Tokens are sent as they come, and a peer that is gone is noticed.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE / 4);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}
