//! The settings of a recorder. The environment is read by the Python binding and not here: a
//! library does not look at it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use backtape::coordinator::Rules;
use backtape::coordinator::limits::MAX_RING_STEPS;
use backtape::credentials::Access;
use backtape::identity::{LaunchName, Name};
use backtape::placement::{Mesh, MeshCoordinates};
use backtape::selection::Selection;
use backtape::store::backend::is_url;

use crate::error::RecorderError;
use crate::watch::Conditions;

/// How the bytes of a shard file reach the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Direct where the coordinator's directory is also this machine's, else stream.
    #[default]
    Auto,
    /// The rank writes into the store itself.
    Direct,
    /// The rank spools its files and sends them to the coordinator.
    Stream,
}

/// Everything a recorder can be told; [`Settings::new`] fills in the defaults.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The run's directory, or the store that holds it where `run` is set.
    pub directory: PathBuf,
    /// The run's name below `directory`; `None` when `directory` is the run's own.
    pub run: Option<String>,
    /// `host:port` of a coordinator; `None` starts one inside rank 0, which
    /// serves the ranks of one host.
    pub coordinator: Option<String>,
    /// Folder of what this rank shows to that coordinator, and it to the rank
    /// (`coordinator certs`); `None` calls it unencrypted.
    pub credentials: Option<PathBuf>,
    /// This process's index in the job.
    pub rank: u32,
    /// Processes in the job.
    pub world_size: u32,
    /// Which launch this is, where the launcher counts restarts itself.
    pub attempt: Option<u32>,
    /// What the launcher calls this launch, as `NAME` or `NAME/RESTART`: the same on all its
    /// ranks. `None`: the coordinator finds out which ranks were alive together.
    pub launch: Option<String>,
    /// This machine's name in records; `None` takes the host name.
    pub host: Option<String>,
    /// The job's mesh; empty when it has none.
    pub mesh: Mesh,
    /// Where this rank sits on the mesh.
    pub coordinates: MeshCoordinates,
    /// What to record: steps, tensors, ranks, microbatches, and how many bytes.
    pub selection: Selection,
    /// Send heartbeats, and record what the coordinator then asks for: plans
    /// and triggers. A ring implies it.
    pub watch: bool,
    /// How often a heartbeat is sent.
    pub heartbeat: Duration,
    /// Steps that are not selected keep their loss-head tensors in memory for
    /// this many steps, to be written when something triggers; 0: none do.
    pub ring_steps: u32,
    /// Most bytes that those hold, beside `queue_bytes`.
    pub ring_bytes: u64,
    /// What [`crate::Recorder::watch`] triggers on.
    pub conditions: Conditions,
    /// Bounds on triggered recordings, for the coordinator inside rank 0.
    pub rules: Rules,
    /// How bytes reach the store.
    pub transport: TransportChoice,
    /// Faults of the background thread come out of the calls, not only into
    /// the summary: for CI, where a silent loss is worse than a stopped job.
    pub strict: bool,
    /// Most bytes of captures held in memory; what does not fit is omitted.
    pub queue_bytes: u64,
    /// Longest that one call may hold up the training thread.
    pub call_cap: Duration,
    /// How long to look for the coordinator before recording is given up.
    pub join_deadline: Duration,
    /// How long a step may take from its first event to its commit.
    pub step_deadline: Duration,
    /// How long the end of the job waits for the recorder after the last thing that got done: a
    /// disk that is full or hangs, or a coordinator that is gone, costs it no more.
    pub close_patience: Duration,
    /// Versions of the job's software, for `run.json`.
    pub versions: BTreeMap<String, String>,
}

impl Settings {
    /// Settings that record step 0 below `directory` with an embedded coordinator.
    pub fn new(directory: impl Into<PathBuf>, rank: u32, world_size: u32) -> Settings {
        Settings {
            directory: directory.into(),
            run: None,
            coordinator: None,
            credentials: None,
            rank,
            world_size,
            attempt: None,
            launch: None,
            host: None,
            mesh: Mesh::default(),
            coordinates: MeshCoordinates::new(),
            selection: Selection::default(),
            watch: false,
            heartbeat: Duration::from_secs(1),
            ring_steps: 0,
            ring_bytes: 1 << 30,
            conditions: Conditions::default(),
            rules: Rules::default(),
            transport: TransportChoice::Auto,
            strict: false,
            queue_bytes: 1 << 30,
            call_cap: Duration::from_millis(250),
            join_deadline: Duration::from_secs(60),
            step_deadline: Duration::from_secs(600),
            close_patience: Duration::from_secs(30),
            versions: BTreeMap::new(),
        }
    }

    /// Checks what can be checked without a coordinator.
    pub(crate) fn validate(self) -> Result<Plan, RecorderError> {
        if self.rank >= self.world_size {
            let (rank, world_size) = (self.rank, self.world_size);
            return Err(RecorderError::RankOutside { rank, world_size });
        }
        if self.ring_steps as usize > MAX_RING_STEPS {
            return Err(RecorderError::RingTooLong { steps: self.ring_steps });
        }
        let (store, run) = self.store_and_run()?;
        if is_url(&store) && self.world_size > 1 && self.coordinator.is_none() {
            let (store, world_size) = (store.display().to_string(), self.world_size);
            return Err(RecorderError::BucketAlone { store, world_size });
        }
        let name = |what, text: String| {
            Name::new(text).map_err(|problem| RecorderError::Name { what, problem })
        };
        let run = name("run", run)?;
        let host = match &self.host {
            Some(host) => name("host", host.clone())?,
            None => local_host(),
        };
        let launch = self.launch.as_deref().map(LaunchName::new).transpose();
        let launch = launch.map_err(|problem| RecorderError::Name { what: "launch", problem })?;
        let access = match &self.credentials {
            Some(folder) => Access::read(folder, &run)?,
            None => Access::default(),
        };
        Ok(Plan { store, run, host, launch, access, settings: self })
    }

    /// True when the coordinator is to be asked while the job runs.
    pub(crate) fn watches(&self) -> bool {
        self.watch || self.ring_steps > 0
    }

    fn store_and_run(&self) -> Result<(PathBuf, String), RecorderError> {
        if let Some(run) = &self.run {
            return Ok((self.directory.clone(), run.clone()));
        }
        let refused = || RecorderError::Directory { path: self.directory.clone() };
        if is_url(&self.directory) {
            let (parent, run) = (self.directory.parent(), self.directory.file_name());
            let store = parent.filter(|parent| is_url(parent)).ok_or_else(refused)?;
            let run = run.and_then(|run| run.to_str()).ok_or_else(refused)?;
            return Ok((store.to_path_buf(), run.to_string()));
        }
        // `dumps/.` and a relative `.` have no last component of their own.
        let directory = std::path::absolute(&self.directory).unwrap_or(self.directory.clone());
        let parts = (directory.parent(), directory.file_name().and_then(|n| n.to_str()));
        match parts {
            (Some(parent), Some(run)) => Ok((parent.to_path_buf(), run.to_string())),
            _ => Err(refused()),
        }
    }
}

/// Settings that were checked.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) store: PathBuf,
    pub(crate) run: Name,
    pub(crate) host: Name,
    pub(crate) launch: Option<LaunchName>,
    pub(crate) access: Access,
    pub(crate) settings: Settings,
}

impl Plan {
    /// Directory of the run, where the coordinator shares this machine's files.
    pub(crate) fn run_directory(&self) -> PathBuf {
        self.store.join(self.run.as_str())
    }
}

/// The host name, with what a [`Name`] cannot hold replaced: a machine named by
/// its owner is no reason not to record.
pub(crate) fn local_host() -> Name {
    let uname = rustix::system::uname();
    let text = uname.nodename().to_string_lossy();
    let plain: String = text
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '-' })
        .take(64)
        .collect();
    Name::new(plain.trim_start_matches('.')).unwrap_or_else(|_| unknown_host())
}

fn unknown_host() -> Name {
    Name::new("unknown-host").expect("letters and a dash")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_a_run_is_the_run_and_its_parent_the_store() {
        let plan = Settings::new("/dumps/fused", 0, 1).validate().unwrap();
        assert_eq!(plan.store, PathBuf::from("/dumps"));
        assert_eq!(plan.run.as_str(), "fused");
        let plan = Settings::new("s3://dumps/team/fused", 0, 1).validate().unwrap();
        assert_eq!(plan.run_directory(), PathBuf::from("s3://dumps/team/fused"));
        assert_eq!(plan.run.as_str(), "fused");
        let mut settings = Settings::new("/dumps", 0, 1);
        settings.run = Some("plain".into());
        let plan = settings.validate().unwrap();
        assert_eq!(plan.run_directory(), PathBuf::from("/dumps/plain"));
    }

    #[test]
    fn settings_that_cannot_work_are_refused_with_what_to_do() {
        let refused = |settings: Settings| settings.validate().unwrap_err().to_string();
        let outside = refused(Settings::new("/dumps/a", 4, 4));
        assert!(outside.contains("rank 4") && outside.contains("world size 4"), "{outside}");
        assert!(refused(Settings::new("/", 0, 1)).contains("run"));
        assert!(refused(Settings::new("s3://dumps", 0, 1)).contains("run"));
        let alone = refused(Settings::new("s3://dumps/run", 0, 2));
        assert!(alone.contains("coordinator --store s3://dumps --world-size 2"), "{alone}");
        let mut climbing = Settings::new("/dumps", 0, 1);
        climbing.run = Some("../elsewhere".into());
        assert!(refused(climbing).contains("../elsewhere"));
    }
}
