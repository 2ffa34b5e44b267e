//! A clean job drawn from a seed: every option, every plausible rounding, every
//! order of summation, in sizes that take milliseconds.
//!
//! What is *not* drawn is as deliberate: an accumulator below f32 that the job
//! does not declare, a p rounded before 1 is taken off it, and combinations that
//! no job has (a masked logit without a mask value that is recorded all the same).

use backtape::head::{
    Denominator, GrpoDeclaration, KlEstimator, LossAverage, LossReduction, MicrobatchReduction,
    RatioLevel, Scope, SmoothingFormula,
};

use super::number::{Float, Order, Random};
use super::options::{Data, Extras, Kind, Layout, Options, Rounding, Shown, Weights};
use super::{Fault, Job};

/// Most multiply-adds of one product over the whole step: some milliseconds.
const WORK: usize = 1_500_000;
/// The same of one job in thirty: what many tokens of a class round alike shows in those alone.
const MORE_WORK: usize = 24_000_000;

pub(super) fn job(seed: u64) -> Job {
    // Neighbouring seeds must not give neighbouring draws.
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed);
    let random = &mut random;
    let kind = match random.unit() {
        x if x < 0.12 => Kind::XentLogits,
        x if x < 0.27 => Kind::Grpo(grpo(random)),
        _ => Kind::Xent,
    };
    let mut job = Job {
        seed,
        ranks: random.one_of(&[1, 1, 2, 3, 4]),
        microbatches: random.one_of(&[1, 1, 2, 3]),
        tokens: random.between(20, 300),
        vocab: random.between(20, 700),
        valid: 0,
        width: random.one_of(&[4, 7, 8, 16, 24, 33, 48, 64]),
        fused: random.chance(0.5) && kind != Kind::XentLogits,
        fault: Fault::None,
        options: Options { kind, ..Options::default() },
    };
    let most = if seed % 30 == 17 { MORE_WORK } else { WORK };
    while job.ranks * job.microbatches * job.tokens * job.vocab * job.width > most {
        job.tokens = (job.tokens * 4 / 5).max(20);
        job.vocab = (job.vocab * 9 / 10).max(20);
        job.width = (job.width * 9 / 10).max(4);
    }
    job.valid = if random.chance(0.6) { job.vocab } else { random.between(17, job.vocab - 1) };
    layout(&mut job, random);
    head(&mut job, random);
    paths(&mut job, random);
    rounding(&mut job, random);
    numbers(&mut job, random);
    loss(&mut job, random);
    extras(&mut job, random);
    shown(&mut job, random);
    job
}

fn grpo(random: &mut Random) -> GrpoDeclaration {
    GrpoDeclaration {
        clip_low: random.one_of(&[0.1, 0.2]),
        clip_high: random.one_of(&[0.1, 0.2, 0.28]),
        dual_clip: random.chance(0.3).then_some(1.5),
        kl_beta: random.one_of(&[0.0, 0.04, 0.5]),
        kl: random.one_of(&[KlEstimator::K1, KlEstimator::K2, KlEstimator::K3]),
        ratio: random.one_of(&[RatioLevel::Token, RatioLevel::Token, RatioLevel::Sequence]),
        average: random.one_of(&[LossAverage::Token, LossAverage::Sequence]),
    }
}

fn layout(job: &mut Job, random: &mut Random) {
    let input = random.one_of(&[Float::Bf16, Float::Bf16, Float::Bf16, Float::F16, Float::F32]);
    let either = |random: &mut Random| random.one_of(&[input, Float::F32]);
    let of_sequences = job.options.grpo().is_some() || random.chance(0.3);
    job.options.layout = Layout {
        sequence: of_sequences.then(|| random.between(3, 20)),
        uneven: random.one_of(&[0, 0, 1, 5]),
        dv: job.options.kind != Kind::XentLogits && random.chance(0.25),
        k_sharded: random.chance(0.3),
        k_once: random.chance(0.3),
        input,
        dq: either(random),
        dk: either(random),
        dk_parts: either(random),
        sums: Float::F32,
        bias: either(random),
    };
}

/// Options of the loss itself.
fn head(job: &mut Job, random: &mut Random) {
    let valid = job.valid;
    let options = &mut job.options;
    let plain_loss = options.grpo().is_none();
    if plain_loss {
        options.label_smoothing =
            if random.chance(0.2) { random.one_of(&[0.1, 0.01]) } else { 0.0 };
        options.z_loss = if random.chance(0.25) { random.one_of(&[1e-4, 1e-2]) } else { 0.0 };
        options.z_loss_in_loss = options.z_loss == 0.0 || random.chance(0.5);
        options.labels_shifted = options.layout.sequence.is_none() || random.chance(0.6);
    }
    if random.chance(0.4) {
        options.smoothing_formula = SmoothingFormula::Megatron;
    }
    options.softcap = random.chance(0.2).then(|| random.one_of(&[5.0, 30.0, 50.0]));
    match random.between(0, 5) {
        // q makes up for the scale, and dk with it: f16 would overflow.
        _ if options.layout.input == Float::F16 => {}
        0 => options.temperature = random.one_of(&[0.7, 2.0]),
        1 => options.logit_scale = random.one_of(&[0.0625, 0.3, 2.5]),
        _ => {}
    }
    options.bias = options.kind != Kind::XentLogits && random.chance(0.2);
    options.tied_embedding = options.kind != Kind::XentLogits && random.chance(0.1);
    options.ignore_label = random.chance(0.5).then(|| random.one_of(&[-100, -1]));
    options.mask_value = (valid < job.vocab && random.chance(0.7)).then(|| {
        let low = [f32::NEG_INFINITY, f32::MIN, -0.7 * f32::MAX];
        f64::from(random.one_of(&low))
    });
}

fn paths(job: &mut Job, random: &mut Random) {
    let options = &mut job.options;
    options.tile = random.one_of(&[16, 32, 64, 100]);
    let chunked = !job.fused && options.kind != Kind::XentLogits && random.chance(0.5);
    options.chunk = chunked.then(|| random.one_of(&[7, 16, 32, 50]));
    options.divides = random.chance(0.3);
    options.order = random.one_of(&[
        Order::Sequential,
        Order::Lanes(8),
        Order::Lanes(32),
        Order::Lanes(128),
        Order::Pairwise,
    ]);
}

/// Intermediates are rounded to the input's dtype or not at all, declared or not;
/// accumulators are below f32 in few jobs, and then declared.
fn rounding(job: &mut Job, random: &mut Random) {
    let input = job.options.layout.input;
    let fused = job.fused;
    let mut either = |here: bool| if here && random.chance(0.5) { input } else { Float::F32 };
    let mut found = Rounding {
        logits: either(job.options.kind != Kind::XentLogits),
        p: either(fused),
        dlogits: either(true),
        label_grad: either(fused),
        parts: either(fused),
        accumulate: Float::F32,
        label_scatter: Float::F32,
        reduce: Float::F32,
    };
    let mut declared: Vec<&'static str> = Vec::new();
    let all = found.named().map(|(name, _)| name);
    declared.extend(all.into_iter().filter(|_| random.chance(0.3)));
    let low = random.unit();
    let mut lower = |name: &'static str, point: &mut Float| {
        *point = Float::Bf16;
        declared.push(name);
    };
    match low {
        x if x < 0.05 && fused => lower("label_scatter", &mut found.label_scatter),
        x if (0.05..0.08).contains(&x) => lower("accumulate", &mut found.accumulate),
        x if (0.08..0.12).contains(&x) => lower("reduce", &mut found.reduce),
        _ => {}
    }
    declared.sort_unstable();
    declared.dedup();
    (job.options.rounding, job.options.declared) = (found, declared);
}

/// What the data are like.
fn numbers(job: &mut Job, random: &mut Random) {
    let options = &job.options;
    let of_tokens = options.grpo().is_none_or(|policy| {
        policy.ratio == RatioLevel::Token && policy.average == LossAverage::Token
    });
    let can_ignore = options.ignore_label.is_some();
    let mask = options.grpo().is_some();
    let silent = (can_ignore || !mask) && job.ranks > 1 && of_tokens && random.chance(0.2);
    let most = if options.layout.input == Float::F16 { 4.0f64 } else { f64::MAX };
    let data = Data {
        spread: most.min(random.one_of(&[0.01, 0.5, 2.0, 2.0, 4.0, 15.0])),
        head: 1.0,
        confident: random
            .chance(0.6)
            .then(|| (random.between(2, 9), random.one_of(&[5.0, 12.0, 25.0]))),
        copies: random.chance(0.12).then(|| random.between(1, 9)),
        ignored: if can_ignore { random.one_of(&[0.0, 0.1, 0.6]) } else { 0.0 },
        silent_rank: silent.then(|| random.between(0, job.ranks - 1)),
        on_policy: random.chance(0.4),
        advantage_of_sequence: !of_tokens || random.chance(0.5),
    };
    let kinds = [Weights::Absent, Weights::Mixed, Weights::Mask];
    let weights = if mask { Weights::Mask } else { random.one_of(&kinds) };
    // What is silent without an ignored label is so by its weights.
    let data = match weights {
        Weights::Absent if !can_ignore => Data { silent_rank: None, ..data },
        _ => data,
    };
    // A copy of a sequence's first token is not the first token of another.
    let copies = data.copies.filter(|_| !mask);
    (job.options.data, job.options.weights) = (Data { copies, ..data }, weights);
}

/// How token losses become one number.
fn loss(job: &mut Job, random: &mut Random) {
    let options = &mut job.options;
    let reductions =
        [LossReduction::Mean, LossReduction::Mean, LossReduction::Sum, LossReduction::None];
    if options.grpo().is_none() {
        options.reduction = random.one_of(&reductions);
    }
    let mut denominators = vec![Denominator::Valid, Denominator::Weights];
    if options.labels_shifted {
        // Whether the last position of a sequence counts among "all" is unsettled.
        denominators.push(Denominator::All);
    }
    let of_sequences = options.grpo().is_some_and(|g| g.average == LossAverage::Sequence);
    if options.reduction == LossReduction::Mean && !of_sequences {
        denominators.push(Denominator::Number(f64::from(random.between(50, 2000) as u32)));
    }
    let denominator = random.one_of(&denominators);
    // Only a mean is divided: nobody can declare more.
    let divided = options.reduction == LossReduction::Mean;
    options.denominator = if divided { denominator } else { Denominator::Valid };
    options.scope = random.one_of(&[Scope::Global, Scope::Global, Scope::Microbatch, Scope::Rank]);
    options.microbatch_reduction =
        random.one_of(&[MicrobatchReduction::Mean, MicrobatchReduction::Sum]);
    options.cotangent = match (options.reduction, options.layout.input) {
        (LossReduction::None, _) => 1.0,
        // f16 jobs scale the loss: without it gradients fall below its range.
        (LossReduction::Mean, Float::F16) => random.one_of(&[16.0, 64.0, 112.0]),
        _ => random.one_of(&[1.0, 1.75, -0.5, 64.0]),
    };
    if options.layout.input == Float::F16 && options.reduction == LossReduction::Sum {
        options.cotangent = 1.75;
    }
}

/// What is recorded beyond the usual.
fn extras(job: &mut Job, random: &mut Random) {
    let unmasked = job.valid < job.vocab && job.options.mask_value.is_none();
    let formed = !job.fused && job.options.kind != Kind::XentLogits;
    // The finite mask values are f32's: below its range they would become -inf.
    let fits = job.options.rounding.logits != Float::F16
        || job.options.mask_value.is_none_or(f64::is_infinite);
    job.options.extras = Extras {
        logits: formed && !unmasked && fits && random.chance(0.3),
        dlogits: formed && random.chance(0.3),
        shown: Shown::AsUsed,
        logprobs: random.chance(0.3),
        accumulated: random.chance(0.3),
        dq_parts: job.fused && random.chance(0.3),
        sums_alone: false,
        unreduced: false,
        averaged: false,
    };
    job.options.reciprocal = random.chance(0.5);
    if random.chance(0.06) {
        job.options.data.head = random.one_of(&[0.0, 1e-3]);
    }
    sums(&mut job.options, random);
}

/// Whether dlogits are recorded with other bits than the products take.
fn shown(job: &mut Job, random: &mut Random) {
    if job.options.extras.dlogits {
        let rounded = Shown::Rounded(job.options.layout.input);
        job.options.extras.shown =
            random.one_of(&[Shown::AsUsed, Shown::AsUsed, Shown::Unrounded, rounded]);
    }
}

/// How the sums of dk are recorded: beside their addends or without them, and in what.
fn sums(options: &mut Options, random: &mut Random) {
    let narrow = options.layout.input == Float::Bf16 && random.chance(0.3);
    options.layout.sums = if narrow { Float::Bf16 } else { Float::F32 };
    let extras = &mut options.extras;
    if options.kind != Kind::XentLogits && random.chance(0.3) {
        extras.sums_alone = true;
        extras.accumulated = random.chance(0.5);
        extras.unreduced = extras.accumulated && random.chance(0.5);
    }
}
