//! Whether `replay` stands any recorded head: jobs drawn at random, with and without a
//! fault, on random meshes, recorded in uneven and padded cuts, as boxes, replicas and
//! addends, at several moments, with tensors left out.
//!
//! Goal: no panic; no error where a stage could be judged; no clean job called diverged.
//! Method: the report of the command itself, over `BACKTAPE_RUNS` jobs from
//! `BACKTAPE_SEED` on (`make soak-heads`). What fails is printed with its seed, the job and
//! its layout, which is all that is needed to repeat it:
//!
//!     BACKTAPE_SEED=1234 BACKTAPE_RUNS=1 make soak-heads
//!
//! With `BACKTAPE_KEEP=DIR` the dumps stay, as `DIR/run-SEED`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

use backtape::head::{Denominator, Microbatches, Ranks, Scope, Sequences, Span};
use backtape::identity::{Microbatch, Rank};
use backtape::placement::Mesh;
use backtape::role::Role;
use backtape_replayer::dump::Selection;
use backtape_replayer::head::Stage;
use backtape_replayer::postmortem::{Extras, RunError, full_report, replay_report};
use backtape_replayer::replay::outcome::NotChecked;
use backtape_replayer::replay::outcome::Status;
use backtape_replayer::replay::variant::Variant;
use backtape_replayer::replay::world::StagePlace;
use backtape_replayer::replay::world::Supplied;
use backtape_replayer::report::schema::{Report, Verdict};

use crate::support::dump;
use crate::support::job::number::Random;
use crate::support::job::{Fault, Float, Job, Narrow, What, Window};
use crate::support::relaid::{Layout, in_pods, local_parts};

/// Dumps of the share that every test run takes.
const QUICK: u64 = 24;
/// Seeds that the campaign once found wrong: sums of dk without addends that tensor ranks hold
/// together, a gradient of the bias in boxes, log-probabilities of sequences, parts that ranks
/// round by themselves, a head of zeros, faults that few rows seemed to prove, ranks that hold
/// few tokens in many copies, and batches of one sequence many times.
const ONCE_WRONG: [u64; 28] = [
    23, 313, 328, 425, 438, 1446, 1495, 1779, 1897, 1900, 1921, 2147, 20145, 300_013, 300_130,
    300_693, 320_082, 400_642, 400_872, 401_917, 402_082, 500_203, 501_180, 600_683, 601_083,
    721_702, 723_103, 732_313,
];
/// Dumps of the whole, where BACKTAPE_RUNS does not say.
const WHOLE: u64 = 5000;

/// A job and how it is recorded, by its seed.
struct Drawn {
    job: Job,
    layout: Layout,
    shards: Vec<dump::Laid>,
}

impl Drawn {
    /// Whether a gradient was recorded of which a right one is known: dk of tied embeddings holds
    /// the lookup's part, and what an accumulator of few bits loses is known of addends alone.
    fn can_be_judged(&self) -> bool {
        let options = &self.job.options;
        let few = [options.rounding.accumulate, options.rounding.label_scatter];
        let swamps = few.contains(&Float::Bf16);
        let unknown = options.tied_embedding || (options.extras.sums_alone && swamps);
        let named = |names: &[&str]| self.shards.iter().any(|one| names.contains(&one.shard.name));
        named(&["dq", "dq_lse", "dq_label", "dlogits", "dk_lse", "dk_label", "dbias"])
            || !unknown && named(&["dk"])
    }

    /// Whether two ranks hold the same labels in different places, and nothing in them tells
    /// that the data repeat: as many as the job's data repeat after.
    fn repeats_labels(&self) -> bool {
        let labels: Vec<&dump::Shard> =
            self.shards.iter().map(|one| &one.shard).filter(|one| one.name == "labels").collect();
        let again = |one: &&dump::Shard, other: &&dump::Shard| {
            let few = one.bytes.len() / one.dtype.width();
            let once = self.job.options.data.copies.is_some_and(|copies| few <= copies);
            once && one.place != other.place && one.bytes == other.bytes
        };
        labels.iter().any(|one| labels.iter().any(|other| again(one, other)))
    }
}

/// What became of one dump.
struct Ended {
    /// `agreed`, `diverged`, `incomplete`, or why there is none.
    word: String,
    /// What is wrong with that.
    wrong: Option<String>,
    /// Why stages were not judged.
    skipped: Vec<String>,
}

fn drawn(seed: u64) -> Drawn {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x4ead);
    let random = &mut random;
    let mut job = Job::random(seed);
    job.draw_mean();
    job.tokens = random.between(4, 64);
    job.vocab = random.between(18, 97);
    job.width = random.between(2, 16);
    job.valid = if random.chance(0.5) { job.vocab } else { random.between(9, job.vocab - 1) };
    if job.valid == job.vocab {
        job.options.mask_value = None;
    }
    // No job records padded logits that nothing masks.
    job.options.extras.logits &= job.valid == job.vocab || job.options.mask_value.is_some();
    if random.chance(0.5) {
        job.fault = fault(random);
    }
    let recorded = job.shards();
    let mut layout = Layout::draw(&job, &recorded, random);
    if job.options.scope == Scope::Rank && layout.cuts_tokens() {
        // What a rank of the job counts is then the count of several ranks of the mesh.
        layout.says = true;
        let ranks = Ranks::Axes(vec!["tensor".into()]);
        let microbatches = Microbatches::One;
        job.options.span = Some(Span { ranks, microbatches, sequences: Sequences::All });
    }
    let shards = layout.apply(&recorded);
    Drawn { job, layout, shards }
}

fn fault(random: &mut Random) -> Fault {
    random.one_of(&[
        Fault::LabelScatterBf16,
        Fault::RankScaled(1.25),
        Fault::OneScaled(0.5),
        Fault::LabelShift,
        Fault::RankMean,
        Fault::Scaled(What::Gradients, 0.75),
        Fault::Scaled(What::Reduced, 2.0),
        Fault::Scaled(What::Dbias, 3.0),
        Fault::Window(Window::Last),
        Fault::Window(Window::Doubled),
        Fault::Narrow(Narrow::Microbatches, Float::Bf16),
        Fault::Narrow(Narrow::Gemm, Float::Bf16),
    ])
}

fn run(drawn: &Drawn) -> Ended {
    // In memory where there is such a place: thousands of dumps, each synced.
    let store = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path = dump::of_seed(drawn.job.seed, store.path());
    dump::write_laid(&path, &drawn.layout.mesh(), Some(&drawn.job.head()), &drawn.shards, &|_| {
        drawn.job.reduction()
    });
    let report = std::panic::catch_unwind(|| {
        let everything: &[Role] = &[];
        replay_report(&path, &Selection::default(), everything, None)
    });
    match report {
        Err(_) => Ended { word: "panic".into(), wrong: Some("panic".into()), skipped: vec![] },
        Ok(Err(error)) => {
            let error = format!("{:#}", anyhow::Error::new(error));
            Ended { word: "error".into(), wrong: Some(error), skipped: vec![] }
        }
        Ok(Ok(report)) => judged(drawn, &report),
    }
}

fn judged(drawn: &Drawn, report: &Report) -> Ended {
    let skipped = report.stages.iter().filter(|stage| !stage.reason.is_empty());
    let skipped = skipped.map(|stage| format!("{}: {:?}", stage.name, stage.reason)).collect();
    let clean = drawn.job.fault == Fault::None;
    let first = report.first_divergence.as_ref().map(|first| first.stage.as_str());
    let wrong = match report.verdict {
        Verdict::Diverged if clean && first == Some("labels") && drawn.repeats_labels() => None,
        Verdict::Diverged if clean => Some(format!("diverged: {first:?}")),
        // Without a mesh in the placement copies and addends may look alike: that is said.
        Verdict::Incomplete if !drawn.layout.says && report.not_checked.iter().any(is_untold) => {
            None
        }
        Verdict::Incomplete if drawn.can_be_judged() => {
            Some(format!("incomplete: {:?} {:?}", report.findings.first(), report.not_checked))
        }
        _ => None,
    };
    Ended { word: format!("{:?}", report.verdict).to_lowercase(), wrong, skipped }
}

fn is_untold(of: &NotChecked) -> bool {
    of.why.contains("give mesh and placement, which say")
}

/// The verdict on a job that is recorded so, and what was not judged.
fn verdict(job: &Job, mesh: &Mesh, shards: &[dump::Laid]) -> Report {
    let store = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path = store.path().join("run-a");
    dump::write_laid(&path, mesh, Some(&job.head()), shards, &|_| job.reduction());
    let everything: &[Role] = &[];
    let report = replay_report(&path, &Selection::default(), everything, None);
    report.unwrap_or_else(|error| panic!("{:#}", anyhow::Error::new(error)))
}

/// Goal: a denominator over any choice of ranks, microbatches and sequences is what the job
/// divided by, and not what another choice gives. Method: a job that counts so, and the same
/// shards under a declaration with one choice changed.
#[test]
fn every_scope_is_what_the_job_counted_over_and_no_other() {
    let mesh = Mesh(vec![("pod".into(), 2), ("data".into(), 2)]);
    let axes = Ranks::Axes(vec!["data".into()]);
    for ranks in [Ranks::All, Ranks::One, axes] {
        for microbatches in [Microbatches::All, Microbatches::One] {
            for sequences in [Sequences::All, Sequences::Each] {
                let mut job = Job { ranks: 4, tokens: 36, vocab: 31, valid: 31, ..Job::default() };
                job.width = 8;
                job.options.layout.sequence = Some(6);
                job.options.layout.uneven = 1;
                job.options.denominator = Denominator::Valid;
                job.options.ignore_label = Some(-100);
                job.options.data.ignored = 0.3;
                let span = Span { ranks: ranks.clone(), microbatches, sequences };
                job.options.span = Some(span.clone());
                let shards = in_pods(&job.shards());
                let own = verdict(&job, &mesh, &shards);
                assert_eq!(own.verdict, Verdict::Agreed, "{span}: {:?}", own.first_divergence);
                let all = |span: &Span| span.microbatches == Microbatches::All;
                let other = Span {
                    microbatches: if all(&span) { Microbatches::One } else { Microbatches::All },
                    ..span.clone()
                };
                let others = [other, Span { sequences: flipped(sequences), ..span.clone() }];
                for other in others {
                    job.options.span = Some(other.clone());
                    let found = verdict(&job, &mesh, &shards);
                    let told = matches!(found.verdict, Verdict::Diverged | Verdict::Misdeclared);
                    assert!(told, "{span} declared {other}: {:?}", found.verdict);
                }
            }
        }
    }
}

fn flipped(sequences: Sequences) -> Sequences {
    match sequences {
        Sequences::All => Sequences::Each,
        Sequences::Each => Sequences::All,
    }
}

/// Goal: ranks with unequal numbers of tokens, each of which knows its own alone, are one
/// tensor, in the order of the mesh; a fault on one of them is found there.
#[test]
fn ranks_with_unequal_numbers_of_tokens_are_judged_as_one_tensor() {
    let mesh = Mesh(vec![("data".into(), 3)]);
    let mut job = Job { tokens: 33, vocab: 29, valid: 27, width: 8, ..Job::default() };
    job.options.layout.uneven = 5;
    let shards = local_parts(&job.shards(), 3);
    let whole = verdict(&job, &mesh, &shards);
    assert_eq!(whole.verdict, Verdict::Agreed, "{:?}", whole.findings);
    assert!(whole.findings.is_empty(), "{:?}", whole.findings);
    assert!(whole.not_checked.iter().any(|item| item.why.contains("ragged")));
    let faulty = Job { fault: Fault::RankScaled(1.25), ..job };
    let found = verdict(&faulty, &mesh, &local_parts(&faulty.shards(), 3));
    let first = found.first_divergence.unwrap();
    assert_eq!((first.stage.as_str(), first.rank), ("dk", Some(1)));
}

/// Goal: a dk of which the sum over ranks alone was recorded, in f32, is allowed what each rank
/// rounded of its own part in bf16, which is more where the parts cancel; a factor is seen. Method:
/// all other points are declared f32, so that nothing else leaves room.
#[test]
fn a_sum_over_ranks_is_allowed_what_each_rank_rounded_of_its_own_part() {
    for (seed, ranks) in [(0, 2), (1, 2), (2, 3), (3, 3), (4, 8), (5, 8)] {
        let mut job = Job { seed, ranks, microbatches: 1, tokens: 60, ..Job::default() };
        (job.vocab, job.valid, job.width, job.fused) = (40, 40, 12, false);
        (job.options.layout.dq, job.options.layout.dk) = (Float::Bf16, Float::Bf16);
        for (fault, expected) in
            [(Fault::None, Status::Pass), (Fault::Scaled(What::Reduced, 1.05), Status::Fail)]
        {
            let job = Job { fault, ..job.clone() };
            let store = tempfile::tempdir().unwrap();
            let path = store.path().join("run-a");
            let mut head = job.head();
            let narrow = ["logits", "lse", "p", "dlogits", "accumulate", "reduce"];
            head.dtypes = narrow.map(|point| (point.into(), "f32".into())).into();
            head.dtypes.insert("output".into(), "bf16".into());
            let own = |shard: &dump::Shard| shard.name.starts_with("dk") && shard.partial;
            let mut shards = job.shards();
            shards.retain(|shard| !own(shard));
            shards.iter_mut().for_each(|shard| shard.microbatch = None);
            dump::write(&path, ranks as u32, &head, &shards);
            let everything: &[Role] = &[];
            let report = replay_report(&path, &Selection::default(), everything, None).unwrap();
            let dk = report.stages.iter().find(|stage| stage.name == "dk").unwrap();
            assert_eq!(dk.status, expected, "seed {seed}, {ranks} ranks: {}", dk.reason);
        }
    }
}

/// Goal: a panic costs what it was computing, not what was found before it, and is one
/// sentence. Method: a caller of the library gives values of another size than the stage has.
#[test]
fn a_panic_is_one_sentence_after_what_was_found() {
    let store = tempfile::tempdir().unwrap();
    let path = store.path().join("run-a");
    let job = Job { ranks: 1, tokens: 20, vocab: 31, valid: 31, ..Job::default() };
    dump::write(&path, 1, &job.head(), &job.shards());
    let at = StagePlace { stage: Stage::Dk, microbatch: Some(Microbatch(0)), rank: Some(Rank(0)) };
    let supplied = vec![Supplied { place: at, values: vec![1.0], precision: None }];
    let variants = [Arc::new(Variant { name: "too short".into(), supplied })];
    let extras = Extras { variants: &variants, ..Extras::default() };
    let everything: &[Role] = &[];
    let ended = full_report(&path, &Selection::default(), everything, None, extras);
    let Err(RunError::Panicked { panicked, found: Some(found) }) = ended else {
        panic!("{ended:?}");
    };
    assert!(panicked.place.contains(".rs:") && !panicked.to_string().contains('\n'));
    assert_eq!(found.verdict, Verdict::Agreed);
    assert!(found.stages.iter().any(|stage| stage.name == "dk" && stage.worst.is_some()));
}

#[derive(Default)]
struct Campaign {
    words: BTreeMap<String, u64>,
    skipped: BTreeMap<String, (u64, u64)>,
    wrong: Vec<(u64, String)>,
}

impl Campaign {
    fn of(seeds: impl IntoIterator<Item = u64>) -> Campaign {
        let mut campaign = Campaign::default();
        for seed in seeds {
            let Ended { word, wrong, skipped } = run(&drawn(seed));
            *campaign.words.entry(word).or_default() += 1;
            campaign.wrong.extend(wrong.map(|wrong| (seed, wrong)));
            for why in skipped {
                campaign.skipped.entry(why).or_insert((0, seed)).0 += 1;
            }
        }
        campaign
    }

    fn render(&self) -> String {
        let mut text = format!("dumps by what the replay says: {:?}\n", self.words);
        for (why, (count, seed)) in &self.skipped {
            writeln!(text, "not judged {count} times, first by seed {seed}: {why}").unwrap();
        }
        let mut kinds: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for (seed, why) in &self.wrong {
            let kind = why.chars().filter(|c| !c.is_ascii_digit()).take(90).collect();
            kinds.entry(kind).or_default().push(*seed);
        }
        for (kind, seeds) in &kinds {
            writeln!(text, "WRONG {} times, seeds {seeds:?}: {kind}", seeds.len()).unwrap();
        }
        for seeds in kinds.values() {
            let (seed, why) = self.wrong.iter().find(|(seed, _)| seed == &seeds[0]).unwrap();
            let Drawn { job, layout, .. } = drawn(*seed);
            writeln!(text, "WRONG seed {seed}: {why}\n  {job:?}\n  {layout:?}").unwrap();
        }
        text
    }
}

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().map_or(usual, |text| text.parse().expect("a whole number"))
}

#[test]
fn any_head_that_is_recorded_is_judged() {
    let campaign = Campaign::of((0..QUICK).chain(ONCE_WRONG));
    assert!(campaign.wrong.is_empty(), "{}", campaign.render());
}

/// `make soak-heads`: the same over thousands.
#[test]
#[ignore = "minutes: make soak-heads"]
fn the_whole_campaign() {
    let (from, runs) = (number("BACKTAPE_SEED", 0), number("BACKTAPE_RUNS", WHOLE));
    println!("BACKTAPE_SEED={from} BACKTAPE_RUNS={runs}");
    let campaign = Campaign::of(from..from + runs);
    println!("{}", campaign.render());
    assert!(campaign.wrong.is_empty());
}
