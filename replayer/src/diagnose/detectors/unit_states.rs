//! What each unit's backward starts from: lse and cotangents of its tokens, as a trial with a
//! recording world shows them; and the unit's captured gradients.

use std::collections::BTreeMap;
use std::sync::Mutex;

use backtape::identity::{Microbatch, Rank};

use crate::assemble::Tensor;
use crate::diagnose::detectors::captured;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{HeadStep, MicrobatchInputs, Scores, Stage};
use crate::kernels::matrix::{Cotangents, HeadInputs, IGNORED};
use crate::kernels::policy::{self, Path, Policy};
use crate::kernels::transform::Transform;
use crate::kernels::{NoProgress, Tiles, TokenCotangents};
use crate::replay::gathered_rows::Gathered;
use crate::replay::trial::{Rows, counted_trial};
use crate::replay::world::{UnitTokens, World};

/// The tokens of a unit, with what their backward starts from.
#[derive(Default)]
pub struct UnitState {
    /// Which microbatch.
    pub microbatch: Option<Microbatch>,
    /// The first rank of the unit.
    pub rank: Option<Rank>,
    /// The ranks that hold its addends together; none for all tokens of the microbatch.
    ranks: Vec<Rank>,
    /// Its tokens among those of the microbatch.
    pub rows: Vec<usize>,
    /// lse as the backward reads it, `[n]`.
    pub lse: Vec<f64>,
    /// Upstream gradient of each token's nll, `[n]`.
    pub g: Vec<f64>,
    /// Cotangents of lse, of the label's logit and of all logits, `[n]` each.
    pub cotangents: [Vec<f64>; 3],
}

/// A world that changes nothing and records what the backward is given.
#[derive(Default)]
struct Recorder {
    seen: Mutex<States>,
}

/// By microbatch and first rank.
type States = BTreeMap<(Option<Microbatch>, Option<Rank>), UnitState>;

impl World for Recorder {
    fn cotangents(&self, tokens: &UnitTokens<'_>, [lse, label, smooth]: [&mut [f64]; 3]) {
        let microbatch = tokens.inputs.microbatch;
        let state = UnitState {
            microbatch,
            rank: tokens.rank,
            ranks: Vec::new(),
            rows: tokens.rows.to_vec(),
            lse: tokens.lse.to_vec(),
            g: tokens.g.to_vec(),
            cotangents: [lse.to_vec(), label.to_vec(), smooth.to_vec()],
        };
        let Ok(mut seen) = self.seen.lock() else { return };
        let place = seen.entry((microbatch, tokens.rank));
        let kept = place.or_default();
        // Some stages compare only a sample of the unit's tokens; the most complete state is kept.
        if state.rows.len() > kept.rows.len() {
            *kept = state;
        }
    }
}

/// Every unit of the step, in the evidence's background; empty where the step cannot be replayed in
/// it.
pub fn units(evidence: &Evidence<'_>) -> Vec<UnitState> {
    let recorder = Recorder::default();
    let mut worlds = evidence.background.clone();
    worlds.push(&recorder);
    let of_microbatch = |inputs: &MicrobatchInputs| (inputs.microbatch, vec![0]);
    let rows =
        Rows { tokens: evidence.inputs.iter().map(of_microbatch).collect(), classes: vec![0] };
    let wanted = [Stage::Lse, Stage::DqLse, Stage::DqLabel, Stage::Dq, Stage::Dlogits];
    // A gradient of k is a sum over all tokens of a unit, so replaying it shows all of them. Where
    // dk was recorded only as sums, only the stages of the sums replay it.
    let of_all = [Stage::DkLse, Stage::DkLabel, Stage::Dk, Stage::Accumulate, Stage::Reduce];
    let wanted = wanted.into_iter().chain(of_all).collect();
    let with = (Some(&rows), evidence.cache(), evidence.progress());
    if counted_trial(evidence.step, &wanted, &worlds, with).is_err() {
        return Vec::new();
    }
    let seen = recorder.seen.into_inner().unwrap_or_default();
    let of_ranks = |mb| seen.keys().any(|&(microbatch, rank)| microbatch == mb && rank.is_some());
    let whole: Vec<bool> = seen.keys().map(|&(mb, _)| !of_ranks(mb)).collect();
    let kept = seen.into_values().zip(whole);
    // dlogits are compared over all tokens of a microbatch at once; that state is dropped where
    // there are units of ranks.
    let kept = kept.filter(|(unit, whole)| unit.rank.is_some() || *whole).map(|(unit, _)| unit);
    let ranked = |unit: UnitState| {
        let (microbatch, rank) = (unit.microbatch, unit.rank);
        let key = Key { stage: Stage::Dk, microbatch, rank };
        let ranks = captured::unit(evidence.step, evidence.inputs, key).map(|unit| unit.ranks);
        UnitState { ranks: ranks.unwrap_or_default(), ..unit }
    };
    kept.map(ranked).collect()
}

/// Some tokens and some classes, with everything that their entries of dlogits are computed from.
pub struct Part {
    q: Gathered,
    k: Gathered,
    labels: Vec<u32>,
    bias: Option<Vec<f64>>,
    valid: usize,
    transform: Transform,
    lse: Vec<f64>,
    cotangents: [Vec<f64>; 3],
}

impl UnitState {
    /// The inputs of the unit's microbatch.
    pub fn inputs<'e>(&self, evidence: &Evidence<'e>) -> Option<&'e MicrobatchInputs> {
        evidence.inputs.iter().find(|inputs| inputs.microbatch == self.microbatch)
    }

    /// Some of the unit's tokens (indices into its rows) and some classes, both ascending; `None`
    /// where there are no q and k. `labelled`: whether entries include the label's part.
    pub fn part(
        &self,
        evidence: &Evidence<'_>,
        tokens: &[usize],
        classes: &[usize],
        labelled: bool,
    ) -> Option<Part> {
        let inputs = self.inputs(evidence)?;
        let Scores::Product { .. } = inputs.scores else { return None };
        let head = inputs.head(evidence.step)?;
        let rows: Vec<usize> = tokens.iter().map(|&t| self.rows[t]).collect();
        let place = |&row: &usize| match classes.binary_search(&(inputs.labels[row] as usize)) {
            Ok(at) if labelled && inputs.labels[row] != IGNORED => at as u32,
            _ => IGNORED,
        };
        let pick = |values: &[f64]| tokens.iter().map(|&t| values[t]).collect::<Vec<f64>>();
        let [a, b, c] = &self.cotangents;
        Some(Part {
            q: Gathered::new(&head.q, &rows),
            k: Gathered::new(&head.k, classes),
            labels: rows.iter().map(place).collect(),
            bias: head.bias.map(|bias| classes.iter().map(|&v| bias[v]).collect()),
            valid: classes.partition_point(|&v| v < head.valid_vocab),
            transform: head.transform,
            lse: pick(&self.lse),
            cotangents: [pick(a), pick(b), pick(c)],
        })
    }

    /// Cotangents of some tokens as if each token's nll had the gradient 1, whatever its
    /// weight.
    pub fn ones(&self, evidence: &Evidence<'_>, tokens: &[usize]) -> [Vec<f64>; 3] {
        let options = &evidence.step.options;
        let classes = self.inputs(evidence).map_or(1, |inputs| inputs.valid_vocab.max(1));
        let each = tokens.iter().map(|&t| options.cotangents(1.0, self.lse[t], classes));
        let each: Vec<TokenCotangents> = each.collect();
        let list = |of: fn(&TokenCotangents) -> f64| each.iter().map(of).collect::<Vec<f64>>();
        [
            list(|cotangents| cotangents.lse),
            list(|cotangents| cotangents.label),
            list(|cotangents| cotangents.smooth),
        ]
    }

    /// A captured gradient of the unit: `[V, D]` of dk and its parts, `[n, D]` of dq's.
    pub fn captured(&self, step: &HeadStep<'_>, stage: Stage) -> Option<Tensor> {
        let key = step.find(stage.role()?, self.microbatch)?;
        let partial = step.tensors[key].partial.is_some();
        let of_tokens = stage.is_of_q();
        let ranks = match (partial, self.rank) {
            (true, _) if of_tokens => return None,
            (true, Some(_)) => Some(&self.ranks[..]),
            (false, Some(_)) if !of_tokens => return None,
            _ => None,
        };
        step.oriented(key, ranks).ok()
    }
}

impl Part {
    /// A part of this part: ascending indices of its tokens and of its classes.
    pub fn sub(&self, tokens: &[usize], classes: &[usize]) -> Part {
        let place = |label: u32| match classes.binary_search(&(label as usize)) {
            Ok(at) if label != IGNORED => at as u32,
            _ => IGNORED,
        };
        let pick = |values: &[f64]| tokens.iter().map(|&t| values[t]).collect::<Vec<f64>>();
        let [a, b, c] = &self.cotangents;
        Part {
            q: Gathered::new(&self.q.matrix(), tokens),
            k: Gathered::new(&self.k.matrix(), classes),
            labels: tokens.iter().map(|&t| place(self.labels[t])).collect(),
            bias: self.bias.as_ref().map(|bias| classes.iter().map(|&v| bias[v]).collect()),
            valid: classes.partition_point(|&v| v < self.valid),
            transform: self.transform,
            lse: pick(&self.lse),
            cotangents: [pick(a), pick(b), pick(c)],
        }
    }

    /// The same entries for other upstream gradients.
    pub fn with(self, cotangents: [Vec<f64>; 3]) -> Part {
        Part { cotangents, ..self }
    }

    /// The inputs of the kernels for this part.
    pub fn head(&self) -> HeadInputs<'_> {
        HeadInputs {
            bias: self.bias.as_deref(),
            transform: self.transform,
            ..HeadInputs::plain(self.q.matrix(), self.k.matrix(), &self.labels, self.valid)
        }
    }

    /// Entries of dlogits, `[tokens, classes]`, as a policy rounds them.
    pub fn entries(&self, policy: &Policy) -> Vec<f64> {
        let head = self.head();
        let (rows, width) = (head.q.rows, head.k.rows);
        let mut entries = vec![0.0; rows * width];
        let [lse, label, smooth] = &self.cotangents;
        let cotangents = Cotangents { lse, label, smooth };
        let plain = Policy { path: Path::Plain, ..*policy };
        let (tiles, progress) = (Tiles::default(), &NoProgress);
        policy::plane(&plain, &head, &self.lse, &cotangents, tiles, progress, &mut |tile| {
            let columns = tile.cols.len().max(1);
            for (row, values) in tile.tokens.clone().zip(tile.dlogits.chunks(columns)) {
                entries[row * width..][tile.cols.clone()].copy_from_slice(values);
            }
        });
        entries
    }
}
