//! One shard as Python hands it over, read into the description that the recorder takes: the job's
//! words become types here and nowhere else.

use std::collections::BTreeMap;

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::identity::{Microbatch, Name};
use backtape::index_box::IndexBox;
use backtape::placement::{Placement, Placements, Reduction};
use backtape::shard::{self, TensorKey, When};
use backtape_dumper::{Capture, Located};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as WordError, StrDeserializer};

use crate::errors::invalid;
use crate::payload::{HeldBuffer, payload};
use crate::staging::Staged;

/// A placement along one mesh axis: a dimension, or `replicate`, `sum`, `mean`.
#[derive(FromPyObject)]
enum PlacementWord {
    Dimension(u32),
    Word(String),
}

/// `backtape.shards.Key`, field for field.
#[derive(FromPyObject)]
pub(crate) struct Key {
    pub(crate) name: String,
    pub(crate) role: Option<String>,
    pub(crate) microbatch: Option<u32>,
    when: Option<String>,
}

/// Parts of a tensor that lie alike in every tensor of its shape and placement: read once, and not
/// again for each capture.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct Cuts {
    shape: Vec<u64>,
    replica: u32,
    placement: Placements,
    cuts: Vec<Cut>,
}

struct Cut {
    place: IndexBox,
    located: Located,
    /// Where it lies in the memory of what this rank holds: its first element, and how many.
    run: (usize, usize),
}

/// Offsets and extent of a part, and its run.
type Boxed = (Vec<u64>, Vec<u64>, (usize, usize));
/// The indices of a part as a framework has them: for each dimension its ranges.
type Indices = Vec<Vec<(u64, u64)>>;

#[pymethods]
impl Cuts {
    /// `boxes`: offsets, extent and run of each part; `indices`: the framework's own indices of
    /// each. Raises ValueError for a box outside of the shape, or a run of another length.
    #[new]
    fn new(
        shape: Vec<u64>,
        boxes: Vec<Boxed>,
        indices: Option<Vec<Indices>>,
        replica: u32,
        placement: BTreeMap<String, PlacementWord>,
    ) -> PyResult<Cuts> {
        let located = indices.map_or_else(
            || vec![Located::ByBox; boxes.len()],
            |indices| indices.into_iter().map(Located::ByIndices).collect(),
        );
        if located.len() != boxes.len() {
            return Err(PyValueError::new_err("there are other numbers of boxes and of indices"));
        }
        let cut = |((offsets, extent, run), located): (Boxed, _)| {
            let place = boxed(&offsets, &extent, &shape)?;
            let (_, count) = run;
            match place.elements() == Some(count as u64) {
                true => Ok(Cut { place, located, run }),
                false => Err(PyValueError::new_err("a part's run has another length than its box")),
            }
        };
        let cuts = boxes.into_iter().zip(located).map(cut).collect::<PyResult<_>>()?;
        let placement = placement.into_iter().map(|(axis, word)| Ok((axis, word.read()?)));
        let placement = placement.collect::<PyResult<_>>()?;
        Ok(Cuts { shape, replica, placement, cuts })
    }
}

impl Cuts {
    /// The bytes of each part in the memory of what this rank holds, of elements of this width.
    pub(crate) fn runs(&self, width: usize) -> Vec<std::ops::Range<usize>> {
        let bytes = |elements: usize| elements.saturating_mul(width);
        let run = |cut: &Cut| bytes(cut.run.0)..bytes(cut.run.0.saturating_add(cut.run.1));
        self.cuts.iter().map(run).collect()
    }
}

/// What was copied of the parts of one tensor; in place of a `backtape.shards.Shard` for each.
#[pyclass(module = "backtape._native")]
pub(crate) struct Copied {
    cuts: Py<Cuts>,
    dtype: Dtype,
    parts: Vec<Staged>,
    #[pyo3(get, set)]
    pub(crate) partial: Option<String>,
    #[pyo3(get, set)]
    compiled: bool,
}

impl Copied {
    pub(crate) fn new(dtype: Dtype, cuts: Py<Cuts>, parts: Vec<Staged>) -> Copied {
        Copied { cuts, dtype, parts, partial: None, compiled: false }
    }

    /// The captures of all parts, or the reason why the dump cannot hold them under their name or
    /// role, as of [`Shard::capture`].
    pub(crate) fn captures(&self, key: &Key) -> PyResult<Result<Vec<Capture>, String>> {
        let partial = self.partial.as_deref().map(|text| word::<Reduction>("partial", text));
        let partial = partial.transpose()?;
        let cuts = self.cuts.get();
        Ok(key.read(key.when()?).map(|(key, role)| {
            let capture = |(cut, part): (&Cut, &Staged)| Capture {
                key: key.clone(),
                shard: shard::Shard {
                    role,
                    dtype: self.dtype,
                    shape: cuts.shape.clone(),
                    place: cut.place.clone(),
                    placement: cuts.placement.clone(),
                    partial,
                    replica: cuts.replica,
                    compiled: self.compiled,
                },
                located: cut.located.clone(),
                payload: Box::new(part.clone()),
            };
            cuts.cuts.iter().zip(&self.parts).map(capture).collect()
        }))
    }
}

/// The captures of what Python hands over as one: a [`Shard`], or parts that were copied together.
pub(crate) fn captures(
    given: &Bound<'_, PyAny>,
    key: &Key,
) -> PyResult<Result<Vec<Capture>, String>> {
    match given.cast::<Copied>() {
        Ok(copied) => copied.borrow().captures(key),
        Err(_) => Ok(given.extract::<Shard>()?.capture(key)?.map(|capture| vec![capture])),
    }
}

/// `backtape.shards.Shard`, field for field.
#[derive(FromPyObject)]
pub(crate) struct Shard<'py> {
    data: Bound<'py, PyAny>,
    dtype: String,
    shape: Vec<u64>,
    offsets: Vec<u64>,
    extent: Vec<u64>,
    replica: u32,
    placement: BTreeMap<String, PlacementWord>,
    partial: Option<String>,
    fingerprint: Option<(u32, u32)>,
    indices: Option<Vec<Vec<(u64, u64)>>>,
    compiled: bool,
}

impl Key {
    /// The key of a tensor that has the role of its name.
    pub(crate) fn new(name: String, microbatch: Option<u32>, when: Option<String>) -> Key {
        Key { name, role: None, microbatch, when }
    }

    fn when(&self) -> PyResult<Option<When>> {
        self.when.as_deref().map(|text| word::<When>("when", text)).transpose()
    }

    /// The tensor's key and role. The sentence of an error is the reason why a dump cannot hold
    /// the tensor under this name or role, which the recorder is to name.
    fn read(
        &self,
        when: Option<When>,
    ) -> Result<(TensorKey, Option<backtape::role::Role>), String> {
        let tensor = Name::new(self.name.as_str()).map_err(|error| error.to_string())?;
        let key = TensorKey { tensor, microbatch: self.microbatch.map(Microbatch), when };
        let role = key.role(self.role.as_deref()).map_err(|error| error.to_string())?;
        Ok((key, role))
    }
}

impl Shard<'_> {
    /// The capture that the recorder takes, whose payload holds the array's buffer; or the reason
    /// why the dump cannot hold it under its name or role. What cannot be read at all raises.
    pub(crate) fn capture(self, key: &Key) -> PyResult<Result<Capture, String>> {
        let place = boxed(&self.offsets, &self.extent, &self.shape)?;
        let placement = self.placement.into_iter().map(|(axis, word)| Ok((axis, word.read()?)));
        let partial = self.partial.as_deref().map(|text| word::<Reduction>("partial", text));
        let (payload, summed) = payload(&self.data)?;
        let when = key.when()?;
        let described = shard::Shard {
            role: None,
            dtype: dtype(&self.dtype)?,
            shape: self.shape,
            place,
            placement: placement.collect::<PyResult<_>>()?,
            partial: partial.transpose()?,
            replica: self.replica,
            compiled: self.compiled,
        };
        let located = match (self.fingerprint, self.indices) {
            (Some((a, b)), _) => Located::BySums(Fingerprint(a, b)),
            (None, Some(runs)) => Located::ByIndices(runs),
            (None, None) if summed => Located::ByPayload,
            (None, None) => Located::ByBox,
        };
        Ok(key.read(when).map(|(key, role)| {
            let shard = shard::Shard { role, ..described };
            Capture { key, shard, located, payload }
        }))
    }
}

impl PlacementWord {
    fn read(self) -> PyResult<Placement> {
        match self {
            PlacementWord::Dimension(dim) => Ok(Placement::Shard(dim)),
            PlacementWord::Word(text) if text == "replicate" => Ok(Placement::Replicate),
            PlacementWord::Word(text) => Ok(Placement::Partial(word("placement", &text)?)),
        }
    }
}

/// One of an enum's words, as its JSON spells it; raises ValueError for any other, as the argument
/// `option` of `record`.
fn word<'a, T: Deserialize<'a>>(option: &str, text: &'a str) -> PyResult<T> {
    let reader: StrDeserializer<'a, WordError> = text.into_deserializer();
    T::deserialize(reader).map_err(|error| invalid(&format!("record({option}={text:?})"), &error))
}

/// A dtype by numpy's name; raises ValueError for one that has no place in a dump.
pub(crate) fn dtype(name: &str) -> PyResult<Dtype> {
    let unknown = || PyValueError::new_err(format!("arrays of dtype {name} cannot be recorded"));
    Dtype::from_numpy(name).ok_or_else(unknown)
}

fn boxed(offsets: &[u64], extent: &[u64], shape: &[u64]) -> PyResult<IndexBox> {
    IndexBox::at(offsets, extent, shape).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Raises ValueError for a dtype, by numpy's name, that has no place in a dump.
#[pyfunction]
pub(crate) fn check_dtype(name: &str) -> PyResult<()> {
    dtype(name).map(drop)
}

/// The recorder's own fingerprint of a shard, as two 32-bit sums: the definition that
/// `backtape.jax_arrays` has to agree with.
#[pyfunction]
pub(crate) fn fingerprint(shard: Shard<'_>) -> PyResult<(u32, u32)> {
    let place = boxed(&shard.offsets, &shard.extent, &shard.shape)?;
    let bytes = HeldBuffer::new(&shard.data)?;
    let Fingerprint(a, b) = Fingerprint::of(dtype(&shard.dtype)?, &place, bytes.as_ref());
    Ok((a, b))
}
