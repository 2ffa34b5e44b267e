//! Part of `buffer-overwritten`: recorded logits that are no logits but their gradient times a
//! factor, `p - onehot`, or (log-)probabilities; or values that nothing after them was computed
//! from.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::assemble::Row;
use crate::diagnose::cause::Hypothesis;
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::detectors::fitted_numbers::rounded;
use crate::diagnose::detectors::reference::{Reference, reference};
use crate::diagnose::detectors::single_tokens::{Direct, tokens};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::kernels::TokenCotangents;
use crate::kernels::formula::probability;
use crate::kernels::transform::Transform;
use crate::replay::world::{Expectation, World};

/// A tensor is taken for another one if its squared distance is at most this share of the squared
/// norm.
pub(super) const SAME: f64 = 2e-3;
/// Factors this near to each other, relatively, count as equal, and a factor this near to 1 as
/// none.
const NEAR: f64 = 0.01;
/// A `[T, V]` tensor with more elements than this is not copied.
pub(super) const PLANE: usize = 1 << 25;

/// What recorded logits may hold, computed from a logit z, the token's lse and its cotangents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogitsContent {
    Gradient,
    /// `p - onehot`, before the token's weight and cotangent multiply it.
    Difference,
    /// The same, with zeros in the rows of tokens that do not count.
    Counted,
    Probabilities,
    LogProbabilities,
}

impl LogitsContent {
    const ALL: [LogitsContent; 5] = [
        LogitsContent::Gradient,
        LogitsContent::Counted,
        LogitsContent::Difference,
        LogitsContent::Probabilities,
        LogitsContent::LogProbabilities,
    ];

    fn name(self) -> &'static str {
        match self {
            LogitsContent::Gradient => "their gradient",
            LogitsContent::Difference | LogitsContent::Counted => {
                "p less 1 at the label, without the tokens' weights"
            }
            LogitsContent::Probabilities => "probabilities",
            LogitsContent::LogProbabilities => "log-probabilities",
        }
    }

    /// The value for a logit with its derivative, the token's lse and cotangents, and whether the
    /// class is the label.
    pub(super) fn of(
        self,
        (z, slope): (f64, f64),
        lse: f64,
        cotangents: TokenCotangents,
        label: bool,
    ) -> f64 {
        match self {
            LogitsContent::Counted if cotangents.lse == 0.0 => 0.0,
            LogitsContent::Difference | LogitsContent::Counted => {
                probability(z, lse) - f64::from(u8::from(label))
            }
            LogitsContent::Gradient => slope * cotangents.entry(probability(z, lse), label),
            LogitsContent::Probabilities => probability(z, lse),
            LogitsContent::LogProbabilities => z - lse,
        }
    }
}

pub(super) type Tokens<T> = BTreeMap<Option<Microbatch>, T>;

/// The hypotheses for captured logits that fail.
pub(super) fn of_logits(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let keys: Vec<Key> = evidence.failing_of(&[Stage::Logits]).map(|(key, _)| key).collect();
    let mut hypotheses = Vec::new();
    if keys.is_empty() {
        return hypotheses;
    }
    // The values that the job computed before the buffer was overwritten: with the lse of the right
    // logits, not of the captured ones.
    let right = ReplacedValues { distrusts: vec![Stage::Logits], ..ReplacedValues::default() };
    let reference = reference(evidence, Some(&right), evidence.rows.as_ref());
    for content in LogitsContent::ALL {
        let times_of = |key: &Key| logits_hold(evidence, &reference, *key, content);
        let Some(times) = keys.iter().map(times_of).collect::<Option<Vec<f64>>>() else { continue };
        // All microbatches must have one factor, which multiplies the gradient afterwards.
        let times = times.iter().all(|x| (x / times[0] - 1.0).abs() < NEAR).then_some(times[0]);
        let Some(times) = times.map(power_of_two) else { continue };
        let labels =
            evidence.inputs.iter().map(|inputs| (inputs.microbatch, inputs.labels.clone()));
        let world = LogitsHold {
            content,
            times,
            labels: labels.collect(),
            lse: reference.lse.clone(),
            cotangents: reference.cotangents.clone(),
            transform: evidence.step.options.transform,
        };
        let mut holds = content.name().to_string();
        if times != 1.0 {
            holds.push_str(&format!(", times {}", rounded(times, 3)));
        }
        let parameters = vec![("tensor", "logits".to_string()), ("holds", holds)];
        hypotheses.push(Hypothesis::new(world, parameters).fitted(usize::from(times != 1.0)));
        return hypotheses;
    }
    hypotheses.extend(not_theirs(evidence, &keys, &right));
    hypotheses
}

/// The power of two that a factor is near, or the factor itself. A loss scale is a power of two,
/// and values of few bits do not show it exactly.
fn power_of_two(times: f64) -> f64 {
    let near = times.abs().log2().round().exp2().copysign(times);
    if (near / times - 1.0).abs() < NEAR { near } else { times }
}

/// The hypothesis that nothing was computed from the recorded logits: every failing gradient passes
/// with logits computed from q and k.
fn not_theirs(evidence: &Evidence<'_>, keys: &[Key], right: &ReplacedValues) -> Option<Hypothesis> {
    let follow = |key: &&Key| key.stage.is_gradient();
    let rest: Vec<&Key> = evidence.failing.iter().filter(follow).collect();
    let captured_plane = |key: &Key| {
        let captured = evidence.captured(*key).filter(|values| values.values.len() <= PLANE)?;
        let values: Vec<f32> = captured.values.iter().map(|&x| x as f32).collect();
        Some((*key, (captured.columns, values)))
    };
    if rest.is_empty() {
        return None;
    }
    let all = evidence.residuals_in(right)?;
    let passes = |key: &&Key| all.get(key).is_some_and(|residual| residual.passes);
    if !rest.iter().all(passes) {
        return None;
    }
    let world = NotTheirs { planes: keys.iter().map(captured_plane).collect::<Option<_>>()? };
    let holds = "something else: what follows was computed from the logits of q and k".to_string();
    let parameters = vec![("tensor", "logits".to_string()), ("holds", holds)];
    Some(Hypothesis::new(world, parameters))
}

/// The recorded logits are taken as captured, and everything after them is computed from q and k.
struct NotTheirs {
    /// The number of columns, and all values.
    planes: BTreeMap<Key, (usize, Vec<f32>)>,
}

impl World for NotTheirs {
    fn trusts(&self, stage: Stage, _microbatch: Option<Microbatch>) -> bool {
        stage != Stage::Logits
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let key = Key {
            stage: expectation.place.stage,
            microbatch: expectation.place.microbatch,
            rank: expectation.place.rank,
        };
        let Some((columns, values)) = self.planes.get(&key) else { return };
        for (&row, to) in
            expectation.rows.iter().zip(expectation.values.chunks_mut(expectation.columns.max(1)))
        {
            let captured = &values[row * columns..];
            to.iter_mut().zip(captured).for_each(|(to, &x)| *to = f64::from(x));
        }
    }
}

/// The factor with which a few tokens' captured logits are this kind of value; none where they are
/// not.
fn logits_hold(
    evidence: &Evidence<'_>,
    reference: &Reference,
    key: Key,
    content: LogitsContent,
) -> Option<f64> {
    let inputs = evidence.inputs_of(key.microbatch)?;
    let (captured, direct) = (evidence.captured(key)?, Direct::new(evidence, inputs)?);
    let cotangents = reference.cotangents.get(&key.microbatch)?;
    let all = tokens(evidence, inputs);
    let few = all.iter().copied().step_by(all.len().div_ceil(16).max(1));
    // Rows of tokens that do not count distinguish the kinds.
    let blank =
        cotangents.iter().filter(|(_, cotangents)| cotangents.lse == 0.0).map(|(&t, _)| t).take(2);
    let (mut both, mut size, mut captured_energy) = (0.0, 0.0, 0.0);
    for t in few.chain(blank) {
        // The row's own lse, computed from q and k; the replay's would come from the captured
        // logits.
        let row = direct.against(&direct.q(Row::From(t)), &Row::From);
        let own_cotangents = *cotangents.get(&t)?;
        for (v, &z) in row.logits.iter().enumerate() {
            let label = inputs.labels[t] as usize == v;
            let x =
                content.of((z, direct.head.transform.slope_at(z)), row.lse, own_cotangents, label);
            let captured = captured.row(t)[v];
            both += captured * x;
            captured_energy += captured * captured;
            size += x * x;
        }
    }
    let times = both / size;
    let times = match content {
        // A gradient may lack the loss scale, or the division of a mean that is taken later.
        LogitsContent::Gradient | LogitsContent::Difference | LogitsContent::Counted
            if (times - 1.0).abs() > NEAR =>
        {
            times
        }
        _ => 1.0,
    };
    let off = captured_energy - 2.0 * times * both + times * times * size;
    (size > 0.0 && off <= SAME * times * times * size).then_some(times)
}

struct LogitsHold {
    content: LogitsContent,
    times: f64,
    labels: Tokens<Vec<u32>>,
    lse: Tokens<Vec<f64>>,
    cotangents: Tokens<BTreeMap<usize, TokenCotangents>>,
    transform: Transform,
}

impl World for LogitsHold {
    fn trusts(&self, stage: Stage, _microbatch: Option<Microbatch>) -> bool {
        stage != Stage::Logits
    }

    fn expected(&self, expectation: &mut Expectation<'_>) {
        let mb = &expectation.place.microbatch;
        if expectation.place.stage != Stage::Logits {
            return;
        }
        let (Some(labels), Some(lse), Some(cotangents)) =
            (self.labels.get(mb), self.lse.get(mb), self.cotangents.get(mb))
        else {
            return;
        };
        for (&t, row) in
            expectation.rows.iter().zip(expectation.values.chunks_mut(expectation.columns.max(1)))
        {
            let upstream = cotangents.get(&t).copied().unwrap_or_default();
            for (v, z) in row.iter_mut().enumerate() {
                let label = labels[t] as usize == v;
                let value =
                    self.content.of((*z, self.transform.slope_at(*z)), lse[t], upstream, label);
                *z = self.times * value;
            }
        }
    }
}
