//! Only the gradient of k reads another microbatch's lse. This happens where weight gradients are
//! computed later than those of activations, when the lse buffer already belongs to another
//! microbatch.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::diagnose::cause::Hypothesis;
use crate::diagnose::counterevidence::Part;
use crate::diagnose::detectors::dlogits_plane::Rows;
use crate::diagnose::detectors::single_tokens::distance;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::{Pass, World};

/// Share of the squared error that another microbatch's lse may leave to be worth a trial.
const LEFT: f64 = 0.02;

/// The hypothesis, where dq does not fail and another microbatch's lse explains every failing dk.
pub(super) fn hypothesis(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    if evidence.fails(Stage::Dq) {
        return None;
    }
    let (mut lse, mut said) = (BTreeMap::new(), Vec::new());
    for (key, _) in evidence.failing_of(&[Stage::Dk]) {
        let (other, rows) = source(evidence, key)?;
        let declared = &evidence.reference().lse;
        let to = lse.entry(key.microbatch).or_insert_with(|| declared[&key.microbatch].clone());
        rows.iter().for_each(|&t| to[t] = declared[&other][t]);
        let [microbatch, other] = [key.microbatch, other].map(|mb| mb.map_or(0, |mb| mb.0));
        said.push(format!("microbatch {microbatch} reads that of microbatch {other}"));
    }
    said.dedup();
    let parameters = vec![("of", "dk".to_string()), ("lse", said.join(", "))];
    (!said.is_empty()).then(|| Hypothesis::new(ReadForK { lse }, parameters).fitted(said.len()))
}

/// The microbatch whose lse explains a dk, and the tokens that read it.
fn source(evidence: &Evidence<'_>, key: Key) -> Option<(Option<Microbatch>, Vec<usize>)> {
    let plane = evidence.plane(key)?;
    let captured = plane.dk(&*evidence.captured(key)?);
    let labels = plane.of_labels();
    let off = |lse: &dyn Fn(usize) -> f64| {
        let classes = plane.dense.cols.max(1);
        let rows = plane.dense.values.chunks(classes).zip(labels.values.chunks(classes));
        let entries = rows.enumerate().flat_map(|(at, (dense, labels))| {
            let times = (plane.lse[at] - lse(at)).exp();
            dense.iter().zip(labels).map(move |(dense, label)| times * dense + label)
        });
        let entries = Rows { cols: plane.dense.cols, values: entries.collect() };
        distance(&captured.values, &entries.transposed_times(&plane.q).values)
    };
    let declared = off(&|at| plane.lse[at]);
    let of_other = |other: &MicrobatchInputs| {
        let lse = evidence.reference().lse.get(&other.microbatch)?;
        let long = plane.rows.iter().all(|&t| t < lse.len());
        let is_candidate =
            key.microbatch != other.microbatch && long && !evidence.spend(plane.work());
        is_candidate.then(|| (off(&|at| lse[plane.rows[at]]), other.microbatch))
    };
    let all = evidence.inputs.iter().filter_map(of_other);
    let (left, other) = all.min_by(|a, b| a.0.total_cmp(&b.0))?;
    (left <= LEFT * declared).then(|| (other, plane.rows.clone()))
}

/// The backward of k reads another lse, `[T]` by microbatch.
struct ReadForK {
    lse: BTreeMap<Option<Microbatch>, Vec<f64>>,
}

impl World for ReadForK {
    fn speaks_of(&self, stage: Stage) -> bool {
        Part::of(stage) == Part::OfK
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if let (Pass::Backward, Some(read)) = (pass, self.lse.get(&inputs.microbatch)) {
            lse.copy_from_slice(read);
        }
    }
}
