//! The reference's backward pass on a device.
//!
//! The sums of q's gradient stay there from slab to slab of k, where they fit; those of k's
//! gradient for one slab. The label path, one row a token, is the host's.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::BackwardWalk;
use super::arguments::Terms;
use super::compare::{Comparison, Kept, Rooms};
use super::error::DeviceError;
use super::head::OnDevice;
use super::machine::{Compute, Machine, Product};
use super::plan::{Plan, Sizes};
use super::room::{Panel, Room};
use super::sums::{SUMS, Sums};
use crate::compare::RowTally;
use crate::kernels::reference::{
    self, Backward, DenseSums, DkSums, GEMMS, LabelTerms, TermNoise, Upstream,
};
use crate::kernels::tiles::spans;
use crate::kernels::{HeadInputs, Progress, Tiles};

/// A walk over slabs of k, in order, of all tokens or of some.
pub(super) struct Walk<'m, M: Machine> {
    machine: &'m M,
    tokens: Range<usize>,
    plan: Plan,
    asked: [bool; SUMS],
    /// The tokens whose sums lie on the device.
    band: Option<Band<M>>,
    key: Panel<M>,
    tile: Tile<M>,
}

/// Tokens whose sums lie on the device, with their rows of q.
struct Band<M: Machine> {
    tokens: Range<usize>,
    queries: Vec<Panel<M>>,
    sums: Sums<M>,
}

/// The entries of a tile, in as many forms as there are sums; the last two where asked for.
struct Tile<M: Machine> {
    terms: [Room<M>; SUMS],
    ones: Room<M>,
}

/// One slab of k, all that its tiles need.
pub(super) struct Slab<'a, M: Machine> {
    inputs: &'a HeadInputs<'a>,
    noise: &'a TermNoise,
    buffers: OnDevice<M>,
    sums: Sums<M>,
    /// Of the bias, `[rows]`: of entries, of their variances, of their squares.
    biases: [Room<M>; 3],
    /// Of the labels' columns, `[T]`: slopes, their variances, entries.
    labels: [Room<M>; 3],
}

impl<'m, M: Machine> Walk<'m, M> {
    /// Of a head whose slabs have at most so many rows.
    pub(super) fn begin(
        machine: &'m M,
        inputs: &HeadInputs,
        tokens: Range<usize>,
        (rows, noise): (usize, &TermNoise),
    ) -> Result<Self, DeviceError> {
        let asked = [true, true, true, noise.filter > 0.0, noise.confident > 0.0];
        let terms = asked.iter().filter(|&&asked| asked).count();
        let sizes = Sizes { tokens: tokens.len(), rows, depth: inputs.q.cols, terms };
        Ok(Walk {
            machine,
            tokens,
            plan: Plan::of(machine.free()?, sizes),
            asked,
            band: None,
            key: Panel::default(),
            tile: Tile { terms: [(); SUMS].map(|()| Room::default()), ones: Room::default() },
        })
    }

    /// Makes some tokens those whose sums lie on the device.
    fn enter(
        &mut self,
        tokens: Range<usize>,
        inputs: &HeadInputs,
        dq: &Mutex<&mut Backward>,
    ) -> Result<(), DeviceError> {
        if self.band.as_ref().is_some_and(|band| band.tokens == tokens) {
            return Ok(());
        }
        self.leave(dq)?;
        let dq = &mut *dq.lock().unwrap_or_else(PoisonError::into_inner);
        let mut queries = Vec::new();
        for span in spans(tokens.len(), self.plan.tiles.tokens) {
            let rows = tokens.start + span.start..tokens.start + span.end;
            let mut query = Panel::default();
            query.load(self.machine, (&inputs.q, rows), self.asked[3])?;
            queries.push(query);
        }
        let sums = Sums::put(self.machine, parts(dq, &tokens, inputs.q.cols).map(|part| &*part))?;
        self.band = Some(Band { tokens, queries, sums });
        Ok(())
    }

    /// Fetches the sums that lie on the device.
    pub(super) fn leave(&mut self, dq: &Mutex<&mut Backward>) -> Result<(), DeviceError> {
        let Some(band) = self.band.take() else { return Ok(()) };
        let dq = &mut *dq.lock().unwrap_or_else(PoisonError::into_inner);
        let depth = dq.dq_lse.len() / dq.dq_label_rel_var.len().max(1);
        band.sums.get(self.machine, parts(dq, &band.tokens, depth))
    }

    /// The sums of dq, where those of all tokens lie on the device.
    pub(super) fn held_dq(&self) -> Option<Lying<'_, M>> {
        let band = self.band.as_ref().filter(|band| band.tokens == self.tokens)?;
        let (machine, sums) = (self.machine, Lie::Tokens(&band.sums));
        Some(Lying { machine, sums, rooms: Rooms::default() })
    }

    /// The sums of a slab over the walk's tokens, on the device.
    pub(super) fn sums<'a>(
        &mut self,
        inputs: &'a HeadInputs<'a>,
        upstream: Upstream<'a>,
        progress: &dyn Progress,
        dq: &Mutex<&mut Backward>,
    ) -> Result<Slab<'a, M>, DeviceError> {
        let mut slab = Slab::begin(self.machine, inputs, upstream, self.asked)?;
        let first = self.tokens.start;
        for tokens in spans(self.tokens.len(), self.plan.band) {
            self.enter(first + tokens.start..first + tokens.end, inputs, dq)?;
            self.tiles(&mut slab, progress)?;
        }
        Ok(slab)
    }

    /// All tiles of a slab and of the tokens whose sums lie here.
    fn tiles(
        &mut self,
        slab: &mut Slab<'_, M>,
        progress: &dyn Progress,
    ) -> Result<(), DeviceError> {
        let band = self.band.as_ref().expect("a band was entered");
        let (machine, depth) = (self.machine, slab.inputs.q.cols);
        for rows in spans(slab.inputs.valid_vocab, self.plan.tiles.vocab) {
            self.key.load(machine, (&slab.inputs.k, rows.clone()), self.asked[3])?;
            for query in &band.queries {
                self.tile.fill(machine, slab, (query, &self.key), self.asked)?;
                let first = (query.rows.start - band.tokens.start) * depth;
                let to_dq = band.sums.at(machine, first);
                let to_dk = slab.sums.at(machine, rows.start * depth);
                let sides = (query, &self.key);
                self.tile.accumulate(machine, sides, (to_dq, to_dk), depth)?;
                self.tile.add_biases(machine, slab, (query, &self.key))?;
                let work = query.rows.len() * rows.len() * depth.max(1);
                progress.advance(GEMMS * work as u64);
            }
        }
        Ok(())
    }
}

impl<M: Machine> BackwardWalk for Walk<'_, M> {
    fn slab(
        &mut self,
        inputs: &HeadInputs,
        upstream: Upstream,
        (tiles, progress): (Tiles, &dyn Progress),
        dq: &mut Backward,
    ) -> Result<DkSums, DeviceError> {
        reference::check(inputs);
        let slab = self.sums(inputs, upstream, progress, &Mutex::new(&mut *dq))?;
        let (dense, labels) = (slab.dense(self.machine)?, slab.labels(self.machine)?);
        Ok(DkSums::with_labels(inputs, upstream, tiles, (&dense, labels), dq))
    }

    fn slab_to_compare<'s>(
        &'s mut self,
        inputs: &'s HeadInputs,
        upstream: Upstream<'s>,
        (tiles, progress): (Tiles, &dyn Progress),
        dq: &mut Backward,
    ) -> Result<(DkSums, Box<dyn Kept + 's>), DeviceError> {
        reference::check(inputs);
        let slab = self.sums(inputs, upstream, progress, &Mutex::new(&mut *dq))?;
        let (dense, labels) = (slab.dense_kept(self.machine)?, slab.labels(self.machine)?);
        let sums = DkSums::with_labels(inputs, upstream, tiles, (&dense, labels), dq);
        Ok((sums, Box::new(slab.kept(self.machine))))
    }

    fn dq_to_compare(&mut self) -> Option<Box<dyn Kept + '_>> {
        Some(Box::new(self.held_dq()?))
    }

    fn finish(mut self: Box<Self>, dq: &mut Backward) -> Result<(), DeviceError> {
        self.leave(&Mutex::new(dq))
    }
}

/// Dense sums that lie on a machine, of rows of the vocabulary or of tokens.
pub(super) struct Lying<'a, M: Machine> {
    machine: &'a M,
    sums: Lie<'a, M>,
    rooms: Rooms<M>,
}

/// Whose they are.
enum Lie<'a, M: Machine> {
    Slab(Slab<'a, M>),
    Tokens(&'a Sums<M>),
}

impl<M: Machine> Kept for Lying<'_, M> {
    fn compare(&mut self, comparison: &Comparison) -> Result<Vec<RowTally>, DeviceError> {
        let (sums, vocabulary) = match &self.sums {
            Lie::Slab(slab) => (&slab.sums, true),
            Lie::Tokens(sums) => (*sums, false),
        };
        let dense = sums.at(self.machine, 0).map(Option::unwrap_or_default);
        self.rooms.compare(self.machine, comparison, (dense, vocabulary))
    }
}

/// The sums of some tokens, in the order of [`Sums`].
fn parts<'a>(dq: &'a mut Backward, tokens: &Range<usize>, depth: usize) -> [&'a mut [f64]; SUMS] {
    let Backward { dq_lse, dq_lse_sq, dq_lse_var, dq_dropped, dq_confident, .. } = dq;
    [dq_lse, dq_lse_sq, dq_lse_var, dq_dropped, dq_confident].map(|all| match all.is_empty() {
        true => &mut all[..],
        false => &mut all[tokens.start * depth..tokens.end * depth],
    })
}

impl<'a, M: Machine> Slab<'a, M> {
    fn begin(
        machine: &M,
        inputs: &'a HeadInputs<'a>,
        upstream: Upstream<'a>,
        asked: [bool; SUMS],
    ) -> Result<Self, DeviceError> {
        let (rows, tokens) = (inputs.k.rows, inputs.q.rows);
        let buffers = OnDevice::backward(machine, inputs, upstream)?;
        let sums = Sums::zeros(machine, rows * inputs.q.cols, asked)?;
        let [mut biases, mut labels] = [(); 2].map(|()| [(); 3].map(|()| Room::default()));
        for (room, values) in biases.iter_mut().map(|room| (room, rows)) {
            room.of(machine, values)?;
        }
        for (room, values) in labels.iter_mut().map(|room| (room, tokens)) {
            room.of(machine, values)?;
        }
        Ok(Slab { inputs, noise: upstream.noise, buffers, sums, biases, labels })
    }

    /// Its sums of k's rows: `[rows, D]`, then those of the bias, `[rows]`.
    pub(super) fn rooms(&self) -> impl Iterator<Item = (&Room<M>, usize)> {
        let (rows, depth) = (self.inputs.k.rows, self.inputs.q.cols);
        let sums = self.sums.rooms().map(move |room| (room, rows * depth));
        sums.chain(self.biases.iter().map(move |room| (room, rows)))
    }

    /// Its sums where they lie.
    pub(super) fn kept(self, machine: &'a M) -> Lying<'a, M> {
        Lying { machine, sums: Lie::Slab(self), rooms: Rooms::default() }
    }

    /// Those of the bias, and of the others the entries alone: the rest stays.
    pub(super) fn dense_kept(&self, machine: &M) -> Result<DenseSums, DeviceError> {
        let lse = vec![0.0; self.inputs.k.rows * self.inputs.q.cols];
        let mut dense = DenseSums { lse, ..DenseSums::default() };
        self.sums.get(machine, [&mut dense.lse, &mut [], &mut [], &mut [], &mut []])?;
        self.biases(machine, dense)
    }

    /// What the slab summed up to.
    pub(super) fn dense(&self, machine: &M) -> Result<DenseSums, DeviceError> {
        let mut dense = DenseSums::zeros(self.inputs, self.noise);
        let DenseSums { lse, lse_sq, lse_var, dropped, confident, .. } = &mut dense;
        self.sums
            .get(machine, [lse, lse_sq, lse_var, dropped, confident].map(|all| &mut all[..]))?;
        self.biases(machine, dense)
    }

    fn biases(&self, machine: &M, mut dense: DenseSums) -> Result<DenseSums, DeviceError> {
        let ([lse, var, sq], rows) = (&self.biases, self.inputs.k.rows);
        dense.bias_lse = fetch(machine, lse, rows)?;
        dense.bias_var = fetch(machine, var, rows)?;
        dense.bias_sq = fetch(machine, sq, rows)?;
        Ok(dense)
    }

    /// The labels' columns, of all tokens: 0 for those that were not walked.
    pub(super) fn labels(&self, machine: &M) -> Result<LabelTerms, DeviceError> {
        let all = |room| fetch(machine, room, self.inputs.q.rows);
        let [slopes, slope_vars, entries] = &self.labels;
        let slopes = all(slopes)?.into_iter().zip(all(slope_vars)?).collect();
        Ok(LabelTerms { slopes, entries: all(entries)? })
    }
}

fn fetch<M: Machine>(machine: &M, room: &Room<M>, values: usize) -> Result<Vec<f64>, DeviceError> {
    let mut fetched = vec![0.0; values];
    room.get(machine, &mut fetched).map(|()| fetched)
}

impl<M: Machine> Tile<M> {
    /// The entries of a tile.
    fn fill(
        &mut self,
        machine: &M,
        slab: &mut Slab<'_, M>,
        (query, key): (&Panel<M>, &Panel<M>),
        asked: [bool; SUMS],
    ) -> Result<(), DeviceError> {
        let size = query.rows.len() * key.rows.len();
        let [dense, squared, noisy, dropped, confident] = &mut self.terms;
        let products = slab.buffers.products(machine, slab.inputs, (query, key), dense)?;
        let when = |asked: bool, room: &mut Room<M>| match asked {
            true => room.of(machine, size),
            false => Ok(0),
        };
        let [slopes, slope_vars, entries] = &slab.labels;
        let terms = Terms {
            threads: size as i64,
            dense: products,
            squared: squared.of(machine, size)?,
            noisy: noisy.of(machine, size)?,
            dropped: when(asked[3], dropped)?,
            confident: when(asked[4], confident)?,
            columns: key.rows.len() as i64,
            first: key.rows.start as i64,
            key_norms: key.norms.address(machine),
            label_slopes: slopes.at(machine, query.rows.start),
            label_slope_vars: slope_vars.at(machine, query.rows.start),
            label_entries: entries.at(machine, query.rows.start),
            tokens: slab.buffers.tokens(machine, query),
            head: slab.buffers.head(machine, slab.inputs, slab.noise),
        };
        // SAFETY: the rooms of a tile were just made that large; those of tokens and of the
        // panels have a row for each of theirs.
        unsafe { machine.launch(&terms) }
    }

    /// The GEMMs of a tile, each a sum onto what earlier tiles left.
    fn accumulate(
        &self,
        machine: &M,
        (query, key): (&Panel<M>, &Panel<M>),
        (to_dq, to_dk): ([Option<u64>; SUMS], [Option<u64>; SUMS]),
        depth: usize,
    ) -> Result<(), DeviceError> {
        let (height, width) = (query.rows.len(), key.rows.len());
        let addresses = |side: &Panel<M>| {
            let Panel { values, squared, magnitudes, .. } = side;
            [values, squared, squared, magnitudes, values].map(|room| room.address(machine))
        };
        let (queries, keys) = (addresses(query), addresses(key));
        for (sum, terms) in self.terms.iter().enumerate() {
            let (Some(dq), Some(dk)) = (to_dq[sum], to_dk[sum]) else { continue };
            let product = Product {
                target: dq,
                rows: height,
                cols: depth,
                lhs: terms.address(machine),
                lhs_transposed: false,
                rhs: keys[sum],
                rhs_transposed: false,
                depth: width,
                add: true,
                compute: Compute::F64,
            };
            let transposed = Product {
                target: dk,
                rows: width,
                lhs_transposed: true,
                rhs: queries[sum],
                depth: height,
                ..product
            };
            // SAFETY: the targets have a row of D for each token of the band and each row of the
            // slab, the terms are the tile's, the panels D wide.
            unsafe {
                machine.multiply(&product)?;
                machine.multiply(&transposed)?;
            }
        }
        Ok(())
    }

    /// Sums of columns: products with ones.
    fn add_biases(
        &mut self,
        machine: &M,
        slab: &Slab<'_, M>,
        (query, key): (&Panel<M>, &Panel<M>),
    ) -> Result<(), DeviceError> {
        if slab.inputs.bias.is_none() {
            return Ok(());
        }
        let (height, width) = (query.rows.len(), key.rows.len());
        let ones = self.ones.put(machine, &vec![1.0; height])?;
        let [dense, squared, noisy, ..] = &self.terms;
        let [lse, var, sq] = &slab.biases;
        for (target, terms) in [(lse, dense), (var, noisy), (sq, squared)] {
            let product = Product {
                target: target.at(machine, key.rows.start),
                rows: width,
                cols: 1,
                lhs: terms.address(machine),
                lhs_transposed: true,
                rhs: ones,
                rhs_transposed: false,
                depth: height,
                add: true,
                compute: Compute::F64,
            };
            // SAFETY: a value for each row of the slab, the tile's terms, a one for each token.
            unsafe { machine.multiply(&product)? };
        }
        Ok(())
    }
}
