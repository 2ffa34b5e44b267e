//! Heat maps: the worst elements of dq and dk by blocks, gathered beside the comparison
//! where a drawing was asked for, and only then.
//!
//! dq has a strip of tokens for each microbatch and rank. Of dk, and of the sums that
//! follow it, there is one map of the vocabulary by D: each block shows the worst of all
//! microbatches and ranks, and whose it is.

use backtape::identity::{Microbatch, Rank};

use super::microbatch::HeadMicrobatch;
use crate::compare::{Bound, Chart, Rows};
use crate::head::Stage;

/// Blocks down and across of a map of the vocabulary by D.
const OF_CLASSES: (usize, usize) = (64, 40);
/// Blocks of tokens in a strip.
const OF_TOKENS: usize = 48;
/// Blocks across all strips of a map together.
const ACROSS: usize = 96;

/// Whose a comparison is: microbatch and rank.
pub type Source = (Option<Microbatch>, Option<Rank>);

/// Blocks of one or of several comparisons, one beside the other in a map.
#[derive(Clone, Debug, PartialEq)]
pub struct Strip {
    /// Whose comparisons these are: a cell's `source` counts them.
    pub sources: Vec<Source>,
    /// The blocks.
    pub chart: Chart,
}

/// One map: a stage over all of its comparisons.
#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    /// The stage.
    pub stage: Stage,
    /// True where rows are tokens, false where they are rows of the vocabulary.
    pub of_tokens: bool,
    /// For tokens one for each comparison, else one for each shape.
    pub strips: Vec<Strip>,
    /// Strips that there was no room for: the least of all.
    pub left_out: usize,
    /// How often each row of the vocabulary is a label; empty for tokens and for parts of dk.
    pub hits: Vec<u32>,
    /// Rows of a tile of the job's kernels, as declared or by default.
    pub tile: usize,
}

/// What is to be drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draw {
    /// Strips that a map of tokens will have.
    pub(super) strips: usize,
}

impl Draw {
    pub(super) fn new(microbatches: &[HeadMicrobatch]) -> Draw {
        Draw {
            strips: microbatches
                .iter()
                .map(|microbatch| microbatch.units.len())
                .sum::<usize>()
                .max(1),
        }
    }

    pub(super) fn most(self, stage: Stage) -> (usize, usize) {
        match stage.is_of_q() {
            true => (OF_TOKENS, (ACROSS / self.strips).clamp(1, OF_CLASSES.1)),
            false => OF_CLASSES,
        }
    }
}

/// Rows of a comparison, and how they were judged.
pub(super) struct Drawn<'a, F> {
    pub(super) stage: Stage,
    /// The comparison's row that the first of these is, and its rows in all.
    pub(super) first: usize,
    pub(super) all: usize,
    pub(super) rows: &'a Rows<'a>,
    pub(super) allowed: &'a F,
    pub(super) bound: &'a Bound,
}

impl Map {
    pub(super) fn take(&mut self, chart: Chart, source: Source) {
        let like = self.strips.iter_mut().find(|strip| strip.chart.shape == chart.shape);
        match like.filter(|_| !self.of_tokens) {
            Some(strip) => {
                let source_index = strip.sources.len() as u32;
                strip.chart.merge(&chart, source_index);
                strip.sources.push(source);
            }
            None => self.strips.push(Strip { sources: vec![source], chart }),
        }
        if self.strips.len() > ACROSS {
            self.drop_least();
        }
    }

    /// Drops the strip whose worst element is the least, the last of equals.
    fn drop_least(&mut self) {
        let mut least = self.strips.len() - 1;
        for index in (0..least).rev() {
            let pair = (self.strips[least].chart.worst(), self.strips[index].chart.worst());
            let less = match pair {
                (Some(least), Some(this)) => least.is_worse_than(this),
                (least, this) => least.is_some() && this.is_none(),
            };
            least = if less { index } else { least };
        }
        self.strips.remove(least);
        self.left_out += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Cell, Worst};

    fn strip(score: f64) -> Chart {
        let mut chart = Chart::new((10, 4), (2, 2));
        let worst = Worst { index: (0, 0), captured: 1.0, reference: 0.0, score };
        chart.cells[0] = Some(Cell { worst, elements: 1, exceeding: 0, nonfinite: 0, source: 0 });
        chart
    }

    fn empty(of_tokens: bool) -> Map {
        let (strips, left_out, hits) = (Vec::new(), 0, Vec::new());
        Map { stage: Stage::Dq, of_tokens, strips, left_out, hits, tile: 1 }
    }

    #[test]
    fn of_more_strips_than_there_is_room_for_the_worst_are_kept_and_the_rest_counted() {
        let mut map = empty(true);
        for n in 0..1000u32 {
            map.take(strip(f64::from((n * 7) % 1000)), (None, Some(Rank(n))));
        }
        assert_eq!((map.strips.len(), map.left_out), (ACROSS, 1000 - ACROSS));
        let least = map.strips.iter().map(|s| s.chart.worst().unwrap().worst.score);
        assert_eq!(least.fold(f64::INFINITY, f64::min), (1000 - ACROSS) as f64);
        let ranks: Vec<_> = map.strips.iter().map(|strip| strip.sources[0].1).collect();
        assert!(ranks.is_sorted(), "the order of ranks is kept");
    }

    #[test]
    fn dk_of_all_units_is_one_map_and_other_shapes_stand_apart() {
        let mut map = empty(false);
        (0..5).for_each(|n| map.take(strip(f64::from(n)), (None, Some(Rank(n)))));
        map.take(Chart::new((9, 4), (2, 2)), (None, None));
        assert_eq!((map.strips.len(), map.strips[0].sources.len()), (2, 5));
        assert_eq!(map.strips[0].chart.worst().unwrap().source, 4);
    }
}
