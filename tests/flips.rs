//! Silent corruption: bits that flip in what a job computed, before anything was hashed.
//!
//! Goal: of the flips that lie above the computed bound, 99.9 % at least are flagged with the
//! tensor and the element named, and clean replays flag nothing. Method: small clean jobs drawn
//! from seeds; in each, a bit of one element of an output flips, or of one element that a GEMM
//! read while it computed one tile of dq or dk, and the dump is replayed. A flip is above the
//! bound where its error is more standard deviations than rounding may reach at that element;
//! `make soak-flips` runs BACKTAPE_RUNS jobs from BACKTAPE_SEED on.

use std::collections::BTreeMap;

use backtape::dtype::Dtype;
use backtape_replayer::compare::Bound;
use backtape_replayer::dump::{Selection, open};
use backtape_replayer::head::HeadStep;
use backtape_replayer::kernels::NoProgress;
use backtape_replayer::replay::outcome::{Outcome, StageOutcome, Status};
use backtape_replayer::replay::{Effort, Request, replay};
use half::{bf16, f16};

use crate::support::dump::{self, Shard};
use crate::support::job::Job;

/// Jobs of the share that every test run takes, and of the whole.
const QUICK: u64 = 25;
const WHOLE: u64 = 1000;
/// Flips in each job; every fourth is in a tile.
const FLIPS: u64 = 20;
/// Rows and columns of a tile.
const TILE: usize = 8;
/// Of the flips above the bound.
const FLAGGED: f64 = 0.999;

/// What a head computes, as jobs record it.
const OUTPUTS: [&str; 9] =
    ["lse", "label_logits", "loss", "dlogits", "dq", "dk", "dk_lse", "dk_label", "dbias"];

/// SplitMix64: the same seed, the same flips.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// How the flips of one kind came out.
#[derive(Clone, Copy, Debug, Default)]
struct Score {
    flips: u64,
    above: u64,
    flagged: u64,
    /// Flagged though not certainly above.
    below_flagged: u64,
}

#[derive(Default)]
struct Campaign {
    clean: u64,
    alarms: Vec<(u64, String)>,
    flips: BTreeMap<String, Score>,
    missed: Vec<String>,
    refused: u64,
}

/// A small clean job that records the outputs.
fn job(seed: u64) -> Job {
    let mut random = Random(seed);
    let mut below = |n: usize| random.below(n as u64) as usize;
    let (tokens, vocab) = (9 + below(32), 17 + below(48));
    let mut job = Job {
        seed,
        ranks: 1,
        microbatches: 1 + below(2),
        tokens,
        vocab,
        valid: vocab,
        width: 5 + below(20),
        fused: below(2) == 0,
        ..Job::default()
    };
    job.options.extras.dlogits = !job.fused;
    job
}

fn judge(job: &Job, shards: &[Shard]) -> Result<(Outcome, usize), String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run-a");
    dump::write(&path, 1, &job.head(), shards);
    let dumped = open(&path, &Selection::default()).unwrap();
    let step = HeadStep::new(&dumped, None, |_| None).map_err(|error| error.to_string())?;
    let request = Request {
        compare: &[],
        effort: Effort::All,
        progress: &NoProgress,
        total: &|_| {},
        draws: false,
        cluster: None,
        device: None,
    };
    let outcome = replay(&step, &request).map_err(|error| error.to_string())?;
    Ok((outcome, step.microbatches.len()))
}

/// One element, as its dtype holds it.
fn get(shard: &Shard, index: usize) -> f64 {
    let size = shard.dtype.width();
    let bytes = &shard.bytes[index * size..][..size];
    match shard.dtype {
        Dtype::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Dtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
        other => panic!("{other:?} is no dtype of these jobs' outputs"),
    }
}

fn set(shard: &mut Shard, index: usize, value: f64) {
    let size = shard.dtype.width();
    let bytes = match shard.dtype {
        Dtype::Bf16 => bf16::from_f64(value).to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
        _ => (value as f32).to_le_bytes().to_vec(),
    };
    shard.bytes[index * size..][..size].copy_from_slice(&bytes);
}

/// What was done: which shard, the elements (row, column) that it changed, and in words.
struct Flip {
    shard: usize,
    changed: Vec<(u64, u64)>,
    kind: String,
}

/// Flips one bit of one element of an output.
fn flip_element(shards: &mut [Shard], random: &mut Random) -> Flip {
    let outputs: Vec<usize> =
        (0..shards.len()).filter(|&at| OUTPUTS.contains(&shards[at].name)).collect();
    let shard = outputs[random.below(outputs.len() as u64) as usize];
    let of = &mut shards[shard];
    let size = of.dtype.width();
    let elements = of.bytes.len() / size;
    let (index, bit) = (random.below(elements as u64) as usize, random.below(8 * size as u64));
    of.bytes[index * size + bit as usize / 8] ^= 1 << (bit % 8);
    let columns = columns(of);
    let changed = vec![((index / columns) as u64, (index % columns) as u64)];
    Flip { shard, changed, kind: format!("element of {}", of.name) }
}

/// Two dimensions: the last is the column; one: all is one column.
fn columns(shard: &Shard) -> usize {
    if shard.shape.len() < 2 { 1 } else { *shard.shape.last().unwrap() as usize }
}

/// Flips one bit of an element that a GEMM read while it computed one tile: the tile's part of
/// one row is off by the change times what the element is multiplied by.
fn flip_in_tile(shards: &mut [Shard], random: &mut Random) -> Option<Flip> {
    let (name, other) = if random.below(2) == 0 { ("dq", "k") } else { ("dk", "q") };
    let outputs: Vec<usize> = (0..shards.len()).filter(|&at| shards[at].name == name).collect();
    let shard = *outputs.get(random.below(outputs.len().max(1) as u64) as usize)?;
    let same = |at: &Shard| at.name == other && at.microbatch == shards[shard].microbatch;
    let operand = shards.iter().find(|at| same(at))?.clone();
    let of = &mut shards[shard];
    let width = columns(of);
    let rows = of.shape[0];
    let (row, from) = (random.below(rows) as usize, random.below(width as u64) as usize);
    let tile = from / TILE * TILE..(from / TILE * TILE + TILE).min(width);
    let at = random.below(operand.shape[0]) as usize;
    // About what the other operand is: the output over this one.
    let (before, beside) = (get(of, row * width + from), get(&operand, at * width + from));
    let read = (before / beside) as f32;
    if !read.is_normal() {
        return None;
    }
    let flipped = f32::from_bits(read.to_bits() ^ (1 << random.below(32)));
    let change = f64::from(flipped) - f64::from(read);
    for column in tile.clone() {
        let value = get(of, row * width + column) + change * get(&operand, at * width + column);
        set(of, row * width + column, value);
    }
    let changed = tile.map(|column| (row as u64, column as u64)).collect();
    Some(Flip { shard, changed, kind: format!("tile of {name}") })
}

impl Campaign {
    fn run(seeds: std::ops::Range<u64>) -> Campaign {
        let mut campaign = Campaign::default();
        for seed in seeds {
            campaign.job(seed);
        }
        campaign
    }

    fn job(&mut self, seed: u64) {
        let job = job(seed);
        let shards = job.shards();
        match judge(&job, &shards) {
            Err(_) => return self.refused += 1,
            Ok((outcome, _)) => {
                self.clean += 1;
                let alarm = outcome.first_divergence();
                self.alarms.extend(alarm.map(|stage| (seed, stage.reason.clone())));
            }
        }
        let mut random = Random(!seed);
        for number in 0..FLIPS {
            let mut flipped = shards.clone();
            let flip = match number % 4 {
                0 => flip_in_tile(&mut flipped, &mut random),
                _ => Some(flip_element(&mut flipped, &mut random)),
            };
            let Some(flip) = flip else { continue };
            // Below what the dtype holds nothing changed.
            if flipped[flip.shard].bytes == shards[flip.shard].bytes {
                continue;
            }
            let judged = judge(&job, &flipped);
            self.flip(seed, number, &flip, &flipped[flip.shard], judged);
        }
    }

    fn flip(
        &mut self,
        seed: u64,
        number: u64,
        flip: &Flip,
        shard: &Shard,
        judged: Result<(Outcome, usize), String>,
    ) {
        let score = self.flips.entry(flip.kind.clone()).or_default();
        score.flips += 1;
        let found = match judged {
            Err(why) => Found { above: true, named: false, said: why },
            Ok((outcome, microbatches)) => found(&outcome, microbatches, flip, shard),
        };
        score.above += u64::from(found.above);
        score.flagged += u64::from(found.above && found.named);
        score.below_flagged += u64::from(!found.above && found.named);
        if found.above && !found.named {
            let (kind, changed) = (&flip.kind, &flip.changed);
            let said = found.said;
            self.missed.push(format!("seed {seed}, flip {number}: {kind} {changed:?}: {said}"));
        }
    }

    fn render(&self) -> String {
        let mut text = String::new();
        for (kind, score) in &self.flips {
            text += &format!(
                "flips: {kind}: {} flips, {} above the bound, {} of them named; {} of the others\n",
                score.flips, score.above, score.flagged, score.below_flagged
            );
        }
        for missed in self.missed.iter().take(10) {
            text += &format!("flips: MISSED: {missed}\n");
        }
        let (above, flagged) = self.sums();
        text + &format!(
            "flips: {} clean replays ({} refused), {} alarms {:?}; {above} flips above the bound, {flagged} named",
            self.clean,
            self.refused,
            self.alarms.len(),
            self.alarms
        )
    }

    fn sums(&self) -> (u64, u64) {
        let sum = |of: fn(&Score) -> u64| self.flips.values().map(of).sum();
        (sum(|score| score.above), sum(|score| score.flagged))
    }

    #[allow(clippy::print_stdout)] // The figures of a campaign that passes.
    fn assert(&self) {
        println!("{}", self.render());
        let (above, flagged) = self.sums();
        assert!(self.alarms.is_empty() && self.clean > 0, "{}", self.render());
        assert!(above > 0 && flagged as f64 >= FLAGGED * above as f64, "{}", self.render());
    }
}

struct Found {
    above: bool,
    /// The report's stage is that of the tensor, and its element one that was changed.
    named: bool,
    said: String,
}

fn found(outcome: &Outcome, microbatches: usize, flip: &Flip, shard: &Shard) -> Found {
    let own = |stage: &&StageOutcome| stage.stage.name() == shard.name;
    let Some(stage) = outcome.stages.iter().find(own) else {
        return Found { above: true, named: false, said: "no stage of that name".into() };
    };
    let mut found = Found { above: false, named: false, said: stage.reason.clone() };
    for comparison in &stage.comparisons {
        let of = comparison.microbatch.map(|microbatch| microbatch.0);
        if of.is_some() && shard.microbatch.is_some() && of != shard.microbatch {
            continue;
        }
        let tally = &comparison.tally;
        let here = |at: &Option<_>| at.as_ref().is_some_and(|at| changed(flip, at));
        if here(&tally.first_nonfinite) {
            found.above = true;
            found.named |= stage.status == Status::Fail;
        }
        if let Some(worst) = tally.worst.as_ref().filter(|worst| changed(flip, worst)) {
            // Each microbatch is a unit of every stage.
            let comparisons = backtape_replayer::head::Stage::ALL.len() * microbatches;
            let bound = Bound::new(comparisons, tally.rows as usize, tally.elements as usize);
            // √(2x) of what is each element's own, and √3 of what all share.
            found.above |= worst.score > (2.0 * bound.element).sqrt() + 3f64.sqrt();
            let named = stage.status == Status::Fail && comparison.excess.is_some();
            found.named |= named;
        }
    }
    // What comes after it is judged on its captured values: nothing before it may be blamed.
    let first = outcome.first_divergence().map(|stage| stage.stage.name());
    if found.named && first != Some(shard.name) {
        found.said = format!("{first:?} is said to diverge first");
        found.named = false;
    }
    found
}

fn changed(flip: &Flip, at: &backtape_replayer::compare::tally::Worst) -> bool {
    flip.changed.contains(&at.index)
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().map_or(otherwise, |text| text.parse().unwrap())
}

#[test]
fn flips_above_the_bound_are_named_and_clean_replays_flag_nothing() {
    Campaign::run(0..QUICK).assert();
}

/// `make soak-flips`.
#[test]
#[ignore = "minutes: make soak-flips"]
fn the_whole_campaign() {
    let from = number("BACKTAPE_SEED", 0);
    Campaign::run(from..from + number("BACKTAPE_RUNS", WHOLE)).assert();
}
