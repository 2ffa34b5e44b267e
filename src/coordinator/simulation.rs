//! Goal: whatever the network, the processes and the disk do, nothing acknowledged is lost; a
//! committed step is complete, stays committed and contains one attempt only; once the faults end
//! the job commits; and the ranks of one launch enter one attempt, which no process of another
//! launch enters.
//!
//! Method: the actor's real requests, state machine, journal and manifests run with simulated
//! ranks, one request after the other. A seed determines everything: which message arrives next,
//! which is lost or duplicated, when the coordinator dies (before its journal's fsync, before the
//! manifest's link, before its answers) and how much of the unsynced line remains, and when ranks
//! or the job are restarted. Messages of dead processes arrive later; if launches have names,
//! processes of old launches live on. The results are checked against what the ranks were told and
//! which processes were started together. The same seed gives the same trace.
//!
//! `BACKTAPE_SEED` and `BACKTAPE_SIMULATIONS` choose other seeds and how many.

mod job;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::oneshot;

use self::job::{Answer, Ask, FILES, Kind, Process, RANKS, STEPS};
use super::actor::handle;
use super::config::Config;
use super::refusal::Refusal;
use super::request::{Answered, Request};
use super::runs::Runs;
use crate::hash::TrustHash;
use crate::identity::{Attempt, Name, Rank, Step};
use crate::manifest::Manifest;
use crate::store::{AttemptDir, Backend, layout};

/// Number of moves with faults, and of moves without in which the job must finish.
const FAULTY: u32 = 400;
const CALM: u32 = 20_000;

/// SplitMix64 (Steele, Lea and Flood 2014).
pub(super) struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn percent(&mut self, share: usize) -> bool {
        self.below(100) < share
    }
}

/// The files that ranks were told are durable, with their header hashes.
type Acknowledged = BTreeMap<(Attempt, Step, Rank, Name), TrustHash>;

/// The simulated job, network and store of one seed.
struct World {
    random: Random,
    store: tempfile::TempDir,
    runs: Option<Runs>,
    kind: Kind,
    /// Restarts per thousand moves.
    restarts: usize,
    job: Vec<Process>,
    /// Processes of old launches that were not killed.
    left_over: Vec<Process>,
    processes: u64,
    launches: u64,
    /// The launch of each process.
    launch_of: BTreeMap<u64, u64>,
    /// Launches of which a single rank was restarted, which launchers should not do.
    torn: BTreeSet<u64>,
    requests: Vec<(u64, Ask)>,
    answers: Vec<(u64, Answer)>,
    acknowledged: Acknowledged,
    /// Steps that a rank was told are committed.
    committed: Vec<(Attempt, Step)>,
    /// Manifests that existed at some time, with their hashes.
    seen: BTreeMap<PathBuf, TrustHash>,
    now_ms: u64,
    trace: Vec<u8>,
}

fn run_name() -> Name {
    Name::new("run").unwrap()
}

impl World {
    fn new(seed: u64) -> World {
        // A directory in memory, where an fsync costs nothing; what a crash leaves of the journal
        // is drawn below.
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.into() } else { std::env::temp_dir() };
        let store = tempfile::Builder::new().prefix("backtape-").tempdir_in(place).unwrap();
        let mut random = Random(seed);
        let kind = [Kind::Before, Kind::Nameless, Kind::Nameless, Kind::Named, Kind::Named];
        let mut world = World {
            kind: kind[random.below(kind.len())],
            // Either seldom, so that steps complete while there are faults, or so often that
            // launches are killed while their ranks enter.
            restarts: if random.percent(60) { 3 } else { 40 },
            random,
            store,
            runs: None,
            job: Vec::new(),
            left_over: Vec::new(),
            processes: 0,
            launches: 0,
            launch_of: BTreeMap::new(),
            torn: BTreeSet::new(),
            requests: Vec::new(),
            answers: Vec::new(),
            acknowledged: BTreeMap::new(),
            committed: Vec::new(),
            seen: BTreeMap::new(),
            now_ms: 0,
            trace: Vec::new(),
        };
        world.start_coordinator();
        world.launch();
        world
    }

    fn start_coordinator(&mut self) {
        let config = Config::new(self.store.path(), RANKS);
        let mut runs = Runs::open(&config, &Backend::Directory).unwrap();
        // A manifest is never ahead of the journal: the journal contains every event of a step
        // whose manifest exists.
        for attempt in
            AttemptDir::list(&Backend::Directory, &self.store.path().join("run")).unwrap()
        {
            for step in attempt.steps().unwrap().iter().filter(|step| step.manifest().is_file()) {
                let log = runs.log(&run_name(), attempt.attempt).unwrap();
                log.recall(step.step).unwrap();
                let known = log.state.complete_files(step.step);
                assert!(known.is_some(), "{} is ahead of the journal", step.manifest().display());
            }
        }
        self.runs = Some(runs);
    }

    /// Starts every rank as a new process. The old processes die, or some live on.
    fn launch(&mut self) {
        let old = std::mem::take(&mut self.job);
        if self.kind == Kind::Named {
            let lives = old.into_iter().filter(|_| self.random.percent(30));
            self.left_over.extend(lives.collect::<Vec<_>>());
        }
        self.launches += 1;
        for rank in 0..RANKS {
            let process = self.start(Rank(rank));
            self.job.push(process);
        }
    }

    fn start(&mut self, rank: Rank) -> Process {
        self.processes += 1;
        self.launch_of.insert(self.processes, self.launches);
        Process::new(rank, self.processes, self.launches, self.kind)
    }

    /// Restarts a single rank.
    fn tear(&mut self, index: usize) {
        self.torn.insert(self.launches);
        self.job[index] = self.start(self.job[index].rank);
    }

    fn note(&mut self, what: &str, number: u64) {
        self.trace.extend(what.as_bytes());
        self.trace.extend(number.to_le_bytes());
    }

    /// One move of the simulation; without faults nothing is lost, duplicated or killed.
    fn step(&mut self, faults: bool) {
        self.now_ms += 1 + self.random.next() % 50;
        match self.random.below(1000) {
            0..20 if faults => self.kill_coordinator(),
            n if faults && n < 20 + self.restarts => self.restart_ranks(),
            20..400 => self.deliver_requests(faults),
            400..700 => self.deliver_answer(faults),
            _ => {
                let beside = self.random.percent(30);
                let index = self.random.below(self.job.len() + self.left_over.len());
                let process = self.job.iter().chain(&self.left_over).nth(index).unwrap();
                if let Some(ask) = process.ask(beside) {
                    let incarnation = process.incarnation;
                    self.note("ask", incarnation);
                    self.requests.push((incarnation, ask));
                }
            }
        }
    }

    fn restart_ranks(&mut self) {
        self.note("restart", self.launches);
        if self.random.percent(70) {
            return self.launch();
        }
        let index = self.random.below(self.job.len());
        self.tear(index);
    }

    /// Delivers some requests to the coordinator, which share a flush; the coordinator may die
    /// during it.
    fn deliver_requests(&mut self, faults: bool) {
        let mut batch = Vec::new();
        for _ in 0..1 + self.random.below(3) {
            if self.requests.is_empty() {
                break;
            }
            let index = self.random.below(self.requests.len());
            let doubled = faults && self.random.percent(15);
            let message = match doubled {
                true => self.requests[index].clone(),
                false => self.requests.swap_remove(index),
            };
            if !(faults && self.random.percent(15)) {
                batch.push(message);
            }
        }
        let Some(mut runs) = self.runs.take() else { return };
        let mut waiting = Vec::new();
        let mut answers = Vec::new();
        for (incarnation, ask) in batch {
            self.note("request", incarnation);
            let (request, told) = self.request(incarnation, &ask);
            answers.push(handle(&mut runs, request, self.now_ms));
            waiting.push((incarnation, ask, told));
        }
        if self.random.percent(10) {
            // The tick is in the same batch as the requests before it.
            runs.tick(self.now_ms);
        }
        if faults && self.random.percent(4) {
            // The coordinator dies before the fsync: some bytes of its line may have reached the
            // disk.
            drop(runs);
            self.leave_torn_line();
            return self.start_coordinator();
        }
        if faults && self.random.percent(4) {
            return self.die_after_the_flush(runs);
        }
        runs.flush(self.now_ms);
        for answer in answers {
            answer(&mut runs);
        }
        self.runs = Some(runs);
        for (incarnation, ask, told) in waiting {
            let told = told.read(&ask);
            self.answers.push((incarnation, told));
        }
    }

    /// The coordinator dies before the manifests are linked, or after that and before the answers.
    fn die_after_the_flush(&mut self, mut runs: Runs) {
        let before = self.manifests();
        runs.flush(self.now_ms);
        drop(runs);
        if self.random.percent(50) {
            let linked = self.manifests();
            for path in linked.keys().filter(|path| !before.contains_key(*path)) {
                std::fs::remove_file(path).unwrap();
            }
        }
        self.start_coordinator();
    }

    fn request(&self, incarnation: u64, ask: &Ask) -> (Request, Waiting) {
        match ask {
            Ask::Join(join) => {
                let (reply, answer) = oneshot::channel();
                (Request::Join((**join).clone(), reply), Waiting::Join(answer))
            }
            Ask::Report(member, step, file) => {
                let (reply, answer) = oneshot::channel();
                let files = vec![(**file).clone()];
                let request = Request::Report(member.clone(), *step, files, reply);
                (request, Waiting::Shards(answer))
            }
            Ask::Close(member, step, closing) => {
                let (reply, answer) = oneshot::channel();
                assert_eq!(member.incarnation, incarnation);
                let request = Request::Close(member.clone(), *step, closing.clone(), reply);
                (request, Waiting::Committed(answer))
            }
        }
    }

    fn deliver_answer(&mut self, faults: bool) {
        if self.answers.is_empty() {
            return;
        }
        let index = self.random.below(self.answers.len());
        let (incarnation, told) = self.answers.swap_remove(index);
        if faults && self.random.percent(15) {
            return;
        }
        // The answer to a process that has died is lost.
        let mut living = self.job.iter_mut().chain(&mut self.left_over);
        let Some(process) = living.find(|p| p.incarnation == incarnation) else {
            return;
        };
        let launch = process.launch;
        let refused = process.hear(&told, &mut self.acknowledged, &mut self.committed);
        self.note("answer", incarnation);
        if !refused {
            return;
        }
        self.left_over.retain(|process| process.incarnation != incarnation);
        let Some(rank) = self.job.iter().position(|p| p.incarnation == incarnation) else {
            return;
        };
        let whole = self.kind != Kind::Before && !self.torn.contains(&launch);
        assert!(!whole, "rank {rank} of the latest launch, {launch}, was refused: {told:?}");
        match self.kind {
            // The launcher restarts the other ranks too, because they are refused.
            Kind::Before => self.tear(rank),
            Kind::Nameless | Kind::Named => self.launch(),
        }
    }

    fn kill_coordinator(&mut self) {
        self.note("kill", self.now_ms);
        drop(self.runs.take());
        self.start_coordinator();
    }

    /// Appends a prefix of a line to the journal, as an interrupted write does.
    fn leave_torn_line(&mut self) {
        let run = self.store.path().join("run");
        let Ok(attempts) = AttemptDir::list(&Backend::Directory, &run) else { return };
        let Some(last) = attempts.last() else { return };
        let path = last.path.join(layout::JOURNAL);
        let Ok(bytes) = std::fs::read(&path) else { return };
        // The prefix of a copy of the journal's last line: also the whole copy is invalid in this
        // place.
        let line = bytes.split_inclusive(|&b| b == b'\n').next_back().unwrap_or_default();
        let torn = &line[..self.random.below(line.len().max(1))];
        std::fs::write(&path, [&bytes, torn].concat()).unwrap();
    }

    fn manifests(&self) -> BTreeMap<PathBuf, TrustHash> {
        let run = self.store.path().join("run");
        let attempts = AttemptDir::list(&Backend::Directory, &run).unwrap();
        let steps = attempts.iter().flat_map(|attempt| attempt.steps().unwrap());
        let read = |path: PathBuf| {
            let bytes = std::fs::read(&path).ok()?;
            Some((path, TrustHash::of(&bytes)))
        };
        steps.filter_map(|step| read(step.manifest())).collect()
    }

    /// Checks that no manifest that existed was changed or removed.
    fn check_manifests(&mut self) {
        let stand = self.manifests();
        for (path, hash) in &self.seen {
            assert_eq!(stand.get(path), Some(hash), "{} was undone", path.display());
        }
        self.seen = stand;
    }

    /// Checks, after another restart, that everything that ranks were told holds.
    fn check(&mut self) {
        self.kill_coordinator();
        self.check_manifests();
        let mut runs = self.runs.take().unwrap();
        for ((attempt, step, rank, name), hash) in &self.acknowledged {
            let log = runs.log(&run_name(), *attempt).unwrap();
            log.recall(*step).unwrap();
            let files = log.state.files(*step, *rank);
            assert_eq!(files.get(name), Some(hash), "{name} of step {step} is lost");
        }
        for (attempt, step) in &self.committed {
            let run = self.store.path().join("run");
            let path = AttemptDir::of(&run, *attempt).step(*step).manifest();
            assert!(path.is_file(), "{} was said to be committed", path.display());
        }
        for path in self.seen.keys() {
            self.check_manifest(&mut runs, path);
        }
        if self.kind != Kind::Before {
            self.check_launches(&mut runs);
        }
    }

    /// Checks that the processes of each launch are in one attempt, without those of other
    /// launches.
    fn check_launches(&self, runs: &mut Runs) {
        let run = self.store.path().join("run");
        let mut met = BTreeMap::new();
        for attempt in AttemptDir::list(&Backend::Directory, &run).unwrap() {
            let Ok(log) = runs.log(&run_name(), attempt.attempt) else { continue };
            let ranks = log.state.ranks.values();
            let launches: BTreeSet<u64> = ranks.map(|r| self.launch_of[&r.incarnation]).collect();
            let number = attempt.attempt;
            assert_eq!(launches.len(), 1, "attempt {number} holds the launches {launches:?}");
            for launch in launches.difference(&self.torn) {
                let other = met.insert(*launch, number);
                assert_eq!(other, None, "launch {launch} is in attempt {number} too");
            }
        }
    }

    /// Checks that a manifest lists all files that its attempt's ranks counted, and none of another
    /// attempt.
    fn check_manifest(&self, runs: &mut Runs, path: &Path) {
        let manifest = Manifest::from_bytes(&std::fs::read(path).unwrap()).unwrap();
        let log = runs.log(&run_name(), manifest.attempt).unwrap();
        assert_eq!(manifest.files.len(), (RANKS * FILES) as usize, "{}", path.display());
        for file in &manifest.files {
            assert!(file.shards.iter().all(|shard| shard.attempt == manifest.attempt));
            log.recall(manifest.step).unwrap();
            let files = log.state.files(manifest.step, file.rank);
            let known = files.get(&file.name) == Some(&file.header_hash);
            assert!(known, "{} is in no journal", file.name);
        }
    }
}

/// The receiver of an answer that the actor has not given yet.
enum Waiting {
    Join(oneshot::Receiver<Result<Answered, Refusal>>),
    Shards(oneshot::Receiver<Result<Vec<Result<u64, Refusal>>, Refusal>>),
    Committed(oneshot::Receiver<Result<bool, Refusal>>),
}

impl Waiting {
    fn read(self, ask: &Ask) -> Answer {
        let refused = |refusal: Refusal| Answer::Refused(refusal.to_string());
        match self {
            Waiting::Join(mut answer) => {
                let joined = |answered: Answered| {
                    let inside = answered.entry.ok().map(|entry| (entry.attempt, entry.vouch));
                    Answer::Joined(answered.arrivals, inside)
                };
                answer.try_recv().unwrap().map_or_else(refused, joined)
            }
            Waiting::Shards(mut answer) => {
                let told = answer.try_recv().unwrap();
                let single = told.and_then(|mut outcomes| outcomes.remove(0));
                single.map_or_else(refused, |_| Answer::Reported(ask.clone()))
            }
            Waiting::Committed(mut answer) => answer
                .try_recv()
                .unwrap()
                .map_or_else(refused, |committed| Answer::Closed(ask.clone(), committed)),
        }
    }
}

/// Runs the simulation of one seed to its end and returns the hash of its trace.
fn simulate(seed: u64) -> TrustHash {
    let mut world = World::new(seed);
    for _ in 0..FAULTY {
        world.step(true);
    }
    world.check_manifests();
    // Without faults a complete launch must finish; for one of which a single rank was restarted,
    // launchers restart all ranks.
    if world.kind != Kind::Before && world.torn.contains(&world.launches) {
        world.launch();
    }
    let mut calm = 0;
    loop {
        while world.job.iter().any(|process| process.ask(false).is_some()) {
            world.step(false);
            calm += 1;
            assert!(calm < CALM, "the job does not come to its end");
        }
        if world.job.iter().all(|process| process.attempt == world.job[0].attempt) {
            break;
        }
        assert_eq!(world.kind, Kind::Before, "the ranks of one launch did not meet");
        world.launch();
    }
    world.check();
    let attempt = world.job[0].attempt.unwrap();
    for step in 0..STEPS {
        let run = world.store.path().join("run");
        let path = AttemptDir::of(&run, attempt).step(Step(step)).manifest();
        assert!(path.is_file(), "step {step} of the last attempt was never committed");
    }
    TrustHash::of(&world.trace)
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn no_order_of_faults_loses_what_was_acknowledged_or_undoes_a_commit() {
    let (first, count) = (number("BACKTAPE_SEED", 1), number("BACKTAPE_SIMULATIONS", 10_000));
    println!("seeds {first} to {}", first + count - 1);
    let next = AtomicU64::new(first);
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + count {
                return;
            }
            let told = std::panic::catch_unwind(|| simulate(seed));
            assert!(told.is_ok(), "BACKTAPE_SEED={seed} BACKTAPE_SIMULATIONS=1 shows it again");
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
}

#[test]
fn a_seed_run_twice_gives_the_same_trace() {
    for seed in 0..20 {
        assert_eq!(simulate(seed), simulate(seed), "seed {seed}");
    }
}
