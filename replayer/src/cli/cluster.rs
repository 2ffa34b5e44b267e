//! `--engine ray`: the replay on a cluster that someone else connects to.
//!
//! This crate knows no cluster. The Python package brings the connection; the binary has none and
//! says so.

use clap::{Args, ValueEnum};

use super::error::CommandError;
use crate::postmortem::AskedCluster;
use crate::replay::tasks::{Cut, Workers};

/// Where the tiles are computed.
#[derive(Debug, Default, Args)]
pub(super) struct ClusterArguments {
    /// Where the tiles are computed: in this process, or by tasks on a Ray cluster. The results
    /// have the same bits.
    #[arg(long, value_enum, conflicts_with_all = ["against", "tokens", "freivalds"])]
    pub(super) engine: Option<EngineArgument>,
    /// The address of the Ray cluster, as `ray start` prints it. By default it is the cluster that
    /// this host is part of.
    #[arg(long, value_name = "HOST:PORT", requires = "engine")]
    pub(super) address: Option<String>,
    /// The number of cores of one task.
    #[arg(long, value_name = "N", requires = "engine",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) task_cpus: Option<u32>,
    /// The largest number of tokens of one task, in whole tiles of 256, by default 2048. The
    /// results do not depend on it.
    #[arg(long, value_name = "N", requires = "engine",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) task_tokens: Option<u32>,
    /// The largest number of classes of one task, in whole tiles of 2048, by default as many as
    /// fit in 32 MiB. The results do not depend on it.
    #[arg(long, value_name = "N", requires = "engine",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) task_classes: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum EngineArgument {
    Local,
    Ray,
}

/// Connects to a cluster; an error is one clause.
pub type Connect<'a> = dyn Fn(&AskedCluster) -> Result<Box<dyn Workers>, String> + 'a;

impl ClusterArguments {
    /// Whoever computes the tasks; `None` for this process.
    pub(super) fn workers(
        &self,
        connect: Option<&Connect<'_>>,
    ) -> Result<Option<Box<dyn Workers>>, CommandError> {
        if self.engine != Some(EngineArgument::Ray) {
            let given = [
                ("--address", self.address.is_some()),
                ("--task-cpus", self.task_cpus.is_some()),
                ("--task-tokens", self.task_tokens.is_some()),
                ("--task-classes", self.task_classes.is_some()),
            ];
            return match given.into_iter().find(|(_, given)| *given) {
                Some((option, _)) => Err(CommandError::NoTasks { option }),
                None => Ok(None),
            };
        }
        let connect = connect.ok_or(CommandError::NoRay)?;
        let task_cpus = self.task_cpus.unwrap_or(1);
        let asked = AskedCluster { address: self.address.clone(), task_cpus };
        connect(&asked).map(Some).map_err(|why| CommandError::Cluster { why })
    }

    pub(super) fn cut(&self) -> Cut {
        let [tokens, classes] =
            [self.task_tokens, self.task_classes].map(|most| most.map(|n| n as usize));
        Cut { tokens, classes }
    }
}
