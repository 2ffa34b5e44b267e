//! From parsed arguments to a report and an exit code.

use std::path::{Path, PathBuf};

use backtape::role::Role;
use backtape::shard::TensorKey;

use super::args::{
    Arguments, Command, DumpArguments, PrecisionArguments, ReplayArguments, WhichArguments,
};
use super::exit;
use super::progress::Bar;
use crate::draw::seed_of;
use crate::dump::{self, OpenError, Selection, StepDump, StepState};
use crate::head::step::StepError;
use crate::head::{HeadStep, Stage};
use crate::precision::{self, Gradients, Precision, PrecisionError};
use crate::replay::against::{Difference, Side, against};
use crate::replay::outcome::{NotChecked, Outcome, Status};
use crate::replay::{self, Effort, Request};
use crate::report::number::plural;
use crate::report::schema::{
    AgainstReport, DumpSummary, FirstDivergence, Report, SCHEMA, StageReport, Verdict,
};
use crate::report::{dumped, precision as shown, text};
use crate::verify::{Verification, verify};

/// Why `replay` ended without a verdict.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The dump could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The head could not be replayed.
    #[error("no verdict on {path}")]
    Step {
        /// The dump.
        path: PathBuf,
        /// Why.
        source: Box<StepError>,
    },
    /// Precision could not be shown.
    #[error("no numbers on the precision of {path}")]
    Precision {
        /// The dump.
        path: PathBuf,
        /// Why.
        source: Box<PrecisionError>,
    },
    /// The report could not be written.
    #[error("the report cannot be written to {path}: choose another file for --json")]
    Write {
        /// Where to.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The thread pool could not be made.
    #[error("{0} threads cannot be started: choose fewer with --threads")]
    Threads(usize),
}

impl RunError {
    pub(super) fn exit_code(&self) -> i32 {
        match self {
            RunError::Open(OpenError::Misplaced { .. }) => exit::INCOMPLETE,
            RunError::Step { source, .. } => step_exit(source),
            RunError::Precision { source, .. } => match &**source {
                PrecisionError::Step(source) => step_exit(source),
                _ => exit::USAGE,
            },
            _ => exit::USAGE,
        }
    }
}

fn step_exit(error: &StepError) -> i32 {
    match error {
        StepError::Unusable { .. } | StepError::Assemble { .. } => exit::INCOMPLETE,
        _ => exit::USAGE,
    }
}

pub(super) fn run(arguments: &Arguments) -> Result<(String, i32), RunError> {
    match &arguments.command {
        Some(Command::Verify(arguments)) => run_verify(arguments),
        Some(Command::Inspect(arguments)) => run_inspect(arguments),
        Some(Command::Precision(arguments)) => run_precision(arguments),
        None => match arguments.replay.threads {
            None => run_replay(&arguments.replay),
            Some(threads) => {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                let pool = pool.map_err(|_| RunError::Threads(threads))?;
                pool.install(|| run_replay(&arguments.replay))
            }
        },
    }
}

fn run_replay(arguments: &ReplayArguments) -> Result<(String, i32), RunError> {
    let bar = Bar::new(arguments.quiet);
    let path = arguments.dump.as_deref().unwrap_or(Path::new("."));
    let selection = selection(&arguments.which);
    let other = arguments.against.as_deref();
    let how = How {
        compare: &arguments.compare,
        probes: arguments.freivalds.map(|n| n as usize),
        tokens: arguments.tokens.map(|n| n as usize),
    };
    let report = report_with(path, &selection, &how, other, &bar)?;
    bar.finish();
    let code = match report.verdict {
        Verdict::Agreed => exit::AGREED,
        Verdict::Diverged => exit::DIVERGED,
        Verdict::Incomplete => exit::INCOMPLETE,
    };
    let json = || serde_json::to_string_pretty(&report).expect("a report is plain data");
    Ok((output(arguments.json.as_deref(), json, || text::render(&report))?, code))
}

/// The report of a replay, without a terminal: what the Python package calls.
pub fn replay_report(
    path: &Path,
    selection: &Selection,
    compare: &[Role],
    other: Option<&Path>,
) -> Result<Report, RunError> {
    let how = How { compare, probes: None, tokens: None };
    report_with(path, selection, &how, other, &Bar::new(true))
}

/// The report of a replay that checks dk and dq with this many random probes.
pub fn probed_report(
    path: &Path,
    selection: &Selection,
    compare: &[Role],
    probes: usize,
) -> Result<Report, RunError> {
    let how = How { compare, probes: Some(probes), tokens: None };
    report_with(path, selection, &how, None, &Bar::new(true))
}

/// What a replay compares, and how.
#[derive(Clone, Copy)]
struct How<'a> {
    compare: &'a [Role],
    probes: Option<usize>,
    tokens: Option<usize>,
}

fn report_with(
    path: &Path,
    selection: &Selection,
    how: &How<'_>,
    other: Option<&Path>,
    bar: &Bar,
) -> Result<Report, RunError> {
    let dump = dump::open(path, selection)?;
    let proof = verify(&dump, &|_| {});
    let (step, outcome) = replay_one(path, &dump, &proof, how, bar)?;
    let mut report = report(path, &step, &outcome, &proof);
    if let Some(other_path) = other {
        let which = Selection { step: Some(dump.step.0), ..Selection::default() };
        let other_dump = dump::open(other_path, &which)?;
        let other_proof = verify(&other_dump, &|_| {});
        let shared = shared_roles(&other_dump, how.compare);
        let shared = How { compare: &shared, ..*how };
        let (other_step, other_outcome) =
            replay_one(other_path, &other_dump, &other_proof, &shared, bar)?;
        let one = Side { step: &step, outcome: &outcome };
        let two = Side { step: &other_step, outcome: &other_outcome };
        let differences = against(&one, &two, how.compare).map_err(|source| RunError::Step {
            path: other_path.into(),
            source: Box::new(source),
        })?;
        let theirs = self::report(other_path, &other_step, &other_outcome, &other_proof);
        join(&mut report, theirs, differences, (&outcome, &other_outcome));
    }
    Ok(report)
}

fn replay_one<'a>(
    path: &Path,
    dump: &'a StepDump,
    proof: &Verification,
    how: &How<'_>,
    bar: &Bar,
) -> Result<(HeadStep<'a>, Outcome), RunError> {
    let wrong = |source| RunError::Step { path: path.into(), source: Box::new(source) };
    let unusable = |key: &TensorKey| proof.unusable(key).map(str::to_string);
    let step = HeadStep::new(dump, None, unusable).map_err(wrong)?;
    let seed = seed_of(dump.run.as_str(), dump.step.0);
    let effort = match (how.probes, how.tokens) {
        (Some(count), _) => Effort::Probes { count, seed },
        (None, Some(count)) => Effort::Tokens { count, seed },
        (None, None) => Effort::All,
    };
    let total = |work| bar.expect(work);
    let request = Request { compare: how.compare, effort, progress: bar, total: &total };
    let outcome = replay::replay(&step, &request).map_err(wrong)?;
    Ok((step, outcome))
}

/// The other run may lack a role: what it holds is replayed, the rest is skipped.
fn shared_roles(dump: &StepDump, compare: &[Role]) -> Vec<Role> {
    let held = |role: &Role| dump.tensors().values().any(|info| info.role == Some(*role));
    compare.iter().copied().filter(held).collect()
}

fn report(path: &Path, step: &HeadStep<'_>, outcome: &Outcome, proof: &Verification) -> Report {
    let dump = summary(path, step, proof);
    let findings: Vec<String> =
        proof.findings.iter().map(|finding| finding.sentence.clone()).collect();
    let mut not_checked: Vec<NotChecked> = outcome.not_checked.clone();
    let unproved = proof.not_checked.iter();
    not_checked.extend(unproved.map(|n| NotChecked { what: n.what.clone(), why: n.why.clone() }));
    let first_divergence = FirstDivergence::of(outcome, &dump.run);
    let blocked = !step.unusable.is_empty() || outcome.compared() == 0;
    let verdict = match (&first_divergence, blocked) {
        (Some(_), _) => Verdict::Diverged,
        (None, true) => Verdict::Incomplete,
        (None, false) => Verdict::Agreed,
    };
    Report {
        schema: SCHEMA,
        version: backtape::VERSION,
        verdict,
        step: dump.step,
        first_divergence,
        dump,
        stages: StageReport::all(outcome),
        causes: Vec::new(),
        grad_norm: outcome.grad_norm.clone(),
        against: None,
        findings,
        not_checked,
    }
}

/// Adds the other run: the earliest stage at which either leaves its reference
/// or the two leave each other is the first divergence.
fn join(
    report: &mut Report,
    other: Report,
    differences: Vec<Difference>,
    outcomes: (&Outcome, &Outcome),
) {
    let apart = differences.iter().find(|found| found.status == Status::Fail);
    let order = |name: &str| Stage::ALL.iter().position(|stage| stage.name() == name);
    let pair = apart.map(|found| FirstDivergence {
        stage: found.stage.name().into(),
        tensor: found.stage.name().into(),
        microbatch: found.microbatch.map(|mb| mb.0),
        rank: None,
        run: format!("{} and {}", report.dump.run, other.dump.run),
        reason: if found.stage.is_input() {
            format!(
                "the inputs differ in {}, so the backward is not to blame yet",
                plural(found.unequal, "element")
            )
        } else {
            "the two runs differ by more than both runs' rounding explains".into()
        },
    });
    let own = FirstDivergence::of(outcomes.0, &report.dump.run);
    let theirs = FirstDivergence::of(outcomes.1, &other.dump.run);
    let all = [own, theirs, pair].into_iter().flatten();
    report.first_divergence = all.min_by_key(|first| order(&first.stage));
    report.verdict = match (&report.first_divergence, report.verdict, other.verdict) {
        (Some(_), _, _) => Verdict::Diverged,
        (None, Verdict::Agreed, Verdict::Agreed) if !differences.is_empty() => Verdict::Agreed,
        _ => Verdict::Incomplete,
    };
    report.findings.extend(other.findings.iter().map(|finding| format!("other run: {finding}")));
    let more = other.not_checked.into_iter().filter(|item| !report.not_checked.contains(item));
    let more: Vec<NotChecked> = more
        .map(|item| NotChecked { what: format!("other run, {}", item.what), why: item.why })
        .collect();
    report.not_checked.extend(more);
    report.against = Some(AgainstReport {
        dump: other.dump,
        stages: other.stages,
        differences,
        grad_norm: other.grad_norm,
    });
}

fn summary(path: &Path, step: &HeadStep<'_>, proof: &Verification) -> DumpSummary {
    let dump = step.dump;
    let (manifest, head) = (&dump.manifest, &step.options.declared);
    let mesh = if manifest.mesh.0.is_empty() {
        String::new()
    } else {
        format!(", mesh {}", manifest.mesh)
    };
    let state = match &dump.state {
        StepState::Committed => "committed".to_string(),
        StepState::Partial { why, .. } => format!("PARTIAL: {why}"),
    };
    let head = format!(
        "softmax_xent {}, {} over {} ({}), {}",
        head.path,
        word(&head.reduction),
        word(&head.denominator),
        word(&head.scope),
        plural(step.microbatches.len() as u64, "microbatch").replace("hs", "hes"),
    );
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
    }
}

/// The declared word of an option, as JSON spells it.
fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default().trim_matches('"').to_string()
}

fn run_verify(arguments: &DumpArguments) -> Result<(String, i32), RunError> {
    let dump = dump::open(&arguments.dump, &selection(&arguments.which))?;
    let proof = verify(&dump, &|_| {});
    let code = if proof.intact() && dump.committed() { exit::AGREED } else { exit::INCOMPLETE };
    let json = || serde_json::to_string_pretty(&proof).expect("plain data");
    Ok((output(arguments.json.as_deref(), json, || dumped::verification(&dump, &proof))?, code))
}

fn run_precision(arguments: &PrecisionArguments) -> Result<(String, i32), RunError> {
    let path = &arguments.dump.dump;
    let tokens = arguments.tokens.map(|n| n as usize);
    let options = precision::Options { microbatch: arguments.microbatch, tokens };
    let found = precision_report(path, &selection(&arguments.dump.which), &options)?;
    let code = match found.gradients {
        Gradients::Diverge(_) => exit::DIVERGED,
        _ if found.nonfinite > 0 || found.check.is_none() => exit::INCOMPLETE,
        _ => exit::AGREED,
    };
    let json = || serde_json::to_string_pretty(&found).expect("plain data");
    Ok((output(arguments.dump.json.as_deref(), json, || shown::render(&found))?, code))
}

/// What `replay precision` finds, without a terminal.
pub fn precision_report(
    path: &Path,
    selection: &Selection,
    options: &precision::Options,
) -> Result<Precision, RunError> {
    let dump = dump::open(path, selection)?;
    let proof = verify(&dump, &|_| {});
    let wrong = |source| RunError::Precision { path: path.into(), source: Box::new(source) };
    let unusable = |key: &TensorKey| proof.unusable(key).map(str::to_string);
    let step = HeadStep::new(&dump, None, unusable).map_err(|source| wrong(source.into()))?;
    precision::precision(&step, options).map_err(wrong)
}

fn run_inspect(arguments: &DumpArguments) -> Result<(String, i32), RunError> {
    let dump = dump::open(&arguments.dump, &selection(&arguments.which))?;
    let json = || serde_json::to_string_pretty(&dump.manifest).expect("plain data");
    Ok((output(arguments.json.as_deref(), json, || dumped::inventory(&dump))?, exit::AGREED))
}

fn selection(which: &WhichArguments) -> Selection {
    Selection { run: which.run.clone(), attempt: which.attempt, step: which.step }
}

/// JSON to its file and text to the terminal; with `-` only the JSON.
fn output(
    json_file: Option<&Path>,
    json: impl Fn() -> String,
    text: impl Fn() -> String,
) -> Result<String, RunError> {
    match json_file {
        Some(path) if path == Path::new("-") => Ok(json() + "\n"),
        Some(path) => {
            let written = std::fs::write(path, json() + "\n");
            written.map_err(|source| RunError::Write { path: path.into(), source })?;
            Ok(text())
        }
        None => Ok(text()),
    }
}
