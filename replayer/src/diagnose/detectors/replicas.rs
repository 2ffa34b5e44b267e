//! Tensors that several ranks hold in different versions although their bits should be the same:
//! who holds which version, and what each version is a sum of.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use backtape::dtype::Dtype;
use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::nan::larger;
use backtape::role::Role;
use backtape::shard::TensorKey;
use half::{bf16, f16};

use super::addends::{Addend, Part, addends_of, fitted, reference_parts};
use super::single_tokens::{Direct, distance, energy, tokens};
use crate::assemble::Row;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::step::flat_rows;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;

/// A tensor is skipped if its elements times its shards are more than this.
const MOST: usize = 1 << 27;
/// Single flipped bits are named if at most this many elements differ.
const FEW: usize = 8;
/// A version is the sum of its parts if the rest has at most this share of its squared norm: as
/// much as bf16 rounding leaves.
const LEFT: f64 = 2e-4;

/// The versions of a sum, and which gradients each adds up.
pub struct Sums {
    /// For each version: the ranks that hold it, and the weights of the gradients of ranks and
    /// microbatches in it.
    pub versions: Vec<(Vec<Rank>, Vec<Addend>)>,
    /// The rows in which the versions differ; none where it is all rows.
    pub rows: Option<Range<usize>>,
}

impl Sums {
    /// The rows in words; empty where it is all of them.
    pub fn place(&self) -> String {
        let in_words = |rows: &Range<usize>| format!("rows {} to {}", rows.start, rows.end - 1);
        self.rows.as_ref().map_or(String::new(), in_words)
    }
}

/// One box of a tensor that ranks hold in several versions.
pub struct Versions {
    /// Which tensor.
    pub key: TensorKey,
    /// Its role.
    pub role: Option<Role>,
    /// Which box of it.
    pub place: IndexBox,
    /// True where the box is the whole tensor.
    pub whole: bool,
    /// The ranks that hold each version, and its values; the version with most holders first.
    pub versions: Vec<(Vec<Rank>, Vec<f64>)>,
    bytes: Vec<Vec<u8>>,
    width: usize,
}

/// Every box whose undamaged replicas differ, of the tensors that the replay could not use for that
/// reason or that are disputed.
pub fn versions(evidence: &Evidence<'_>) -> Vec<Versions> {
    let step = evidence.step;
    let mut versions = Vec::new();
    for key in step.unusable.keys().chain(&step.disputed) {
        let Some(info) = step.dump.tensors().get(key) else { continue };
        let size: u64 = info.shape.iter().product();
        if info.partial.is_some() || size * info.shards.len() as u64 > MOST as u64 {
            continue;
        }
        let mut boxes: BTreeMap<IndexBox, BTreeMap<&[u8], Vec<Rank>>> = BTreeMap::new();
        for shard in &info.shards {
            let (record, bytes) = (step.dump.record(shard), step.dump.intact_bytes(shard));
            let Some(bytes) = bytes else { continue };
            let ranks = boxes.entry(record.place.clone()).or_default().entry(bytes).or_default();
            ranks.push(record.rank);
        }
        for (place, holders) in boxes.into_iter().filter(|(_, holders)| holders.len() > 1) {
            let mut by_holders: Vec<(Vec<Rank>, &[u8])> =
                holders.into_iter().map(|(bytes, ranks)| (ranks, bytes)).collect();
            by_holders.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.0.cmp(&b.0)));
            let wide = |(ranks, bytes): &(Vec<Rank>, &[u8])| {
                Some((ranks.clone(), widened(info.dtype, bytes)?))
            };
            let Some(values) = by_holders.iter().map(wide).collect::<Option<Vec<_>>>() else {
                continue;
            };
            versions.push(Versions {
                key: key.clone(),
                role: info.role,
                whole: place == IndexBox::whole(&info.shape),
                place,
                versions: values,
                bytes: by_holders.into_iter().map(|(_, bytes)| bytes.to_vec()).collect(),
                width: info.dtype.width(),
            });
        }
    }
    versions
}

fn widened(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f64>> {
    let two = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    let four = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    Some(match dtype {
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_bits(two(b)).to_f64()).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_bits(two(b)).to_f64()).collect(),
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_bits(four(b)).into()).collect(),
        _ => return None,
    })
}

impl Versions {
    /// The stage that computes this tensor.
    pub fn stage(&self) -> Option<Stage> {
        match (self.role?, self.key.microbatch) {
            (Role::Dk, None) => Some(Stage::Reduce),
            (role, _) => Stage::of_role(role),
        }
    }

    /// How the versions differ from the one that most ranks hold: the number of differing elements,
    /// the largest difference relative to the root mean square, and the flipped bits in words where
    /// they are few.
    pub fn difference(&self) -> (usize, f64, Vec<String>) {
        let (first, bytes) = (&self.versions[0].1, &self.bytes[0]);
        let size = (energy(first) / first.len().max(1) as f64).sqrt().max(f64::MIN_POSITIVE);
        let (mut count, mut most, mut bits) = (0, 0.0f64, Vec::new());
        for ((ranks, values), other) in self.versions[1..].iter().zip(&self.bytes[1..]) {
            let elements = other.chunks(self.width).zip(bytes.chunks(self.width)).enumerate();
            for (index, (a, b)) in elements.filter(|(_, (a, b))| a != b) {
                count += 1;
                most = larger(most, (values[index] - first[index]).abs() / size);
                let flipped: u32 = a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones()).sum();
                if flipped == 1 && bits.len() < FEW {
                    let place = a.iter().zip(b).enumerate().find(|(_, (a, b))| a != b);
                    let bit =
                        place.map_or(0, |(i, (a, b))| 8 * i as u32 + (a ^ b).trailing_zeros());
                    bits.push(format!("bit {bit} of element {index} on rank {}", ranks[0]));
                }
            }
        }
        (count, most, if count <= FEW { bits } else { Vec::new() })
    }

    /// The ranks that do not hold the majority's version; all ranks where there is no majority.
    pub fn odd(&self) -> Vec<Rank> {
        let all: usize = self.versions.iter().map(|(ranks, _)| ranks.len()).sum();
        let skipped = usize::from(2 * self.versions[0].0.len() > all);
        self.versions[skipped..].iter().flat_map(|(ranks, _)| ranks.clone()).collect()
    }

    /// Each version as a weighted sum of gradients of ranks and microbatches: all of it, or only
    /// the range in which the versions differ. None where this does not explain every version, or
    /// all have the same weights.
    pub fn as_sums(&self, evidence: &Evidence<'_>) -> Option<Sums> {
        if self.stage() != Some(Stage::Reduce) {
            return None;
        }
        let key = Key { stage: Stage::Reduce, microbatch: None, rank: None };
        let recorded = addends_of(evidence, key, false);
        let ranks =
            |parts: &[Part]| parts.iter().map(|(addend, _)| addend.rank).collect::<BTreeSet<_>>();
        // Where the outcome is of one version, it has only that version's ranks' gradients; then
        // the reference's are used.
        let recorded = recorded.filter(|parts| ranks(parts).len() > 1);
        let mut parts = recorded.or_else(|| reference_parts(evidence))?;
        if !self.whole {
            let elements =
                flat_rows(&self.place.0, &evidence.step.dump.tensors().get(&self.key)?.shape);
            for (_, values) in &mut parts {
                // Rows of padding have a gradient of zero.
                *values =
                    elements.iter().map(|&at| values.get(at).copied().unwrap_or(0.0)).collect();
            }
        }
        let all = 0..self.versions[0].1.len();
        let whole = self.sums_in(evidence, &parts, all.clone());
        let sums = whole.map(|of| Sums { versions: of, rows: None });
        sums.or_else(|| {
            let piece = self.differing().filter(|piece| *piece != all)?;
            let columns = self.place.extent().last().map_or(1, |&width| width.max(1) as usize);
            let rows = piece.start / columns..piece.end.div_ceil(columns);
            let sums_of_segment = self.sums_in(evidence, &parts, piece)?;
            Some(Sums { versions: sums_of_segment, rows: Some(rows) })
        })
    }

    /// The range from the first to the last element in which versions differ.
    fn differing(&self) -> Option<Range<usize>> {
        let (first, rest) = self.versions.split_first()?;
        let differs = |at: &usize| {
            rest.iter().any(|(_, values)| values[*at].to_bits() != first.1[*at].to_bits())
        };
        let mut all = 0..first.1.len();
        let start = all.find(differs)?;
        Some(start..all.rev().find(differs).unwrap_or(start) + 1)
    }

    /// Solves a range of elements of each version for the weights of the parts.
    fn sums_in(
        &self,
        evidence: &Evidence<'_>,
        parts: &[Part],
        elements: Range<usize>,
    ) -> Option<Vec<(Vec<Rank>, Vec<Addend>)>> {
        let part = |(addend, values): &Part| {
            Some((addend.clone(), values.get(elements.clone())?.to_vec()))
        };
        let parts: Vec<Part> = parts.iter().map(part).collect::<Option<_>>()?;
        let fitted_sum = |(ranks, values): &(Vec<Rank>, Vec<f64>)| {
            let values = &values[elements.clone()];
            let (addends, scale) = fitted(evidence, &parts, values)?;
            let mut left = values.to_vec();
            for (addend, (_, addend_values)) in addends.iter().zip(&parts) {
                let weight = addend.weight * scale;
                left.iter_mut().zip(addend_values).for_each(|(x, part)| *x -= weight * part);
            }
            (energy(&left) <= LEFT * energy(values)).then(|| (ranks.clone(), addends))
        };
        let sums: Vec<(Vec<Rank>, Vec<Addend>)> =
            self.versions.iter().map(fitted_sum).collect::<Option<_>>()?;
        let weights = |at: usize| sums[at].1.iter().map(|addend: &Addend| addend.weight);
        let differ = (1..sums.len()).any(|at| !weights(at).eq(weights(0)));
        differ.then_some(sums)
    }

    /// True where the versions are the parts of one sum: for a few tokens, the rows of dq added
    /// over all versions give the reference, and no version's row alone does.
    pub fn is_parts_of_dq(&self, evidence: &Evidence<'_>) -> bool {
        let shown = || {
            let inputs = evidence.inputs_of(self.key.microbatch)?;
            let alone = self.versions.iter().all(|of| of.0.len() == 1);
            if self.role != Some(Role::Dq) || !alone {
                return None;
            }
            let width = *self.place.extent().last()? as usize;
            let shape = &evidence.step.dump.tensors().get(&self.key)?.shape;
            let (depth, leading) = shape.split_last()?;
            if width as u64 != *depth {
                return None;
            }
            // The place of each token in the box.
            let own_tokens = flat_rows(&self.place.0[..leading.len()], leading);
            let place: BTreeMap<usize, usize> =
                own_tokens.into_iter().enumerate().map(|(at, token)| (token, at)).collect();
            let counted = tokens(evidence, inputs);
            let all: Vec<usize> = counted.into_iter().filter(|t| place.contains_key(t)).collect();
            let mut shown = 0;
            for &t in all.iter().step_by(all.len().div_ceil(4).max(1)) {
                let (wanted, position) = (dq_row(evidence, inputs, t)?, place[&t]);
                let row =
                    |values: &[f64]| values[position * width..(position + 1) * width].to_vec();
                let rows: Vec<Vec<f64>> =
                    self.versions.iter().map(|(_, values)| row(values)).collect();
                let near = |row: &[f64]| distance(row, &wanted) <= 1e-3 * energy(&wanted);
                let sum: Vec<f64> =
                    (0..width).map(|i| rows.iter().map(|row| row[i]).sum()).collect();
                if !near(&sum) || rows.iter().any(|row| near(row)) {
                    return None;
                }
                shown += 1;
            }
            Some(shown > 1)
        };
        shown().unwrap_or(false)
    }
}

/// The reference of a token's row of dq.
fn dq_row(evidence: &Evidence<'_>, inputs: &MicrobatchInputs, t: usize) -> Option<Vec<f64>> {
    let direct = Direct::new(evidence, inputs)?;
    let reference = evidence.reference();
    let (g, lse) =
        (reference.g.get(&inputs.microbatch)?[t], reference.lse.get(&inputs.microbatch)?[t]);
    let cotangents = evidence.step.options.cotangents(g, lse, inputs.valid_vocab);
    let q = direct.q(Row::From(t));
    let mut row = vec![0.0; q.len()];
    for v in 0..inputs.valid_vocab {
        let is_label = inputs.labels[t] != IGNORED && inputs.labels[t] as usize == v;
        let entry = direct.entry((&q, v), (lse, cotangents), is_label);
        row.iter_mut().zip(direct.k(Row::From(v))).for_each(|(sum, k)| *sum += entry * k);
    }
    Some(row)
}
