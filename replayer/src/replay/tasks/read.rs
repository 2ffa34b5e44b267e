//! What a task reads of the dump: rows of tensors, from the shards that hold them and no others.
//!
//! Every shard that is read hashes to what the job hashed, or the task fails and says which.

use std::collections::BTreeSet;
use std::ops::Range;

use backtape::head::KLayout;
use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use super::error::TaskError;
use super::task::{Part, PlanePart, RowsOf, Task};
use crate::assemble::slab::{boxes_of, elements};
use crate::assemble::{assemble_box, whole};
use crate::dump::{ShardRef, StepDump};
use crate::head::HeadOptions;
use crate::kernels::matrix::{HeadInputs, Matrix, Values};
use crate::kernels::transform::Transform;
use crate::replay::gathered_rows::Gathered;

/// The matrices of a part, as they were dumped.
pub(super) struct PartMatrices {
    q: Option<Gathered>,
    k: Option<Gathered>,
    given: Option<Gathered>,
}

impl PartMatrices {
    pub(super) fn read(
        dump: &StepDump,
        options: &HeadOptions,
        part: &Part,
    ) -> Result<PartMatrices, TaskError> {
        let q = part.q.as_ref().map(|of| rows(dump, of)).transpose()?;
        let k = part.k.as_ref().map(|rows| classes(dump, options, rows)).transpose()?;
        let given = part.given.as_ref().map(|of| rows(dump, of)).transpose()?;
        Ok(PartMatrices { q, k, given })
    }

    /// The kernels' view of a part.
    pub(super) fn head<'a>(&'a self, options: &HeadOptions, part: &'a Part) -> HeadInputs<'a> {
        let none = |rows| Matrix { rows, cols: 0, values: Values::F32(&[]) };
        let rows_of =
            |held: &'a Option<Gathered>, rows| held.as_ref().map_or(none(rows), Gathered::matrix);
        let (q, k) = (rows_of(&self.q, part.labels.len()), rows_of(&self.k, part.classes));
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

/// Where rows lie, as boxes of the tensor.
fn boxes(shape: &[u64], rows: &RowsOf) -> Vec<IndexBox> {
    let cols = shape.last().map_or(1, |&n| n as usize);
    let run =
        |run: &Range<usize>| boxes_of(shape, (run.start * cols) as u64..(run.end * cols) as u64);
    rows.runs.iter().flat_map(run).collect()
}

/// Where a run of classes lies, in the job's layout.
fn box_of_classes(shape: &[u64], rows: &RowsOf) -> Option<IndexBox> {
    let ([depth, _], [run]) = (shape, &rows.runs[..]) else { return None };
    Some(IndexBox(vec![(0, *depth), (run.start as u64, run.end as u64)]))
}

/// Names of the files that hold what a task reads.
pub(super) fn files(dump: &StepDump, task: &Task) -> Result<BTreeSet<String>, TaskError> {
    let of_plane =
        |plane: &PlanePart| RowsOf { key: plane.key.clone(), runs: vec![plane.tokens.clone()] };
    let plane = task.plane.as_ref().map(of_plane);
    let Part { q, k, given, .. } = &task.part;
    let transposed = dump.manifest.head.as_ref().is_some_and(|head| head.k_layout == KLayout::Dv);
    let mut names = BTreeSet::new();
    for (rows, is_k) in [(q, false), (given, false), (&plane, false), (k, true)] {
        let Some(rows) = rows else { continue };
        let info = whole(dump, &key(&rows.key)?)?;
        let places = match box_of_classes(&info.shape, rows).filter(|_| is_k && transposed) {
            Some(place) => vec![place],
            None => boxes(&info.shape, rows),
        };
        let reached = info.shards.iter().filter(|shard| {
            let stored = &dump.record(shard).place;
            places.iter().any(|place| place.intersection(stored).is_some())
        });
        let name =
            |shard: &ShardRef| dump.file_of(shard).path().file_name()?.to_str().map(String::from);
        names.extend(reached.filter_map(name));
    }
    Ok(names)
}

/// Rows of a tensor, its leading dimensions flattened.
pub(super) fn rows(dump: &StepDump, rows: &RowsOf) -> Result<Gathered, TaskError> {
    let key = key(&rows.key)?;
    let info = whole(dump, &key)?;
    let cols = info.shape.last().map_or(1, |&n| n as usize);
    let mut bytes = Vec::new();
    for run in &rows.runs {
        let range = (run.start * cols) as u64..(run.end * cols) as u64;
        bytes.extend_from_slice(&elements(dump, &key, range)?);
    }
    Gathered::of_bytes(info.dtype, cols, &bytes).ok_or(TaskError::NoFloats(key))
}

/// A run of classes of k, `[classes, D]` whatever the job's layout.
fn classes(dump: &StepDump, options: &HeadOptions, wanted: &RowsOf) -> Result<Gathered, TaskError> {
    let name = key(&wanted.key)?;
    let shape = &whole(dump, &name)?.shape;
    let place = box_of_classes(shape, wanted).filter(|_| options.transposed());
    let Some(place) = place else { return rows(dump, wanted) };
    let tensor = assemble_box(dump, &name, &place)?.transposed()?;
    let (dtype, cols) = (tensor.dtype, shape[0] as usize);
    Gathered::of_bytes(dtype, cols, tensor.bytes()).ok_or(TaskError::NoFloats(name))
}
