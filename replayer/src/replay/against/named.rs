//! Tensors that have no part in the loss head, matched by name, microbatch and
//! moment: layer activations, their gradients, weights, anything a job records.
//!
//! Equal bits pass. NaN, a wrong infinity or another shape fails: no rounding makes them.
//! What is a product of two tensors that were recorded, too, has a bound and is judged by
//! it (`products`). Of everything else nothing is known of how it was computed, so there
//! is no bound to derive and none is made up: it is a `warn`, and what is stated beside it
//! is how far rounding alone could have come:
//!
//! - Each tensor so far, in each of the two runs, was rounded to its dtype (unit
//!   roundoff `u`) and summed in f32 over about its last dimension `D`. Errors of
//!   `2k` independent roundings grow like a random walk (Higham and Mary 2019):
//!   `√(2k (u² + D u_f32²))` after `k` tensors of a microbatch.
//! - The first tensor beyond that is the likely first divergence; so is the first
//!   that differs by more than `u` and by `JUMP` times more units than any
//!   tensor before it: an error that was carried along grows slowly, one that
//!   enters jumps.
//!
//! It is a pointer for the eye. A warn says that the runs differ, and no more.

use backtape::identity::Microbatch;
use backtape::role::Role;
use backtape::shard::{TensorKey, When};
use serde::Serialize;

use super::error::AgainstError;
use super::products::{self, Judged, Products};
use super::side::Side;
use super::view::View;
use super::walk::walk;
use crate::compare::measures::Summary;
use crate::compare::pair::Compared;
use crate::dump::{StepDump, TensorInfo};
use crate::head::roundings::{F32, unit_of};
use crate::replay::outcome::Status;

/// How many times more units of rounding than any tensor before is a jump.
const JUMP: f64 = 10.0;

/// One tensor in both runs, compared by name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NamedDifference {
    /// The tensor, with its microbatch and moment.
    pub tensor: String,
    /// Its microbatch.
    pub microbatch: Option<Microbatch>,
    /// True for what is made in the backward.
    pub gradient: bool,
    /// `pass` for equal bits and for what each run's own operands give, `warn` where they
    /// differ, `fail` where no rounding can be the reason.
    pub status: Status,
    /// Why it fails, or why it passes though the bits differ.
    pub reason: String,
    /// Its dtype in this run.
    pub dtype: &'static str,
    /// Relative difference in the Frobenius norm.
    pub difference: f64,
    /// Unit roundoff of the dtype, the coarser one of the two runs.
    pub unit: f64,
    /// How far roundings alone come by here.
    pub expected: f64,
    /// Units of rounding over the most of any tensor before it; none before the
    /// first that differs.
    pub growth: Option<f64>,
    /// The measures that other tools have too.
    pub measures: Summary,
}

/// Tensors to compare by name, in the order in which they were captured.
pub(super) fn in_order<'a>(
    side: &Side<'a>,
    wanted: impl Fn(&TensorKey) -> bool,
) -> Vec<&'a TensorKey> {
    let matching = side.tensors().filter(|(key, _)| wanted(key));
    let mut keys: Vec<_> = matching.map(|(key, info)| (moment(key, info), key)).collect();
    keys.sort();
    keys.into_iter().map(|(_, key)| key).collect()
}

/// When a tensor was captured, as far as the dump says: activations before
/// gradients; parameters before the first microbatch, their gradients after the
/// last; then the order of the records in a rank's file, which is the order in
/// which the rank recorded them, the lowest rank that holds the tensor first.
fn moment(key: &TensorKey, info: &TensorInfo) -> impl Ord {
    let gradient = is_gradient(key, info);
    let microbatch = match (key.microbatch, gradient) {
        (Some(mb), _) => u64::from(mb.0) + 1,
        (None, false) => 0,
        (None, true) => u64::MAX,
    };
    (gradient, microbatch, info.shards.first().map(|shard| (shard.file, shard.index)))
}

/// By role or moment where there is one, else by name: a word of it is `grad`.
fn is_gradient(key: &TensorKey, info: &TensorInfo) -> bool {
    let words = ["grad", "grads", "gradient", "gradients", "dgrad", "wgrad"];
    let name = key.tensor.as_str().to_ascii_lowercase();
    let reduced = matches!(key.when, Some(When::PreReduce | When::PostReduce));
    info.role.is_some_and(|role| role >= Role::Dlogprobs)
        || reduced
        || name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| words.contains(&word))
}

/// Compares tensors that both runs hold, one after the other.
pub(super) fn compare<'a>(
    this_run: &'a Side<'a>,
    other_run: &'a Side<'a>,
    keys: &[&'a TensorKey],
) -> Result<Vec<NamedDifference>, AgainstError> {
    let mut differences = Vec::new();
    let (mut ours, mut theirs) = (Products::of(this_run), Products::of(other_run));
    let (mut most, mut depth) = (0.0f64, 0u32);
    let mut microbatch = None;
    for &key in keys {
        // Each microbatch walks through the model anew.
        depth = if microbatch == Some(key.microbatch) { depth + 1 } else { 1 };
        microbatch = Some(key.microbatch);
        let mut difference = compare_one(this_run.dump, other_run.dump, key, depth)?;
        if difference.status == Status::Warn {
            match products::judge(&mut ours, &mut theirs, key) {
                Some(Judged::Wrong(why)) => {
                    (difference.status, difference.reason) = (Status::Fail, why);
                }
                Some(Judged::Explained(why)) => {
                    (difference.status, difference.reason) = (Status::Pass, why);
                }
                None => {}
            }
        }
        let units = difference.difference / difference.unit;
        if difference.status != Status::Pass && most > 0.0 {
            difference.growth = Some(units / most);
        }
        if units.is_finite() {
            most = most.max(units);
        }
        differences.push(difference);
    }
    Ok(differences)
}

fn compare_one(
    this_run: &StepDump,
    other_run: &StepDump,
    key: &TensorKey,
    depth: u32,
) -> Result<NamedDifference, AgainstError> {
    // Both dumps know the key, each by its own copy of it.
    let (info, theirs_info) = (&this_run.tensors()[key], &other_run.tensors()[key]);
    let (ours, theirs) = (View::of(this_run, key), View::of(other_run, key));
    let same_shape = (ours.columns, ours.elements()) == (theirs.columns, theirs.elements());
    let compared = if same_shape {
        let wrong = |source| AgainstError::Assemble { key: key.clone(), source };
        walk(&ours, &theirs).map_err(wrong)?
    } else {
        Compared::default()
    };
    let unit = unit_of(info.dtype).max(unit_of(theirs_info.dtype));
    let sum = ours.columns as f64 * F32.min(unit).powi(2);
    let expected = (2.0 * f64::from(depth) * (unit * unit + sum)).sqrt();
    let (status, reason) = if !same_shape {
        (
            Status::Fail,
            format!("shape {:?} here, {:?} in the other run", info.shape, theirs_info.shape),
        )
    } else {
        judge(&compared, info.dtype == theirs_info.dtype)
    };
    Ok(NamedDifference {
        tensor: key.to_string(),
        microbatch: key.microbatch,
        gradient: is_gradient(key, info),
        status,
        reason,
        dtype: info.dtype.name(),
        difference: if same_shape { compared.difference() } else { f64::INFINITY },
        unit,
        expected,
        growth: None,
        measures: compared.summary(),
    })
}

fn judge(compared: &Compared, same_dtype: bool) -> (Status, String) {
    match compared {
        c if c.nonfinite > 0 => {
            let n = c.nonfinite;
            (Status::Fail, format!("{n} values are NaN, or infinite in one run alone"))
        }
        c if c.measures.mismatches == 0 && same_dtype => (Status::Pass, String::new()),
        c if c.measures.mismatches == 0 && c.difference() == 0.0 => {
            (Status::Pass, "the same values in two dtypes".into())
        }
        _ => (Status::Warn, String::new()),
    }
}

impl NamedDifference {
    /// True when it differs by more than rounding is likely to have made of it.
    fn stands_out(&self) -> bool {
        match self.status {
            Status::Fail => true,
            Status::Warn => {
                let jump = self.growth.is_some_and(|growth| !(growth <= JUMP));
                !(self.difference <= self.expected) || (jump && !(self.difference <= self.unit))
            }
            Status::Pass | Status::Skip => false,
        }
    }
}

/// The likely first divergence, and why it is taken for that.
pub(super) fn likely(differences: &[NamedDifference]) -> Option<(usize, String)> {
    let index = differences.iter().position(NamedDifference::stands_out)?;
    let first = &differences[index];
    let why = match (first.status, first.growth) {
        (Status::Fail, _) => first.reason.clone(),
        _ if !(first.difference <= first.expected) => format!(
            "it differs by {:.1e}, roundings of {} alone come to {:.1e} by here",
            first.difference, first.dtype, first.expected
        ),
        (_, growth) => format!(
            "it differs by {:.1e}, {:.0} times more units of rounding than any tensor before it",
            first.difference,
            growth.unwrap_or(f64::INFINITY)
        ),
    };
    Some((index, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differences(differences: &[f64]) -> Vec<NamedDifference> {
        let unit = 1.0 / 256.0;
        let mut most = 0.0f64;
        let difference_of_layer = |(k, &difference): (usize, &f64)| {
            let growth = (most > 0.0).then(|| difference / unit / most);
            most = most.max(difference / unit);
            NamedDifference {
                tensor: format!("layers.{k}"),
                microbatch: None,
                gradient: false,
                status: if difference == 0.0 { Status::Pass } else { Status::Warn },
                reason: String::new(),
                dtype: "bf16",
                difference,
                unit,
                expected: unit * (2.0 * (k as f64 + 1.0)).sqrt(),
                growth,
                measures: Summary::default(),
            }
        };
        differences.iter().enumerate().map(difference_of_layer).collect()
    }

    #[test]
    fn an_error_that_grows_like_a_random_walk_points_at_nothing() {
        assert_eq!(likely(&differences(&[0.0, 3e-3, 4e-3, 5e-3, 6e-3])), None);
        assert_eq!(
            likely(&differences(&[0.0, 1e-7, 3e-3, 4e-3])),
            None,
            "one flipped element spreads"
        );
    }

    #[test]
    fn the_first_that_leaves_the_walk_or_jumps_is_the_likely_one() {
        assert_eq!(likely(&differences(&[0.0, 3e-3, 9e-2, 9e-2])).unwrap().0, 2);
        assert_eq!(likely(&differences(&[1e-4, 2e-4, 5e-3, 5e-3])).unwrap().0, 2);
        assert_eq!(likely(&differences(&[f64::NAN, 1.0])).unwrap().0, 0, "NaN is within no bound");
    }
}
