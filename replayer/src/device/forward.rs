//! The reference's forward pass on a device.

use super::arguments::{Absorb, Fold, LANES, Running};
use super::error::DeviceError;
use super::head::OnDevice;
use super::machine::Machine;
use super::plan::{Plan, Sizes};
use super::room::{Panel, Room};
use crate::kernels::reference::{self, ForwardSums, TermNoise};
use crate::kernels::tiles::spans;
use crate::kernels::{HeadInputs, Progress};

/// Values of 8 bytes in a [`Running`].
const RUNNING: usize = size_of::<Running>() / size_of::<f64>();

/// Sums of q `[T, D]` against the valid rows of k `[V, D]`, or of given logits `[T, V]`.
///
/// Vocabulary tiles are the outer loop. A row is summed in 64 lanes inside a tile, the lanes are
/// folded in their order, and tiles in vocabulary order.
pub(super) fn forward<M: Machine>(
    machine: &M,
    inputs: &HeadInputs,
    progress: &dyn Progress,
) -> Result<ForwardSums, DeviceError> {
    reference::check(inputs);
    let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
    let sizes = Sizes { tokens, rows: 0, depth, terms: 1 };
    let tiles = Plan::of(machine.free()?, sizes).tiles;
    let mut buffers = OnDevice::forward(machine, inputs)?;
    let head = buffers.head(machine, inputs, &TermNoise::default());
    let begin = Running { max: f64::NEG_INFINITY, sum: 0.0, logits: 0.0, squares: 0.0 };
    let (mut running, mut label_logits) = (Room::default(), Room::default());
    running.put(machine, &vec![begin; tokens])?;
    label_logits.put(machine, &vec![0.0; tokens])?;
    let (mut key, mut query) = (Panel::default(), Panel::default());
    let (mut tile, mut lanes) = (Room::default(), Room::<M>::default());
    for columns in spans(inputs.valid_vocab, tiles.vocab) {
        key.load(machine, (&inputs.k, columns.clone()), false)?;
        let (first, width) = (columns.start as i64, columns.len() as i64);
        for span in spans(tokens, tiles.tokens) {
            query.load(machine, (&inputs.q, span.clone()), false)?;
            let products = buffers.products(machine, inputs, (&query, &key), &mut tile)?;
            let threads = (span.len() * LANES) as i64;
            let lanes = lanes.of(machine, span.len() * LANES * RUNNING)?;
            let absorb = Absorb { threads, products, columns: width, first, lanes, head };
            let fold = Fold {
                threads: span.len() as i64,
                products,
                columns: width,
                first,
                lanes,
                rows: running.at(machine, span.start * RUNNING),
                labels: buffers.labels_from(machine, span.start),
                label_logits: label_logits.at(machine, span.start),
                head,
            };
            // SAFETY: the tile holds its products, the lanes were just made that large, and the
            // others have a row for each token.
            unsafe {
                machine.launch(&absorb)?;
                machine.launch(&fold)?;
            }
            progress.advance((span.len() * columns.len() * depth.max(1)) as u64);
        }
    }
    let (mut rows, mut labels) = (vec![begin; tokens], vec![0.0; tokens]);
    running.get(machine, &mut rows)?;
    label_logits.get(machine, &mut labels)?;
    let field_of_rows = |field: fn(&Running) -> f64| rows.iter().map(field).collect();
    Ok(ForwardSums {
        max: field_of_rows(|row| row.max),
        sum: field_of_rows(|row| row.sum),
        label_logits: labels,
        logit_sum: field_of_rows(|row| row.logits),
        logit_squares: field_of_rows(|row| row.squares),
    })
}
