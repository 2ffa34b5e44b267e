//! A set of steps that is kept as runs of neighbouring steps, so that a job that records every step
//! for weeks holds two numbers here.

use std::fmt;

/// Steps, each once, in order.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Steps {
    /// First and last of each run of neighbours, ascending; two runs never touch.
    runs: Vec<(u64, u64)>,
}

impl Steps {
    /// Adds a step; false when it was there.
    pub fn insert(&mut self, step: u64) -> bool {
        let after = self.runs.partition_point(|&(first, _)| first <= step);
        if after > 0 && step <= self.runs[after - 1].1 {
            return false;
        }
        let joins_before = after > 0 && self.runs[after - 1].1 + 1 == step;
        let joins_after = self.runs.get(after).is_some_and(|&(first, _)| step + 1 == first);
        match (joins_before, joins_after) {
            (true, true) => self.runs[after - 1].1 = self.runs.remove(after).1,
            (true, false) => self.runs[after - 1].1 = step,
            (false, true) => self.runs[after].0 = step,
            (false, false) => self.runs.insert(after, (step, step)),
        }
        true
    }

    /// True when the step is one of them.
    pub fn contains(&self, step: u64) -> bool {
        let after = self.runs.partition_point(|&(first, _)| first <= step);
        after > 0 && step <= self.runs[after - 1].1
    }

    /// All of them, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs.iter().flat_map(|&(first, last)| first..=last)
    }

    /// How many they are.
    pub fn len(&self) -> u64 {
        self.runs.iter().map(|&(first, last)| last - first + 1).sum()
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

impl FromIterator<u64> for Steps {
    fn from_iter<I: IntoIterator<Item = u64>>(steps: I) -> Steps {
        let mut all = Steps::default();
        steps.into_iter().for_each(|step| {
            all.insert(step);
        });
        all
    }
}

impl<const N: usize> PartialEq<[u64; N]> for Steps {
    fn eq(&self, steps: &[u64; N]) -> bool {
        self.iter().eq(steps.iter().copied())
    }
}

impl PartialEq<Vec<u64>> for Steps {
    fn eq(&self, steps: &Vec<u64>) -> bool {
        self.iter().eq(steps.iter().copied())
    }
}

/// As a person would write them: `[0, 4-17]`.
impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let run = |&(first, last): &(u64, u64)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        write!(f, "[{}]", self.runs.iter().map(run).collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set_whatever_the_order_and_its_runs_never_touch(
            steps in proptest::collection::vec(prop_oneof![0u64..40, Just(u64::MAX - 1), Just(u64::MAX)], 0..60)
        ) {
            let (mut runs, mut set) = (Steps::default(), BTreeSet::new());
            for &step in &steps {
                prop_assert_eq!(runs.insert(step), set.insert(step));
            }
            prop_assert!(runs.iter().eq(set.iter().copied()));
            let mut asked = (0..42).chain([u64::MAX - 2, u64::MAX]);
            prop_assert!(asked.all(|step| runs.contains(step) == set.contains(&step)));
            prop_assert!(runs.runs.windows(2).all(|two| two[0].1 + 1 < two[1].0));
            prop_assert_eq!((runs.is_empty(), runs.len()), (set.is_empty(), set.len() as u64));
        }
    }

    #[test]
    fn a_long_job_is_one_run_and_reads_like_one() {
        let steps: Steps = (0..100_000).chain([200_000]).collect();
        assert_eq!(steps.runs.len(), 2);
        assert_eq!(format!("{steps:?}"), "[0-99999, 200000]");
    }
}
