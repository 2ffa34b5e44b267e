//! `gradient-filter`: tiles of dlogits are left out where nothing in them reaches a
//! threshold, and the job does not declare it.
//!
//! Real: Apple's CCE (`filter_eps`, 2⁻¹² by default). Rows of dk whose tiles are all left
//! out are exactly zero; others lose their small terms, dq with them.
//!
//! Detectors: dk loses what a filter of some size and threshold would leave out
//! (`detectors::tile_filter`). Emulation: the entries of those tiles are subtracted from dq, dk and
//! dlogits.

use backtape::nan::largest;
use std::sync::Arc;

use super::emulated::{bases, has_products};
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::detectors::tile_filter::{Filter, Filtered, Tiled};
use crate::diagnose::evidence::Evidence;
use crate::head::Stage;
use crate::kernels::policy::{Path, Policy};
use crate::replay::world::{Expectation, World};

/// The catalogue's entry.
pub struct GradientFilter;

impl Cause for GradientFilter {
    fn id(&self) -> &'static str {
        "gradient-filter"
    }

    fn about(&self) -> &'static str {
        "tiles of dlogits in which nothing reaches a threshold are left out of dq and dk"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["ml-cross-entropy filter_eps"]
    }

    fn advice(&self) -> &'static str {
        "switch the gradient filter off (CCE: filter_eps=None), or declare gradient_filter"
    }

    fn effort(&self) -> Effort {
        Effort::Some
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let Some(roundings) = evidence.roundings() else { return Vec::new() };
        if !has_products(evidence) || !evidence.fails(Stage::Dk) || !loses(evidence) {
            return Vec::new();
        }
        // Whether a filter is recognised depends on how the entries are rounded.
        let each = bases(&roundings).into_iter().flat_map(|base| {
            let kinds = [true, false].into_iter();
            let kinds = kinds.filter(move |&labelled| labelled || base.path == Path::Fused);
            kinds.flat_map(move |labelled| of(evidence, &base, labelled))
        });
        each.collect()
    }
}

/// Whether dk is nowhere larger than it should be: a filter only takes away.
fn loses(evidence: &Evidence<'_>) -> bool {
    let most = |stage| largest(evidence.failing_of(&[stage]).map(|(_, residual)| residual.factor));
    // The factor may exceed 1 a little, by noise.
    most(Stage::Dk) < 1.01
}

fn of(evidence: &Evidence<'_>, base: &Policy, labelled: bool) -> Vec<Hypothesis> {
    let Some(worst) = evidence.worst_unit(&[Stage::Dk]) else { return Vec::new() };
    let look = |unit| Filtered::new(evidence, unit, base, labelled);
    let Some(seen) = look(worst) else { return Vec::new() };
    let filters = seen.search(evidence, worst, base, labelled);
    if filters.is_empty() {
        return Vec::new();
    }
    let units: Arc<Vec<Filtered>> = Arc::new(evidence.units().iter().filter_map(look).collect());
    let of_filter = |filter: Filter| {
        let [tokens, classes] = filter.tile;
        let magnitude = if labelled { "|p - onehot|" } else { "p" };
        let parameters = vec![
            ("threshold", format!("{:.3e}", filter.least)),
            ("of", magnitude.to_string()),
            ("tile", format!("{tokens} tokens x {classes} classes")),
        ];
        let tiles = units.iter().map(|unit| unit.dropped(&filter)).collect();
        let world = Skips { units: units.clone(), tiles, policy: *base };
        Hypothesis::new(world, parameters).fitted(2)
    };
    filters.into_iter().map(of_filter).collect()
}

struct Skips {
    units: Arc<Vec<Filtered>>,
    /// Which tiles of each unit are left out.
    tiles: Vec<Tiled>,
    policy: Policy,
}

impl World for Skips {
    fn expected(&self, expectation: &mut Expectation<'_>) {
        let place = expectation.place;
        let here = |unit: &Filtered| {
            unit.microbatch == place.microbatch && (unit.rank == place.rank || place.rank.is_none())
        };
        for (unit, tiled) in self.units.iter().zip(&self.tiles) {
            if !here(unit) {
                continue;
            }
            match expectation.place.stage {
                Stage::Dk | Stage::DkLse => self.subtract_from_dk(unit, tiled, expectation),
                Stage::Dq | Stage::DqLse => self.subtract_from_dq(unit, tiled, expectation),
                Stage::Dbias => self.subtract_from_dbias(unit, tiled, expectation),
                Stage::Dlogits => clear(unit, tiled, expectation),
                _ => {}
            }
        }
    }
}

impl Skips {
    /// The entries of dlogits that are left out, `[tokens of the unit, classes]`; zero for the
    /// others.
    fn lost(
        &self,
        unit: &Filtered,
        tiled: &Tiled,
        tokens: &[usize],
        classes: &[usize],
    ) -> Vec<f64> {
        let mut entries = unit.part.sub(tokens, classes).entries(&self.policy);
        for (&t, row) in tokens.iter().zip(entries.chunks_mut(classes.len().max(1))) {
            for (&v, x) in classes.iter().zip(row) {
                *x = if tiled.drops(t, v) { *x } else { 0.0 };
            }
        }
        entries
    }

    fn subtract_from_dk(&self, unit: &Filtered, tiled: &Tiled, expectation: &mut Expectation<'_>) {
        let tokens: Vec<usize> = (0..unit.rows.len()).collect();
        let valid: Vec<usize> =
            expectation.rows.iter().copied().filter(|&v| v < unit.classes).collect();
        let q = unit.part.head().q;
        let lost = self.lost(unit, tiled, &tokens, &valid);
        for (t, row) in lost.chunks(valid.len().max(1)).enumerate() {
            for (index, &entry) in row.iter().enumerate().filter(|(_, x)| **x != 0.0) {
                let values = &mut expectation.values
                    [index * expectation.columns..(index + 1) * expectation.columns];
                values.iter_mut().enumerate().for_each(|(d, value)| {
                    *value -= entry * q.get_f64(t * q.cols + d);
                });
            }
        }
    }

    fn subtract_from_dq(&self, unit: &Filtered, tiled: &Tiled, expectation: &mut Expectation<'_>) {
        let k = unit.part.head().k;
        let classes: Vec<usize> = (0..unit.classes).collect();
        let place_and_row =
            |(at, row): (usize, &usize)| Some((at, unit.rows.binary_search(row).ok()?));
        let (places, tokens): (Vec<usize>, Vec<usize>) =
            expectation.rows.iter().enumerate().filter_map(place_and_row).unzip();
        let lost = self.lost(unit, tiled, &tokens, &classes);
        for (&place, row) in places.iter().zip(lost.chunks(classes.len().max(1))) {
            let values = &mut expectation.values
                [place * expectation.columns..(place + 1) * expectation.columns];
            for (v, &entry) in row.iter().enumerate().filter(|(_, x)| **x != 0.0) {
                values.iter_mut().enumerate().for_each(|(d, value)| {
                    *value -= entry * k.get_f64(v * k.cols + d);
                });
            }
        }
    }

    fn subtract_from_dbias(
        &self,
        unit: &Filtered,
        tiled: &Tiled,
        expectation: &mut Expectation<'_>,
    ) {
        let tokens: Vec<usize> = (0..unit.rows.len()).collect();
        let valid: Vec<usize> =
            expectation.rows.iter().copied().filter(|&v| v < unit.classes).collect();
        for row in self.lost(unit, tiled, &tokens, &valid).chunks(valid.len().max(1)) {
            expectation.values.iter_mut().zip(row).for_each(|(value, entry)| *value -= entry);
        }
    }
}

fn clear(unit: &Filtered, tiled: &Tiled, expectation: &mut Expectation<'_>) {
    for (index, row) in expectation.rows.iter().enumerate() {
        let Ok(token) = unit.rows.binary_search(row) else { continue };
        for v in (0..expectation.columns.min(unit.classes)).filter(|&v| tiled.drops(token, v)) {
            expectation.values[index * expectation.columns + v] = 0.0;
        }
    }
}
