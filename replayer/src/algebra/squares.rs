//! The sums of squares that ranks declare of gradients which are not recorded whole.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use backtape::part::Part;
use serde::Deserialize;

use super::declaration::{Declaration, number};
use super::inventory::{Inventory, Piece};
use super::judge::Judge;
use super::outcome::{Divergence, Judged, Outcome, Stage};
use crate::kernels::round::Precision;

/// What a rank declares of the gradient of a parameter that it does not record whole.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Squares {
    /// Of the whole parameter.
    pub shape: Vec<u64>,
    /// The boxes that the rank holds.
    pub held: Vec<IndexBox>,
    /// The format of its elements.
    #[serde(default)]
    pub dtype: Option<String>,
    /// The sum of the squares of what the rank holds, after communication.
    #[serde(default, deserialize_with = "number")]
    pub reduced: Option<f64>,
    /// The same after the loss scale was taken out.
    #[serde(default, deserialize_with = "number")]
    pub unscaled: Option<f64>,
    /// The same of what the optimizer takes.
    #[serde(default, deserialize_with = "number")]
    pub clipped: Option<f64>,
}

impl Squares {
    /// The sum of a stage, by its name.
    pub(crate) fn of_stage(&self, stage: &str) -> Option<f64> {
        match stage {
            "reduced" => self.reduced,
            "unscaled" => self.unscaled,
            "clipped" => self.clipped,
            _ => None,
        }
    }

    fn elements(&self) -> u64 {
        self.held.iter().filter_map(IndexBox::elements).sum()
    }
}

/// What ranks hold of a gradient, of which they declare the sums of squares.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held {
    /// Parts that share no element: elements and sum of squares of one copy of each.
    pub parts: Vec<(u64, f64)>,
    /// The sum of what each rank holds.
    pub by_rank: BTreeMap<Rank, f64>,
    /// How many ranks hold a part, at most.
    pub copies: usize,
    /// The format of fewest bits that its elements are stored in.
    pub format: Option<Precision>,
}

impl Inventory<'_> {
    /// The declared sums of squares of a parameter's gradient at a stage; where copies differ, that
    /// of `rank` counts. `None` where no rank declares one; an error where they do not make up
    /// the whole.
    pub(crate) fn declared_squares(
        &self,
        parameter: &str,
        stage: &str,
        rank: Rank,
    ) -> Option<Result<Held, String>> {
        let mut copies: BTreeMap<&[IndexBox], Vec<(Rank, f64, &Squares)>> = BTreeMap::new();
        for (own, declared) in &self.declared {
            let Some(squares) = declared.squares.get(parameter) else { continue };
            if let Some(sum) = squares.of_stage(stage) {
                copies.entry(&squares.held).or_default().push((*own, sum, squares));
            }
        }
        let (_, first) = copies.first_key_value()?;
        let whole: u64 = first[0].2.shape.iter().product();
        let mut held = Held::default();
        for those in copies.values() {
            let chosen = those.iter().find(|(own, ..)| *own == rank).unwrap_or(&those[0]);
            held.parts.push((chosen.2.elements(), chosen.1));
            held.by_rank.extend(those.iter().map(|(own, sum, _)| (*own, *sum)));
            held.copies = held.copies.max(those.len());
            let format = chosen.2.dtype.as_deref().and_then(Precision::from_name);
            held.format = super::domain::fewer_bits(held.format, format);
        }
        let declared: u64 = held.parts.iter().map(|(elements, _)| elements).sum();
        if declared != whole {
            return Some(Err(format!(
                "ranks declare the squares of {declared} of the {whole} elements of {parameter}"
            )));
        }
        Some(Ok(held))
    }
}

impl Held {
    /// The sum over everything that ranks hold, where those of the same sum hold copies.
    pub(crate) fn versions(&self) -> f64 {
        let sums: BTreeSet<u64> = self.by_rank.values().map(|sum| sum.to_bits()).collect();
        sums.into_iter().map(f64::from_bits).sum()
    }

    /// The sum over all elements, each once.
    pub(crate) fn whole(&self) -> f64 {
        self.parts.iter().map(|(_, sum)| sum).sum()
    }
}

/// A stage that multiplies all elements by one number.
struct Scaling<'a> {
    stage: Stage,
    /// The names of the stages before and after it.
    names: (&'a str, &'a str),
    part: Part,
    /// What a rank multiplies by; `None` where it does not say.
    factor: &'a dyn Fn(Rank) -> Option<f64>,
}

impl Judge<'_> {
    /// Whether stages that multiply a gradient by a number did so with all of its elements, also
    /// those outside of a sample: by the sums of squares before and after.
    pub(crate) fn scaled_squares(&self, parameter: &str, judged: &[Judged]) -> Vec<Judged> {
        let inventory = self.inventory;
        if inventory.samples.of_parameter(parameter).is_none() {
            return Vec::new();
        }
        let unscaled = |rank: Rank| Some(1.0 / inventory.declared.get(&rank)?.scale_of(parameter)?);
        let clipped = |rank: Rank| {
            let limit = inventory.declared.get(&rank)?.limit_of(parameter)?;
            let together = inventory.taken_out_by_clipping(rank, parameter);
            Some(limit.coefficient().min(1.0) / together.unwrap_or(1.0))
        };
        let has_unscaled = inventory.key(parameter, &Part::Unscaled).is_some();
        let before = if has_unscaled { "unscaled" } else { "reduced" };
        let scalings = [
            (Stage::Unscale, ("reduced", "unscaled"), Part::Unscaled, &unscaled as &dyn Fn(_) -> _),
            (Stage::Clip, (before, "clipped"), Part::Clipped, &clipped),
        ];
        let scalings = scalings.into_iter().filter(|(stage, ..)| {
            // What is wrong in the sample is told with what explains it.
            let mut own = judged.iter().filter(|one| one.stage == *stage);
            own.all(|one| matches!(one.result, Outcome::Agreed { .. }))
        });
        let each = scalings.flat_map(|(stage, names, part, factor)| {
            self.scaled_by(parameter, &Scaling { stage, names, part, factor })
        });
        each.collect()
    }

    fn scaled_by(&self, parameter: &str, of: &Scaling<'_>) -> Vec<Judged> {
        let Some(key) = self.inventory.key(parameter, &of.part) else { return Vec::new() };
        let format = self.inventory.precision(key).unwrap_or(Precision::F32);
        let judge = |(rank, declared): (&Rank, &Declaration)| {
            let squares = declared.squares.get(parameter)?;
            let (before, after) =
                (squares.of_stage(of.names.0)?.sqrt(), squares.of_stage(of.names.1)?.sqrt());
            let expected = before * (of.factor)(*rank)?;
            // A norm changes by no more than that of the roundings: of the factor, which takes three
            // operations, of the product, and of what is too small for the format.
            let unit = format.unit_roundoff() + 4.0 * Precision::F32.unit_roundoff();
            let count = squares.elements() as f64;
            let allowed = expected * (unit + count * f64::EPSILON)
                + count.sqrt() * 0.5 * format.smallest_subnormal();
            let is_meant = self.nan_is_meant && !expected.is_finite() && !after.is_finite();
            if is_meant || (after - expected).abs() <= allowed {
                return None;
            }
            let divergence = Divergence {
                reason: format!(
                    "all of it has the norm {after:.6e} after the stage, and should have \
                     {expected:.6e}; in what was sampled of it nothing is wrong"
                ),
                factor: None,
                error: (after / expected - 1.0).abs(),
                floor: allowed / expected,
                worst: None,
                reading: None,
                readings: Vec::new(),
            };
            let piece = Piece { ranks: vec![*rank], place: IndexBox::whole(&squares.shape) };
            let result = Ok(Outcome::Diverged(Box::new(divergence)));
            Some(self.judged(of.stage, parameter, (key, &piece), result))
        };
        self.inventory.declared.iter().filter_map(judge).collect()
    }
}
