//! Exports tensors of a dump to files that other tools read: `.safetensors` for any dtype, `.npy`
//! for numpy.
//!
//! Tensors are assembled and written part by part, so that a tensor larger than memory can be
//! exported. Only bytes with the hash that the training process took are written, and the file gets
//! its name when it is complete.

mod npy;
mod repro;
mod safetensors;

use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use backtape::dtype::Dtype;
use backtape::identity::Rank;
use backtape::shard::TensorKey;

use crate::assemble::{self, AssembleError, slab};
use crate::bits;
use crate::dump::StepDump;
use crate::kernels::Progress;
pub use repro::{Framework, ReproError, repro};

/// Most bytes that are assembled at a time.
const PART_BYTES: u64 = 64 << 20;

/// A tensor to export.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Which tensor.
    pub key: TensorKey,
    /// Which rank's addend, where the tensor is held as addends.
    pub rank: Option<Rank>,
    /// Its name in the file.
    pub name: String,
}

/// Why nothing was exported.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExportError {
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    #[error("{path}: name a file that ends in .safetensors or .npy", path = path.display())]
    Format { path: PathBuf },
    #[error("{path}: a .npy file holds one tensor, not {tensors}: write a .safetensors file", path = path.display())]
    Several { path: PathBuf, tensors: usize },
    #[error(
        "numpy has no {dtype}, which {key} is of: give --widen for its values in f32, which is exact, or write a .safetensors file"
    )]
    NotOfNumpy { key: TensorKey, dtype: Dtype },
    #[error("two tensors would both be called {name:?}: export them to two files")]
    SameName { name: String },
    #[error("{path} is there already: choose another name, or remove it", path = path.display())]
    Exists { path: PathBuf },
    #[error("{path} cannot be written: check that its directory exists and has room", path = path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// One tensor of the file.
struct Member<'a> {
    name: &'a str,
    key: &'a TensorKey,
    dtype: Dtype,
    shape: Vec<u64>,
    /// Its dtype in the file.
    stored: Dtype,
    /// The tensor, if it is already in memory; else it is assembled while it is written.
    made: Option<Made<'a>>,
}

enum Made<'a> {
    Tensor(assemble::Tensor),
    Bytes(&'a [u8]),
}

impl Made<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Made::Tensor(tensor) => tensor.bytes(),
            Made::Bytes(bytes) => bytes,
        }
    }
}

impl Member<'_> {
    fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    fn bytes(&self) -> u64 {
        self.elements() * self.stored.width() as u64
    }
}

/// Writes the tensors to `target`, whose extension chooses the format; `widen` converts narrower
/// floats to f32. `progress` gets the bytes of the dump that were written. Returns the bytes of the
/// file.
pub fn export(
    dump: &StepDump,
    wanted: &[Wanted],
    target: &Path,
    widen: bool,
    progress: &dyn Progress,
) -> Result<u64, ExportError> {
    let members = members(dump, wanted, widen)?;
    let extension = target.extension().and_then(|name| name.to_str());
    let header = match (extension, members.as_slice()) {
        (Some("safetensors"), _) => safetensors::header(dump, &members)?,
        (Some("npy"), [member]) => npy::header(member)?,
        (Some("npy"), several) => {
            let tensors = several.len();
            return Err(ExportError::Several { path: target.into(), tensors });
        }
        _ => return Err(ExportError::Format { path: target.into() }),
    };
    save(dump, &header, &members, target, progress)
}

/// Writes the header and then the tensors to `target`, which must not exist; returns the bytes
/// written.
fn save(
    dump: &StepDump,
    header: &[u8],
    members: &[Member<'_>],
    target: &Path,
    progress: &dyn Progress,
) -> Result<u64, ExportError> {
    if target.symlink_metadata().is_ok() {
        return Err(ExportError::Exists { path: target.into() });
    }
    let wrong = |source| ExportError::Write { path: target.into(), source };
    let directory = target.parent().filter(|parent| *parent != Path::new(""));
    // The temporary file is in the directory of the target, so that renaming it is atomic, and is
    // deleted if anything fails. Its permissions are those of the user's umask, not the owner's
    // only.
    let mode = std::fs::Permissions::from_mode(0o666);
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix(".backtape-").permissions(mode);
    let scratch = builder.tempfile_in(directory.unwrap_or(Path::new(".")));
    let mut scratch = scratch.map_err(wrong)?;
    let mut out = BufWriter::with_capacity(1 << 20, scratch.as_file_mut());
    out.write_all(header).map_err(wrong)?;
    for member in members {
        write(dump, member, &mut out, progress, &wrong)?;
    }
    out.flush().map_err(wrong)?;
    drop(out);
    scratch.persist_noclobber(target).map_err(|error| wrong(error.error))?;
    Ok(header.len() as u64 + members.iter().map(Member::bytes).sum::<u64>())
}

fn members<'a>(
    dump: &StepDump,
    wanted: &'a [Wanted],
    widen: bool,
) -> Result<Vec<Member<'a>>, ExportError> {
    let mut members: Vec<Member<'a>> = Vec::new();
    for wanted in wanted {
        if members.iter().any(|member| member.name == wanted.name) {
            return Err(ExportError::SameName { name: wanted.name.clone() });
        }
        let (dtype, shape, made) = match wanted.rank {
            Some(rank) => {
                let tensor = assemble::addend(dump, &wanted.key, rank)?;
                (tensor.dtype, tensor.shape.clone(), Some(Made::Tensor(tensor)))
            }
            None => {
                let info = assemble::whole(dump, &wanted.key)?;
                (info.dtype, info.shape.clone(), None)
            }
        };
        let narrow = matches!(dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F8E4m3 | Dtype::F8E5m2);
        let stored = if widen && narrow { Dtype::F32 } else { dtype };
        let (name, key) = (&wanted.name, &wanted.key);
        members.push(Member { name, key, dtype, shape, stored, made });
    }
    Ok(members)
}

/// Writes the elements of a tensor in order, converted to f32 where that was asked for.
fn write(
    dump: &StepDump,
    member: &Member<'_>,
    out: &mut impl Write,
    progress: &dyn Progress,
    wrong: &impl Fn(io::Error) -> ExportError,
) -> Result<(), ExportError> {
    let mut put = |bytes: &[u8]| match member.stored == member.dtype {
        true => out.write_all(bytes).map_err(wrong),
        false => out.write_all(&widened(member.dtype, bytes)).map_err(wrong),
    };
    if let Some(made) = &member.made {
        return put(made.bytes());
    }
    let (elements, each) = (member.elements(), PART_BYTES / member.dtype.width() as u64);
    let mut start = 0;
    while start < elements {
        let end = elements.min(start + each);
        put(&slab::elements(dump, member.key, start..end)?)?;
        progress.advance((end - start) * member.dtype.width() as u64);
        start = end;
    }
    Ok(())
}

/// The elements converted to f32, which represents every narrower float exactly.
fn widened(dtype: Dtype, bytes: &[u8]) -> Vec<u8> {
    let width = dtype.width();
    let value = |index| bits::value(dtype, bits::bits(bytes, width, index)) as f32;
    (0..bytes.len() / width).flat_map(|index| value(index).to_le_bytes()).collect()
}
