//! What ranks were told: one file for each rank process, appended to and fsynced line by line,
//! so that it survives the SIGKILL of the process that was told.
//!
//! ```text
//! joined ATTEMPT LAUNCH RANK NS              the rank learned which attempt it is in
//! began ATTEMPT LAUNCH RANK STEP NS          it hands the shards of a step over
//! shard ATTEMPT LAUNCH RANK STEP FILE INDEX  this shard was acknowledged
//! committed ATTEMPT STEP                     it was told that the step is committed
//! partial LAUNCH RANK STEP                   it was told that the step is not
//! closed LAUNCH RANK FAULTS...               the recorder was closed, with its faults
//! trained LAUNCH RANK STEPS WORST HELD LOSSES  its steps, its longest call in microseconds, what
//!                                            memory it took in KiB, the hash of its losses
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use backtape_dumper::Summary;

use crate::job::Shard;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Joined { attempt: u32, launch: u32, rank: u32, at_ns: u64 },
    Began { attempt: u32, launch: u32, rank: u32, step: u64, at_ns: u64 },
    Shard { attempt: u32, shard: Shard },
    Committed { attempt: u32, step: u64 },
    Partial { launch: u32, rank: u32, step: u64 },
    Closed { launch: u32, rank: u32, faults: String },
    Trained { launch: u32, rank: u32, steps: u64, worst_us: u64, held_kib: u64, losses: String },
}

impl Told {
    /// What a summary says of faults and omissions.
    pub(crate) fn closed(launch: u32, rank: u32, summary: &Summary) -> Told {
        let said = [&summary.faults[..], &summary.omissions[..]].concat();
        Told::Closed { launch, rank, faults: said.join("; ") }
    }

    fn line(&self) -> String {
        match self {
            Told::Joined { attempt, launch, rank, at_ns } => {
                format!("joined {attempt} {launch} {rank} {at_ns}\n")
            }
            Told::Began { attempt, launch, rank, step, at_ns } => {
                format!("began {attempt} {launch} {rank} {step} {at_ns}\n")
            }
            Told::Shard { attempt, shard } => {
                let Shard { launch, step, rank, file, index } = shard;
                format!("shard {attempt} {launch} {rank} {step} {file} {index}\n")
            }
            Told::Committed { attempt, step } => format!("committed {attempt} {step}\n"),
            Told::Partial { launch, rank, step } => format!("partial {launch} {rank} {step}\n"),
            Told::Closed { launch, rank, faults } => {
                format!("closed {launch} {rank} {}\n", faults.replace('\n', " "))
            }
            Told::Trained { launch, rank, steps, worst_us, held_kib, losses } => {
                format!("trained {launch} {rank} {steps} {worst_us} {held_kib} {losses}\n")
            }
        }
    }

    fn read(line: &str) -> Option<Told> {
        let (word, rest) = line.split_once(' ')?;
        let number = |index: usize| rest.split(' ').nth(index)?.parse::<u64>().ok();
        let small = |index: usize| number(index).and_then(|n| u32::try_from(n).ok());
        Some(match word {
            "joined" => Told::Joined {
                attempt: small(0)?,
                launch: small(1)?,
                rank: small(2)?,
                at_ns: number(3)?,
            },
            "began" => Told::Began {
                attempt: small(0)?,
                launch: small(1)?,
                rank: small(2)?,
                step: number(3)?,
                at_ns: number(4)?,
            },
            "shard" => {
                let (launch, rank, step) = (small(1)?, small(2)?, number(3)?);
                let (file, index) = (small(4)?, small(5)?);
                let shard = Shard { launch, step, rank, file, index };
                Told::Shard { attempt: small(0)?, shard }
            }
            "committed" => Told::Committed { attempt: small(0)?, step: number(1)? },
            "partial" => Told::Partial { launch: small(0)?, rank: small(1)?, step: number(2)? },
            "closed" => {
                let faults = rest.splitn(3, ' ').nth(2).unwrap_or_default().to_string();
                Told::Closed { launch: small(0)?, rank: small(1)?, faults }
            }
            "trained" => Told::Trained {
                launch: small(0)?,
                rank: small(1)?,
                steps: number(2)?,
                worst_us: number(3)?,
                held_kib: number(4)?,
                losses: rest.split(' ').nth(5)?.into(),
            },
            _ => return None,
        })
    }
}

/// Where a rank process keeps what it was told.
pub(crate) struct Ledger(File);

impl Ledger {
    /// Opens it to append.
    pub(crate) fn open(path: &Path) -> io::Result<Ledger> {
        Ok(Ledger(OpenOptions::new().append(true).create(true).open(path)?))
    }

    /// One write for each line: a kill cannot leave half of one among others.
    pub(crate) fn note(&self, told: &[Told]) -> io::Result<()> {
        let text: String = told.iter().map(Told::line).collect();
        (&self.0).write_all(text.as_bytes())?;
        self.0.sync_data()
    }
}

/// Every line of a ledger; a process that was killed before it opened one leaves none. A
/// last line without its end was being written when the process died: it was not yet believed.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Told>> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text?,
    };
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let unread = |line: &str| anyhow::anyhow!("{} has the line {line:?}", path.display());
    whole.lines().map(|line| Told::read(line).ok_or_else(|| unread(line))).collect()
}

/// Whether some rank says that a step is partial, and why.
pub(crate) fn labelled(told: &[Told], step: u64) -> bool {
    // A fault begins with its step; an omission names it after what was left out.
    let so = format!("step {step} ");
    let of = format!(" of step {step}: ");
    told.iter().any(|line| match line {
        Told::Closed { launch, rank, faults } => faults.split("; ").any(|said| {
            let fault = said.strip_prefix(&so).is_some_and(|rest| rest.contains(": "));
            // Whoever gave up recording as a whole named no step, and of very many only the
            // first are named: its list of partial steps is whole.
            let cut = said.contains("more faults are not named here");
            let whole = cut || said.contains("did not finish writing");
            let listed = Told::Partial { launch: *launch, rank: *rank, step };
            fault
                || said.contains(&of)
                || said.contains("nothing is recorded on")
                || whole && told.contains(&listed)
        }),
        _ => false,
    })
}

/// All lines of some ledgers.
pub(crate) fn read_all(paths: &[std::path::PathBuf]) -> anyhow::Result<Vec<Told>> {
    let all = paths.iter().map(|path| read(path));
    Ok(all.collect::<anyhow::Result<Vec<_>>>()?.concat())
}
