//! From parsed arguments to a report and an exit code.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use backtape::head::PolicyDeclaration;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::args::{Arguments, Command, DumpArguments, ReplayArguments, WhichArguments};
use super::caught::caught;
use super::cluster::Connect;
use super::device::{AskedDevice, Used};
use super::error::RunError;
use super::exit;
use super::kernel::Kernels;
use super::page::PageFile;
use super::progress::Bar;
use super::written::{Json, write_out};
use super::{against, checks, look, own, precision, trajectory};
use crate::checks::{Subject, check_replayed};
use crate::device::{Device, Kernel};
use crate::diagnose::{self, Budget, Causes, Found, diagnose};
use crate::draw::seed_of;
use crate::dump::versions::{HeldBy, disputed, versions};
use crate::dump::{self, Selection, StepDump};
use crate::head::HeadStep;
use crate::head::policy_file::read_toml;
use crate::head::step::StepError;
use crate::number::plural;
use crate::replay::against::Asked;
use crate::replay::outcome::{NotChecked, Outcome, Passes};
use crate::replay::tasks::{Cluster, Cut, Workers};
use crate::replay::unit_inputs::{UnitInputs, unit_inputs};
use crate::replay::variant::Variant;
use crate::replay::versions::joined;
use crate::replay::{self, Effort, Request};
use crate::report::drawings::drawings;
use crate::report::schema::{
    DeviceReport, DumpSummary, FirstDivergence, Report, SCHEMA, StageReport,
};
use crate::report::verdict::Reason;
use crate::report::{catalogue, dumped, inventory, step_checks, text, verdict};
use crate::spill::{keep_arrays, spill_to};
use crate::verify::{Verification, verify};

pub(super) fn run(
    arguments: &Arguments,
    connect: Option<&Connect<'_>>,
) -> Result<(String, i32), RunError> {
    match &arguments.command {
        Some(Command::Verify(arguments)) => run_verify(arguments),
        Some(Command::Ls(arguments)) => look::list(arguments),
        Some(Command::Inspect(arguments)) => run_inspect(arguments),
        Some(Command::Show(arguments)) => look::show(arguments),
        Some(Command::Export(arguments)) => look::export(arguments),
        Some(Command::Diff(arguments)) => run_replay(&arguments.replay(), None),
        Some(Command::Completions { shell }) => Ok((own::completions(*shell), exit::AGREED)),
        Some(Command::Man) => Ok((own::manual(), exit::AGREED)),
        Some(Command::Checks(arguments)) => checks::run(arguments),
        Some(Command::Trajectory(arguments)) => trajectory::run(arguments),
        Some(Command::Causes(arguments)) => run_causes(arguments.id.as_deref()),
        Some(Command::Precision(arguments)) => precision::run(arguments),
        None => match arguments.replay.threads {
            None => run_replay(&arguments.replay, connect),
            Some(threads) => {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                let pool = pool.map_err(|_| RunError::Threads(threads))?;
                let workers = arguments.replay.cluster.workers(connect)?;
                pool.install(|| replay_on(&arguments.replay, workers.as_deref()))
            }
        },
    }
}

fn run_replay(
    arguments: &ReplayArguments,
    connect: Option<&Connect<'_>>,
) -> Result<(String, i32), RunError> {
    let workers = arguments.cluster.workers(connect)?;
    replay_on(arguments, workers.as_deref())
}

fn replay_on(
    arguments: &ReplayArguments,
    workers: Option<&dyn Workers>,
) -> Result<(String, i32), RunError> {
    keep_arrays();
    arguments.spill.as_deref().map(spill_to).transpose()?;
    let bar = Bar::new(arguments.quiet);
    let path = arguments.dump.as_deref().unwrap_or(Path::new("."));
    let selection = selection(&arguments.which);
    let other = arguments.against.as_deref();
    let asked = Asked::parse(&arguments.compare)?;
    let policy = arguments.policy.as_deref().map(read_policy).transpose()?;
    // A replay may take long: what cannot be written is said before it.
    let page = arguments.report.as_deref().map(PageFile::beside).transpose()?;
    let written = Json::asked(arguments.json.as_deref())?;
    let cut = arguments.cluster.cut();
    let cluster = workers.map(|workers| {
        let cluster = Cluster::new(workers, (path, &selection), policy.as_ref(), cut);
        cluster.spilling_to(arguments.spill.as_deref())
    });
    let kernels = arguments.kernel.open()?;
    let used = Used::open(arguments.device.device.as_ref());
    used.say();
    // The table stands there while causes are looked for.
    let shown = RefCell::new(String::new());
    let show = |report: Report| {
        bar.finish();
        let first = text::first(&report.computed_by(used.report.clone()));
        write_out(&first);
        shown.replace(first);
    };
    let how = How {
        policy: policy.as_ref(),
        cluster: cluster.as_ref(),
        device: used.device.as_deref(),
        kernels: Some(&kernels),
        probes: arguments.freivalds.map(|n| n as usize),
        tokens: arguments.tokens.map(|n| n as usize),
        variants: &[],
        draws: page.is_some(),
        causes: arguments.causes,
        show: (!written.is_output()).then_some(&show),
    };
    let report = report_with(path, &selection, &asked, other, how, &bar)?;
    let report = report.computed_by(used.report.clone());
    bar.finish();
    if let Some(page) = page {
        page.write(&report)?;
    }
    let code = exit::of(report.verdict);
    let json = || serde_json::to_string_pretty(&report).expect("a report is plain data");
    let text = written.output(json, || text::render(&report))?;
    Ok((rest(text, &shown.borrow()), code))
}

/// What of a text is still to be written where its beginning was shown; all of it where the
/// search has changed what a stage is.
fn rest(text: String, shown: &str) -> String {
    match text.strip_prefix(shown) {
        Some(rest) => rest.into(),
        None => format!(
            "\nThe search has changed what was said of a stage; the report again:\n\n{text}"
        ),
    }
}

/// The report of a replay, without a terminal: what the Python package calls.
pub fn replay_report(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    other: Option<&Path>,
) -> Result<Report, RunError> {
    report_with(path, selection, &compare.into(), other, How::default(), &Bar::new(true))
}

/// What a replay without a terminal may be asked for beyond its step.
#[derive(Clone, Copy, Default)]
pub struct Extras<'a> {
    /// Functions of the user's own, which are tried on one run alone.
    pub variants: &'a [Arc<Variant>],
    /// Whether all that a page draws is gathered, see `report::html`.
    pub draws: bool,
    /// What computes the reference; where it cannot be used the report says why.
    pub device: Option<&'a AskedDevice>,
    /// How closely causes are looked for.
    pub causes: Causes,
}

/// The report of a replay of one run or of two, with all that is asked for.
pub fn full_report(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    other: Option<&Path>,
    extras: Extras<'_>,
) -> Result<Report, RunError> {
    let Extras { variants, draws, device, causes } = extras;
    let used = Used::open(device);
    let how = How { variants, draws, causes, device: used.device.as_deref(), ..How::default() };
    let report = report_with(path, selection, &compare.into(), other, how, &Bar::new(true))?;
    Ok(report.computed_by(used.report))
}

/// What a user's own functions are called with, unit by unit.
pub fn variant_inputs(path: &Path, selection: &Selection) -> Result<Vec<UnitInputs>, RunError> {
    let dump = dump::open(path, selection)?;
    let proof = verify(&dump, &|_| {});
    let unusable = |key: &TensorKey| proof.unusable(key).map(str::to_string);
    let wrong = |source| RunError::Step { path: path.into(), source: Box::new(source) };
    let step = HeadStep::new(&dump, None, unusable).map_err(wrong)?;
    unit_inputs(&step).map_err(wrong)
}

/// The report of a replay that checks dk and dq with this many random probes.
pub fn probed_report(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    probes: usize,
) -> Result<Report, RunError> {
    let how = How { probes: Some(probes), ..How::default() };
    report_with(path, selection, &compare.into(), None, how, &Bar::new(true))
}

/// The report of a replay of a stratified sample of so many tokens a microbatch.
pub fn sampled_report(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    tokens: usize,
) -> Result<Report, RunError> {
    let how = How { tokens: Some(tokens), ..How::default() };
    report_with(path, selection, &compare.into(), None, how, &Bar::new(true))
}

/// The report of a replay whose tiles others compute, to the same bits.
pub fn clustered_report(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    (workers, cut): (&dyn Workers, Cut),
) -> Result<Report, RunError> {
    let cluster = Cluster::new(workers, (path, selection), None, cut);
    let how = How { cluster: Some(&cluster), ..How::default() };
    report_with(path, selection, &compare.into(), None, how, &Bar::new(true))
}

/// The report of a replay whose reference a device computes.
pub fn devised_report(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    device: &dyn Device,
) -> Result<Report, RunError> {
    let how = How { device: Some(device), ..How::default() };
    let report = report_with(path, selection, &compare.into(), None, how, &Bar::new(true))?;
    Ok(report.computed_by(Some(DeviceReport::of(device.description()))))
}

/// The report of a replay in which a user's kernels take part, on any device.
pub fn compiled_report(
    path: &Path,
    selection: &Selection,
    compare: impl Into<Asked>,
    (kernels, device): (Vec<Kernel>, Box<dyn Device>),
) -> Result<Report, RunError> {
    let kernels = Kernels::on(kernels, device);
    let how = How { kernels: Some(&kernels), ..How::default() };
    report_with(path, selection, &compare.into(), None, how, &Bar::new(true))
}

/// How a head is replayed, beyond what its job declared.
#[derive(Clone, Copy, Default)]
pub(super) struct How<'a> {
    /// Stands in for the declared rounding points.
    pub(super) policy: Option<&'a PolicyDeclaration>,
    probes: Option<usize>,
    tokens: Option<usize>,
    /// A user's own functions.
    variants: &'a [Arc<Variant>],
    /// Who computes the tiles; `None`: this process.
    cluster: Option<&'a Cluster<'a>>,
    /// What computes the reference; `None`: this process.
    device: Option<&'a dyn Device>,
    /// A user's own kernels.
    kernels: Option<&'a Kernels>,
    /// Whether what a page draws is gathered.
    pub(super) draws: bool,
    /// How closely causes are looked for.
    pub(super) causes: Causes,
    /// Shown what is known before the causes are looked for.
    show: Option<&'a dyn Fn(Report)>,
}

fn read_policy(path: &Path) -> Result<PolicyDeclaration, RunError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| RunError::PolicyFile { path: path.into(), source })?;
    read_toml(&text).map_err(|source| RunError::Policy { path: path.into(), source })
}

fn report_with(
    path: &Path,
    selection: &Selection,
    asked: &Asked,
    other: Option<&Path>,
    how: How<'_>,
    bar: &Bar,
) -> Result<Report, RunError> {
    let dump = dump::open(path, selection)?;
    let proof = bar.verify(&dump);
    if let Some(other) = other {
        return against::report((path, &dump, &proof), other, asked, (how, bar));
    }
    if !dump.is_whole() {
        return Ok(report(path, &dump, None, &proof));
    }
    if let Some(named) = asked.patterns.first() {
        let known: Vec<_> = Role::ALL.iter().map(|role| role.name()).collect();
        return Err(RunError::NotRole { word: named.to_string(), known: known.join(", ") });
    }
    let held = versions(&dump, |key| proof.unusable(key).is_none());
    if !held.is_empty() {
        return held_report(path, (&dump, &proof), &held, asked, (how, bar));
    }
    // A defect of ours costs what it was computing, and not what was found before it.
    let ended = |panicked, judged: Option<(&HeadStep<'_>, &Outcome)>| {
        let found = Some(Box::new(report(path, &dump, judged, &proof)));
        RunError::Panicked { panicked, found }
    };
    let judged = caught(|| replay_one(path, &dump, &proof, &asked.roles, (how, bar)));
    let (step, mut outcome) = judged.map_err(|panicked| ended(panicked, None))??;
    let before = outcome.clone();
    let whole = caught(|| explained((path, &dump, &proof), (&step, &mut outcome), (how, bar)));
    whole.map_err(|panicked| ended(panicked, Some((&step, &before))))?
}

/// The report of a head that was replayed, with what explains it.
fn explained(
    (path, dump, proof): (&Path, &StepDump, &Verification),
    (step, outcome): (&HeadStep<'_>, &mut Outcome),
    (how, bar): (How<'_>, &Bar),
) -> Result<Report, RunError> {
    let wrong = |source| RunError::Step { path: path.into(), source: Box::new(source) };
    let ran = how.kernels.map(|kernels| kernels.run(step)).transpose().map_err(wrong)?;
    let (compiled, kernels) = ran.unwrap_or_default();
    let variants = [how.variants, &compiled].concat();
    if let Some(show) = how.show {
        show(report(path, dump, Some((step, &*outcome)), proof));
    }
    let begin = |work| bar.search(work);
    let budget = Budget { causes: how.causes, progress: bar, begin: &begin, among: 1 };
    let causes = searched(diagnose(step, outcome, &variants, &budget), outcome).map_err(wrong)?;
    let variants = diagnose::variants(step, &variants).map_err(wrong)?;
    let drawings = how.draws.then(|| drawings(dump, proof, std::mem::take(&mut outcome.maps)));
    let judged = Some((step, &*outcome));
    let found = report(path, dump, judged, proof);
    let causes = step_checks::causes(dump, &found.checks, causes);
    Ok(Report { causes, variants, kernels, drawings, ..found })
}

/// The report of a step of which ranks hold several versions: each group of ranks is judged by
/// what it holds. Others would compute with other versions, so the tiles stay in this process.
fn held_report(
    path: &Path,
    (dump, proof): (&StepDump, &Verification),
    held: &[HeldBy],
    asked: &Asked,
    (how, bar): (How<'_>, &Bar),
) -> Result<Report, RunError> {
    let wrong = |source| RunError::Step { path: path.into(), source: Box::new(source) };
    let unusable = |key: &TensorKey| proof.unusable(key).map(str::to_string);
    let disputed = disputed(dump, |key| proof.unusable(key).is_none());
    let mut all = HeadStep::new(dump, how.policy, unusable).map_err(wrong)?;
    all.disputed.clone_from(&disputed);
    let how = How { cluster: None, ..how };
    let mut judged: Vec<(HeadStep<'_>, Outcome)> = Vec::new();
    for one in held {
        let mut step = HeadStep::new(&one.dump, how.policy, unusable).map_err(wrong)?;
        step.only = Some(one.ranks.clone());
        let mut outcome = replay_step(path, &step, &asked.roles, (how, bar))?;
        // What the forward passes of many versions hold would add up.
        outcome.passes = Passes::default();
        judged.push((step, outcome));
    }
    let Some(whole) = joined(&judged, held, &disputed) else {
        return Ok(report(path, dump, None, proof));
    };
    let versions = diagnose::Versions::of(&all, &whole).map_err(wrong)?;
    let mut causes: Vec<Found> = Vec::new();
    let open = |(_, outcome): &&mut (HeadStep<'_>, Outcome)| !versions.explain_all_of(outcome);
    let open: Vec<_> = judged.iter_mut().filter(open).collect();
    let among = open.len() as u64;
    for (step, outcome) in open {
        let begin = |work| bar.search(work);
        let budget = Budget { causes: how.causes, progress: bar, begin: &begin, among };
        let causes_of = searched(diagnose(step, outcome, how.variants, &budget), outcome);
        for cause in causes_of.map_err(wrong)? {
            if causes.iter().all(|known| known.id != cause.id) {
                causes.push(cause);
            }
        }
    }
    let mut outcome = joined(&judged, held, &disputed).unwrap_or(whole);
    let step = judged.swap_remove(0).0;
    let causes = versions.with(causes);
    let variants = diagnose::variants(&step, how.variants).map_err(wrong)?;
    let drawings = how.draws.then(|| drawings(dump, proof, std::mem::take(&mut outcome.maps)));
    let found = report(path, dump, Some((&step, &outcome)), proof);
    let causes = step_checks::causes(dump, &found.checks, causes);
    Ok(Report { causes, variants, drawings, ..found })
}

/// The causes of a search. One that a tensor of no use ends takes no verdict with it.
pub(super) fn searched(
    found: Result<Vec<Found>, StepError>,
    outcome: &mut Outcome,
) -> Result<Vec<Found>, StepError> {
    match found {
        Err(error) if error.is_of_dump() => {
            let (what, why) = ("causes".into(), error.to_string());
            outcome.not_checked.push(NotChecked { what, why });
            Ok(Vec::new())
        }
        found => found,
    }
}

pub(super) fn replay_one<'a>(
    path: &Path,
    dump: &'a StepDump,
    proof: &Verification,
    compare: &[Role],
    (how, bar): (How<'_>, &Bar),
) -> Result<(HeadStep<'a>, Outcome), RunError> {
    let wrong = |source| RunError::Step { path: path.into(), source: Box::new(source) };
    let unusable = |key: &TensorKey| proof.unusable(key).map(str::to_string);
    let step = HeadStep::new(dump, how.policy, unusable).map_err(wrong)?;
    let outcome = replay_step(path, &step, compare, (how, bar))?;
    Ok((step, outcome))
}

fn replay_step(
    path: &Path,
    step: &HeadStep<'_>,
    compare: &[Role],
    (how, bar): (How<'_>, &Bar),
) -> Result<Outcome, RunError> {
    let wrong = |source| RunError::Step { path: path.into(), source: Box::new(source) };
    let seed = seed_of(step.dump.run.as_str(), step.dump.step.0);
    let effort = match (how.probes, how.tokens) {
        (Some(count), _) => Effort::Probes { count, seed },
        (None, Some(count)) => Effort::Tokens { count, seed },
        (None, None) => Effort::All,
    };
    let total = |work| bar.expect(work);
    let How { draws, cluster, device, .. } = how;
    let (progress, total): (_, &(dyn Fn(u64) + Sync)) = (bar, &total);
    let request = Request { compare, effort, progress, total, draws, cluster, device };
    match (cluster, device) {
        // In one of the threads that share the work: from outside each piece of it would be handed
        // over and waited for.
        (None, None) => rayon::scope(|_| replay::replay(step, &request)),
        _ => replay::replay(step, &request),
    }
    .map_err(wrong)
}

/// The report of one run; without stages where its head was not replayed.
pub(super) fn report(
    path: &Path,
    dump: &StepDump,
    judged: Option<(&HeadStep<'_>, &Outcome)>,
    proof: &Verification,
) -> Report {
    let uncommitted =
        dump.state.why().map(|why| format!("step {} is not committed: {why}", dump.step));
    let microbatches = judged.map(|(step, _)| step.microbatches.len());
    let manifest = &dump.manifest;
    let opened = dump;
    let passed_over = dump.passed_over();
    let dump = summary(path, dump, microbatches, proof);
    let mut findings: Vec<String> =
        proof.findings.iter().map(|finding| finding.sentence.clone()).collect();
    findings.extend(passed_over);
    let outcome = judged.map(|(_, outcome)| outcome);
    let mut not_checked: Vec<NotChecked> =
        outcome.map(|outcome| outcome.not_checked.clone()).unwrap_or_default();
    // What nobody asked for was not forgotten by the job.
    for item in not_checked.iter_mut().filter(|item| item.why.starts_with("not captured")) {
        if let Some(why) = manifest.unselected(&item.what, None) {
            item.why = why;
        }
    }
    let unproved = proof.not_checked.iter();
    not_checked.extend(unproved.map(|n| NotChecked { what: n.what.clone(), why: n.why.clone() }));
    let checked =
        step_checks::weighed(opened, check_replayed(Subject { dump: opened, proof }), outcome);
    let replayed = outcome.and_then(|outcome| FirstDivergence::of(outcome, opened.run.as_str()));
    let mut reasons = verdict::of_head(judged, replayed.as_ref());
    reasons.extend(verdict::of_checks(&checked));
    reasons.extend(uncommitted.map(Reason::incomplete));
    let first_divergence = step_checks::first_of(opened, &checked, replayed);
    Report {
        schema: SCHEMA,
        version: backtape::VERSION,
        verdict: verdict::verdict(&reasons),
        reasons,
        step: opened.step.0,
        first_divergence,
        dump,
        stages: outcome.map(StageReport::all).unwrap_or_default(),
        coverage: outcome.map(|outcome| outcome.coverage.clone()),
        other_declaration: outcome.and_then(|outcome| outcome.other_declaration.clone()),
        causes: Vec::new(),
        variants: Vec::new(),
        grad_norm: outcome.map(|outcome| outcome.grad_norm.clone()).unwrap_or_default(),
        against: None,
        findings,
        not_checked,
        checks: checked,
        device: None,
        multiplied: outcome.map(|outcome| outcome.multiplied.clone()).unwrap_or_default(),
        kernels: Vec::new(),
        drawings: None,
    }
}

fn summary(
    path: &Path,
    dump: &StepDump,
    microbatches: Option<usize>,
    proof: &Verification,
) -> DumpSummary {
    let manifest = &dump.manifest;
    let mesh = if manifest.mesh.0.is_empty() {
        String::new()
    } else {
        format!(", mesh {}", manifest.mesh)
    };
    let state = dump.state.to_string();
    let head = match &manifest.head {
        None => "none declared".to_string(),
        Some(head) => format!(
            "{} {}, {} over {} ({}), {}",
            word(&head.loss),
            head.path,
            word(&head.reduction),
            word(&head.denominator),
            head.scope,
            match microbatches {
                Some(1) => "1 microbatch".into(),
                Some(n) => format!("{n} microbatches"),
                None => "not replayed".into(),
            },
        ),
    };
    DumpSummary {
        path: path.display().to_string(),
        run: dump.run.to_string(),
        attempt: dump.attempt.0,
        step: dump.step.0,
        state,
        ranks: format!("{}{mesh}", plural(u64::from(manifest.world_size), "rank")),
        head,
        shards: proof.shards,
        bytes: proof.bytes,
        proved: proof.intact(),
        copies_differ: proof.only_copies_differ(),
        trigger: manifest.trigger.as_ref().map(|trigger| trigger.sentence()),
        selection: manifest.selections.first().map(|kept| {
            let (of, ranks) = (kept.selection.restrictions(), &kept.ranks);
            format!("{of} (asked of ranks {ranks})")
        }),
    }
}

/// The declared word of an option, as JSON spells it.
fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default().trim_matches('"').to_string()
}

fn run_verify(arguments: &DumpArguments) -> Result<(String, i32), RunError> {
    let written = Json::asked(arguments.json.as_deref())?;
    let dump = dump::open(&arguments.dump, &selection(&arguments.which))?;
    let bar = Bar::new(arguments.quiet);
    let proof = bar.verify(&dump);
    bar.finish();
    let code = match (dump.committed(), proof.intact(), proof.only_copies_differ()) {
        (true, true, _) => exit::AGREED,
        (true, _, true) => exit::DIVERGED,
        _ => exit::INCOMPLETE,
    };
    let json = || serde_json::to_string_pretty(&proof).expect("plain data");
    Ok((written.output(json, || dumped::verification(&dump, &proof))?, code))
}

fn run_inspect(arguments: &DumpArguments) -> Result<(String, i32), RunError> {
    let dump = dump::open(&arguments.dump, &selection(&arguments.which))?;
    let json = || serde_json::to_string_pretty(&dump.manifest).expect("plain data");
    let written = Json::asked(arguments.json.as_deref())?;
    Ok((written.output(json, || inventory::inventory(&dump))?, exit::of_step(&dump)))
}

fn run_causes(id: Option<&str>) -> Result<(String, i32), RunError> {
    match catalogue::text(id) {
        Some(text) => Ok((text, exit::AGREED)),
        None => Err(RunError::NoCause(id.unwrap_or_default().into())),
    }
}

pub(super) fn selection(which: &WhichArguments) -> Selection {
    Selection { run: which.run.clone(), attempt: which.attempt, step: which.step }
}
