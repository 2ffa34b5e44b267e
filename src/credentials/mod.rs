//! How a coordinator and a rank authenticate to each other: certificates of a private authority for
//! mutual TLS, and a token of the run.
//!
//! A folder holds what one of the two needs, under fixed names:
//!
//! ```text
//! ca.pem      the authority that the other side's certificate must come from
//! cert.pem    this side's certificate
//! key.pem     its key; nobody else may read it
//! token       one line `TOKEN`, or lines `RUN TOKEN`; nobody else may read it
//! ```

mod issue;
mod token;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

pub use issue::{Issued, issue};
pub use token::{Token, TokenError, Tokens};

use crate::identity::Name;

/// Names in a folder of credentials.
const CA: &str = "ca.pem";
const CERTIFICATE: &str = "cert.pem";
const KEY: &str = "key.pem";
const TOKEN: &str = "token";

/// Why credentials cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CredentialsError {
    #[error("{path} cannot be read: {source}; `coordinator certs --out DIR` makes such a folder", path = .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} can be read by others on this machine: chmod 600 it, or make new credentials", path = .path.display())]
    Open { path: PathBuf },
    #[error("{path}: {source}", path = .path.display())]
    Token { path: PathBuf, source: TokenError },
    #[error("{path} has no token for run {run}: give the rank the folder that was made for it", path = .path.display())]
    NoToken { path: PathBuf, run: Name },
    #[error("{path} is there already: credentials are never replaced, choose another --out", path = .path.display())]
    Exists { path: PathBuf },
    #[error("{path} cannot be written: {source}", path = .path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("no certificate can be made: {0}")]
    Certificate(String),
}

/// One side's certificate and key, and the authority that signs the other side's, in PEM.
#[derive(Clone)]
pub struct Tls {
    /// The certificate of the authority.
    pub ca: Vec<u8>,
    /// This side's certificate.
    pub certificate: Vec<u8>,
    /// Its key.
    pub key: Vec<u8>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls") // never the key
    }
}

/// What a coordinator requires of its callers.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    /// If set, callers must use TLS with a certificate of this authority.
    pub tls: Option<Tls>,
    /// Callers must send the token of their run.
    pub tokens: Tokens,
}

impl Guard {
    /// Reads what a coordinator's folder of credentials requires.
    pub fn read(directory: &Path) -> Result<Guard, CredentialsError> {
        Ok(Guard { tls: Some(tls(directory)?), tokens: tokens(directory)? })
    }
}

/// How a caller authenticates to a coordinator.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// If set, calls use TLS, and the coordinator's certificate must be of this authority.
    pub tls: Option<Tls>,
    /// The token that calls carry.
    pub token: Option<Token>,
}

impl Access {
    /// Reads a rank's folder of credentials, for one run.
    pub fn read(directory: &Path, run: &Name) -> Result<Access, CredentialsError> {
        let token = tokens(directory)?.of(run).cloned();
        let path = directory.join(TOKEN);
        let token = token.ok_or(CredentialsError::NoToken { path, run: run.clone() })?;
        Ok(Access { tls: Some(tls(directory)?), token: Some(token) })
    }
}

fn tls(directory: &Path) -> Result<Tls, CredentialsError> {
    let read_file = |name| read(directory.join(name));
    Ok(Tls {
        ca: read_file(CA)?,
        certificate: read_file(CERTIFICATE)?,
        key: private(directory.join(KEY))?,
    })
}

fn tokens(directory: &Path) -> Result<Tokens, CredentialsError> {
    let path = directory.join(TOKEN);
    let text = String::from_utf8_lossy(&private(path.clone())?).into_owned();
    text.parse().map_err(|source| CredentialsError::Token { path, source })
}

fn read(path: PathBuf) -> Result<Vec<u8>, CredentialsError> {
    std::fs::read(&path).map_err(|source| CredentialsError::Read { path, source })
}

/// Reads a file; refuses one that users other than its owner can read.
fn private(path: PathBuf) -> Result<Vec<u8>, CredentialsError> {
    let bytes = read(path.clone())?;
    let mode = std::fs::metadata(&path).map(|metadata| metadata.permissions().mode());
    match mode {
        Ok(mode) if mode & 0o077 == 0 => Ok(bytes),
        Ok(_) => Err(CredentialsError::Open { path }),
        Err(source) => Err(CredentialsError::Read { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_issued_is_read_back_by_both_sides_and_never_replaced() {
        let out = tempfile::tempdir().unwrap();
        let (run, other) = (Name::new("fused").unwrap(), Name::new("plain").unwrap());
        let hosts = ["node-0".to_string(), "10.0.0.1".to_string()];
        let issued = issue(out.path(), &hosts, &[run.clone(), other.clone()], 30).unwrap();
        let guard = Guard::read(&issued.coordinator).unwrap();
        let [of_run, of_other] = &issued.ranks[..] else { panic!("{issued:?}") };
        let access = Access::read(of_run, &run).unwrap();
        assert!(guard.tokens.admit(&run, Some(access.token.as_ref().unwrap().as_str())));
        assert!(!guard.tokens.admit(&other, Some(access.token.as_ref().unwrap().as_str())));
        let refused = Access::read(of_other, &run).unwrap_err().to_string();
        assert!(refused.contains("no token for run fused"), "{refused}");
        let again = issue(out.path(), &hosts, &[], 30).unwrap_err().to_string();
        assert!(again.contains("never replaced"), "{again}");
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let out = tempfile::tempdir().unwrap();
        let issued = issue(out.path(), &["localhost".to_string()], &[], 30).unwrap();
        let key = issued.coordinator.join(KEY);
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o640)).unwrap();
        let refused = Guard::read(&issued.coordinator).unwrap_err().to_string();
        assert!(refused.contains("chmod 600"), "{refused}");
    }
}
