//! Creates a private certificate authority, which signs the certificates of a coordinator and of
//! its ranks. Its key is discarded, so that nobody can sign further ones later.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

use super::{CA, CERTIFICATE, CredentialsError, KEY, TOKEN, Token};
use crate::identity::Name;
use crate::store::durable;

/// How long before its creation a certificate becomes valid, because the clocks of a cluster
/// differ.
const SKEW: Duration = Duration::hours(1);

/// The folders that were created.
#[derive(Clone, Debug)]
pub struct Issued {
    /// For the coordinator.
    pub coordinator: PathBuf,
    /// For the ranks: one for all runs, or one for each named run.
    pub ranks: Vec<PathBuf>,
}

/// Makes the credentials of a coordinator that ranks reach by these host names or addresses, and of
/// its ranks: `OUT/coordinator` and `OUT/rank`, or `OUT/rank-RUN` for every run.
pub fn issue(
    out: &Path,
    hosts: &[String],
    runs: &[Name],
    days: u32,
) -> Result<Issued, CredentialsError> {
    let coordinator = out.join("coordinator");
    let ranks: Vec<PathBuf> = match runs.is_empty() {
        true => vec![out.join("rank")],
        false => runs.iter().map(|run| out.join(format!("rank-{run}"))).collect(),
    };
    for folder in std::iter::once(&coordinator).chain(&ranks) {
        if folder.exists() {
            return Err(CredentialsError::Exists { path: folder.clone() });
        }
    }
    let authority = Authority::new(days).map_err(certificate)?;
    let server = authority.sign(hosts, ExtendedKeyUsagePurpose::ServerAuth).map_err(certificate)?;
    let client = authority.sign(&[], ExtendedKeyUsagePurpose::ClientAuth).map_err(certificate)?;
    let mut lines = String::new();
    for (index, folder) in ranks.iter().enumerate() {
        let drawn = Token::draw();
        let token = drawn.map_err(|source| CredentialsError::Write { path: out.into(), source })?;
        let line = match runs.get(index) {
            Some(run) => format!("{run} {}\n", token.as_str()),
            None => format!("{}\n", token.as_str()),
        };
        lines += &line;
        write_folder(folder, &authority, &client, &line)?;
    }
    write_folder(&coordinator, &authority, &server, &lines)?;
    Ok(Issued { coordinator, ranks })
}

fn certificate(error: rcgen::Error) -> CredentialsError {
    CredentialsError::Certificate(error.to_string())
}

/// A certificate and its key, in PEM.
struct Signed(String, String);

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
    days: u32,
}

impl Authority {
    fn new(days: u32) -> Result<Authority, rcgen::Error> {
        let mut params = params(&[], "backtape private authority", days)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?.pem();
        Ok(Authority { issuer: Issuer::new(params, key), certificate, days })
    }

    /// Signs a certificate for either the server or the client side, so that a rank's cannot be
    /// used as a coordinator's.
    fn sign(
        &self,
        hosts: &[String],
        usage: ExtendedKeyUsagePurpose,
    ) -> Result<Signed, rcgen::Error> {
        let mut params = params(hosts, "backtape", self.days)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Signed(certificate.pem(), key.serialize_pem()))
    }
}

fn params(hosts: &[String], name: &str, days: u32) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(hosts.to_vec())?;
    params.distinguished_name.push(DnType::CommonName, name);
    let now = OffsetDateTime::now_utc();
    params.not_before = now - SKEW;
    params.not_after = now + Duration::days(days.into());
    Ok(params)
}

fn write_folder(
    folder: &Path,
    authority: &Authority,
    Signed(certificate, key): &Signed,
    tokens: &str,
) -> Result<(), CredentialsError> {
    let files = [
        (CA, authority.certificate.as_str()),
        (CERTIFICATE, certificate),
        (KEY, key),
        (TOKEN, tokens),
    ];
    let write = || -> io::Result<()> {
        durable::create_directory(folder)?;
        for (name, text) in files {
            let mut file = durable::create_private(&folder.join(name))?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
        }
        durable::sync_parent(&folder.join(TOKEN))
    };
    write().map_err(|source| CredentialsError::Write { path: folder.into(), source })
}
