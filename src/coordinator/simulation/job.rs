//! The simulated ranks: each sends one request after the other and repeats it until it is answered.

use std::collections::BTreeMap;

use super::{Acknowledged, run_name};
use crate::coordinator::event::Closing;
use crate::coordinator::request::{Join, Member};
use crate::hash::TrustHash;
use crate::identity::{Attempt, LaunchName, Microbatch, Name, Rank, Step};
use crate::manifest::FileRecord;
use crate::placement::Mesh;
use crate::store::layout;

pub(super) const RANKS: u32 = 3;
pub(super) const STEPS: u64 = 2;
/// Files of one rank in one step.
pub(super) const FILES: u32 = 2;

/// A rank's request.
#[derive(Clone, Debug)]
pub(super) enum Ask {
    Join(Box<Join>),
    Report(Member, Step, Box<FileRecord>),
    Close(Member, Step, Closing),
}

/// The answer to a rank.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    /// The newest arrival, and the attempt that it entered with whether to repeat the request, or
    /// None if it must wait.
    Joined(u64, Option<(Attempt, bool)>),
    Reported(Ask),
    Closed(Ask, bool),
    Refused(String),
}

/// How the ranks of a job tell one launch from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// They do not: ranks of earlier versions.
    Before,
    /// By which processes were alive at the same time. The launcher ends one launch before it
    /// starts the next.
    Nameless,
    /// By the launcher's name as well: processes of old launches may live on.
    Named,
}

/// One process of one rank.
pub(super) struct Process {
    pub(super) rank: Rank,
    pub(super) incarnation: u64,
    pub(super) launch: u64,
    kind: Kind,
    heard: u64,
    /// It opened the attempt and must show that it is alive.
    vouch: bool,
    pub(super) attempt: Option<Attempt>,
    /// How many of its files and closes were acknowledged.
    done: u64,
}

impl Process {
    pub(super) fn new(rank: Rank, incarnation: u64, launch: u64, kind: Kind) -> Process {
        let (heard, vouch, attempt, done) = (0, false, None, 0);
        Process { rank, incarnation, launch, kind, heard, vouch, attempt, done }
    }

    /// Its next request; None when it is done. A process that must show that it is alive does so
    /// between its other requests.
    pub(super) fn ask(&self, beside: bool) -> Option<Ask> {
        let join = || Some(Ask::Join(Box::new(self.join())));
        let Some(attempt) = self.attempt else { return join() };
        match self.work(attempt) {
            Some(work) if !(beside && self.vouch) => Some(work),
            _ if self.vouch => join(),
            _ => None,
        }
    }

    fn work(&self, attempt: Attempt) -> Option<Ask> {
        let a_step = u64::from(FILES) + 1;
        let (step, part) = (Step(self.done / a_step), self.done % a_step);
        if step.0 >= STEPS {
            return None;
        }
        let member =
            Member { run: run_name(), attempt, rank: self.rank, incarnation: self.incarnation };
        Some(if part < u64::from(FILES) {
            Ask::Report(member, step, Box::new(self.file(attempt, step, part as u32)))
        } else {
            Ask::Close(member, step, Closing { files: FILES, ..Closing::default() })
        })
    }

    fn join(&self) -> Join {
        Join {
            run: run_name(),
            rank: self.rank,
            world_size: RANKS,
            incarnation: self.incarnation,
            host: Name::new("h").unwrap(),
            attempt: None,
            format_version: crate::FORMAT_VERSION,
            mesh: Mesh::default(),
            versions: BTreeMap::new(),
            launch: (self.kind == Kind::Named)
                .then(|| LaunchName::new(&format!("job/{}", self.launch)).unwrap()),
            heard: (self.kind != Kind::Before).then_some(self.heard),
        }
    }

    fn file(&self, attempt: Attempt, step: Step, number: u32) -> FileRecord {
        let microbatch = number.checked_sub(1).map(Microbatch);
        let content = format!("{} {step} {number}", self.incarnation);
        let shard = serde_json::json!({
            "tensor": "q", "microbatch": microbatch, "when": null, "role": "q", "dtype": "f32",
            "shape": [1], "box": [[0, 1]], "rank": self.rank, "host": "h", "attempt": attempt,
            "mesh": {}, "placement": {}, "partial": null, "replica": 0, "hash": "0".repeat(32),
            "length": 4, "fingerprint": [0, 0], "fingerprint_source": "recorder", "entry": "q",
        });
        FileRecord {
            name: layout::file_name(self.rank, microbatch),
            rank: self.rank,
            length: 4,
            header_hash: TrustHash::of(content.as_bytes()),
            shards: vec![serde_json::from_value(shard).unwrap()],
        }
    }

    /// Handles an answer; true when this process is refused for good.
    pub(super) fn hear(
        &mut self,
        told: &Answer,
        acknowledged: &mut Acknowledged,
        committed: &mut Vec<(Attempt, Step)>,
    ) -> bool {
        match told {
            Answer::Joined(arrivals, inside) => {
                self.heard = *arrivals;
                if let Some((attempt, vouch)) = *inside {
                    self.vouch = vouch;
                    let entered = *self.attempt.get_or_insert(attempt);
                    assert_eq!(entered, attempt, "one process entered two attempts");
                }
            }
            Answer::Reported(Ask::Report(member, step, file)) => {
                let key = (member.attempt, *step, self.rank, file.name.clone());
                acknowledged.insert(key, file.header_hash);
                self.pass(
                    *step,
                    if file.name == layout::file_name(self.rank, None) { 0 } else { 1 },
                );
            }
            Answer::Closed(Ask::Close(member, step, _), done) => {
                if *done {
                    committed.push((member.attempt, *step));
                }
                self.pass(*step, u64::from(FILES));
            }
            Answer::Refused(why) => {
                let replaced = why.contains("attempt") || why.contains("left over");
                assert!(replaced, "an honest rank was refused: {why}");
                return replaced;
            }
            other => panic!("an answer to something else: {other:?}"),
        }
        false
    }

    /// Continues after the acknowledged part, unless it already has.
    fn pass(&mut self, step: Step, part: u64) {
        let told = step.0 * (u64::from(FILES) + 1) + part + 1;
        self.done = self.done.max(told);
    }
}
