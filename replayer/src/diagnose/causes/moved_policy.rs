//! A policy loss that reads advantages, or log-probabilities of the old or the reference policy,
//! from other tokens: from neighbours, or from other sequences. Or one that reads the
//! log-probabilities of another policy, for example its own, so that the ratio is always 1.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;
use backtape::role::Role;

use super::policy_terms::logprobs;
use crate::diagnose::cause::Hypothesis;
use crate::diagnose::detectors::token_runs::{TokenRuns, known};
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::World;

/// By how many positions a column may be shifted.
const MOVES: [isize; 2] = [1, -1];

/// One input column of a policy loss, read from other tokens.
struct MovedColumn {
    role: Role,
    /// The token whose value each token reads; none for 0.
    from: From,
}

/// The token that each token's value is read from, by microbatch.
type From = BTreeMap<Option<Microbatch>, Vec<Option<usize>>>;

impl World for MovedColumn {
    fn policy_column(&self, role: Role, inputs: &MicrobatchInputs, values: &mut [f64]) {
        let Some(from) = self.from.get(&inputs.microbatch).filter(|_| role == self.role) else {
            return;
        };
        let declared = values.to_vec();
        for (to, from) in values.iter_mut().zip(from) {
            *to = from.map_or(0.0, |from| declared[from]);
        }
    }
}

/// The log-probabilities of one policy are replaced by those of another.
struct OtherPolicyLogprobs {
    role: Role,
    /// The other policy's log-probabilities, `[T]` by microbatch.
    by: BTreeMap<Option<Microbatch>, Vec<f64>>,
}

impl World for OtherPolicyLogprobs {
    fn policy_column(&self, role: Role, inputs: &MicrobatchInputs, values: &mut [f64]) {
        if let Some(by) = self.by.get(&inputs.microbatch).filter(|_| role == self.role) {
            values.copy_from_slice(by);
        }
    }
}

/// The hypotheses that the old (or reference) policy's log-probabilities are replaced by the
/// policy's own, or by the other one's.
fn with_other_policys_logprobs(evidence: &Evidence<'_>, replaced: Role) -> Vec<Hypothesis> {
    let column = |role: Role, inputs: &MicrobatchInputs| {
        evidence.step.optional(role, inputs.microbatch, inputs.tokens()).ok().flatten()
    };
    let other = if replaced == Role::OldLogprobs { Role::RefLogprobs } else { Role::OldLogprobs };
    let own_logprobs = |inputs: &MicrobatchInputs| logprobs(evidence, inputs);
    let of_other = |inputs: &MicrobatchInputs| column(other, inputs);
    let sources: [(&str, OfMicrobatch<'_>); 2] =
        [("policy's own log-probabilities", &own_logprobs), (words_of(other), &of_other)];
    let hypothesis_of = |(words, values): (&str, OfMicrobatch<'_>)| {
        let values = |inputs: &MicrobatchInputs| Some((inputs.microbatch, values(inputs)?));
        let by = evidence.inputs.iter().map(values).collect::<Option<_>>()?;
        let words = format!("with the {words} in the place of the {}", words_of(replaced));
        Some(Hypothesis::new(
            OtherPolicyLogprobs { role: replaced, by },
            vec![("each token counts", words)],
        ))
    };
    sources.into_iter().filter_map(hypothesis_of).collect()
}

/// Gives a column of a microbatch, `[T]`.
type OfMicrobatch<'a> = &'a dyn Fn(&MicrobatchInputs) -> Option<Vec<f64>>;

fn words_of(column: Role) -> &'static str {
    match column {
        Role::OldLogprobs => "old policy's log-probabilities",
        _ => "reference policy's log-probabilities",
    }
}

/// The hypotheses for every column and every other place, where the step has a policy loss that
/// fails.
pub(super) fn hypotheses(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let stages = [&Stage::GRADIENTS[..], &[Stage::Loss, Stage::Dlogprobs]].concat();
    if !evidence.step.is_policy_loss() || !evidence.fails_any(&stages) {
        return Vec::new();
    }
    let is_recorded =
        |role: &Role| evidence.step.tensors.values().any(|info| info.role == Some(*role));
    let columns = [Role::Advantages, Role::OldLogprobs, Role::RefLogprobs];
    let kinds = evidence.inputs.first().map_or(0, |inputs| known(evidence.step, inputs).len());
    let mut hypotheses = Vec::new();
    for role in columns.into_iter().filter(is_recorded) {
        // Where the loss agrees, only the backward is wrong, and `policy_terms` tries another ratio
        // there.
        if role != Role::Advantages && evidence.fails(Stage::Loss) {
            hypotheses.extend(with_other_policys_logprobs(evidence, role));
        }
        for kind in 0..kinds {
            for by in MOVES {
                hypotheses.extend(neighbours(evidence, role, (kind, by, true)));
                hypotheses.extend(neighbours(evidence, role, (kind, by, false)));
            }
            for order in Order::ALL {
                hypotheses.extend(sequences(evidence, role, (kind, order)));
            }
        }
    }
    hypotheses
}

fn hypothesis(role: Role, from: From, words: String) -> Hypothesis {
    let column = role.name().replace('_', " ");
    let words = format!("with the {column} of {words}");
    Hypothesis::new(MovedColumn { role, from }, vec![("each token counts", words)])
}

/// The hypothesis that each token reads the value of the token before or after it.
fn neighbours(
    evidence: &Evidence<'_>,
    role: Role,
    (kind, by, around): (usize, isize, bool),
) -> Option<Hypothesis> {
    let (mut from, mut name) = (From::new(), String::new());
    for inputs in evidence.inputs {
        let (n, extent) = (inputs.tokens(), known(evidence.step, inputs).into_iter().nth(kind)?);
        let places = match around {
            true => extent.rolled(n, by).into_iter().map(Some).collect(),
            false => extent.shifted(n, by),
        };
        from.insert(inputs.microbatch, places);
        name = extent.name;
    }
    let ends = if around { "around the end" } else { "none beyond the end" };
    let next = if by > 0 { "after" } else { "before" };
    Some(hypothesis(role, from, format!("the token {next} it in {name}, {ends}")))
}

/// Which sequence's values a token reads, among the sequences of one run.
#[derive(Clone, Copy)]
enum Order {
    /// The first token reads the first sequence's value, the second token the second's, and so on:
    /// per-sequence values were tiled instead of repeated for each token of a sequence.
    Tiled,
    /// That of the sequence before.
    Before,
    /// That of the sequence after.
    After,
    /// That of the sequence in reversed order.
    Reversed,
}

impl Order {
    const ALL: [Order; 4] = [Order::Tiled, Order::Before, Order::After, Order::Reversed];

    fn words(self) -> &'static str {
        match self {
            Order::Tiled => "the sequences in turn, one token each",
            Order::Before => "the sequence before its own",
            Order::After => "the sequence after its own",
            Order::Reversed => "the sequence that lies as far from the other end",
        }
    }

    /// The position in a run of sequences from which `position` reads.
    fn from(self, position: usize, [sequences, length]: [usize; 2]) -> usize {
        let (sequence_here, inside) = (position / length, position % length);
        let place = |sequence: usize| sequence % sequences * length + inside;
        match self {
            Order::Tiled => (position % sequences) * length,
            Order::Before => place(sequence_here + sequences - 1),
            Order::After => place(sequence_here + 1),
            Order::Reversed => place(sequences - 1 - sequence_here),
        }
    }
}

/// The hypothesis that each token reads the value of another sequence of the same run; `None` where
/// runs are not whole sequences, or hold only one.
fn sequences(
    evidence: &Evidence<'_>,
    role: Role,
    (kind, order): (usize, Order),
) -> Option<Hypothesis> {
    let (mut from, mut name) = (From::new(), String::new());
    for inputs in evidence.inputs {
        let length = inputs.sequence.max(1);
        let TokenRuns { name: of_runs, runs } =
            known(evidence.step, inputs).into_iter().nth(kind)?;
        let mut places: Vec<Option<usize>> = vec![None; inputs.tokens()];
        for run in &runs {
            if run.len() % length != 0 || run.len() < 2 * length {
                return None;
            }
            let shape = [run.len() / length, length];
            for (position, &t) in run.iter().enumerate() {
                places[t] = Some(run[order.from(position, shape)]);
            }
        }
        from.insert(inputs.microbatch, places);
        name = of_runs;
    }
    Some(hypothesis(role, from, format!("{}, in {name}", order.words())))
}
