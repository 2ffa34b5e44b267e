//! Finds rows of dq and dk that are zero although the data show that they cannot be.
//!
//! For a token that counts and whose label has a probability below [`SURE`], the entry of dlogits
//! in the label's class is at least 2⁻⁶ of the token's weight. Rounding to bf16 (2⁻⁸) does not
//! bring the token's whole row of dq to zero, nor the label's row of dk. So
//!
//! - dq: the row of every such token is not zero, unless all rows of k are equal;
//! - dk: the row of every class that such a token has as its label is not zero on the
//!   ranks that hold the token, where the token's q is not.
//!
//! Rows of padding, of ignored tokens and of classes that are no token's label are correctly zero.
//! f16 and f8 may lose small gradients below their range, so for these dtypes the finding is a
//! note.

use backtape::dtype::Dtype;
use backtape::head::{HeadDeclaration, KLayout, Loss};
use backtape::identity::Rank;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::facts::{Facts, facts, optional};
use super::pieces::{Piece, pieces};
use super::{CheckResults, Place, Severity, Subject};
use crate::bits::{Kind, bits, kind};
use crate::dump::{TensorInfo, name_ranks};
use crate::number::plural;

/// If the label's probability is above this, the gradient may round to zero.
const SURE: f64 = 1.0 - 1.0 / 64.0;

pub(super) fn run(subjects: &[Subject<'_>], results: &mut CheckResults) {
    for subject in subjects {
        let skip = |results: &mut CheckResults, why: &str| {
            results.skip(format!("step {}: zero rows of dq and dk", subject.dump.step), why);
        };
        match subject.head() {
            None => skip(results, "no head was declared: it is not known which tokens count"),
            Some(head) if head.loss != Loss::SoftmaxXent => {
                skip(results, "only cross-entropy on q and k has such rows: a policy loss clips");
            }
            Some(head) => step(subject, head, results),
        }
    }
}

fn step(subject: &Subject<'_>, head: &HeadDeclaration, results: &mut CheckResults) {
    let of_k = subject.of_role(Role::K).map(|(_, info)| info);
    if !of_k.into_iter().any(|info| tells(subject, info, head)) {
        let why = "k was not recorded, or all of its rows are one: gradients may be zero";
        return results.skip(format!("step {}: zero rows of dq", subject.dump.step), why);
    }
    let mut all: Vec<(Facts, Vec<bool>)> = Vec::new();
    for facts in facts(subject).into_iter().flatten() {
        match telling(subject, head, &facts) {
            Some(telling) => {
                dq(subject, &facts, &telling, results);
                dk(subject, head, facts.microbatch, &[(&facts, &telling)], results);
                all.push((facts, telling));
            }
            None => {
                let why = "lse, label_logits and q were not all recorded: a token may be so sure that its gradient is nothing";
                results.skip(facts.key.to_string(), why);
            }
        }
    }
    if all.iter().any(|(facts, _)| facts.microbatch.is_some()) {
        let all: Vec<_> = all.iter().map(|(facts, telling)| (facts, telling)).collect();
        dk(subject, head, None, &all, results);
    }
}

/// Whether at least two valid rows of k differ: where all are equal, `Σ p k - k[y]` is zero.
fn tells(subject: &Subject<'_>, info: &TensorInfo, head: &HeadDeclaration) -> bool {
    let (recorded, _) = pieces(subject.dump, info);
    let (dtype, width) = (info.dtype, info.dtype.width());
    let valid = head.valid_vocab.unwrap_or(u64::MAX);
    // -0 counts as equal to 0.
    let element_bits = |bytes: &[u8]| match bits(bytes, width, 0) {
        bits if kind(dtype, bits) == Kind::Zero => 0,
        bits => bits,
    };
    let row = |bytes: &[u8]| -> Vec<u64> { bytes.chunks_exact(width).map(element_bits).collect() };
    recorded.iter().any(|piece| match head.k_layout {
        KLayout::Dv => (0..piece.rows()).any(|index| {
            let classes = valid.saturating_sub(piece.column_range().0);
            let row = row(piece.row_bytes(index));
            let row = &row[..row.len().min(usize::try_from(classes).unwrap_or(usize::MAX))];
            row.windows(2).any(|pair| pair[0] != pair[1])
        }),
        KLayout::Vd => {
            let mut rows = (0..piece.rows()).filter(|&at| piece.global_row(at) < valid);
            let first = rows.next().map(|at| row(piece.row_bytes(at)));
            rows.any(|at| Some(row(piece.row_bytes(at))) != first)
        }
    })
}

/// Whether the gradient of each token cannot be zero, `[T]`; `None` where that is not known.
fn telling(subject: &Subject<'_>, head: &HeadDeclaration, facts: &Facts) -> Option<Vec<bool>> {
    let (_, label_logits) = facts.likelihood.as_ref()?;
    let cotangent = optional(subject, Role::Cotangent, facts.microbatch, facts.tokens()).ok()?;
    let q = subject.of_role(Role::Q).find(|(key, _)| key.microbatch == facts.microbatch)?;
    let (recorded, _) = pieces(subject.dump, q.1);
    let mut live = vec![false; facts.tokens()];
    for piece in recorded.iter().filter(|_| q.1.shape.len() > 1) {
        for row in 0..piece.rows() {
            if let Some(live) = live.get_mut(piece.global_row(row) as usize) {
                *live |= !all_zero(q.1.dtype, piece.row_bytes(row));
            }
        }
    }
    let transform = crate::head::options::transform(head);
    let filter = head.gradient_filter.unwrap_or(0.0);
    let sure = SURE.min(1.0 - 2.0 * filter);
    let cannot_be_zero = |t: usize| {
        let likely = -facts.nll(t).unwrap_or(0.0);
        // Where the softcap saturates, the derivative of tanh rounds to 0.
        let capped = transform.saturates(label_logits[t], SURE);
        let upstream = cotangent.as_ref().map_or(head.cotangent, |(all, _)| all[t]);
        let counts = facts.weights[t].is_finite() && facts.weights[t] != 0.0;
        live[t] && counts && upstream != 0.0 && !capped && likely.exp() < sure
    };
    Some((0..facts.tokens()).map(cannot_be_zero).collect())
}

fn all_zero(dtype: Dtype, bytes: &[u8]) -> bool {
    let width = dtype.width();
    (0..bytes.len() / width).all(|i| kind(dtype, bits(bytes, width, i)) == Kind::Zero)
}

fn dq(subject: &Subject<'_>, facts: &Facts, telling: &[bool], results: &mut CheckResults) {
    let tensor = subject.of_role(Role::Dq).find(|(key, info)| {
        key.microbatch == facts.microbatch && info.partial.is_none() && info.shape.len() > 1
    });
    let Some((key, info)) = tensor else { return };
    results.looked();
    let (recorded, _) = pieces(subject.dump, info);
    // A row may be sharded over ranks: it is zero if all of its parts are.
    let mut zero = vec![true; telling.len()];
    let mut seen = vec![0u64; telling.len()];
    for piece in &recorded {
        for row in 0..piece.rows() {
            let token = piece.global_row(row) as usize;
            if token < zero.len() {
                zero[token] &= all_zero(info.dtype, piece.row_bytes(row));
                seen[token] += piece.columns() as u64;
            }
        }
    }
    let width = info.shape.last().copied().unwrap_or(0);
    let hit = (0..zero.len()).filter(|&t| telling[t] && zero[t] && seen[t] >= width);
    let rows: Vec<u64> = hit.map(|t| t as u64).collect();
    let Some(&first) = rows.first() else { return };
    let ranks = &facts.holders[facts.holder[first as usize]];
    let run = run_of_zeros(&zero, first as usize);
    report(subject, (key, info), ranks, &rows, run, "tokens that count and are not sure", results);
}

/// Checks dk of a microbatch (or of the step) against the tokens that it was summed over.
fn dk(
    subject: &Subject<'_>,
    head: &HeadDeclaration,
    microbatch: Option<backtape::identity::Microbatch>,
    from: &[(&Facts, &Vec<bool>)],
    results: &mut CheckResults,
) {
    for role in [Role::Dk, Role::DkLabel] {
        // With tied embeddings dk includes the gradient of the input embedding.
        if role == Role::Dk && head.tied_embedding {
            continue;
        }
        let tensors = subject.of_role(role);
        let tensors =
            tensors.filter(|(key, info)| key.microbatch == microbatch && info.shape.len() == 2);
        for (key, info) in tensors {
            results.looked();
            of_vocabulary(subject, head, (key, info), from, results);
        }
    }
}

/// A class whose row is zero, the ranks that held the token, and the tile of zero rows around it.
type Hit = (u64, Vec<Rank>, Option<(u64, u64)>);

fn of_vocabulary(
    subject: &Subject<'_>,
    head: &HeadDeclaration,
    (key, info): (&TensorKey, &TensorInfo),
    from: &[(&Facts, &Vec<bool>)],
    results: &mut CheckResults,
) {
    let transposed = head.k_layout == KLayout::Dv;
    let vocabulary = info.shape[usize::from(transposed)] as usize;
    let (recorded, _) = pieces(subject.dump, info);
    let depth = info.shape[usize::from(!transposed)];
    // For each class, whether its row is zero on all of these ranks, or on all ranks.
    let zero_on = |ranks: Option<&[Rank]>| -> Vec<bool> {
        let mut alive = vec![false; vocabulary];
        let mut seen = vec![0u64; vocabulary];
        let matters = |piece: &&Piece<'_>| {
            ranks.is_none_or(|ranks| piece.ranks.iter().any(|rank| ranks.contains(rank)))
        };
        for piece in recorded.iter().filter(matters) {
            mark(info, piece, transposed, &mut alive, &mut seen);
        }
        alive.iter().zip(&seen).map(|(alive, &seen)| !alive && seen >= depth).collect()
    };
    let of_all = info.partial.is_none().then(|| zero_on(None));
    let mut hit: Vec<Hit> = Vec::new();
    for (facts, telling) in from {
        for (group, ranks) in facts.holders.iter().enumerate() {
            let zero_on_ranks = of_all.is_none().then(|| zero_on(Some(ranks)));
            let zero = of_all.as_ref().or(zero_on_ranks.as_ref()).expect("one of the two");
            let tokens = facts.held_tokens[group].iter().copied().filter(|&t| telling[t]);
            for class in tokens.filter_map(|t| facts.targets[t]) {
                if usize::try_from(class).is_ok_and(|class| zero.get(class) == Some(&true)) {
                    let run = run_of_zeros(zero, class as usize);
                    hit.push((class as u64, ranks.clone(), run));
                }
            }
        }
    }
    hit.sort();
    let mut rows: Vec<u64> = hit.iter().map(|(row, ..)| *row).collect();
    rows.dedup();
    let Some((_, ranks, run)) = hit.first().cloned() else { return };
    let what = "classes that are the label of tokens that count and are not sure";
    report(subject, (key, info), &ranks, &rows, run, what, results);
}

/// Marks the classes of which a piece holds a nonzero element, and counts the elements that it
/// holds of each class.
fn mark(
    info: &TensorInfo,
    piece: &Piece<'_>,
    transposed: bool,
    alive: &mut [bool],
    seen: &mut [u64],
) {
    let (columns, start) = (piece.columns(), piece.column_range().0 as usize);
    let width = info.dtype.width();
    for row in 0..piece.rows() {
        let class = piece.global_row(row) as usize;
        match transposed {
            false => {
                alive[class] |= !all_zero(info.dtype, piece.row_bytes(row));
                seen[class] += columns as u64;
            }
            true => {
                let bytes = piece.row_bytes(row);
                for column in 0..columns {
                    let zero = kind(info.dtype, bits(bytes, width, column)) == Kind::Zero;
                    alive[start + column] |= !zero;
                    seen[start + column] += 1;
                }
            }
        }
    }
}

/// The run of zero rows around a row, if it looks like skipped tiles: its start is a multiple of a
/// power of two of at least 8, and its end is too, or is the end of the tensor.
fn run_of_zeros(zero: &[bool], index: usize) -> Option<(u64, u64)> {
    let start = zero[..index].iter().rposition(|zero| !zero).map_or(0, |last| last + 1);
    let end = zero[index..].iter().position(|zero| !zero).map_or(zero.len(), |n| index + n);
    let tile = 1 << (end - start).max(1).ilog2();
    let aligned = tile >= 8 && start % tile == 0 && (end % tile == 0 || end == zero.len());
    aligned.then_some((start as u64, end as u64))
}

fn report(
    subject: &Subject<'_>,
    (key, info): (&TensorKey, &TensorInfo),
    ranks: &[Rank],
    rows: &[u64],
    run: Option<(u64, u64)>,
    what: &str,
    results: &mut CheckResults,
) {
    let small = matches!(info.dtype, Dtype::F16 | Dtype::F8E4m3 | Dtype::F8E5m2);
    let severity = if small { Severity::Note } else { Severity::Fail };
    let tile = match run {
        Some((start, end)) => format!("; rows {start} to {} are a whole tile", end - 1),
        None => String::new(),
    };
    let lost = if small {
        format!("; {} may have lost them below its range", info.dtype)
    } else {
        String::new()
    };
    let evidence = format!(
        "{key}: {} of {what} are exactly zero, the first row {} ({}){tile}{lost}",
        plural(rows.len() as u64, "row"),
        rows[0],
        name_ranks(ranks),
    );
    let place = Place::of(subject).tensor(key).ranks(ranks).rows(rows);
    let advice = "Look for tiles that are skipped or never written, and for a filter or a mask that takes too much";
    results.add(severity, None, place, evidence, advice);
}
