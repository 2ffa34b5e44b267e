//! Advantages, or log-probabilities of the old or the reference policy, that are taken of other
//! tokens: of neighbours, or of other sequences than the token's own; or log-probabilities that are
//! those of another policy, as where the ratio is taken to the policy itself.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;
use backtape::role::Role;

use super::policy_terms::logprobs;
use crate::diagnose::cause::Hypothesis;
use crate::diagnose::detectors::token_runs::{TokenRuns, known};
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::World;

/// Places that a column may be off by.
const MOVES: [isize; 2] = [1, -1];

/// One column of a policy loss, as tokens of other places have it.
struct MovedTokens {
    of: Role,
    /// The token whose value each takes, none for 0.
    from: From,
}

/// Where each token's value is taken, by microbatch.
type From = BTreeMap<Option<Microbatch>, Vec<Option<usize>>>;

impl World for MovedTokens {
    fn policy_column(&self, of: Role, inputs: &MicrobatchInputs, values: &mut [f64]) {
        let Some(from) = self.from.get(&inputs.microbatch).filter(|_| of == self.of) else {
            return;
        };
        let own = values.to_vec();
        for (to, from) in values.iter_mut().zip(from) {
            *to = from.map_or(0.0, |from| own[from]);
        }
    }
}

/// Log-probabilities of one policy, as another policy has them.
struct Exchanged {
    of: Role,
    /// `[T]` by microbatch.
    by: BTreeMap<Option<Microbatch>, Vec<f64>>,
}

impl World for Exchanged {
    fn policy_column(&self, of: Role, inputs: &MicrobatchInputs, values: &mut [f64]) {
        if let Some(by) = self.by.get(&inputs.microbatch).filter(|_| of == self.of) {
            values.copy_from_slice(by);
        }
    }
}

/// The policy's own log-probabilities, or the other policy's, in the place of one policy's.
fn exchanged(evidence: &Evidence<'_>, of: Role) -> Vec<Hypothesis> {
    let column = |role: Role, one: &MicrobatchInputs| {
        evidence.step.optional(role, one.microbatch, one.tokens()).ok().flatten()
    };
    let other = if of == Role::OldLogprobs { Role::RefLogprobs } else { Role::OldLogprobs };
    let own = |one: &MicrobatchInputs| logprobs(evidence, one);
    let of_other = |one: &MicrobatchInputs| column(other, one);
    let sources: [(&str, OfMicrobatch<'_>); 2] =
        [("policy's own log-probabilities", &own), (words_of(other), &of_other)];
    let one = |(words, values): (&str, OfMicrobatch<'_>)| {
        let values = |inputs: &MicrobatchInputs| Some((inputs.microbatch, values(inputs)?));
        let by = evidence.inputs.iter().map(values).collect::<Option<_>>()?;
        let words = format!("with the {words} in the place of the {}", words_of(of));
        Some(Hypothesis::new(Exchanged { of, by }, vec![("each token counts", words)]))
    };
    sources.into_iter().filter_map(one).collect()
}

/// `[T]` of a microbatch.
type OfMicrobatch<'a> = &'a dyn Fn(&MicrobatchInputs) -> Option<Vec<f64>>;

fn words_of(column: Role) -> &'static str {
    match column {
        Role::OldLogprobs => "old policy's log-probabilities",
        _ => "reference policy's log-probabilities",
    }
}

/// Every column in every other place, where the step has a policy loss that is not right.
pub(super) fn hypotheses(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let stages = [&Stage::GRADIENTS[..], &[Stage::Loss, Stage::Dlogprobs]].concat();
    if !evidence.step.is_policy_loss() || !evidence.fails_any(&stages) {
        return Vec::new();
    }
    let held = |role: &Role| evidence.step.tensors.values().any(|info| info.role == Some(*role));
    let columns = [Role::Advantages, Role::OldLogprobs, Role::RefLogprobs];
    let kinds = evidence.inputs.first().map_or(0, |one| known(evidence.step, one).len());
    let mut found = Vec::new();
    for of in columns.into_iter().filter(held) {
        // In the backward alone it is another ratio there.
        if of != Role::Advantages && evidence.fails(Stage::Loss) {
            found.extend(exchanged(evidence, of));
        }
        for kind in 0..kinds {
            for by in MOVES {
                found.extend(neighbours(evidence, of, (kind, by, true)));
                found.extend(neighbours(evidence, of, (kind, by, false)));
            }
            for order in Order::ALL {
                found.extend(sequences(evidence, of, (kind, order)));
            }
        }
    }
    found
}

fn hypothesis(of: Role, from: From, words: String) -> Hypothesis {
    let column = of.name().replace('_', " ");
    let words = format!("with the {column} of {words}");
    Hypothesis::new(MovedTokens { of, from }, vec![("each token counts", words)])
}

/// Those of the token before or after.
fn neighbours(
    evidence: &Evidence<'_>,
    of: Role,
    (kind, by, around): (usize, isize, bool),
) -> Option<Hypothesis> {
    let (mut from, mut name) = (From::new(), String::new());
    for one in evidence.inputs {
        let (n, extent) = (one.tokens(), known(evidence.step, one).into_iter().nth(kind)?);
        let places = match around {
            true => extent.rolled(n, by).into_iter().map(Some).collect(),
            false => extent.shifted(n, by),
        };
        from.insert(one.microbatch, places);
        name = extent.name;
    }
    let ends = if around { "around the end" } else { "none beyond the end" };
    let next = if by > 0 { "after" } else { "before" };
    Some(hypothesis(of, from, format!("the token {next} it in {name}, {ends}")))
}

/// Which sequence's values a token takes of those that lie together.
#[derive(Clone, Copy)]
enum Order {
    /// The first token has the first sequence's, the second token the second's, and so on: the
    /// values were tiled, and not repeated for each sequence's own tokens.
    Tiled,
    /// Those of the sequence before.
    Before,
    /// Those of the sequence after.
    After,
    /// In the other direction.
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

    /// The token of a run of sequences that stands for another.
    fn from(self, at: usize, [sequences, length]: [usize; 2]) -> usize {
        let (own, inside) = (at / length, at % length);
        let of = |sequence: usize| sequence % sequences * length + inside;
        match self {
            Order::Tiled => (at % sequences) * length,
            Order::Before => of(own + sequences - 1),
            Order::After => of(own + 1),
            Order::Reversed => of(sequences - 1 - own),
        }
    }
}

/// Those of other sequences of the same run; `None` where runs are not whole sequences, or hold
/// one alone.
fn sequences(
    evidence: &Evidence<'_>,
    of: Role,
    (kind, order): (usize, Order),
) -> Option<Hypothesis> {
    let (mut from, mut name) = (From::new(), String::new());
    for one in evidence.inputs {
        let length = one.sequence.max(1);
        let TokenRuns { name: of_runs, runs } = known(evidence.step, one).into_iter().nth(kind)?;
        let mut places: Vec<Option<usize>> = vec![None; one.tokens()];
        for run in &runs {
            if run.len() % length != 0 || run.len() < 2 * length {
                return None;
            }
            let shape = [run.len() / length, length];
            for (at, &t) in run.iter().enumerate() {
                places[t] = Some(run[order.from(at, shape)]);
            }
        }
        from.insert(one.microbatch, places);
        name = of_runs;
    }
    Some(hypothesis(of, from, format!("{}, in {name}", order.words())))
}
