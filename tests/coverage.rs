//! What a replay judges where it cannot judge everything: tokens at a clip bound, losses held as
//! each rank's addend or for the step alone, tensors that are of no use. And what its last
//! sentence says of how much that was.

use backtape::head::{GrpoDeclaration, HeadDeclaration, MicrobatchReduction, Scope};
use backtape::placement::Reduction;
use backtape::role::Role;
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::replay::outcome::Status;
use backtape_replayer::report::schema::{Report, StageReport, Verdict};
use backtape_replayer::report::text;

use crate::support::dump::{self, Shard};
use crate::support::job::Job;
use crate::support::job::options::Kind;

fn replayed(head: &HeadDeclaration, shards: &[Shard], asked: &[Role]) -> Report {
    reduced(head, shards, asked, Reduction::Sum)
}

/// The same; addends of the loss make up this.
fn reduced(head: &HeadDeclaration, shards: &[Shard], asked: &[Role], of_loss: Reduction) -> Report {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run-a");
    let ranks = shards.iter().map(|shard| shard.rank + 1).max().unwrap();
    let reduction = |shard: &Shard| if shard.name == "loss" { of_loss } else { Reduction::Sum };
    dump::write_reduced(&path, ranks, Some(head), shards, &reduction);
    replay_report(&path, &Selection::default(), asked, None).unwrap()
}

fn stage<'a>(report: &'a Report, name: &str) -> &'a StageReport {
    report.stages.iter().find(|stage| stage.name == name).unwrap()
}

fn floats(shard: &Shard) -> Vec<f32> {
    let four = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    shard.bytes.chunks(4).map(four).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The shard of a name in a rank's microbatch.
fn of<'a>(shards: &'a [Shard], name: &str, like: &Shard) -> &'a Shard {
    let same = |shard: &&Shard| {
        (shard.name, shard.rank, shard.microbatch) == (name, like.rank, like.microbatch)
    };
    shards.iter().find(same).unwrap()
}

/// A clean policy job, of which this many tokens of rank 0 that their clip bound left without a
/// gradient stand exactly at that bound; dlogprobs are not recorded.
fn at_the_bound(tokens: usize) -> (HeadDeclaration, Vec<Shard>, Vec<usize>) {
    let options = GrpoDeclaration { clip_low: 0.1, clip_high: 0.2, ..GrpoDeclaration::default() };
    let mut job = Job { ranks: 2, microbatches: 1, tokens: 60, ..Job::default() };
    job.options.kind = Kind::Grpo(options.clone());
    let mut shards = job.shards();
    let first = |name: &str| shards.iter().find(|one| one.name == name && one.rank == 0).unwrap();
    let (dlogp, logp) = (floats(first("dlogprobs")), floats(first("logprobs")));
    let (advantages, weights) = (floats(first("advantages")), floats(first("weights")));
    let mut old = floats(first("old_logprobs"));
    let clipped = |t: &usize| dlogp[*t] == 0.0 && weights[*t] != 0.0 && advantages[*t] != 0.0;
    let moved: Vec<usize> = (0..dlogp.len()).filter(clipped).take(tokens).collect();
    assert_eq!(moved.len(), tokens, "too few clipped tokens in this job");
    for &t in &moved {
        let bound =
            if advantages[t] > 0.0 { 1.0 + options.clip_high } else { 1.0 - options.clip_low };
        old[t] = (f64::from(logp[t]) - bound.ln()) as f32;
    }
    let of_rank = |one: &&mut Shard| one.name == "old_logprobs" && one.rank == 0;
    shards.iter_mut().find(of_rank).unwrap().bytes = bytes(&old);
    shards.retain(|shard| shard.name != "dlogprobs");
    (job.head(), shards, moved)
}

/// Goal: a token whose gradient may be there or not costs its own row of dq, and what it may be
/// of dk, and no more. Method: tokens exactly at a clip bound, whose gradients the job left out;
/// an error anywhere else is found all the same.
#[test]
fn a_token_at_its_clip_bound_costs_its_own_rows_and_no_more() {
    let (head, shards, moved) = at_the_bound(2);
    let report = replayed(&head, &shards, &[Role::Dq, Role::Dk]);
    let shown = text::render(&report);
    assert_eq!(report.verdict, Verdict::Agreed, "{shown}");
    for name in ["dq", "dk"] {
        assert_eq!(stage(&report, name).status, Status::Pass, "{shown}");
    }
    let named = format!("({}, {})", moved[0], moved[1]);
    assert!(shown.contains(&format!("2 of 60 tokens {named}")), "{shown}");
    let coverage = report.coverage.clone().unwrap();
    assert!(coverage.judged == coverage.of && coverage.of > 3, "{coverage:?}");
    let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("dq, dk_lse, dk_label not, or not all of it"), "{shown}");

    // What these tokens hold is not judged, what others hold is.
    for (token, found) in [(moved[0], false), ((moved[0] + 1) % 60, true)] {
        let mut shards = shards.clone();
        let of_rank = |one: &&mut Shard| one.name == "dq" && one.rank == 0;
        let dq = shards.iter_mut().find(of_rank).unwrap();
        let width = dq.bytes.len() / 60;
        // All of its row is 1.
        let row = &mut dq.bytes[token * width..(token + 1) * width];
        row.chunks_mut(2).for_each(|x| x.copy_from_slice(&0x3f80u16.to_le_bytes()));
        let report = replayed(&head, &shards, &[Role::Dq, Role::Dk]);
        let first = report.first_divergence.as_ref().map(|first| first.stage.as_str());
        assert_eq!(first, found.then_some("dq"), "{token}: {}", text::render(&report));
    }
    let mut scaled = shards.clone();
    for dk in scaled.iter_mut().filter(|one| one.name.starts_with("dk") && one.rank == 0) {
        dk.bytes = bytes(&floats(dk).iter().map(|x| 1.05 * x).collect::<Vec<f32>>());
    }
    let report = replayed(&head, &scaled, &[Role::Dk]);
    assert_eq!(report.verdict, Verdict::Diverged, "{}", text::render(&report));
}

/// Goal: nothing agrees where no gradient could be judged, and what was asked for by name is not
/// left out in silence. Method: every token's ratio is 1, and so are both clip bounds.
#[test]
fn where_every_token_is_at_its_bound_the_gradients_have_no_verdict_and_none_is_given() {
    let mut job = Job { ranks: 2, microbatches: 1, tokens: 40, ..Job::default() };
    let options = GrpoDeclaration { clip_low: 0.0, clip_high: 0.0, ..GrpoDeclaration::default() };
    job.options.kind = Kind::Grpo(options);
    job.options.data.on_policy = true;
    let mut shards = job.shards();
    // The parts of dk would be judged by their sum.
    shards.retain(|shard| shard.name != "dlogprobs" && !shard.name.starts_with("dk"));
    let report = replayed(&job.head(), &shards, &[]);
    let shown = text::render(&report);
    assert_eq!(report.verdict, Verdict::Incomplete, "{shown}");
    assert!(
        shown.contains("INCOMPLETE: no gradient that the dump holds could be judged"),
        "{shown}"
    );
    let report = replayed(&job.head(), &shards, &[Role::Loss, Role::Dq]);
    let shown = text::render(&report);
    assert_eq!(report.verdict, Verdict::Incomplete, "{shown}");
    assert!(shown.contains("dq of microbatch 0 was asked for and not judged"), "{shown}");
    let report = replayed(&job.head(), &shards, &[Role::Loss]);
    let shown = text::render(&report);
    assert_eq!(report.verdict, Verdict::Agreed, "{shown}");
    assert!(shown.contains("AGREED on "), "{shown}");
}

/// The losses of a job's microbatches as each rank's addend: over its tokens, divided by the sum
/// of weights of all tokens of the step, or of its own tokens of the microbatch alone.
fn with_addends(shards: &[Shard], own: bool) -> Vec<Shard> {
    let weights = |shard: &Shard| -> f64 {
        floats(of(shards, "weights", shard)).iter().copied().map(f64::from).sum()
    };
    let of_lse = || shards.iter().filter(|shard| shard.name == "lse");
    let all: f64 = of_lse().map(weights).sum();
    let mut found: Vec<Shard> = shards.iter().filter(|one| one.name != "loss").cloned().collect();
    for lse in of_lse() {
        let label = floats(of(shards, "label_logits", lse));
        let weight = floats(of(shards, "weights", lse));
        let terms = floats(lse).into_iter().zip(label).zip(weight);
        let sum: f64 = terms.map(|((a, b), w)| f64::from(w) * (f64::from(a) - f64::from(b))).sum();
        let loss = sum / if own { weights(lse) } else { all };
        let (name, shape) = ("loss", Vec::new());
        let place = backtape::index_box::IndexBox(Vec::new());
        let (partial, bytes) = (true, bytes(&[loss as f32]));
        found.push(Shard { name, shape, place, partial, bytes, ..lse.clone() });
    }
    found
}

/// Goal: a loss that each rank holds for its own tokens is judged, rank by rank, and its mean
/// where that is what it is. Method: addends of a clean job, with its denominator and with each
/// rank's own; then one of them off by a hundredth.
#[test]
fn a_loss_held_as_each_ranks_addend_is_judged_rank_by_rank() {
    for (scope, reduction) in [
        (Scope::Global, Reduction::Sum),
        (Scope::Rank, Reduction::Mean),
        (Scope::Rank, Reduction::Sum),
        (Scope::Global, Reduction::Mean),
    ] {
        let mut job = Job { tokens: 50, ..Job::default() };
        job.options.scope = scope;
        let mut shards = with_addends(&job.shards(), scope == Scope::Rank);
        if (scope, reduction) == (Scope::Global, Reduction::Mean) {
            // The mean over three ranks is the loss: each holds three times its part.
            for loss in shards.iter_mut().filter(|shard| shard.name == "loss") {
                loss.bytes = bytes(&[3.0 * floats(loss)[0]]);
            }
        }
        let report = reduced(&job.head(), &shards, &[], reduction);
        let shown = text::render(&report);
        let loss = stage(&report, "loss");
        let each = scope == Scope::Rank || reduction == Reduction::Sum;
        let comparisons = if each { 6 } else { 2 };
        assert_eq!(report.verdict, Verdict::Agreed, "{scope:?} {reduction:?}\n{shown}");
        assert_eq!((loss.status, loss.comparisons), (Status::Pass, comparisons), "{shown}");
        let wrong = |one: &&mut Shard| one.name == "loss" && one.rank == 1;
        let loss = shards.iter_mut().find(wrong).unwrap();
        loss.bytes = bytes(&[1.01 * floats(loss)[0]]);
        let report = reduced(&job.head(), &shards, &[Role::Loss], reduction);
        let shown = text::render(&report);
        let first = report.first_divergence.as_ref().unwrap_or_else(|| panic!("{shown}"));
        assert_eq!((first.stage.as_str(), first.rank), ("loss", each.then_some(1)), "{shown}");
    }
}

/// Goal: a loss that was recorded for the step, and not for its microbatches, is compared with
/// their sum as the head declares it. Method: the sum, and the mean where that is declared, of a
/// clean job's losses, with and without the losses themselves beside it.
#[test]
fn a_loss_without_a_microbatch_is_the_sum_over_microbatches() {
    for (reduction, beside) in [
        (MicrobatchReduction::Sum, true),
        (MicrobatchReduction::Sum, false),
        (MicrobatchReduction::Mean, false),
    ] {
        let mut job = Job { tokens: 50, microbatches: 3, ..Job::default() };
        job.options.microbatch_reduction = reduction;
        let shards = job.shards();
        let losses = shards.iter().filter(|shard| shard.name == "loss" && shard.rank == 0);
        let sum: f64 = losses.map(|loss| f64::from(floats(loss)[0])).sum();
        let right = if reduction == MicrobatchReduction::Mean { sum / 3.0 } else { sum };
        let replayed = |total: f64| {
            let mut shards = shards.clone();
            let step = shards.iter().filter(|shard| shard.name == "loss");
            let step = step.filter(|shard| shard.microbatch == Some(0));
            let bytes = bytes(&[total as f32]);
            let step: Vec<Shard> = step
                .map(|one| Shard { microbatch: None, bytes: bytes.clone(), ..one.clone() })
                .collect();
            shards.retain(|shard| beside || shard.name != "loss");
            shards.extend(step);
            replayed(&job.head(), &shards, &[])
        };
        let clean = replayed(right);
        let shown = text::render(&clean);
        assert_eq!(clean.verdict, Verdict::Agreed, "{reduction:?}\n{shown}");
        assert_eq!(stage(&clean, "loss").comparisons, if beside { 4 } else { 1 }, "{shown}");
        let wrong = replayed(right * 1.001);
        let shown = text::render(&wrong);
        let first = wrong.first_divergence.as_ref().unwrap_or_else(|| panic!("{shown}"));
        assert_eq!((first.stage.as_str(), first.microbatch), ("loss", None), "{shown}");
    }
}

/// Goal: a tensor that is of no use costs the stages that it is for. Method: tensors of a clean
/// job are recorded with a shape that cannot be theirs; all others are judged as before.
#[test]
fn a_tensor_of_another_shape_costs_its_own_stage_and_no_other() {
    let job = Job { tokens: 50, ranks: 1, microbatches: 2, ..Job::default() };
    let (head, shards) = (job.head(), job.shards());
    let clean = replayed(&head, &shards, &[]);
    let judged = |report: &Report| -> Vec<&'static str> {
        let all = report.stages.iter().filter(|stage| stage.comparisons > 0);
        all.map(|stage| stage.name).collect()
    };
    for name in ["lse", "label_logits", "loss", "dq", "dk"] {
        let mut shards = shards.clone();
        let own = |one: &&mut Shard| one.name == name && one.microbatch.is_some();
        for shard in shards.iter_mut().filter(own) {
            let width = shard.dtype.width();
            (shard.shape, shard.bytes) = (vec![3], shard.bytes.repeat(3)[..3 * width].to_vec());
            shard.place = backtape::index_box::IndexBox(vec![(0, 3)]);
        }
        let report = replayed(&head, &shards, &[]);
        let shown = text::render(&report);
        let mut wanted = judged(&clean);
        wanted.retain(|stage| *stage != name && !(name == "dk" && *stage == "reduce"));
        assert_eq!(judged(&report), wanted, "{name}\n{shown}");
        assert_ne!(report.verdict, Verdict::Diverged, "{name}\n{shown}");
        let reason = &stage(&report, name).reason;
        assert!(reason.contains("[3]"), "{name}: {reason}\n{shown}");
        let role = Role::from_name(name).unwrap();
        let asked = replayed(&head, &shards, &[role]);
        let shown = text::render(&asked);
        assert_eq!(asked.verdict, Verdict::Incomplete, "{name}\n{shown}");
        assert!(shown.contains("was asked for and not judged"), "{name}\n{shown}");
    }
}
