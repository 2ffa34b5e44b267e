//! From parsed arguments to the text of a report and an exit code.

use std::cell::RefCell;
use std::path::Path;

use backtape::head::PolicyDeclaration;

use super::args::{Arguments, Command, DumpArguments, ReplayArguments, WhichArguments};
use super::cluster::Connect;
use super::device::say;
use super::error::CommandError;
use super::progress::Bar;
use super::written::{Json, write_out};
use super::{exit, look, manual, readings};
use crate::algebra::against::Mapping;
use crate::dump::{self, Selection};
use crate::head::policy_file::read_toml;
use crate::postmortem::{self, PageFile, Settings, Used, proved};
use crate::replay::against::Asked;
use crate::replay::tasks::{Cluster, Workers};
use crate::report::schema::Report;
use crate::report::{catalogue, dumped, inventory, text};
use crate::spill::{keep_arrays, spill_to};

pub(super) fn run(
    arguments: &Arguments,
    connect: Option<&Connect<'_>>,
) -> Result<(String, i32), CommandError> {
    match &arguments.command {
        Some(Command::Verify(arguments)) => run_verify(arguments),
        Some(Command::Ls(arguments)) => look::list(arguments),
        Some(Command::Inspect(arguments)) => run_inspect(arguments),
        Some(Command::Show(arguments)) => look::show(arguments),
        Some(Command::Export(arguments)) => look::export(arguments),
        Some(Command::Diff(arguments)) => run_replay(&arguments.replay(), None),
        Some(Command::Completions { shell }) => Ok((manual::completions(*shell), exit::AGREED)),
        Some(Command::Man) => Ok((manual::manual(), exit::AGREED)),
        Some(Command::Checks(arguments)) => readings::checks(arguments),
        Some(Command::Trajectory(arguments)) => readings::trajectory(arguments),
        Some(Command::Causes(arguments)) => run_causes(arguments.id.as_deref()),
        Some(Command::Precision(arguments)) => readings::precision(arguments),
        None => match arguments.replay.threads {
            None => run_replay(&arguments.replay, connect),
            Some(threads) => {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                let pool = pool.map_err(|_| CommandError::Threads(threads))?;
                let workers = arguments.replay.cluster.workers(connect)?;
                pool.install(|| replay_on(&arguments.replay, workers.as_deref()))
            }
        },
    }
}

fn run_replay(
    arguments: &ReplayArguments,
    connect: Option<&Connect<'_>>,
) -> Result<(String, i32), CommandError> {
    let workers = arguments.cluster.workers(connect)?;
    replay_on(arguments, workers.as_deref())
}

fn replay_on(
    arguments: &ReplayArguments,
    workers: Option<&dyn Workers>,
) -> Result<(String, i32), CommandError> {
    keep_arrays();
    arguments.spill.as_deref().map(spill_to).transpose()?;
    let bar = Bar::new(arguments.quiet);
    let path = arguments.dump.as_deref().unwrap_or(Path::new("."));
    let selection = selection(&arguments.which);
    let other = arguments.against.as_deref();
    let asked = Asked::parse(&arguments.compare)?;
    let policy = arguments.policy.as_deref().map(read_policy).transpose()?;
    let mapping = arguments.map.as_deref().map(read_mapping).transpose()?;
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
    say(&used);
    // The table stands there while causes are looked for.
    let shown = RefCell::new(String::new());
    let show = |report: Report| {
        bar.finish();
        let first = text::first(&report.computed_by(used.report.clone()));
        write_out(&first);
        shown.replace(first);
    };
    let settings = Settings {
        policy: policy.as_ref(),
        cluster: cluster.as_ref(),
        device: used.device.as_deref(),
        kernels: Some(&kernels),
        probes: arguments.freivalds.map(|n| n as usize),
        tokens: arguments.tokens.map(|n| n as usize),
        variants: &[],
        mapping: mapping.as_ref(),
        draws: page.is_some(),
        causes: arguments.causes,
        show: (!written.is_output()).then_some(&show),
        watch: &bar,
    };
    let report = postmortem::report(path, &selection, &asked, other, &settings)?;
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

fn read_policy(path: &Path) -> Result<PolicyDeclaration, CommandError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| CommandError::PolicyFile { path: path.into(), source })?;
    read_toml(&text).map_err(|source| CommandError::Policy { path: path.into(), source })
}

fn read_mapping(path: &Path) -> Result<Mapping, CommandError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| CommandError::MapFile { path: path.into(), source })?;
    Mapping::read(&text).map_err(|source| CommandError::Map { path: path.into(), source })
}

fn run_verify(arguments: &DumpArguments) -> Result<(String, i32), CommandError> {
    let written = Json::asked(arguments.json.as_deref())?;
    let dump = dump::open(&arguments.dump, &selection(&arguments.which))?;
    let bar = Bar::new(arguments.quiet);
    let proof = proved(&dump, &bar);
    bar.finish();
    let code = match (dump.committed(), proof.intact(), proof.only_copies_differ()) {
        (true, true, _) => exit::AGREED,
        (true, _, true) => exit::DIVERGED,
        _ => exit::INCOMPLETE,
    };
    let json = || serde_json::to_string_pretty(&proof).expect("plain data");
    Ok((written.output(json, || dumped::verification(&dump, &proof))?, code))
}

fn run_inspect(arguments: &DumpArguments) -> Result<(String, i32), CommandError> {
    let dump = dump::open(&arguments.dump, &selection(&arguments.which))?;
    let json = || serde_json::to_string_pretty(&dump.manifest).expect("plain data");
    let written = Json::asked(arguments.json.as_deref())?;
    Ok((written.output(json, || inventory::inventory(&dump))?, exit::of_step(&dump)))
}

fn run_causes(id: Option<&str>) -> Result<(String, i32), CommandError> {
    match catalogue::text(id) {
        Some(text) => Ok((text, exit::AGREED)),
        None => Err(CommandError::NoCause(id.unwrap_or_default().into())),
    }
}

pub(super) fn selection(which: &WhichArguments) -> Selection {
    Selection { run: which.run.clone(), attempt: which.attempt, step: which.step }
}
