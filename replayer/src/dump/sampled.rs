//! What stands for a parameter where a job sampled its step: the boxes that ranks declare in
//! `step.declared:RANK` (docs/step.md).

use std::collections::BTreeMap;

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;
use serde::Deserialize;

use super::StepDump;

/// The sample of one parameter.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Sample {
    /// Of the whole parameter.
    pub shape: Vec<u64>,
    /// What is recorded of it.
    pub boxes: Vec<IndexBox>,
}

/// The samples that the ranks of a step declare.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    by_parameter: BTreeMap<String, Sample>,
    /// Samples that cannot be used, in sentences.
    pub faults: Vec<String>,
}

/// The part of a declaration that says what is sampled.
#[derive(Deserialize)]
struct Declared {
    #[serde(default)]
    sampled: Sampled,
}

#[derive(Default, Deserialize)]
struct Sampled {
    #[serde(default)]
    parameters: BTreeMap<String, Sample>,
}

impl Samples {
    /// Reads what the ranks declare. A declaration that cannot be read is passed over here: the
    /// replay of the step names it.
    pub fn of(dump: &StepDump) -> Samples {
        let mut samples = Samples::default();
        for (key, info) in dump.tensors() {
            let Some(rank) = Part::declaring_rank(key.tensor.as_str()) else { continue };
            let text = info.shards.first().and_then(|shard| dump.intact_bytes(shard));
            let declared = text.and_then(|text| serde_json::from_slice::<Declared>(text).ok());
            for (name, sample) in declared.into_iter().flat_map(|own| own.sampled.parameters) {
                samples.add(Rank(rank), name, sample);
            }
        }
        samples
    }

    fn add(&mut self, rank: Rank, name: String, sample: Sample) {
        if let Some(error) = sample.boxes.iter().find_map(|own| own.check(&sample.shape).err()) {
            self.faults.push(format!("the sample of {name} that rank {rank} declares: {error}"));
            return;
        }
        match self.by_parameter.get(&name) {
            Some(known) if *known != sample => self.faults.push(format!(
                "rank {rank} declares another sample of {name} than ranks before it: their \
                 elements are not the same"
            )),
            Some(_) => {}
            None => drop(self.by_parameter.insert(name, sample)),
        }
    }

    /// The sample of a parameter; `None` for one that is recorded whole.
    pub fn of_parameter(&self, name: &str) -> Option<&Sample> {
        self.by_parameter.get(name)
    }

    /// What is sampled, by the name of the parameter.
    pub fn all(&self) -> impl Iterator<Item = (&String, &Sample)> {
        self.by_parameter.iter()
    }

    /// The boxes of a tensor that should be recorded, where it is not all of it.
    pub fn boxes(&self, key: &TensorKey, shape: &[u64]) -> Option<Vec<IndexBox>> {
        let (_, parameter) = Part::of_tensor(key.tensor.as_str())?;
        let sample = self.by_parameter.get(parameter)?;
        if sample.shape == shape {
            return Some(sample.boxes.clone());
        }
        // The addends of several devices, side by side.
        let (first, inner) = shape.split_first()?;
        let side_by_side = |own: &IndexBox| {
            IndexBox(std::iter::once((0, *first)).chain(own.0.iter().copied()).collect())
        };
        (sample.shape == inner).then(|| sample.boxes.iter().map(side_by_side).collect())
    }
}

impl Sample {
    /// How many elements are recorded.
    pub fn elements(&self) -> u64 {
        self.boxes.iter().filter_map(IndexBox::elements).sum()
    }

    /// How many the parameter has.
    pub fn of(&self) -> u64 {
        self.shape.iter().product()
    }
}
