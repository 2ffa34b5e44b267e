//! Ways to divide a microbatch's tokens into runs that a job may have treated as sequences: the
//! declared sequences, each rank's tokens, the whole batch, or rows of a length that only the data
//! show.

use crate::head::{HeadStep, MicrobatchInputs};

/// The tokens of a microbatch divided into runs.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenRuns {
    /// The division in words.
    pub name: String,
    /// Tokens of each run, in order; every token is in one run.
    pub runs: Vec<Vec<usize>>,
}

impl TokenRuns {
    /// Cuts runs into pieces of `length` tokens.
    pub fn cut(name: String, runs_to_cut: &[Vec<usize>], length: usize) -> TokenRuns {
        let runs =
            runs_to_cut.iter().flat_map(|run| run.chunks(length.max(1))).map(<[usize]>::to_vec);
        TokenRuns { name, runs: runs.collect() }
    }

    /// Whether all runs are equally long.
    pub fn is_even(&self) -> bool {
        self.runs.windows(2).all(|pair| pair[0].len() == pair[1].len())
    }

    /// For each token, the one that stands `by` places further in its run; none beyond its ends.
    pub fn shifted(&self, tokens: usize, by: isize) -> Vec<Option<usize>> {
        let mut from = vec![None; tokens];
        for run in &self.runs {
            for (position, &t) in run.iter().enumerate() {
                from[t] = position.checked_add_signed(by).and_then(|at| run.get(at)).copied();
            }
        }
        from
    }

    /// The same, continuing at the other end of the run.
    pub fn rolled(&self, tokens: usize, by: isize) -> Vec<usize> {
        let mut from = vec![0; tokens];
        for run in &self.runs {
            for (position, &t) in run.iter().enumerate() {
                from[t] = run[(position as isize + by).rem_euclid(run.len() as isize) as usize];
            }
        }
        from
    }
}

/// The tokens of each rank; one run of all tokens where that is not known.
pub fn of_ranks(step: &HeadStep<'_>, inputs: &MicrobatchInputs) -> Vec<Vec<usize>> {
    match step.rank_rows(inputs) {
        Ok(units) if !units.is_empty() => units.into_iter().map(|unit| unit.rows).collect(),
        _ => vec![(0..inputs.tokens()).collect()],
    }
}

/// The divisions that the dump declares: into sequences, into ranks' tokens, and none. Equal ones
/// once.
pub fn known(step: &HeadStep<'_>, inputs: &MicrobatchInputs) -> Vec<TokenRuns> {
    let all: Vec<Vec<usize>> = vec![(0..inputs.tokens()).collect()];
    let extents = [
        TokenRuns::cut("each sequence".into(), &all, inputs.sequence),
        TokenRuns { name: "each rank's tokens".into(), runs: of_ranks(step, inputs) },
        TokenRuns { name: "the whole batch".into(), runs: all },
    ];
    let mut divisions: Vec<TokenRuns> = Vec::new();
    for extent in extents {
        if divisions.iter().all(|other| other.runs != extent.runs) {
            divisions.push(extent);
        }
    }
    divisions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shift_inside_runs_has_no_token_beyond_their_ends() {
        let extent = TokenRuns::cut("rows".into(), &[(0..5).collect()], 3);
        assert_eq!(extent.shifted(5, 1), [Some(1), Some(2), None, Some(4), None]);
        assert_eq!(extent.rolled(5, -1), [2, 0, 1, 4, 3]);
        assert!(!extent.is_even());
    }
}
