//! Runs of tokens that a job may have treated as one: sequences, a rank's tokens, the
//! batch, rows of a length that only the data show.

use crate::head::{HeadStep, MicrobatchInputs};

/// Tokens in runs, each in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Extent {
    /// In words.
    pub name: String,
    /// Every token is in one run.
    pub runs: Vec<Vec<usize>>,
}

impl Extent {
    /// Runs of a length inside other runs.
    pub fn cut(name: String, of: &[Vec<usize>], length: usize) -> Extent {
        let runs = of.iter().flat_map(|run| run.chunks(length.max(1))).map(<[usize]>::to_vec);
        Extent { name, runs: runs.collect() }
    }

    /// Whether all runs are as long.
    pub fn is_even(&self) -> bool {
        self.runs.windows(2).all(|pair| pair[0].len() == pair[1].len())
    }

    /// For each token, the one that stands `by` places further in its run.
    pub fn shifted(&self, tokens: usize, by: isize) -> Vec<Option<usize>> {
        let mut from = vec![None; tokens];
        for run in &self.runs {
            for (at, &t) in run.iter().enumerate() {
                from[t] = at.checked_add_signed(by).and_then(|at| run.get(at)).copied();
            }
        }
        from
    }

    /// The same, around the end of its run.
    pub fn rolled(&self, tokens: usize, by: isize) -> Vec<usize> {
        let mut from = vec![0; tokens];
        for run in &self.runs {
            for (at, &t) in run.iter().enumerate() {
                from[t] = run[(at as isize + by).rem_euclid(run.len() as isize) as usize];
            }
        }
        from
    }
}

/// Tokens by the ranks that hold them; all of them where that is not known.
pub fn of_ranks(step: &HeadStep<'_>, inputs: &MicrobatchInputs) -> Vec<Vec<usize>> {
    match step.rank_rows(inputs) {
        Ok(units) if !units.is_empty() => units.into_iter().map(|unit| unit.rows).collect(),
        _ => vec![(0..inputs.tokens()).collect()],
    }
}

/// What is known before the data are looked at, without doubles: each sequence, each
/// rank's tokens, the whole batch.
pub fn known(step: &HeadStep<'_>, inputs: &MicrobatchInputs) -> Vec<Extent> {
    let all: Vec<Vec<usize>> = vec![(0..inputs.tokens()).collect()];
    let extents = [
        Extent::cut("each sequence".into(), &all, inputs.sequence),
        Extent { name: "each rank's tokens".into(), runs: of_ranks(step, inputs) },
        Extent { name: "the whole batch".into(), runs: all },
    ];
    let mut found: Vec<Extent> = Vec::new();
    for extent in extents {
        if found.iter().all(|other| other.runs != extent.runs) {
            found.push(extent);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shift_inside_runs_has_no_token_beyond_their_ends() {
        let extent = Extent::cut("rows".into(), &[(0..5).collect()], 3);
        assert_eq!(extent.shifted(5, 1), [Some(1), Some(2), None, Some(4), None]);
        assert_eq!(extent.rolled(5, -1), [2, 0, 1, 4, 3]);
        assert!(!extent.is_even());
    }
}
