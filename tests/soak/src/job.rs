//! The job that the campaigns record: which shards it has, and what is in them. Every byte
//! follows from the seed, so that whoever checks needs nothing from whoever wrote.

use std::path::{Path, PathBuf};

use backtape::dtype::Dtype;
use backtape::identity::{Microbatch, Name};
use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;
use backtape_dumper::Capture;
use clap::Args;

use crate::random::Random;

/// The name of the run in every trial.
pub(crate) const RUN: &str = "run";

/// The shape of a job. The same on the command line of a rank and in the checks.
#[derive(Args, Clone, Debug)]
pub(crate) struct Job {
    /// Draws every byte
    #[arg(long)]
    pub seed: u64,
    /// Ranks
    #[arg(long, default_value_t = 4)]
    pub world: u32,
    /// Steps that are recorded
    #[arg(long, default_value_t = 12)]
    pub steps: u64,
    /// Microbatches of each step, a file each
    #[arg(long, default_value_t = 2)]
    pub files: u32,
    /// Shards in each file
    #[arg(long, default_value_t = 2)]
    pub shards: u32,
    /// Longest shard
    #[arg(long, default_value_t = 2048)]
    pub bytes: u64,
}

/// One shard of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Shard {
    pub launch: u32,
    pub step: u64,
    pub rank: u32,
    pub file: u32,
    pub index: u32,
}

impl Job {
    /// The shards of one rank and step, in the order in which their files are delivered.
    pub(crate) fn shards_of(&self, launch: u32, step: u64, rank: u32) -> Vec<Shard> {
        let one = |file, index| Shard { launch, step, rank, file, index };
        let files = 0..self.files;
        files.flat_map(|file| (0..self.shards).map(move |index| one(file, index))).collect()
    }

    /// Bytes of one rank's part of a tensor: no attempt shares them with another.
    pub(crate) fn content(&self, shard: Shard) -> Vec<u8> {
        let Shard { launch, step, rank, file, index } = shard;
        let place = (step << 24) ^ (u64::from(rank) << 16) ^ u64::from(file << 4 | index);
        let mut random = Random::of(self.seed ^ (u64::from(launch) << 48), place);
        // Of one length for all ranks of a tensor, so that the boxes tile it.
        let length = self.length(step, file, index) as usize;
        (0..length.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(length).collect()
    }

    fn length(&self, step: u64, file: u32, index: u32) -> u64 {
        let place = (step << 24) ^ u64::from(file << 4 | index);
        // Long enough that no two launches have the same bytes by chance.
        16 + Random::of(!self.seed, place).below(self.bytes)
    }

    /// What the recorder is handed.
    pub(crate) fn capture(&self, shard: Shard) -> Capture {
        let bytes = self.content(shard);
        let (length, rank) = (bytes.len() as u64, u64::from(shard.rank));
        let place = IndexBox(vec![(rank * length, (rank + 1) * length)]);
        let shape = vec![u64::from(self.world) * length];
        let key = TensorKey {
            tensor: Name::new(tensor(shard.index)).expect("letters and digits"),
            microbatch: Some(Microbatch(shard.file)),
            when: None,
        };
        let described = backtape::shard::Shard::new(Dtype::U8, shape, place);
        Capture::new(key, described, Box::new(bytes))
    }

    /// As arguments for a rank's process.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let pairs = [
            ("--seed", self.seed),
            ("--world", u64::from(self.world)),
            ("--steps", self.steps),
            ("--files", u64::from(self.files)),
            ("--shards", u64::from(self.shards)),
            ("--bytes", self.bytes),
        ];
        pairs.into_iter().flat_map(|(name, value)| [name.into(), value.to_string()]).collect()
    }
}

/// The name of a tensor.
pub(crate) fn tensor(index: u32) -> String {
    format!("t{index}")
}

/// The directory of a step, as the documents lay it out; no product code is asked.
pub(crate) fn step_directory(store: &Path, attempt: u32, step: u64) -> PathBuf {
    let run = store.join(RUN);
    let attempt = match attempt {
        0 => run,
        n => run.join(format!("attempt-{n:04}")),
    };
    attempt.join(format!("step-{step:08}"))
}

/// The name of a file of a rank.
pub(crate) fn file_name(rank: u32, file: u32) -> String {
    format!("rank-{rank:05}-mb-{file:04}.safetensors")
}
