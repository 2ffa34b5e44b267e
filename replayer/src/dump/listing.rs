//! Lists what a directory or bucket holds: runs, their attempts, their steps.
//!
//! Only names, sizes and manifests are read, and no shards, so that listing a thousand steps takes
//! no longer than reading one.

use std::path::{Path, PathBuf};

use backtape::identity::Step;
use backtape::store::StepDir;
use rayon::prelude::*;
use serde::Serialize;

use super::error::OpenError;
use super::locate::{self, directory_name};
use super::{Place, Selection, run_record, uncommitted};

/// One run of a place.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct ListedRun {
    pub run: String,
    pub path: PathBuf,
    /// The number of ranks from run.json; absent where that is lost.
    pub world_size: Option<u32>,
    /// Its steps, by attempt, then by number.
    pub steps: Vec<ListedStep>,
}

/// One step of an attempt.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct ListedStep {
    pub attempt: u32,
    pub step: u64,
    /// True when its manifest was committed and no rank stopped before the end of the step.
    pub committed: bool,
    /// Why it is not committed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partial: Option<String>,
    /// Shard files, and their bytes.
    pub files: u64,
    pub bytes: u64,
}

/// Every run below `path`, or the run that `path` itself is; `wanted` names one of several.
pub fn list(path: &Path, wanted: Option<&str>) -> Result<Vec<ListedRun>, OpenError> {
    let place = Place::of(path)?;
    let named = Selection { run: wanted.map(str::to_string), ..Selection::default() };
    let which = place.narrow(&named)?;
    let runs =
        locate::runs(place.path(), which.run.as_deref()).map_err(|e| place.with_user_paths(e))?;
    runs.iter()
        .map(|run| listed(&place, run, &which).map_err(|e| place.with_user_paths(e)))
        .collect()
}

fn listed(place: &Place, run: &Path, which: &Selection) -> Result<ListedRun, OpenError> {
    let here = Selection { run: None, step: None, ..which.clone() };
    let (_, attempts) = locate::attempts(run, &here)?;
    let is_meant = |step: &StepDir| {
        step.path.is_dir() && which.step.is_none_or(|number| step.step.0 == number)
    };
    let (mut steps, mut looked_at) = (Vec::new(), Vec::new());
    for attempt in attempts {
        let read = |source| OpenError::Read { path: attempt.path.clone(), source };
        for step in attempt.steps().map_err(read)?.into_iter().filter(is_meant) {
            let sizes = place
                .shard_files(&step)
                .map_err(|source| OpenError::Read { path: step.path.clone(), source })?;
            steps.push(ListedStep {
                attempt: attempt.attempt.0,
                step: step.step.0,
                committed: false,
                partial: None,
                files: sizes.len() as u64,
                bytes: sizes.iter().sum(),
            });
            looked_at.push((attempt.attempt, step));
        }
    }
    if let (Some(number), true) = (which.step, steps.is_empty()) {
        let (path, wanted) = (run.to_path_buf(), Step(number));
        return Err(OpenError::NoSuchStep { path, wanted, steps: locate::steps(place, &here)? });
    }
    steps.par_iter_mut().zip(&looked_at).for_each(|(listed, (attempt, step))| {
        listed.partial = uncommitted(place, step, *attempt);
        listed.committed = listed.partial.is_none();
    });
    let record = run_record(run);
    Ok(ListedRun {
        run: record.as_ref().map_or_else(|| directory_name(run), |r| r.run.to_string()),
        path: place.given(run),
        world_size: record.map(|record| record.world_size),
        steps,
    })
}
