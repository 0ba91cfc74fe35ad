//! TLS through rustls.

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A certificate or a key that TLS cannot use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file that is not PEM, or that has no certificate or key.
    #[error("{} has no {what} in PEM form", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What the file should have.
        what: &'static str,
        /// The cause.
        source: PemError,
    },
    /// A certificate and a key that do not belong together, or of an unknown kind.
    #[error("the certificate {} cannot be used with the key {}", certificate.display(), key.display())]
    Pair {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
}

/// Reads a chain of certificates and its key, in PEM form, for
/// [`ServeOptions::tls`](crate::ServeOptions::tls).
///
/// # Errors
/// If a file cannot be read, or the key does not belong to the certificate.
pub fn tls_config(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let pem = |path: &Path, what| {
        let path = path.to_path_buf();
        move |source| TlsError::Pem { path, what, source }
    };
    let chain: Vec<_> = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect)
        .and_then(|chain: Vec<_>| match chain.is_empty() {
            true => Err(PemError::NoItemsFound),
            false => Ok(chain),
        })
        .map_err(pem(certificate, "certificate"))?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(pem(key, "private key"))?;
    let pair = |source| TlsError::Pair {
        certificate: certificate.into(),
        key: key.into(),
        source,
    };
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(pair)?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
