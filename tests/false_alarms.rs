//! How often `replay` calls a clean job diverged, over jobs drawn at random.
//!
//! Goal: an upper bound of the false-alarm rate, and how near to an alarm clean
//! runs come. Method: `Job::random(seed)` for many seeds; every alarm is printed
//! with its seed and the job, which is all that is needed to repeat it:
//!
//!     BACKTAPE_SEED=1234 BACKTAPE_RUNS=1 make bench-false-alarms
//!
//! With `BACKTAPE_KEEP=DIR` the dumps stay, as `DIR/run-SEED`.
//!
//! What `replay` refuses is counted beside, never as an agreement.

use std::collections::BTreeMap;
use std::fmt::Write;

use backtape::nan::larger;
use backtape_replayer::compare::Bound;
use backtape_replayer::diagnose::{Budget, diagnose};
use backtape_replayer::dump::{Selection, StepDump, open};
use backtape_replayer::head::{HeadStep, Stage};
use backtape_replayer::kernels::NoProgress;
use backtape_replayer::replay::comparison::Comparison;
use backtape_replayer::replay::outcome::Outcome;
use backtape_replayer::replay::{Effort, Request, replay};
use backtape_replayer::verify::verify;

use crate::support::dump;
use crate::support::job::Job;
use crate::support::job::number::Random;

/// Runs of the share that every test run takes.
const QUICK: u64 = 60;
/// Seeds that the campaign once found wrong: a head of zeros, proofs by the rounding of few
/// tokens, addends below the smallest f16, values near each other, a filter below what f32 tells.
const ONCE_WRONG: [u64; 10] =
    [750, 5303, 5550, 90244, 160_018, 161_299, 171_767, 181_794, 190_970, 200_119];
/// Runs of the whole, where BACKTAPE_RUNS does not say.
const WHOLE: u64 = 2000;
/// Confidence of the upper bound.
const CONFIDENCE: f64 = 0.95;

/// How near to its bound a comparison came: above 1 it would be an alarm.
#[derive(Clone, Copy, Debug, Default)]
struct Consumption {
    /// Error energy over allowed energy.
    energy: f64,
    /// Worst score over the score that rounding may reach; a lower estimate of
    /// the latter, which depends on how the element's variance is shared.
    score: f64,
    /// |slope| over allowed slope.
    slope: f64,
}

/// What became of one run.
enum Ended {
    Judged { alarm: Option<Alarm>, consumed: BTreeMap<Stage, Consumption>, compared: usize },
    Refused(String),
}

struct Alarm {
    /// The stage, `verify` or `panic`.
    stage: &'static str,
    reason: String,
}

/// The campaign's sums.
#[derive(Default)]
struct Campaign {
    judged: u64,
    compared: usize,
    alarms: Vec<(u64, Alarm)>,
    refused: BTreeMap<String, (u64, u64)>,
    /// The largest consumption of each stage, with its seed.
    worst: BTreeMap<Stage, [(f64, u64); 3]>,
}

/// A run whose panic is one alarm more, not the end of the campaign.
fn survived(job: &Job) -> Ended {
    std::panic::catch_unwind(|| run(job)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
        let reason = text.unwrap_or_default();
        let alarm = Some(Alarm { stage: "panic", reason });
        Ended::Judged { alarm, consumed: BTreeMap::new(), compared: 0 }
    })
}

fn run(job: &Job) -> Ended {
    let directory = tempfile::tempdir().unwrap();
    let path = dump::of_seed(job.seed, directory.path());
    let (ranks, reduction) = (job.ranks as u32, |_: &dump::Shard| job.reduction());
    dump::write_reduced(&path, ranks, Some(&job.head()), &job.shards(), &reduction);
    let dumped = open(&path, &Selection::default()).unwrap();
    let (outcome, units) = match judged(&dumped) {
        Ok(found) => found,
        Err(why) => return Ended::Refused(why),
    };
    let mut ended = ended(&outcome, units);
    // A clean job's dump must be proved as well: a finding is an alarm like any other.
    let findings = verify(&dumped, &|_| {}).findings;
    if let (Ended::Judged { alarm, .. }, Some(found)) = (&mut ended, findings.first()) {
        *alarm = Some(Alarm { stage: "verify", reason: found.sentence.clone() });
    }
    ended
}

fn judged(dumped: &StepDump) -> Result<(Outcome, usize), String> {
    let step = HeadStep::new(dumped, None, |_| None).map_err(|error| error.to_string())?;
    let request = Request {
        compare: &[],
        effort: Effort::All,
        progress: &NoProgress,
        total: &|_| {},
        draws: false,
        cluster: None,
        device: None,
    };
    let mut outcome = replay(&step, &request).map_err(|error| error.to_string())?;
    // A fault that is proved beside a policy is an alarm as well, and a bound that is too
    // narrow stays one though a policy clears it.
    if outcome.first_divergence().is_none() {
        diagnose(&step, &mut outcome, &[], &Budget::default())
            .map_err(|error| error.to_string())?;
    }
    let units = |microbatch| {
        let inputs = step.inputs(microbatch).unwrap();
        step.units(&inputs).map_or(0, |units| units.len())
    };
    let units = step.microbatches.iter().map(|&microbatch| units(microbatch)).sum();
    Ok((outcome, units))
}

fn ended(outcome: &Outcome, units: usize) -> Ended {
    let alarm = outcome.first_divergence().map(|found| {
        let worst = found.worst().map(|c| {
            (&c.source, c.rank, &c.tally.first, &c.tally.worst, c.tally.worst_rows.first())
        });
        let reason = format!("{}\n  {worst:?}", found.reason);
        Alarm { stage: found.stage.name(), reason }
    });
    let comparisons = Stage::ALL.len() * units.max(1);
    let mut consumed: BTreeMap<Stage, Consumption> = BTreeMap::new();
    for stage in &outcome.stages {
        for comparison in &stage.comparisons {
            let found = consumption(comparison, comparisons);
            let kept = consumed.entry(stage.stage).or_default();
            kept.energy = larger(kept.energy, found.energy);
            kept.score = larger(kept.score, found.score);
            kept.slope = larger(kept.slope, found.slope);
        }
    }
    Ended::Judged { alarm, consumed, compared: outcome.compared() }
}

fn consumption(comparison: &Comparison, comparisons: usize) -> Consumption {
    let tally = &comparison.tally;
    let bound = Bound::new(comparisons, tally.rows as usize, tally.elements as usize);
    let share = |used: f64, allowed: f64| if used == 0.0 { 0.0 } else { used / allowed };
    let score = tally.worst.as_ref().map_or(0.0, |worst| worst.score);
    Consumption {
        energy: share(tally.error_energy, tally.budget.energy(bound.stage)),
        score: share(score, (2.0 * bound.element).sqrt()),
        slope: share(tally.slope().abs(), tally.allowed_slope(&bound)),
    }
}

impl Campaign {
    fn of(seeds: impl IntoIterator<Item = u64>) -> Campaign {
        Campaign::with(seeds, |_| {})
    }

    /// The same, with all jobs changed alike.
    fn with(seeds: impl IntoIterator<Item = u64>, change: impl Fn(&mut Job)) -> Campaign {
        let mut campaign = Campaign::default();
        for seed in seeds {
            let mut job = Job::random(seed);
            job.draw_mean();
            change(&mut job);
            campaign.add(seed, survived(&job));
        }
        campaign
    }

    fn add(&mut self, seed: u64, ended: Ended) {
        match ended {
            Ended::Refused(why) => self.refused.entry(why).or_insert((0, seed)).0 += 1,
            Ended::Judged { alarm, consumed, compared } => {
                self.judged += 1;
                self.compared += compared;
                self.alarms.extend(alarm.map(|alarm| (seed, alarm)));
                for (stage, found) in consumed {
                    let worst = self.worst.entry(stage).or_default();
                    let found = [found.energy, found.score, found.slope];
                    for (worst, found) in worst.iter_mut().zip(found) {
                        if !(found <= worst.0) {
                            *worst = (found, seed);
                        }
                    }
                }
            }
        }
    }

    /// Alarms by the stage where they were raised.
    fn by_stage(&self) -> BTreeMap<&'static str, Vec<u64>> {
        let mut found: BTreeMap<&'static str, Vec<u64>> = BTreeMap::new();
        self.alarms
            .iter()
            .for_each(|(seed, alarm)| found.entry(alarm.stage).or_default().push(*seed));
        found
    }

    fn render(&self) -> String {
        let mut text = String::new();
        let line = &mut text;
        let refused: u64 = self.refused.values().map(|(count, _)| count).sum();
        let (n, alarms) = (self.judged, self.alarms.len() as u64);
        let upper = upper_bound(alarms, n, CONFIDENCE);
        writeln!(line, "runs {}  judged {n}  refused {refused}", n + refused).unwrap();
        writeln!(line, "stages compared in all {}", self.compared).unwrap();
        writeln!(
            line,
            "false alarms {alarms}; rate at most {upper:.2e} at {CONFIDENCE} (Clopper-Pearson)"
        )
        .unwrap();
        for (stage, seeds) in self.by_stage() {
            writeln!(line, "  {stage:<14} {:>5}  seeds {seeds:?}", seeds.len()).unwrap();
        }
        writeln!(line, "largest share of what is allowed, clean runs (1 is an alarm), by seed:")
            .unwrap();
        writeln!(line, "  {:<14} {:>18} {:>18} {:>18}", "stage", "energy", "score", "slope")
            .unwrap();
        for (stage, worst) in &self.worst {
            let of = |(share, seed): (f64, u64)| format!("{share:.3} ({seed})");
            let [energy, score, slope] = worst.map(of);
            writeln!(line, "  {:<14} {energy:>18} {score:>18} {slope:>18}", stage.name()).unwrap();
        }
        for (why, (count, seed)) in &self.refused {
            writeln!(line, "refused {count} times, first by seed {seed}: {why}").unwrap();
        }
        // One of each stage in full: the seeds above lead to the others.
        for seeds in self.by_stage().values() {
            let (seed, alarm) = self.alarms.iter().find(|(seed, _)| *seed == seeds[0]).unwrap();
            let mut job = Job::random(*seed);
            job.draw_mean();
            writeln!(line, "ALARM {}: {}\n  {job:?}", alarm.stage, alarm.reason).unwrap();
        }
        text
    }
}

/// Clopper-Pearson: the rate at which so few alarms in `n` runs would be seen with
/// probability `1 - confidence` only. With no alarm it is the rule of three.
fn upper_bound(alarms: u64, n: u64, confidence: f64) -> f64 {
    if alarms >= n {
        return 1.0;
    }
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if at_most(alarms, n, middle) > 1.0 - confidence {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

/// Probability of at most so many alarms in `n` runs at this rate.
fn at_most(alarms: u64, n: u64, rate: f64) -> f64 {
    let mut log_term = n as f64 * (-rate).ln_1p();
    let mut total = log_term.exp();
    for i in 0..alarms {
        log_term += ((n - i) as f64 / (i + 1) as f64).ln() + (rate / (1.0 - rate)).ln();
        total += log_term.exp();
    }
    total
}

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().map_or(usual, |text| text.parse().expect("a whole number"))
}

#[test]
fn clean_jobs_drawn_at_random_raise_no_alarm() {
    let campaign = Campaign::of((0..QUICK).chain(ONCE_WRONG));
    assert!(campaign.judged > 0, "nothing was judged:\n{}", campaign.render());
    assert!(campaign.alarms.is_empty(), "{}", campaign.render());
}

/// Clean jobs that were once called diverged, by what the model of rounding lacked.
const ONCE_ALARMED: [u64; 12] = [
    20_261_240, // dbias: entries of copied tokens below f16's smallest step
    20_261_301, // loss: terms of one sequence are alike, and summed one after the other
    40_261_239, // dk_label: g of few tokens times q of few bits rounds to one side
    20_261_688, // logits: tanh of a small number of few bits is rounded back to it
    60_261_854, // loss: smoothing's sum of logits of either sign, in a declared bf16 accumulator
    60_261_931, // loss: no token counts, and a mean over 0 made the allowance no number
    60_262_436, // loss: the same, of copies of an ignored token
    60_261_258, // dk_label: one token repeated, whose equal addends err alike
    60_261_748, // dq_lse: a scatter's policy without its scatter equals the job in every bit
    60_262_500, // dk_lse: p on bf16's grid less smoothing's s/K rounds to one side
    60_261_902, // dk_label: f32 sums that are declared in bf16 equal sums in f16
    50_261_298, // dk_lse: a scatter's policy rounded the parts as the job does
];

#[test]
fn clean_jobs_that_once_raised_an_alarm_raise_none() {
    let campaign = Campaign::of(ONCE_ALARMED);
    assert_eq!(campaign.judged, ONCE_ALARMED.len() as u64);
    assert!(campaign.alarms.is_empty(), "{}", campaign.render());
}

/// A job whose sums of nearly equal addends err further than those of addends that differ.
const ALIKE: [u64; 2] = [
    167, // losses of equal tokens
    219, // dbias: logits of a class that are its bias round alike for all tokens
];

/// Goal: a job whose head starts at zero, or near it, raises no alarm at its step 0, where
/// all losses, and all entries of a column of p, are alike and so are their roundings.
#[test]
fn heads_of_zeros_raise_no_alarm() {
    for head in [0.0, 1e-3] {
        let seeds = (0..number("BACKTAPE_HEADS", 20)).chain(ALIKE);
        let campaign = Campaign::with(seeds, |job| {
            job.options.data.head = head;
        });
        assert!(campaign.alarms.is_empty(), "{}", campaign.render());
    }
}

/// The job with as many columns of q and k as a real head has, where the reference adds its
/// squares in f32; fewer tokens make up for the work.
fn widened(job: &mut Job) {
    let mut random = Random(job.seed ^ 0x71de);
    let narrow = std::mem::replace(&mut job.width, random.one_of(&[256, 272, 384, 513]));
    job.tokens = job.tokens.min(60);
    // Half of the jobs have the logits that were drawn; those of the others are larger.
    if random.chance(0.5) {
        job.options.data.head *= (narrow as f64 / job.width as f64).sqrt();
    }
}

/// Goal: what rounding allows is no less where its squares are added in f32.
#[test]
fn wide_heads_raise_no_alarm() {
    let campaign = Campaign::with(0..number("BACKTAPE_WIDE", 12), widened);
    assert!(campaign.judged > 0, "nothing was judged:\n{}", campaign.render());
    assert!(campaign.alarms.is_empty(), "{}", campaign.render());
}

/// `make bench-false-alarms`: the same over as many seeds as there is time for, one job in ten
/// of them a wide one besides.
#[test]
#[ignore = "minutes: make bench-false-alarms"]
fn the_whole_campaign() {
    let (from, runs) = (number("BACKTAPE_SEED", 0), number("BACKTAPE_RUNS", WHOLE));
    for campaign in [
        Campaign::of(from..from + runs),
        Campaign::with(from..from + number("BACKTAPE_WIDE", runs / 10), widened),
    ] {
        println!("{}", campaign.render());
        assert!(campaign.judged > 0 && campaign.alarms.is_empty());
    }
}

#[test]
fn the_bound_on_the_rate_is_that_of_clopper_and_pearson() {
    // No alarm: 1 - 0.05^(1/n), three over n. The others are from tables.
    assert!((upper_bound(0, 2000, 0.95) - (1.0 - 0.05f64.powf(1.0 / 2000.0))).abs() < 1e-9);
    for (alarms, n, wanted) in [(1, 10, 0.394_163), (3, 100, 0.075_709), (10, 10, 1.0)] {
        let found = upper_bound(alarms, n, 0.95);
        assert!((found - wanted).abs() < 2e-4, "{alarms} of {n}: {found}");
    }
}

/// Goal: the campaign can fail. Method: a job with a fault, judged as it judges.
#[test]
fn a_job_with_a_fault_counts_as_an_alarm() {
    use crate::support::job::Fault;
    let mut campaign = Campaign::default();
    campaign.add(7, run(&Job { fault: Fault::RankScaled(1.01), ..Job::default() }));
    campaign.add(8, run(&Job::default()));
    assert_eq!((campaign.judged, campaign.alarms.len()), (2, 1), "{}", campaign.render());
    assert_eq!(campaign.alarms[0].0, 7);
    let largest = campaign.worst[&Stage::Dk][0];
    assert!(largest.0 > 1.0 && largest.1 == 7, "{}", campaign.render());
}
