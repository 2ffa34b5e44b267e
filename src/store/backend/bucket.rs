//! A bucket of S3, Google Cloud Storage or Azure, or one in memory, through object_store.
//!
//! Every call blocks its caller, like the calls of a file system, and runs on the threads of a
//! separate runtime, because the coordinator's journal thread and the recorder's thread have no
//! async runtime.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::memory::InMemory;
use object_store::path::Path as Key;
use object_store::{
    BackoffConfig, ClientOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig,
    WriteMultipart,
};
use tokio::runtime::{Builder, Runtime};
use url::Url;

use super::super::durable;
use super::super::pieces::Moved;
use super::{Listing, ReadAt, absent};

/// URLs that name a bucket.
pub(super) const SCHEMES: [&str; 4] = ["s3", "gs", "az", "memory"];

/// A larger file is uploaded in parts. A conditional put fails if the object exists, but an upload
/// in parts does not: those files rely on names that only one process of one attempt uses.
const WHOLE_BYTES: u64 = PART_BYTES as u64;

/// Bytes of one part: S3 allows 10,000 parts, so that a file has at most 320 GB. One request moves
/// one part, which must succeed within [`RETRY`].
const PART_BYTES: usize = 32 << 20;

/// Parts that are uploaded at a time, which are in memory.
const PARTS: usize = 4;

/// Objects that are read at a time.
const READS: usize = 32;

/// Time limit of one request with all its retries: shorter than the coordinator's own deadline for
/// a request.
const RETRY: Duration = Duration::from_secs(20);
const CONNECT: Duration = Duration::from_secs(5);

/// A whole bucket; the names of a store's objects begin with the store's path in it.
#[derive(Clone)]
pub struct Bucket {
    store: Arc<dyn ObjectStore>,
    /// `s3://bucket`, with which every place in it begins.
    root: String,
}

/// Why a bucket cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConnectError {
    #[error("{place} is not the URL of a bucket: give one like s3://bucket/prefix")]
    Url { place: String },
    #[error(
        "the bucket of {place} cannot be reached: {detail}; check the credentials and the region in the environment (AWS_…, GOOGLE_…, AZURE_…)"
    )]
    Client { place: String, detail: String },
    #[error("the threads that talk to {place} cannot be started")]
    Threads { place: String, source: io::Error },
}

impl fmt::Debug for Bucket {
    // The client's own `Debug` output is a page long and contains its credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bucket").field(&self.root).finish()
    }
}

impl Bucket {
    /// The bucket at the beginning of a URL. Makes no request yet.
    pub fn connect(place: &Path) -> Result<Bucket, ConnectError> {
        let (scheme, root) = root(place)?;
        let text = || place.display().to_string();
        runtime().map_err(|source| ConnectError::Threads { place: text(), source })?;
        let client = |error: object_store::Error| unreachable(place, &error);
        let store: Arc<dyn ObjectStore> = match scheme.as_str() {
            "memory" => in_memory(&root),
            "gs" => Arc::new(
                GoogleCloudStorageBuilder::from_env()
                    .with_url(&root)
                    .with_retry(retry())
                    .with_client_options(options())
                    .build()
                    .map_err(client)?,
            ),
            "az" => Arc::new(
                MicrosoftAzureBuilder::from_env()
                    .with_url(&root)
                    .with_retry(retry())
                    .with_client_options(options())
                    .build()
                    .map_err(client)?,
            ),
            _ => {
                return Bucket::s3(
                    AmazonS3Builder::from_env().with_client_options(options()),
                    place,
                );
            }
        };
        Ok(Bucket { store, root })
    }

    /// The bucket of S3, or of a server that speaks its protocol.
    pub(super) fn s3(builder: AmazonS3Builder, place: &Path) -> Result<Bucket, ConnectError> {
        let (_, root) = root(place)?;
        // The client needs the process's TLS provider, which `runtime` installs.
        runtime().map_err(|source| ConnectError::Threads {
            place: place.display().to_string(),
            source,
        })?;
        let built = builder.with_url(&root).with_retry(retry()).build();
        let store = Arc::new(built.map_err(|error| unreachable(place, &error))?);
        Ok(Bucket { store, root })
    }

    /// The object's name: the place without the bucket.
    fn key(&self, place: &Path) -> io::Result<Key> {
        let foreign = || {
            let detail = format!("{} is not in {}", place.display(), self.root);
            io::Error::new(io::ErrorKind::InvalidInput, detail)
        };
        let text = place.to_str().ok_or_else(foreign)?;
        let rest = text.strip_prefix(&self.root).ok_or_else(foreign)?;
        Key::parse(rest).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
    }

    pub(super) fn create(&self, target: &Path, bytes: &[u8]) -> io::Result<bool> {
        self.put_new(self.key(target)?, Bytes::copy_from_slice(bytes))
    }

    /// Puts an object if the name is free. False if it exists, which may be this call's own: the
    /// client retries after a lost response.
    fn put_new(&self, key: Key, bytes: Bytes) -> io::Result<bool> {
        let store = self.store.clone();
        wait(async move {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            match store.put_opts(&key, bytes.into(), options).await {
                Ok(_) => Ok(true),
                Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        })
    }

    pub(super) fn read(&self, target: &Path) -> io::Result<Vec<u8>> {
        let (store, key) = (self.store.clone(), self.key(target)?);
        wait(async move { Ok(store.get(&key).await?.bytes().await?.into()) })
    }

    pub(super) fn read_all(&self, targets: &[PathBuf]) -> io::Result<Vec<Vec<u8>>> {
        let keys: io::Result<Vec<Key>> = targets.iter().map(|target| self.key(target)).collect();
        let (store, keys) = (self.store.clone(), keys?);
        wait(async move {
            let reads = keys.into_iter().map(|key| {
                let store = store.clone();
                async move { Ok(store.get(&key).await?.bytes().await?.into()) }
            });
            futures::stream::iter(reads).buffered(READS).try_collect().await
        })
    }

    pub(super) fn length(&self, target: &Path) -> io::Result<u64> {
        let (store, key) = (self.store.clone(), self.key(target)?);
        wait(async move { Ok(store.head(&key).await?.size) })
    }

    pub(super) fn open(&self, target: &Path) -> io::Result<Object> {
        Ok(Object { bucket: self.clone(), key: self.key(target)?, length: self.length(target)? })
    }

    pub(super) fn list(&self, directory: &Path) -> io::Result<Listing> {
        let (store, key) = (self.store.clone(), self.key(directory)?);
        wait(async move {
            let listed = store.list_with_delimiter(Some(&key)).await?;
            let name = |key: &Key| key.filename().map(str::to_string);
            Ok(Listing {
                directories: listed.common_prefixes.iter().filter_map(name).collect(),
                files: listed.objects.iter().filter_map(|object| name(&object.location)).collect(),
            })
        })
    }

    /// All objects below a place, with their sizes in bytes.
    pub fn walk(&self, directory: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
        let (store, key) = (self.store.clone(), self.key(directory)?);
        let root = PathBuf::from(&self.root);
        wait(async move {
            let objects: Vec<_> = store.list(Some(&key)).try_collect().await?;
            let place = |key: &Key| root.join(key.as_ref());
            Ok(objects.iter().map(|object| (place(&object.location), object.size)).collect())
        })
    }

    /// Uploads a file of this host; false if an object of that name existed.
    pub(super) fn send(&self, file: &Path, target: &Path, moved: &Moved) -> io::Result<bool> {
        let key = self.key(target)?;
        if std::fs::metadata(file)?.len() <= WHOLE_BYTES {
            return self.put_new(key, std::fs::read(file)?.into());
        }
        if self.length(target).map(|_| true).or_else(absent(false))? {
            return Ok(false);
        }
        self.send_parts(file, key, moved.clone())?;
        Ok(true)
    }

    fn send_parts(&self, file: &Path, key: Key, moved: Moved) -> io::Result<()> {
        let (store, path) = (self.store.clone(), file.to_path_buf());
        wait_io(async move {
            let upload = store.put_multipart(&key).await.map_err(as_io_error)?;
            let mut parts = WriteMultipart::new_with_chunk_size(upload, PART_BYTES);
            match feed(&mut parts, &path, &moved).await {
                Ok(()) => parts.finish().await.map_err(as_io_error).map(drop),
                Err(error) => {
                    // The provider charges for uploaded parts until the upload is aborted.
                    let _ = parts.abort().await;
                    Err(error)
                }
            }
        })
    }

    /// Downloads an object to a file of this host.
    pub fn fetch(&self, source: &Path, length: u64, target: &Path) -> io::Result<()> {
        let (store, key) = (self.store.clone(), self.key(source)?);
        let target = target.to_path_buf();
        wait_io(async move {
            let mut file = durable::create_private(&target)?;
            let starts = (0..length).step_by(PART_BYTES);
            let ranges = starts.map(|start| start..length.min(start + PART_BYTES as u64));
            let reads = ranges.map(|range| {
                let (store, key) = (store.clone(), key.clone());
                async move { store.get_range(&key, range).await }
            });
            let mut parts = futures::stream::iter(reads).buffered(PARTS);
            while let Some(part) = parts.try_next().await.map_err(as_io_error)? {
                io::Write::write_all(&mut file, &part)?;
            }
            Ok(())
        })
    }

    /// Writes an object, also over an existing one: for objects that grow, such as scalars.
    pub fn replace(&self, target: &Path, bytes: Vec<u8>) -> io::Result<()> {
        let (store, key) = (self.store.clone(), self.key(target)?);
        wait(async move { store.put(&key, bytes.into()).await.map(drop) })
    }

    pub(super) fn prove_writable(&self, probe: &Path) -> io::Result<()> {
        // If a bucket ignored the condition of a put, a second coordinator could overwrite the
        // first one's journal.
        if !self.create(probe, b"backtape")? {
            return Err(io::Error::other("a new name is said to be taken"));
        }
        let twice = self.create(probe, b"again");
        let (store, key) = (self.store.clone(), self.key(probe)?);
        wait(async move { store.delete(&key).await })?;
        match twice? {
            false => Ok(()),
            true => Err(io::Error::other(
                "the bucket overwrites where it was told to create only (If-None-Match): dumps \
                 would not be safe in it",
            )),
        }
    }
}

/// An object of which ranges are read.
pub(super) struct Object {
    bucket: Bucket,
    key: Key,
    length: u64,
}

impl ReadAt for Object {
    fn length(&self) -> io::Result<u64> {
        Ok(self.length)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset + buffer.len() as u64;
        if end > self.length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (store, key) = (self.bucket.store.clone(), self.key.clone());
        let bytes = wait(async move { store.get_range(&key, offset..end).await })?;
        if bytes.len() != buffer.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        buffer.copy_from_slice(&bytes);
        Ok(())
    }
}

async fn feed(parts: &mut WriteMultipart, path: &Path, moved: &Moved) -> io::Result<()> {
    let mut file = File::open(path)?;
    loop {
        let mut piece = vec![0; PART_BYTES];
        let mut filled = 0;
        while filled < piece.len() {
            match io::Read::read(&mut file, &mut piece[filled..])? {
                0 => break,
                n => filled += n,
            }
        }
        piece.truncate(filled);
        if piece.is_empty() {
            return Ok(());
        }
        parts.wait_for_capacity(PARTS).await.map_err(as_io_error)?;
        moved.fetch_add(piece.len() as u64, Ordering::Relaxed);
        parts.put(piece.into());
    }
}

/// The scheme of a bucket's URL, and the URL up to and including the bucket.
fn root(place: &Path) -> Result<(String, String), ConnectError> {
    let text = place.to_string_lossy();
    let refused = || ConnectError::Url { place: text.to_string() };
    let url: Url = text.parse().map_err(|_| refused())?;
    let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(refused)?;
    match SCHEMES.contains(&url.scheme()) {
        true => Ok((url.scheme().into(), format!("{}://{host}", url.scheme()))),
        false => Err(refused()),
    }
}

fn unreachable(place: &Path, error: &object_store::Error) -> ConnectError {
    ConnectError::Client { place: place.display().to_string(), detail: error.to_string() }
}

fn retry() -> RetryConfig {
    RetryConfig { max_retries: 5, retry_timeout: RETRY, backoff: BackoffConfig::default() }
}

fn options() -> ClientOptions {
    // These options replace the builder's own, into which it reads from the environment whether
    // plain HTTP (a test's server) is allowed: so it is read here again.
    let plain = std::env::var("AWS_ALLOW_HTTP").is_ok_and(|value| value == "true");
    ClientOptions::new().with_connect_timeout(CONNECT).with_timeout(RETRY).with_allow_http(plain)
}

/// The in-memory bucket of this name, the same one for all callers in this process.
fn in_memory(name: &str) -> Arc<dyn ObjectStore> {
    static BUCKETS: LazyLock<Mutex<HashMap<String, Arc<InMemory>>>> = LazyLock::new(Mutex::default);
    let mut buckets = BUCKETS.lock().unwrap_or_else(PoisonError::into_inner);
    buckets.entry(name.into()).or_default().clone()
}

/// The async runtime of all buckets of this process.
fn runtime() -> io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    // The client uses the process's TLS provider; if the program has already installed one, it
    // stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("backtape-bucket")
        .enable_all()
        .build()?;
    Ok(RUNTIME.get_or_init(|| runtime))
}

/// Runs a call on the buckets' runtime and waits for it; may be called from any thread, also one
/// that belongs to another async runtime.
fn wait_io<T: Send + 'static>(
    call: impl Future<Output = io::Result<T>> + Send + 'static,
) -> io::Result<T> {
    let (sender, answer) = std::sync::mpsc::sync_channel(1);
    runtime()?.spawn(async move {
        // Fails only if the waiting thread is gone.
        let _ = sender.send(call.await);
    });
    answer.recv().unwrap_or_else(|_| Err(io::Error::other("the call to the bucket panicked")))
}

fn wait<T: Send + 'static>(
    call: impl Future<Output = object_store::Result<T>> + Send + 'static,
) -> io::Result<T> {
    wait_io(async move { call.await.map_err(as_io_error) })
}

/// Translates an error to the one of a file system.
fn as_io_error(error: object_store::Error) -> io::Error {
    use object_store::Error;
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::AlreadyExists { .. } | Error::Precondition { .. } => io::ErrorKind::AlreadyExists,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            io::ErrorKind::PermissionDenied
        }
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}
