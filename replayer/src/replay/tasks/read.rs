//! What a task reads of the dump: rows of tensors, from the shards that hold them and no others.
//!
//! Every shard that is read hashes to what the job hashed, or the task fails and says which.

use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use super::perform::TaskError;
use super::task::{Part, RowsOf};
use crate::assemble::slab::elements;
use crate::assemble::{assemble_box, whole};
use crate::dump::StepDump;
use crate::head::HeadOptions;
use crate::kernels::matrix::{HeadInputs, Matrix, Transform, Values};
use crate::replay::gather::Gathered;

/// The matrices of a part, as they were dumped.
pub(super) struct Held {
    q: Option<Gathered>,
    k: Option<Gathered>,
    given: Option<Gathered>,
}

impl Held {
    pub(super) fn read(
        dump: &StepDump,
        options: &HeadOptions,
        part: &Part,
    ) -> Result<Held, TaskError> {
        let q = part.q.as_ref().map(|of| rows(dump, of)).transpose()?;
        let k = part.k.as_ref().map(|of| classes(dump, options, of)).transpose()?;
        let given = part.given.as_ref().map(|of| rows(dump, of)).transpose()?;
        Ok(Held { q, k, given })
    }

    /// The kernels' view of a part.
    pub(super) fn head<'a>(&'a self, options: &HeadOptions, part: &'a Part) -> HeadInputs<'a> {
        let none = |rows| Matrix { rows, cols: 0, values: Values::F32(&[]) };
        let of =
            |held: &'a Option<Gathered>, rows| held.as_ref().map_or(none(rows), Gathered::matrix);
        let (q, k) = (of(&self.q, part.labels.len()), of(&self.k, part.classes));
        HeadInputs {
            bias: part.bias.as_deref(),
            given: self.given.as_ref().map(Gathered::matrix),
            transform: if part.plain { Transform::NONE } else { options.transform },
            mask: options.mask,
            copies: part.copies.as_deref(),
            ..HeadInputs::plain(q, k, &part.labels, part.valid)
        }
    }
}

/// The tensor that a task names.
pub(super) fn key(json: &str) -> Result<TensorKey, TaskError> {
    serde_json::from_str(json).map_err(|_| TaskError::Parcel(crate::parcel::ParcelError))
}

/// Rows of a tensor, its leading dimensions flattened.
pub(super) fn rows(dump: &StepDump, of: &RowsOf) -> Result<Gathered, TaskError> {
    let key = key(&of.key)?;
    let info = whole(dump, &key)?;
    let cols = info.shape.last().map_or(1, |&n| n as usize);
    let mut bytes = Vec::new();
    for run in &of.runs {
        let range = (run.start * cols) as u64..(run.end * cols) as u64;
        bytes.extend_from_slice(&elements(dump, &key, range)?);
    }
    Gathered::of_bytes(info.dtype, cols, &bytes).ok_or(TaskError::NoFloats(key))
}

/// A run of classes of k, `[classes, D]` whatever the job's layout.
fn classes(dump: &StepDump, options: &HeadOptions, of: &RowsOf) -> Result<Gathered, TaskError> {
    let name = key(&of.key)?;
    let shape = &whole(dump, &name)?.shape;
    let ([depth, _], [run], true) = (&shape[..], &of.runs[..], options.transposed()) else {
        return rows(dump, of);
    };
    let place = IndexBox(vec![(0, *depth), (run.start as u64, run.end as u64)]);
    let tensor = assemble_box(dump, &name, &place)?.transposed()?;
    let (dtype, cols) = (tensor.dtype, *depth as usize);
    Gathered::of_bytes(dtype, cols, tensor.bytes()).ok_or(TaskError::NoFloats(name))
}
