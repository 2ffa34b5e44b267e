//! What a recorder did, for the log line at the end of a job.

use std::path::PathBuf;

use crate::steps::Steps;

/// What one recorder did: counts, and sentences about what went wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Shards that the coordinator acknowledged.
    pub shards: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Rows of scalars that lie in the store.
    pub scalar_rows: u64,
    /// Steps whose manifest stands at its final name.
    pub steps_committed: Steps,
    /// Steps recorded here that are not known to be committed.
    pub steps_partial: Steps,
    /// What was not recorded, each with its reason.
    pub omissions: Vec<String>,
    /// What went wrong in the background, each one sentence.
    pub faults: Vec<String>,
    /// What the coordinator asked for while the job ran, each one sentence.
    pub orders: Vec<String>,
    /// Steps that fell out of the ring before their time, for want of memory.
    pub ring_dropped: u64,
    /// Which launch of the run this is, once the coordinator has said so.
    pub attempt: Option<u32>,
    /// Directory of the attempt, as the coordinator sees it.
    pub directory: Option<PathBuf>,
    /// True when the files were sent to the coordinator, not written beside its own.
    pub streamed: bool,
    pub(crate) unnamed: Unnamed,
}

/// Omissions, faults and orders that a summary names one by one: a log line, not a database.
const MAX_SENTENCES: usize = 1000;

/// Steps that one sentence names.
const MAX_NAMED: usize = 10;

/// How many sentences of each list are beyond those.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unnamed {
    omissions: u64,
    faults: u64,
    orders: u64,
}

impl Summary {
    pub(crate) fn omitted(&mut self, sentence: String) {
        // Two captures of one name are two omissions.
        match self.omissions.len() < MAX_SENTENCES {
            true => self.omissions.push(sentence),
            false => self.unnamed.omissions += 1,
        }
    }

    pub(crate) fn fault(&mut self, sentence: String) {
        push(&mut self.faults, &mut self.unnamed.faults, sentence);
    }

    pub(crate) fn ordered(&mut self, sentence: String) {
        push(&mut self.orders, &mut self.unnamed.orders, sentence);
    }

    /// The summary as it is handed out: each list that was cut says so.
    pub(crate) fn finished(mut self) -> Summary {
        // Omissions go to the coordinator with their step, and into no log.
        let manifest = "the manifests of their steps have them";
        let log = "the log has each of them";
        let lists = [
            (&mut self.omissions, self.unnamed.omissions, "omissions", manifest),
            (&mut self.faults, self.unnamed.faults, "faults", log),
            (&mut self.orders, self.unnamed.orders, "orders", log),
        ];
        for (list, more, what, named_elsewhere) in lists {
            if more > 0 {
                list.push(format!("{more} more {what} are not named here: {named_elsewhere}"));
            }
        }
        self
    }

    /// Notes that the steps of `taken` that have not come to an end are not known to be committed.
    /// Returns the sentence that names them, if there are any.
    pub(crate) fn unfinished(&mut self, taken: &Steps) -> Option<String> {
        let ended = |step| self.steps_committed.contains(step) || self.steps_partial.contains(step);
        let open: Vec<u64> = taken.iter().filter(|&step| !ended(step)).collect();
        if open.is_empty() {
            return None;
        }
        for &step in &open {
            self.steps_partial.insert(step);
        }
        let named: Vec<String> = open.iter().take(MAX_NAMED).map(u64::to_string).collect();
        let more = match open.len().saturating_sub(MAX_NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        Some(format!("not known to be committed: step {}{more}", named.join(", ")))
    }
}

fn push(list: &mut Vec<String>, more: &mut u64, sentence: String) {
    if list.contains(&sentence) {
        return;
    }
    match list.len() < MAX_SENTENCES {
        true => list.push(sentence),
        false => *more += 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_full_list_leaves_out_is_counted_and_said() {
        let mut summary = Summary::default();
        for step in 0..1003 {
            summary.fault(format!("step {step} failed"));
            summary.omitted("q of step 0: too large".into());
        }
        summary.fault("step 7 failed".into());
        let told = summary.finished();
        assert_eq!(told.faults.len(), 1001);
        assert!(told.faults[1000].starts_with("3 more faults"), "{}", told.faults[1000]);
        let omissions = &told.omissions[1000];
        assert!(omissions.starts_with("3 more omissions") && omissions.contains("manifests"));
        assert!(told.orders.is_empty());
    }

    #[test]
    fn steps_that_came_to_no_end_are_partial_and_named() {
        let mut summary =
            Summary { steps_committed: [0].into_iter().collect(), ..Summary::default() };
        summary.steps_partial.insert(1);
        assert_eq!(summary.unfinished(&(0..2).collect()), None);
        let said = summary.unfinished(&(0..14).collect()).unwrap();
        assert!(said.ends_with("step 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more"), "{said}");
        assert_eq!(summary.steps_partial.len(), 13);
        assert_eq!(summary.unfinished(&(0..14).collect()), None, "each once");
    }
}
