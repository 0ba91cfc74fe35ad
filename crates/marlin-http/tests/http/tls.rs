//! TLS.

use crate::support::client::{PATIENCE, bytes, connect, read};
use crate::support::server::{TestOptions, TestServer};
use marlin_http::{ServeOptions, TlsError, tls_config};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn answers_are_encrypted_and_other_connections_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    let [certificate_path, key_path] =
        ["certificate.pem", "key.pem"].map(|name| dir.path().join(name));
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["localhost".to_string()]).unwrap();
    std::fs::write(&certificate_path, cert.pem()).unwrap();
    std::fs::write(&key_path, signing_key.serialize_pem()).unwrap();
    let mut serve = ServeOptions::default();
    serve.header_timeout = Duration::from_millis(300);
    serve.tls = Some(tls_config(&certificate_path, &key_path).unwrap());
    let server = TestServer::with(TestOptions {
        serve,
        ..TestOptions::default()
    });
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "localhost".try_into().unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(connection, connect(server.address));
    stream
        .write_all(&bytes("GET", "/health", &[], &[]))
        .unwrap();
    assert_eq!(read(&mut stream).unwrap().status, 200);
    // Neither plain HTTP nor a handshake that does not come.
    let start = Instant::now();
    for part in [b"GET /health HTTP/1.1\r\n\r\n".as_slice(), b""] {
        let mut plain = connect(server.address);
        plain.write_all(part).unwrap();
        let mut rest = Vec::new();
        _ = plain.read_to_end(&mut rest);
        assert!(!rest.starts_with(b"HTTP"), "{rest:?}");
    }
    assert!(start.elapsed() < PATIENCE / 4);
    let error = tls_config(&key_path, &key_path).unwrap_err();
    assert!(
        matches!(
            error,
            TlsError::Pem {
                what: "certificate",
                ..
            }
        ),
        "{error}"
    );
    let error = tls_config(&certificate_path, &certificate_path).unwrap_err();
    assert!(
        matches!(
            error,
            TlsError::Pem {
                what: "private key",
                ..
            }
        ),
        "{error}"
    );
}
