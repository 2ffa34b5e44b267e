//! A policy's forward pass on a device.

use super::arguments::{Fold, LANES, LaneSums, Maxima};
use super::head::{Head, Tile};
use super::rows::Operands;
use super::{at, halves, tiles};
use crate::device::DeviceError;
use crate::device::machine::Machine;
use crate::device::room::Room;
use crate::kernels::policy::{self, Online, Policy, PolicyForward, dense};
use crate::kernels::tiles::spans;
use crate::kernels::{HeadInputs, Progress, Tiles};

/// What a row of logits has summed up to here: max, sum, the label's logit, sum of logits.
type Running = [f32; 4];

const BEGIN: Running = [f32::NEG_INFINITY, 0.0, 0.0, 0.0];

/// See `kernels::policy::forward`.
pub(in crate::device) fn forward<M: Machine>(
    machine: &M,
    policy: &Policy,
    inputs: &HeadInputs,
    (own_tiles, progress): (Tiles, &dyn Progress),
) -> Result<PolicyForward, DeviceError> {
    if !policy.is_fast() || policy.keeps_log_p() {
        return Ok(policy::forward(policy, inputs, own_tiles, progress));
    }
    policy::check(inputs);
    let tiles = tiles(machine, (policy, inputs), own_tiles)?;
    let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
    let mut head = Head::new(machine, policy, inputs)?;
    let mut rows = Rows::begin(machine, tokens)?;
    let (mut query, mut key, mut tile) =
        (Operands::default(), Operands::default(), Tile::default());
    for cols in policy.vocab_spans(inputs.valid_vocab, tiles.vocab) {
        key.load(machine, policy, (&inputs.k, cols.clone()), false)?;
        for span in spans(tokens, tiles.tokens) {
            query.load(machine, policy, (&inputs.q, span.clone()), false)?;
            let logits = head.logits((&query, &key), &mut tile)?;
            rows.absorb(&head, logits, (&query, &key))?;
            progress.advance((span.len() * cols.len() * depth) as u64);
        }
    }
    Ok(dense::forward(policy, inputs, rows.finish(machine, tokens)?))
}

/// Rows of logits on their way through the vocabulary.
struct Rows<M: Machine> {
    running: Room<M>,
    /// Lanes of a tile, `[rows, LANES]`.
    maxima: Room<M>,
    sums: Room<M>,
    logit_sums: Room<M>,
}

impl<M: Machine> Rows<M> {
    fn begin(machine: &M, tokens: usize) -> Result<Self, DeviceError> {
        let [mut running, maxima, sums, logit_sums] = [(); 4].map(|()| Room::default());
        running.put(machine, &vec![BEGIN; tokens])?;
        Ok(Rows { running, maxima, sums, logit_sums })
    }

    fn absorb(
        &mut self,
        head: &Head<'_, M>,
        logits: u64,
        (query, key): (&Operands<M>, &Operands<M>),
    ) -> Result<(), DeviceError> {
        let (machine, lanes) = (head.machine, query.rows.len() * LANES);
        let (threads, columns) = (lanes as i64, key.rows.len() as i64);
        let maxima = self.maxima.of(machine, halves(lanes))?;
        let sums = self.sums.of(machine, halves(lanes))?;
        let logit_sums = self.logit_sums.of(machine, halves(lanes))?;
        let rows = at(machine, &self.running, query.rows.start * BEGIN.len());
        let fold = Fold {
            threads: query.rows.len() as i64,
            logits,
            columns,
            first: key.rows.start as i64,
            maxima,
            sums,
            logit_sums,
            rows,
            labels: at(machine, &head.labels, query.rows.start),
        };
        // SAFETY: the tile is that large, the lanes were just made so, and there is a row and a
        // label for each token.
        unsafe {
            machine.launch(&Maxima { threads, logits, columns, maxima })?;
            machine.launch(&LaneSums {
                threads,
                logits,
                columns,
                maxima,
                sums,
                logit_sums,
                rows,
            })?;
            machine.launch(&fold)
        }
    }

    fn finish(self, machine: &M, tokens: usize) -> Result<Vec<Online>, DeviceError> {
        let mut rows = vec![BEGIN; tokens];
        self.running.get(machine, &mut rows)?;
        Ok(rows.into_iter().map(Online::of).collect())
    }
}
