//! Reads a shard file through a memory map: its header is checked first, and the bytes of shards
//! are slices of the map.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::backend::ReadAt;
use super::header::{FileSelf, MAX_HEADER, METADATA_KEY};
use crate::FORMAT_VERSION;
use crate::hash::TrustHash;
use crate::shard::{RecordError, ShardRecord};

/// An open shard file.
pub struct ShardFile {
    path: PathBuf,
    map: Mmap,
    data: usize,
    about: FileSelf,
    offsets: Vec<(usize, usize)>,
}

/// Why a shard file cannot be trusted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ShardFileError {
    #[error("{path} cannot be read", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} is truncated: {found} bytes, {wanted} expected", path = path.display())]
    Truncated { path: PathBuf, found: u64, wanted: u64 },
    #[error("{path} has a header of {found} bytes: more than {MAX_HEADER} are not read", path = path.display())]
    HeaderTooLarge { path: PathBuf, found: u64 },
    #[error("{path} is not a safetensors file: {detail}", path = path.display())]
    Malformed { path: PathBuf, detail: String },
    #[error("{path} carries no shard records: another program wrote it", path = path.display())]
    Foreign { path: PathBuf },
    #[error("{path} has format version {found}, this backtape reads up to {FORMAT_VERSION}: install a newer one", path = path.display())]
    Newer { path: PathBuf, found: u64 },
    #[error("{path} contradicts itself: {detail}", path = path.display())]
    Contradiction { path: PathBuf, detail: String },
}

/// A shard file's header, read without a memory map: an error of the disk is returned, where a map
/// would kill the reading process with SIGBUS.
pub struct Description {
    /// Backtape's records in the header, checked against the safetensors entries and the file's
    /// length.
    pub about: FileSelf,
    /// blake3 of the header.
    pub header_hash: TrustHash,
    /// Length of the file in bytes, with the header.
    pub length: u64,
    /// The offsets in the file at which each shard starts and ends.
    pub spans: Vec<(u64, u64)>,
}

/// Reads and checks the header of an open file; `path` only names it.
pub fn describe(path: &Path, file: &dyn ReadAt) -> Result<Description, ShardFileError> {
    let read = |source| ShardFileError::Read { path: path.into(), source };
    let length = file.length().map_err(read)?;
    let truncated = |wanted| ShardFileError::Truncated { path: path.into(), found: length, wanted };
    if length < 8 {
        return Err(truncated(8));
    }
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0).map_err(read)?;
    let data = header_end(path, prefix)?;
    if length < data as u64 {
        return Err(truncated(data as u64));
    }
    let mut header = vec![0; data];
    file.read_exact_at(&mut header, 0).map_err(read)?;
    describe_header(path, &header, length)
}

/// The same, of a file's header alone and the file's length.
pub fn describe_header(
    path: &Path,
    header: &[u8],
    length: u64,
) -> Result<Description, ShardFileError> {
    let data = header.len();
    let wanted = data as u64;
    let after = length.checked_sub(wanted);
    let truncated = || ShardFileError::Truncated { path: path.into(), found: length, wanted };
    let (about, metadata) = read_header(path, header)?;
    let offsets = locate(path, header, (&about, &metadata), after.ok_or_else(truncated)? as usize)?;
    let spans = offsets.iter().map(|&(start, end)| ((data + start) as u64, (data + end) as u64));
    Ok(Description { header_hash: TrustHash::of(header), length, spans: spans.collect(), about })
}

impl ShardFile {
    /// Opens a file and checks its header against itself. The bytes of the
    /// shards are not hashed here: see [`ShardFile::bytes`].
    pub fn open(path: &Path) -> Result<ShardFile, ShardFileError> {
        let read = |source| ShardFileError::Read { path: path.into(), source };
        let file = File::open(path).map_err(read)?;
        // SAFETY: a shard file is written once under another name and never
        // changed under its own; a file that shrinks while mapped faults this
        // process, which holds nothing that could be lost.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        let (header, data) = split_header(path, &map)?;
        let (about, metadata) = read_header(path, header)?;
        let offsets = locate(path, header, (&about, &metadata), map.len() - data)?;
        Ok(ShardFile { path: path.into(), map, data, about, offsets })
    }

    /// The records in its header.
    pub fn about(&self) -> &FileSelf {
        &self.about
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.map.len() as u64
    }

    /// blake3 of the header, as the manifest holds it.
    pub fn header_hash(&self) -> TrustHash {
        TrustHash::of(&self.map[..self.data])
    }

    /// Its shards, in the order of their bytes.
    pub fn shards(&self) -> &[ShardRecord] {
        &self.about.shards
    }

    /// The bytes of the shard at this position of [`ShardFile::shards`].
    pub fn bytes(&self, index: usize) -> &[u8] {
        let (start, end) = self.offsets[index];
        &self.map[self.data + start..self.data + end]
    }
}

/// The offset of the data according to the length prefix, checked against [`MAX_HEADER`].
fn header_end(path: &Path, prefix: [u8; 8]) -> Result<usize, ShardFileError> {
    let length = u64::from_le_bytes(prefix);
    if length > MAX_HEADER as u64 {
        return Err(ShardFileError::HeaderTooLarge { path: path.into(), found: length });
    }
    Ok(8 + length as usize)
}

/// The header with its length prefix, and the offset of the data.
fn split_header<'a>(path: &Path, map: &'a [u8]) -> Result<(&'a [u8], usize), ShardFileError> {
    let length = map.len() as u64;
    let truncated = |wanted| ShardFileError::Truncated { path: path.into(), found: length, wanted };
    let prefix = map.first_chunk::<8>().ok_or_else(|| truncated(8))?;
    let data = header_end(path, *prefix)?;
    let header = map.get(..data).ok_or_else(|| truncated(data as u64))?;
    Ok((header, data))
}

/// Backtape's records in a header, and the entries, which the safetensors crate has checked to lie
/// inside the data without holes or overlaps. The text is parsed once: most of what the coordinator
/// does for a step of thousands of shards is to parse the headers of all ranks.
fn read_header(path: &Path, header: &[u8]) -> Result<(FileSelf, Metadata), ShardFileError> {
    let malformed = |detail: String| ShardFileError::Malformed { path: path.into(), detail };
    let text = unpadded(&header[8..]);
    let (texts, entries) = match serde_json::from_slice::<Outer>(text) {
        Ok(Outer { metadata, entries }) => (metadata, Ok(entries)),
        // Whose file it is, and of which version, goes before what is wrong with an entry.
        Err(error) => match serde_json::from_slice::<Texts>(text) {
            Ok(Texts { metadata }) => (metadata, Err(error.to_string())),
            Err(error) => return Err(malformed(error.to_string())),
        },
    };
    let about = read_self(path, texts)?;
    let mut entries: Vec<_> = entries.map_err(malformed)?.into_iter().collect();
    entries.sort_by_key(|(_, entry)| entry.data_offsets);
    let checked = Metadata::new(None, entries);
    Ok((about, checked.map_err(|error| malformed(error.to_string()))?))
}

fn read_self(
    path: &Path,
    texts: Option<BTreeMap<String, String>>,
) -> Result<FileSelf, ShardFileError> {
    let malformed = |detail: String| ShardFileError::Malformed { path: path.into(), detail };
    let Some(text) = texts.and_then(|mut metadata| metadata.remove(METADATA_KEY)) else {
        return Err(ShardFileError::Foreign { path: path.into() });
    };
    let newer = |version| ShardFileError::Newer { path: path.into(), found: version };
    match serde_json::from_str::<FileSelf>(&text) {
        Ok(about) if about.format_version > FORMAT_VERSION => {
            Err(newer(about.format_version.into()))
        }
        Ok(about) => Ok(about),
        // A newer format may have other fields: then its version is the error to report.
        Err(error) => match serde_json::from_str::<Version>(&text) {
            Ok(Version { format_version: Some(version) })
                if version > u64::from(FORMAT_VERSION) =>
            {
                Err(newer(version))
            }
            _ => Err(malformed(error.to_string())),
        },
    }
}

/// The metadata of a safetensors header; its entries are skipped.
#[derive(Deserialize)]
struct Texts {
    #[serde(rename = "__metadata__")]
    metadata: Option<BTreeMap<String, String>>,
}

/// A safetensors header. By hand, as `#[serde(flatten)]` keeps all of it a second time.
#[derive(Default)]
struct Outer {
    metadata: Option<BTreeMap<String, String>>,
    entries: HashMap<String, TensorInfo>,
}

impl<'de> Deserialize<'de> for Outer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Outer, D::Error> {
        deserializer.deserialize_map(OuterFields)
    }
}

struct OuterFields;

impl<'de> Visitor<'de> for OuterFields {
    type Value = Outer;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a safetensors header")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Outer, A::Error> {
        let mut outer = Outer::default();
        while let Some(name) = fields.next_key::<String>()? {
            if name != "__metadata__" {
                outer.entries.insert(name, fields.next_value()?);
            } else if outer.metadata.is_some() {
                return Err(A::Error::duplicate_field("__metadata__"));
            } else {
                outer.metadata = fields.next_value()?;
            }
        }
        Ok(outer)
    }
}

#[derive(Deserialize)]
struct Version {
    format_version: Option<u64>,
}

/// Strips the spaces that pad a header, which a parser would skip one by one.
fn unpadded(mut text: &[u8]) -> &[u8] {
    while let Some((rest, [b' ', ..])) = text.split_last_chunk::<64>()
        && text.ends_with(&[b' '; 64])
    {
        text = rest;
    }
    text
}

/// Finds every shard's bytes.
fn locate(
    path: &Path,
    header: &[u8],
    (about, metadata): (&FileSelf, &Metadata),
    data: usize,
) -> Result<Vec<(usize, usize)>, ShardFileError> {
    let contradiction =
        |detail: String| ShardFileError::Contradiction { path: path.into(), detail };
    let wanted = metadata.data_len();
    if wanted != data {
        let (length, wanted) = ((header.len() + data) as u64, (header.len() + wanted) as u64);
        return Err(if length < wanted {
            ShardFileError::Truncated { path: path.into(), found: length, wanted }
        } else {
            contradiction(format!("{} bytes follow its last shard", length - wanted))
        });
    }
    let bytes_of = |shard: &ShardRecord| {
        shard.check().map_err(|error: RecordError| contradiction(error.to_string()))?;
        let missing = || contradiction(format!("{} has no entry {:?}", shard.key, shard.entry));
        let info = metadata.info(&shard.entry).ok_or_else(missing)?;
        let (start, end) = info.data_offsets;
        let shape: Vec<u64> = info.shape.iter().map(|&n| n as u64).collect();
        let length = (end - start) as u64;
        if length != shard.length || shape != shard.place.extent() {
            return Err(contradiction(format!(
                "entry {:?} is not box {}",
                shard.entry, shard.place
            )));
        }
        Ok((start, end))
    };
    about.shards.iter().map(bytes_of).collect()
}
