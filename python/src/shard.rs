//! One shard as Python hands it over: `backtape.shards.Shard`, field for field.

use std::collections::BTreeMap;

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::index_box::IndexBox;
use backtape::placement::{Placement, Reduction};
use backtape::shard::When;
use backtape_dumper::{Capture, Located};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as WordError, StrDeserializer};

use crate::errors::invalid;
use crate::payload::{HeldBuffer, payload};

/// A placement along one mesh axis: a dimension, or `replicate`, `sum`, `mean`.
#[derive(FromPyObject)]
enum PlacementWord {
    Dimension(u32),
    Word(String),
}

/// Which tensor and which of its values: what the job said in `tape.record`.
#[derive(FromPyObject)]
pub(crate) struct Key {
    name: String,
    role: Option<String>,
    microbatch: Option<u32>,
    when: Option<String>,
    partial: Option<String>,
}

/// Which part of it, and the bytes: what the array itself says.
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

impl Shard<'_> {
    /// The capture that the recorder takes; its payload holds the array's buffer.
    pub(crate) fn capture(self, key: Key) -> PyResult<Capture> {
        let place = boxed(&self.offsets, &self.extent, &self.shape)?;
        let placement = self.placement.into_iter().map(|(axis, word)| Ok((axis, word.read()?)));
        // What the job said, else what the framework knows of the array.
        let partial = key.partial.or(self.partial);
        let partial = partial.as_deref().map(|text| word::<Reduction>("partial", text));
        let when = key.when.as_deref().map(|text| word::<When>("when", text));
        let (payload, summed) = payload(&self.data)?;
        Ok(Capture {
            tensor: key.name,
            role: key.role,
            microbatch: key.microbatch,
            when: when.transpose()?,
            dtype: dtype(&self.dtype)?,
            place,
            shape: self.shape,
            placement: placement.collect::<PyResult<_>>()?,
            partial: partial.transpose()?,
            replica: self.replica,
            located: match (self.fingerprint, self.indices) {
                (Some((a, b)), _) => Located::BySums(Fingerprint(a, b)),
                (None, Some(runs)) => Located::ByIndices(runs),
                (None, None) if summed => Located::ByPayload,
                (None, None) => Located::ByBox,
            },
            compiled: self.compiled,
            payload,
        })
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

/// One of an enum's words, as its JSON spells it.
fn word<'a, T: Deserialize<'a>>(option: &str, text: &'a str) -> PyResult<T> {
    let reader: StrDeserializer<'a, WordError> = text.into_deserializer();
    T::deserialize(reader).map_err(|error| invalid(&format!("record({option}={text:?})"), &error))
}

/// A dtype by numpy's name.
pub(crate) fn dtype(name: &str) -> PyResult<Dtype> {
    let unknown = || PyValueError::new_err(format!("arrays of dtype {name} cannot be recorded"));
    Dtype::from_numpy(name).ok_or_else(unknown)
}

fn boxed(offsets: &[u64], extent: &[u64], shape: &[u64]) -> PyResult<IndexBox> {
    IndexBox::at(offsets, extent, shape).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Raises ValueError for a dtype that has no place in a dump, by numpy's name.
#[pyfunction]
pub(crate) fn check_dtype(name: &str) -> PyResult<()> {
    dtype(name).map(drop)
}

/// The recorder's own fingerprint of a box, as two 32-bit sums: the definition
/// that `backtape.jax_arrays` has to agree with.
#[pyfunction]
pub(crate) fn fingerprint(shard: Shard<'_>) -> PyResult<(u32, u32)> {
    let place = boxed(&shard.offsets, &shard.extent, &shard.shape)?;
    let bytes = HeldBuffer::new(&shard.data)?;
    let Fingerprint(a, b) = Fingerprint::of(dtype(&shard.dtype)?, &place, bytes.as_ref());
    Ok((a, b))
}
