//! The simulator against calculus: it is the oracle of the campaigns, so nothing
//! else may vouch for it.
//!
//! Method: the same code in f64 without any rounding. Its losses must be what a
//! naive formula gives, its gradients the slopes of its losses, and the identities
//! of softmax must hold; the rounded f32 run must then lie near the exact one.

use backtape::head::{
    Denominator, KlEstimator, LossAverage, LossReduction, MicrobatchReduction, RatioLevel, Scope,
    SmoothingFormula,
};

use super::inputs::{Inputs, Share};
use super::number::{Float, Random};
use super::options::{Kind, Options};
use super::step::{Part, Step};
use super::{Fault, Job};

/// Jobs that a test draws: some seconds for all of them together.
const RUNS: u64 = 80;
/// Step of the finite differences: its error is h² relative, rounding adds 1e-16/h.
const H: f64 = 1e-5;

/// What the gradients are the slope of: the losses with their cotangents, as
/// microbatches and ranks combine.
fn objective(job: &Job, inputs: &Inputs) -> f64 {
    let step = Step::<f64>::run(job, inputs);
    let mut total = 0.0;
    for (parts, shares) in step.parts.iter().zip(&inputs.shares) {
        for (part, share) in parts.iter().zip(shares) {
            for (t, loss) in part.losses.iter().enumerate() {
                total += loss
                    * match job.options.reduction {
                        LossReduction::None => share.cotangent[t],
                        _ => job.options.cotangent,
                    };
            }
        }
    }
    total
}

/// One tensor of the inputs, of every share where there are several.
type Tensor = for<'i> fn(&'i mut Inputs) -> Vec<&'i mut Vec<f64>>;

fn of_shares(inputs: &mut Inputs) -> impl Iterator<Item = &mut Share> {
    inputs.shares.iter_mut().flatten()
}

/// Slope of the objective along a random direction, measured and from gradients.
fn slopes(job: &Job, tensor: Tensor, gradient: impl Fn(&Part<f64>) -> &[f64]) -> (f64, f64) {
    let mut inputs = Inputs::draw(job);
    let step = Step::<f64>::run(job, &inputs);
    let mut random = Random(job.seed ^ 0xd1f);
    let directions: Vec<Vec<f64>> =
        tensor(&mut inputs).iter().map(|x| x.iter().map(|_| random.normal()).collect()).collect();
    let mut moved = |by: f64| {
        let each = tensor(&mut inputs).into_iter().zip(&directions);
        each.for_each(|(x, along)| x.iter_mut().zip(along).for_each(|(x, d)| *x += by * d));
        objective(job, &inputs)
    };
    let (up, down) = (moved(H), moved(-2.0 * H));
    let parts = step.parts.iter().flatten();
    let dot = |(at, part): (usize, &Part<f64>)| -> f64 {
        // k and the bias are one tensor that every share reads.
        let along = &directions[at % directions.len()];
        gradient(part).iter().zip(along).map(|(g, d)| g * d).sum()
    };
    ((up - down) / (2.0 * H), parts.enumerate().map(dot).sum())
}

/// A random job whose loss holds all that its gradients hold.
fn differentiable(seed: u64) -> Job {
    let mut job = Job::random(seed);
    (job.options.z_loss_in_loss, job.options.tied_embedding) = (true, false);
    job
}

#[test]
fn gradients_are_the_slopes_of_the_loss_whatever_the_options() {
    for seed in 0..RUNS {
        let job = differentiable(seed);
        let check = |name: &str, (measured, found): (f64, f64)| {
            let near = 1e-5 * (measured.abs() + found.abs()) + 1e-8;
            assert!((measured - found).abs() <= near, "d{name}: {measured} {found} {job:?}");
        };
        if job.options.kind == Kind::XentLogits {
            let given: Tensor = |inputs| of_shares(inputs).map(|share| &mut share.given).collect();
            check("logits", slopes(&job, given, |part| &part.gradients.dlogits));
            continue;
        }
        let q: Tensor = |inputs| of_shares(inputs).map(|share| &mut share.q).collect();
        check("q", slopes(&job, q, |part| &part.gradients.dq));
        check("k", slopes(&job, |inputs| vec![&mut inputs.k], |part| &part.gradients.dk));
        if job.options.bias {
            let bias: Tensor = |inputs| vec![&mut inputs.bias];
            check("bias", slopes(&job, bias, |part| &part.gradients.dbias));
        }
    }
}

/// Goal: the forward is right too, not just consistent with the backward.
/// Method: probabilities and a target distribution, as in a textbook.
#[test]
fn losses_are_the_cross_entropy_of_the_target_distribution() {
    for seed in (0..RUNS).filter(|&seed| Job::random(seed).options.grpo().is_none()) {
        let job = Job::random(seed);
        let inputs = Inputs::draw(&job);
        let step = Step::<f64>::run(&job, &inputs);
        for (mb, (parts, shares)) in step.parts.iter().zip(&inputs.shares).enumerate() {
            for (rank, (part, share)) in parts.iter().zip(shares).enumerate() {
                let divisor = divisor(&job, &inputs, mb, rank);
                for (t, &found) in part.losses.iter().enumerate() {
                    let wanted = textbook(&job, &inputs, share, t) / divisor;
                    let near = 1e-9 * (1.0 / divisor + wanted.abs());
                    assert!((found - wanted).abs() <= near, "token {t}: {found} {wanted} {job:?}");
                }
            }
        }
    }
}

/// The position of the label that a position is to predict, if it takes part.
fn labelled(job: &Job, share: &Share, t: usize) -> Option<usize> {
    let o = &job.options;
    let next = usize::from(!o.labels_shifted);
    let last = next == 1 && (t + 1).is_multiple_of(o.layout.sequence.unwrap());
    let ignored = || Some(share.labels[t + next]) == o.ignore_label;
    if last || ignored() { None } else { Some(t + next) }
}

/// The shares over which the declared scope counts.
fn within<'i>(job: &Job, inputs: &'i Inputs, mb: usize, rank: usize) -> Vec<&'i Share> {
    let mut found = Vec::new();
    for (at_mb, shares) in inputs.shares.iter().enumerate() {
        for (at_rank, share) in shares.iter().enumerate() {
            let inside = match job.options.scope {
                Scope::Global => true,
                Scope::Microbatch => at_mb == mb,
                Scope::Rank => (at_mb, at_rank) == (mb, rank),
            };
            found.extend(inside.then_some(share));
        }
    }
    found
}

/// What the losses of one rank's microbatch are divided by, as the declaration says.
fn divisor(job: &Job, inputs: &Inputs, mb: usize, rank: usize) -> f64 {
    if job.options.reduction != LossReduction::Mean {
        return 1.0;
    }
    let policy = job.options.grpo().is_some();
    let mut total = 0.0;
    for share in within(job, inputs, mb, rank) {
        for t in 0..share.tokens {
            let weight = labelled(job, share, t).map(|source| share.weights[source]);
            total += match job.options.denominator {
                Denominator::All => 1.0,
                // A mask takes the place of ignored labels in a policy loss.
                Denominator::Valid if policy => f64::from(weight.is_some_and(|w| w != 0.0)),
                Denominator::Valid => f64::from(weight.is_some()),
                Denominator::Weights => weight.unwrap_or(0.0),
                Denominator::Number(_) => 0.0,
            };
        }
    }
    match job.options.denominator {
        Denominator::Number(n) => n,
        _ if total == 0.0 => 1.0,
        _ => total,
    }
}

/// Goal: finite differences cannot see a clip or a mean that loss and gradient
/// lack alike. Method: the formula of the declaration's documentation, with `min`
/// and `clamp`, token by token.
#[test]
fn policy_losses_are_the_clipped_surrogate_and_the_divergence() {
    let mut clipped = 0;
    for job in (0..4 * RUNS).map(Job::random).filter(|job| job.options.grpo().is_some()) {
        let inputs = Inputs::draw(&job);
        let step = Step::<f64>::run(&job, &inputs);
        let length = job.options.layout.sequence.unwrap();
        for (mb, (parts, shares)) in step.parts.iter().zip(&inputs.shares).enumerate() {
            for (rank, (part, share)) in parts.iter().zip(shares).enumerate() {
                let among = within(&job, &inputs, mb, rank);
                let sequences: usize = among.iter().map(|share| share.tokens / length).sum();
                let tokens = divisor(&job, &inputs, mb, rank);
                for t in 0..share.tokens {
                    let counted = counted(&job, share, t);
                    let (loss, outside) = surrogate(&job, share, &part.logprobs, &counted, t);
                    let wanted = match job.options.grpo().unwrap().average {
                        _ if !counted.contains(&t) => 0.0,
                        LossAverage::Token => loss / tokens,
                        LossAverage::Sequence => loss / (counted.len() * sequences) as f64,
                    };
                    clipped += usize::from(counted.contains(&t) && outside);
                    let gap = (part.losses[t] - wanted).abs();
                    assert!(gap <= 1e-9 * (1e-3 + wanted.abs()), "token {t}: {wanted} {job:?}");
                }
            }
        }
    }
    assert!(clipped > 100, "{clipped} ratios were clipped");
}

/// The tokens of a token's sequence that the mask leaves.
fn counted(job: &Job, share: &Share, t: usize) -> Vec<usize> {
    let length = job.options.layout.sequence.unwrap();
    let from = t / length * length;
    let counts = |t: &usize| labelled(job, share, *t).is_some() && share.weights[*t] != 0.0;
    (from..from + length).filter(counts).collect()
}

/// The loss of one token of a policy, and whether its ratio is outside the clip.
fn surrogate(job: &Job, share: &Share, logp: &[f64], counted: &[usize], t: usize) -> (f64, bool) {
    let grpo = job.options.grpo().unwrap();
    let log_ratio = |t: &usize| logp[*t] - share.old[*t];
    let ratio = match grpo.ratio {
        RatioLevel::Token => log_ratio(&t).exp(),
        RatioLevel::Sequence => {
            (counted.iter().map(log_ratio).sum::<f64>() / counted.len() as f64).exp()
        }
    };
    let shared = share.advantages.len() < share.tokens;
    let of = if shared { t / job.options.layout.sequence.unwrap() } else { t };
    let advantage = share.advantages[of];
    let inside = ratio.clamp(1.0 - grpo.clip_low, 1.0 + grpo.clip_high);
    let mut loss = -(ratio * advantage).min(inside * advantage);
    if let Some(dual) = grpo.dual_clip.filter(|_| advantage < 0.0) {
        loss = loss.min(-dual * advantage);
    }
    let d = share.reference[t] - logp[t];
    let divergence = match grpo.kl {
        KlEstimator::K1 => -d,
        KlEstimator::K2 => d * d / 2.0,
        KlEstimator::K3 => d.exp() - d - 1.0,
    };
    (loss + grpo.kl_beta * divergence, ratio != inside)
}

/// The weighted loss of one token.
fn textbook(job: &Job, inputs: &Inputs, share: &Share, t: usize) -> f64 {
    let o = &job.options;
    let Some(source) = labelled(job, share, t) else { return 0.0 };
    let z: Vec<f64> = (0..job.valid)
        .map(|v| {
            let dot = |i: usize| share.q[t * job.width + i] * inputs.k[v * job.width + i];
            let raw = match o.kind {
                Kind::XentLogits => share.given[t * job.vocab + v],
                _ => (0..job.width).map(dot).sum::<f64>(),
            };
            let raw = raw + inputs.bias.get(v).copied().unwrap_or(0.0);
            let scaled = raw * o.logit_scale / o.temperature;
            o.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh())
        })
        .collect();
    let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = max + z.iter().map(|z| (z - max).exp()).sum::<f64>().ln();
    let classes = job.valid as f64;
    // Megatron's s is chosen so that each wrong class has ε/(K-1).
    let wrong = match o.smoothing_formula {
        SmoothingFormula::Uniform => o.label_smoothing / classes,
        SmoothingFormula::Megatron => o.label_smoothing / (classes - 1.0),
    };
    let right = 1.0 - wrong * (classes - 1.0);
    let label = share.labels[source] as usize;
    let target = |v: usize| if v == label { right } else { wrong };
    let entropy: f64 = (0..job.valid).map(|v| -target(v) * (z[v] - lse)).sum();
    let z_loss = if o.z_loss_in_loss { o.z_loss * lse * lse } else { 0.0 };
    share.weights[source] * (entropy + z_loss)
}

#[test]
fn the_paths_agree_when_nothing_is_rounded() {
    for seed in 0..RUNS {
        let drawn = Job::random(seed);
        if drawn.options.kind == Kind::XentLogits {
            continue;
        }
        let inputs = Inputs::draw(&drawn);
        let run = |fused: bool, chunk: Option<usize>| {
            let options = Options { chunk, divides: false, ..drawn.options.clone() };
            Step::<f64>::run(&Job { fused, options, ..drawn.clone() }, &inputs)
        };
        let (plain, fused, chunked) = (run(false, None), run(true, None), run(false, Some(7)));
        for other in [&fused, &chunked] {
            assert!(distance(&plain.reduced, &other.reduced) < 1e-9, "{drawn:?}");
            for (a, b) in plain.parts.iter().flatten().zip(other.parts.iter().flatten()) {
                let (a, b) = (&a.gradients, &b.gradients);
                assert!(distance(&a.dq, &b.dq) < 1e-9, "{drawn:?}");
                assert!(distance(&a.dbias, &b.dbias) < 1e-9, "{drawn:?}");
            }
        }
    }
}

/// Columns of dk sum to nothing where only softmax stands between them; dq and dk
/// have one trace where nothing else reads q or k.
#[test]
fn the_identities_of_softmax_hold() {
    let mut checked = 0;
    for seed in 0..2 * RUNS {
        let mut job = Job::random(seed);
        if job.options.kind == Kind::XentLogits || job.options.softcap.is_some() {
            continue;
        }
        (job.options.z_loss, job.options.tied_embedding) = (0.0, false);
        let inputs = Inputs::draw(&job);
        for (part, share) in Step::<f64>::run(&job, &inputs)
            .parts
            .iter()
            .flatten()
            .zip(inputs.shares.iter().flatten())
        {
            let found = &part.gradients;
            let norm = found.dk.iter().map(|x| x * x).sum::<f64>().sqrt();
            // On confident tokens p and the label cancel: what is left of u remains.
            let size: f64 = share.q.iter().map(|x| x.abs()).sum();
            let noise = 1e-14 * job.options.cotangent.abs().max(4.0) * size;
            for i in 0..job.width {
                let sum: f64 = found.dk.iter().skip(i).step_by(job.width).sum();
                assert!(sum.abs() <= 1e-9 * norm + noise, "column {i}: {sum} {norm} {job:?}");
            }
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let (left, right) = (dot(&found.dq, &share.q), dot(&found.dk, &inputs.k));
            let near = (1e-9 * norm + noise) * dot(&inputs.k, &inputs.k).sqrt();
            assert!((left - right).abs() <= near, "{left} {right} {job:?}");
            checked += 1;
        }
    }
    assert!(checked > RUNS, "{checked}");
}

/// Goal: a clean job is one that rounds, not one that computes something else.
/// Method: its distance from the exact run, beside the exact softmax part alone:
/// on confident tokens that and the label's part cancel.
#[test]
fn the_rounded_run_lies_near_the_exact_one() {
    for job in (0..RUNS).map(Job::random) {
        // An embedding's part would hide the head's.
        let tied_embedding = false;
        let job = Job { options: Options { tied_embedding, ..job.options.clone() }, ..job };
        let options = Options { chunk: None, ..job.options.clone() };
        let low = job.options.rounding.named().iter().any(|(_, to)| *to != Float::F32)
            || job.options.layout.input != Float::F32;
        // A ratio near its clip falls on the other side of it when logits are rounded.
        let jumps = job.options.grpo().is_some() && job.options.rounding.logits != Float::F32;
        if jumps || job.options.kind == Kind::XentLogits {
            continue;
        }
        let inputs = Inputs::draw(&job);
        let exact = Step::<f64>::run(&Job { fused: true, options, ..job.clone() }, &inputs);
        let rounded = Step::<f32>::run(&job, &inputs);
        // Logits of 60 rounded to bf16 are off by 0.12, and p by as much.
        let near = if low { 0.2 } else { 1e-4 };
        for (a, b) in exact.parts.iter().flatten().zip(rounded.parts.iter().flatten()) {
            let (a, b) = (&a.gradients, &b.gradients);
            for (name, all, part, found) in
                [("dq", &a.dq, &a.dq_lse, &b.dq), ("dk", &a.dk, &a.dk_lse, &b.dk)]
            {
                let gaps = all.iter().zip(found).map(|(a, &b)| a - f64::from(b));
                let gap = norm(gaps) / norm(part.iter().copied()).max(f64::MIN_POSITIVE);
                assert!(gap <= near, "{name} is {gap} off {job:?}");
            }
        }
    }
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

/// Relative distance in the Frobenius norm; NaN is never near.
fn distance(one: &[f64], other: &[f64]) -> f64 {
    assert_eq!(one.len(), other.len());
    let gap = norm(one.iter().zip(other).map(|(a, b)| a - b));
    if gap == 0.0 { 0.0 } else { gap / norm(one.iter().copied()) }
}

#[test]
fn every_option_is_drawn_and_no_clean_job_has_a_fault() {
    let jobs: Vec<Job> = (0..3000).map(Job::random).collect();
    let mut seen = std::collections::BTreeSet::new();
    for job in &jobs {
        assert_eq!(job.fault, Fault::None);
        let (head, o) = (job.head(), &job.options);
        let low = |to: Float| to != Float::F32;
        for (name, to) in o.rounding.named() {
            let accumulator = ["accumulate", "label_scatter", "reduce"].contains(&name);
            assert!(!(accumulator && low(to)) || o.declared.contains(&name), "{job:?}");
            seen.insert(format!("{name} low {} declared {}", low(to), o.declared.contains(&name)));
        }
        let grpo = o.grpo().map(|g| format!("{:?} {:?} {:?}", g.kl, g.ratio, g.average));
        for fact in [
            format!("{:?} {}", head.loss, head.path),
            format!("{:?} {:?}", head.reduction, o.scope),
            format!("{:?}", head.denominator).chars().take(5).collect(),
            format!("{:?} {:?}", head.microbatch_reduction, o.weights),
            format!("cap {} scale {}", o.softcap.is_some(), o.scale() != 1.0),
            format!("z {} in loss {}", o.z_loss > 0.0, o.z_loss_in_loss),
            format!("smooth {} {:?}", o.label_smoothing > 0.0, o.smoothing_formula),
            format!("mask {:?}", o.mask_value),
            format!("shifted {} tied {}", o.labels_shifted, o.tied_embedding),
            format!("{:?} dv {} cut {}", o.layout.input, o.layout.dv, o.layout.k_sharded),
            format!("bias {} once {}", o.bias, o.layout.k_once),
            format!("copies {}", o.data.copies.is_some()),
            format!("silent {}", o.data.silent_rank.is_some()),
            format!("{:?} {grpo:?}", o.order),
        ] {
            seen.insert(fact);
        }
    }
    for wanted in [
        "SoftmaxXent plain",
        "SoftmaxXent fused",
        "SoftmaxXent chunked",
        "XentLogits plain",
        "Grpo fused",
        "Grpo plain",
        "Grpo chunked",
        "label_scatter low true declared true",
        "accumulate low true declared true",
        "reduce low true declared true",
        "p low true declared false",
        "parts low true declared true",
        "logits low true declared false",
        "Mean Rank",
        "Mean Microbatch",
        "Sum Global",
        "None Global",
        "Numbe",
        "All",
        "Weigh",
        "Valid",
        "cap true scale true",
        "z true in loss false",
        "smooth true Megatron",
        "smooth true Uniform",
        "mask None",
        "mask Some(-inf)",
        "mask Some(-3.4028234663852886e38)",
        "shifted false tied false",
        "shifted true tied true",
        "F16 dv true cut true",
        "F32 dv false cut false",
        "bias true once true",
        "copies true",
        "silent true",
    ] {
        assert!(seen.contains(wanted), "{wanted} is never drawn: {seen:#?}");
    }
}

#[test]
fn a_seed_is_all_that_a_job_depends_on_and_its_record_is_finite() {
    for seed in 0..RUNS {
        let job = Job::random(seed);
        let (one, two) = (job.shards(), Job::random(seed).shards());
        assert_eq!(one.len(), two.len());
        for (a, b) in one.iter().zip(&two) {
            assert!(a.bytes == b.bytes && a.name == b.name, "{} {job:?}", a.name);
            assert_eq!(
                a.place.elements().unwrap() as usize * a.dtype.width(),
                a.bytes.len(),
                "{} {job:?}",
                a.name
            );
            if a.name != "logits" {
                assert!(super::record::finite(a), "{} {job:?}", a.name);
            }
        }
        assert!(!format!("{job:?}").contains('\n'));
    }
}

#[test]
fn microbatch_means_divide_what_microbatch_sums_do_not() {
    let of = |microbatch_reduction| {
        let options = Options { microbatch_reduction, ..Options::default() };
        let job = Job { options, ..Job::default() };
        Step::<f64>::run(&job, &Inputs::draw(&job)).reduced
    };
    let (mean, sum) = (of(MicrobatchReduction::Mean), of(MicrobatchReduction::Sum));
    let doubled: Vec<f64> = mean.iter().map(|x| 2.0 * x).collect();
    assert!(distance(&sum, &doubled) < 1e-12);
}
