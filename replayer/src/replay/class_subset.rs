//! A head over some of its classes: rows of k, and what belongs to them.

use super::gathered_rows::Gathered;
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix, Reads, Values};

/// What a head has of some classes, copied together.
pub(super) struct OfClasses {
    count: usize,
    k: Gathered,
    labels: Vec<u32>,
    valid_vocab: usize,
    bias: Option<Vec<f64>>,
    read: Option<(Gathered, Option<Vec<f64>>)>,
}

impl OfClasses {
    /// Of `classes`, ascending. A token whose label is none of them has none there.
    pub(super) fn new(head: &HeadInputs<'_>, classes: &[usize]) -> OfClasses {
        let place = |label: &u32| match classes.binary_search(&(*label as usize)) {
            Ok(row) if *label != IGNORED => row as u32,
            _ => IGNORED,
        };
        let read = head.reads.map(|reads| {
            let scores = reads.scores.map(|(matrix, _)| columns_of(&matrix, classes));
            (Gathered::new(&reads.k, classes), scores)
        });
        OfClasses {
            count: classes.len(),
            k: Gathered::new(&head.k, classes),
            labels: head.labels.iter().map(place).collect(),
            valid_vocab: classes.partition_point(|&v| v < head.valid_vocab),
            bias: head.bias.map(|bias| classes.iter().map(|&v| bias[v]).collect()),
            read,
        }
    }

    /// The head that they were taken from, over these classes alone.
    pub(super) fn head<'h>(&'h self, head: &HeadInputs<'h>) -> HeadInputs<'h> {
        let reads = head.reads.zip(self.read.as_ref()).map(|(reads, (k, scores))| {
            let values = scores.as_deref().map(Values::F64);
            let (rows, cols) = (head.q.rows, self.count);
            let scores = values.map(|values| (Matrix { rows, cols, values }, 0));
            Reads { k: k.matrix(), scores, ..reads }
        });
        let (k, labels, bias) = (self.k.matrix(), &self.labels[..], self.bias.as_deref());
        HeadInputs { k, labels, valid_vocab: self.valid_vocab, bias, reads, ..*head }
    }
}

/// Some columns of a matrix, widened.
fn columns_of(matrix: &Matrix<'_>, columns: &[usize]) -> Vec<f64> {
    let row =
        |row: usize| columns.iter().map(move |column| matrix.get_f64(row * matrix.cols + column));
    (0..matrix.rows).flat_map(row).collect()
}
