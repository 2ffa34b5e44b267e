//! Sums of gradients: over the microbatches of a rank, and over the ranks of a domain.

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use super::domain::{Addend, fewer_bits};
use super::judge::{Judge, Operand, arithmetic};
use crate::compare::Tally;
use crate::kernels::round::Precision;
use crate::ops::table::op;

/// A sum of weighted addends, element by element.
pub(crate) struct WeightedSum;

op! {
    WeightedSum = "weighted_sum";
    inputs {
        addends: Plane, "one addend a row";
        weights: Rows, "what each addend is multiplied by";
    }
    stages {
        total: Columns Forward OverRows |_op, addends, weights| addends * weights,
            "the sum of the weighted addends";
    }
}

/// A recorded sum, and what it should be the sum of.
pub(crate) struct SumOf<'a> {
    /// The tensor that holds the sum.
    pub key: &'a TensorKey,
    /// The rank that holds it, and the box that is compared.
    pub rank: Rank,
    /// The box.
    pub place: &'a IndexBox,
    /// What is summed.
    pub addends: &'a [Addend],
    /// What each is multiplied by.
    pub weights: &'a [f64],
    /// The format of fewest bits that an addend or a partial sum was sent in.
    pub sent: Option<Precision>,
}

impl Judge<'_> {
    /// Compares a recorded sum with the sum of its weighted addends.
    pub(crate) fn sum(&self, of: &SumOf<'_>) -> Result<Tally, String> {
        let inventory = self.inventory;
        let stored = inventory.precision(of.key);
        let addend = of.addends.first().and_then(|addend| inventory.precision(&addend.key));
        // What is sent in fewer bits than it was recorded in is rounded once before it is summed.
        let rounded = of.sent.filter(|_| fewer_bits(of.sent, addend) != addend);
        let declared = arithmetic(Some(Precision::F32), fewer_bits(of.sent, stored));
        let operands = |part: &IndexBox| {
            let mut addends = Vec::new();
            for addend in of.addends {
                addends.extend(inventory.read_addend(addend, part)?);
            }
            let rows = of.addends.len();
            let total = inventory.read_box(of.key, of.rank, part)?;
            let weights = Operand { rows, ..Operand::row("weights", of.weights.to_vec(), None) };
            let addends = Operand { rows, ..Operand::row("addends", addends, rounded) };
            Ok(vec![addends, weights, Operand::row("total", total, stored)])
        };
        let compared = self.compare(&WeightedSum, &declared, of.place, &operands)?;
        let (_, tally) = compared.into_iter().next().ok_or("it has no elements")?;
        tally
    }
}
