//! What the rule of an optimizer takes of a whole parameter: norms, means of rows and columns, an
//! orthogonal matrix. Each is computed in f64 over the boxes of all ranks, with the error that
//! rounding may have brought to a job's.

use backtape::index_box::IndexBox;
use backtape::part::Part;
use backtape::shard::TensorKey;

use super::inventory::Piece;
use super::judge::{Judge, Operand, arithmetic};
use super::orthogonal::{Newton, orthogonalised};
use super::outcome::{Judged, Stage};
use super::rules::Rule;
use super::rules::adafactor::{Adafactor, FACTORS};
use super::rules::muon::{Muon, Taken};
use super::supposed::{Supposed, Tensors};
use crate::assemble::pieces;
use crate::kernels::policy::Sum;
use crate::kernels::round::Precision;
use crate::ops::Declared;
use crate::ops::expected::Expected;
use crate::ops::table::op;
use crate::ops::tallies_from;

/// An input of a rule's table that is made of the whole parameter.
#[derive(Clone)]
pub(super) struct Whole {
    /// Its name in the table, and that of its variance.
    names: (&'static str, &'static str),
    shape: Shape,
    values: Vec<f64>,
    /// One for each value, or one for all.
    variances: Vec<f64>,
}

/// How the values of a [`Whole`] lie.
#[derive(Clone)]
enum Shape {
    /// One number.
    Number,
    /// One number for each element.
    Same,
    /// The elements of a box.
    Plane(IndexBox),
}

impl Whole {
    fn number(names: (&'static str, &'static str), value: f64, deviation: f64) -> Whole {
        let variances = vec![deviation * deviation];
        Whole { names, shape: Shape::Number, values: vec![value], variances }
    }

    /// It and its variance, of a part of the parameter.
    pub(super) fn operands<'o>(&self, part: &IndexBox) -> [Operand<'o>; 2] {
        let of = |all: &[f64]| match &self.shape {
            Shape::Number => all.to_vec(),
            Shape::Same => vec![all[0]; part.elements().unwrap_or(0) as usize],
            Shape::Plane(_) if all.len() == 1 => {
                vec![all[0]; part.elements().unwrap_or(0) as usize]
            }
            Shape::Plane(place) => cut(all, place, part),
        };
        let (name, variance) = self.names;
        [
            Operand::row(name, of(&self.values), None),
            Operand::row(variance, of(&self.variances), None),
        ]
    }
}

/// The elements of `part` of those of `place`, both row-major.
fn cut(all: &[f64], place: &IndexBox, part: &IndexBox) -> Vec<f64> {
    let mut kept = Vec::with_capacity(part.elements().unwrap_or(0) as usize);
    let mut index: Vec<u64> = part.0.iter().map(|(low, _)| *low).collect();
    let width = part.0.last().map_or(1, |(low, high)| high - low) as usize;
    while kept.len() < part.elements().unwrap_or(0) as usize {
        let at = index.iter().zip(&place.0);
        let at = at.fold(0, |sum, (at, (low, high))| sum * (high - low) + (at - low)) as usize;
        kept.extend_from_slice(&all[at..at + width]);
        for dimension in (0..index.len().saturating_sub(1)).rev() {
            index[dimension] += 1;
            if index[dimension] < part.0[dimension].1 {
                break;
            }
            index[dimension] = part.0[dimension].0;
        }
    }
    kept
}

/// A sum of squares, as of a norm.
#[derive(Clone, Copy, Default)]
struct Squares {
    count: f64,
    sum: f64,
    squared: f64,
}

impl Squares {
    fn add(&mut self, x: f64) {
        self.count += 1.0;
        self.sum += x * x;
        self.squared += (x * x).powi(2);
    }

    /// The relative deviation of its root in a job that adds in `sum`, and keeps the result in a
    /// format of this unit.
    fn deviation(&self, sum: Sum, unit: f64) -> f64 {
        let added = sum.variance(self.count, self.sum, self.squared).sqrt();
        if self.sum > 0.0 { added / (2.0 * self.sum) + 2.0 * unit } else { 0.0 }
    }
}

/// The mean of squares of a row or a column, moved on.
struct Mean;

op! {
    Mean = "mean";
    inputs {
        mean: Plane, "the mean of the squares of this step";
        before: Plane, "the moving mean before the step";
        rate: Rows, "how much of this step's enters";
    }
    stages {
        moving: Plane Forward Each |_op, mean, before, rate| {
                let stays = rate.constant(1.0) - rate.clone();
                before.scaled(stays) + mean.scaled(rate)
            },
            "the moving mean";
    }
}

impl Judge<'_> {
    /// The inputs of a rule that are made of the whole parameter.
    pub(super) fn wholes(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Result<Vec<Whole>, String> {
        match &supposed.rule {
            Rule::Lamb(_) => self.ratio(tensors, piece, supposed),
            Rule::Adafactor(rule) => self.scale(tensors, piece, (supposed, rule)),
            Rule::Muon(rule) => self.orthogonal(tensors, piece, (supposed, rule)),
            _ => Ok(Vec::new()),
        }
    }

    /// The boxes that make up the parameter, each once, or the rank's own where a norm is supposed
    /// to be of that alone.
    fn whole_pieces(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        is_local: bool,
    ) -> Result<Vec<Piece>, String> {
        if is_local {
            return Ok(vec![piece.clone()]);
        }
        self.distinct(tensors.after, tensors.rank)
    }

    /// The boxes that make up a tensor, each once.
    fn distinct(
        &self,
        key: &TensorKey,
        rank: backtape::identity::Rank,
    ) -> Result<Vec<Piece>, String> {
        let mut all = self.inventory.pieces(key, &|_| ());
        all.sort_by_key(|own| !own.ranks.contains(&rank));
        let mut distinct: Vec<Piece> = Vec::new();
        for mut own in all {
            if distinct.iter().all(|known| known.place != own.place) {
                own.ranks.sort_by_key(|of| *of != rank);
                distinct.push(own);
            }
        }
        let found: u64 = distinct.iter().filter_map(|own| own.place.elements()).sum();
        let whole: u64 = self.inventory.dump.tensors()[key].shape.iter().product();
        match found == whole {
            true => Ok(distinct),
            false => Err(format!(
                "the rule takes what is made of the whole parameter, and {found} of the {whole} \
                 elements of {key} were recorded"
            )),
        }
    }

    /// Calls `see` with each part of the boxes, and the rank that holds it.
    fn each_part(
        &self,
        boxes: &[Piece],
        see: &mut dyn FnMut(backtape::identity::Rank, &IndexBox) -> Result<(), String>,
    ) -> Result<(), String> {
        for own in boxes {
            for part in pieces(&own.place, 8) {
                see(own.ranks[0], &part)?;
            }
        }
        Ok(())
    }

    /// The squares of the parameter and of the direction of its change.
    fn squares(
        &self,
        tensors: &Tensors<'_>,
        boxes: &[Piece],
        (supposed, known): (&Supposed<'_>, &[Whole]),
    ) -> Result<[Squares; 2], String> {
        let declared = arithmetic(self.inventory.precision(tensors.after), None);
        let mut both = [Squares::default(); 2];
        self.each_part(boxes, &mut |rank, part| {
            let tensors = Tensors { rank, ..*tensors };
            let operands = self.operands(&tensors, supposed, known, part)?;
            let direction = supposed.rule.stage(&operands, &declared, "direction")?;
            let before = operands.iter().find(|operand| operand.name == "before");
            let before = before.map(|own| own.values.clone().widened());
            before.into_iter().flatten().for_each(|x| both[0].add(x));
            direction.iter().for_each(|x| both[1].add(*x));
            Ok(())
        })?;
        Ok(both)
    }

    /// LAMB: the norm of the parameter over that of the direction; 1 where either is 0.
    fn ratio(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Result<Vec<Whole>, String> {
        let boxes = self.whole_pieces(tensors, piece, supposed.is_local)?;
        let [parameter, direction] = self.squares(tensors, &boxes, (supposed, &[]))?;
        let (sum, unit) = self.rounding(tensors);
        let ratio = match parameter.sum > 0.0 && direction.sum > 0.0 {
            true => (parameter.sum / direction.sum).sqrt(),
            false => 1.0,
        };
        let deviation = parameter.deviation(sum, unit) + direction.deviation(sum, 3.0 * unit);
        Ok(vec![Whole::number(("ratio", "ratio_variance"), ratio, ratio * deviation)])
    }

    /// How sums are taken, and the unit of the format that their results are kept in.
    fn rounding(&self, tensors: &Tensors<'_>) -> (Sum, f64) {
        let Declared { sum, between, compute } =
            arithmetic(self.inventory.precision(tensors.after), None);
        (sum, between.unwrap_or(compute).unit_roundoff())
    }

    /// Adafactor: how fast the second moment moves, what rows and columns give of it, and what the
    /// direction is multiplied by.
    fn scale(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        (supposed, rule): (&Supposed<'_>, &Adafactor),
    ) -> Result<Vec<Whole>, String> {
        let boxes = self.whole_pieces(tensors, piece, supposed.is_local)?;
        let (sum, unit) = self.rounding(tensors);
        let mut wholes = vec![rate(rule, unit), self.rows_columns(tensors, rule, unit)?];
        let [parameter, direction] = self.squares(tensors, &boxes, (supposed, &wholes))?;
        let rms = |of: &Squares| (of.sum / of.count.max(1.0)).sqrt();
        let lr = self.learning_rate(supposed).ok_or("the optimizer declares no lr")?;
        let lr = rule.most(lr / supposed.lr_factor) * supposed.lr_factor;
        let mut deviation = 6.0 * unit;
        let mut scale = lr;
        if let Some(least) = rule.least {
            scale *= rms(&parameter).max(least);
            deviation += parameter.deviation(sum, unit);
        }
        if let Some(threshold) = rule.threshold {
            scale /= (rms(&direction) / threshold).max(1.0);
            deviation += direction.deviation(sum, 3.0 * unit);
        }
        wholes.push(Whole::number(("scale", "scale_variance"), scale, scale * deviation));
        Ok(wholes)
    }

    /// What the means of rows and columns give of the second moment; 0 where there are none.
    fn rows_columns(
        &self,
        tensors: &Tensors<'_>,
        rule: &Adafactor,
        unit: f64,
    ) -> Result<Whole, String> {
        let names = ("rows_columns", "rows_columns_variance");
        if !rule.is_factored {
            return Ok(Whole {
                names,
                shape: Shape::Same,
                values: vec![0.0],
                variances: vec![0.0],
            });
        }
        let shape = &self.inventory.dump.tensors()[tensors.after].shape;
        let (rows, columns) = last_two(shape);
        let mut means = Vec::new();
        for name in FACTORS {
            let key = self.factor(tensors.parameter, name, Part::StateAfter);
            let key =
                key.ok_or("the means of rows and columns after the step were not recorded")?;
            means.push(self.whole_of(key, tensors)?);
        }
        // optax takes rows along the longer dimension.
        let is_turned = rule.is_optax && rows > columns;
        let [row, column] = if is_turned { [1, 0] } else { [0, 1] };
        let batches = means[0].len() / if is_turned { columns } else { rows }.max(1);
        let first = &means[0];
        let length = first.len() / batches.max(1);
        let mut values = Vec::with_capacity(batches * rows * columns);
        for batch in 0..batches {
            let all = &first[batch * length..(batch + 1) * length];
            let mean = all.iter().sum::<f64>() / length.max(1) as f64;
            let mean = if rule.is_optax { mean } else { mean.max(rule.eps()) };
            for i in 0..rows {
                let own = means[row][batch * rows + i];
                let columns = &means[column][batch * columns..(batch + 1) * columns];
                values.extend(columns.iter().map(|other| own * other / mean));
            }
        }
        let variances = values.iter().map(|x| (3.0 * unit * x).powi(2)).collect();
        Ok(Whole { names, shape: Shape::Plane(IndexBox::whole(shape)), values, variances })
    }

    /// A tensor of the state that has means of rows or columns.
    fn factor(
        &self,
        parameter: &str,
        names: &[&str],
        part: fn(String) -> Part,
    ) -> Option<&TensorKey> {
        let key = |name: &&str| self.inventory.key(parameter, &part((*name).to_string()));
        names.iter().find_map(key)
    }

    /// Whether the state of a parameter has means of rows and columns. optax has tensors of one
    /// element in their place where it has none.
    pub(super) fn is_factored(&self, parameter: &str) -> bool {
        let key = self.factor(parameter, FACTORS[0], Part::StateAfter);
        key.is_some_and(|key| self.inventory.dump.tensors()[key].shape != [1])
    }

    /// All elements of a tensor, row-major.
    fn whole_of(&self, key: &TensorKey, tensors: &Tensors<'_>) -> Result<Vec<f64>, String> {
        let whole = IndexBox::whole(&self.inventory.dump.tensors()[key].shape);
        let boxes = self.distinct(key, tensors.rank)?;
        self.gathered(key, &boxes, &whole)
    }

    /// The elements of a box, from boxes that make it up.
    fn gathered(
        &self,
        key: &TensorKey,
        boxes: &[Piece],
        whole: &IndexBox,
    ) -> Result<Vec<f64>, String> {
        let mut values = vec![f64::NAN; whole.elements().unwrap_or(0) as usize];
        for own in boxes {
            let read = self.inventory.read_box(key, own.ranks[0], &own.place)?;
            super::inventory::put(&own.place, &read, whole, &mut values);
        }
        Ok(values)
    }

    /// The means of rows and columns of Adafactor's second moment after the step.
    pub(super) fn judged_factors(
        &self,
        tensors: &Tensors<'_>,
        supposed: &Supposed<'_>,
    ) -> Vec<Judged> {
        let Rule::Adafactor(rule) = &supposed.rule else { return Vec::new() };
        let mut judged = Vec::new();
        for (at, names) in FACTORS.iter().enumerate().filter(|_| rule.is_factored) {
            let Some(key) = self.factor(tensors.parameter, names, Part::StateAfter) else {
                continue;
            };
            let mean = self.means(tensors, supposed, rule, at);
            for piece in self.inventory.pieces(key, &|rank| rank) {
                let result = mean.clone().and_then(|mean| {
                    let before = self.factor(tensors.parameter, names, Part::StateBefore);
                    self.mean_tally(tensors, rule, (before, key), &piece, &mean)
                });
                let result = result.map(|tally| self.outcome(&tally, &piece.place, |_| None));
                let at = (key, &piece);
                judged.push(self.judged(Stage::State, tensors.parameter, at, result));
            }
        }
        judged
    }

    fn mean_tally(
        &self,
        tensors: &Tensors<'_>,
        rule: &Adafactor,
        (before, after): (Option<&TensorKey>, &TensorKey),
        piece: &Piece,
        mean: &[Squares],
    ) -> Result<crate::compare::Tally, String> {
        let inventory = self.inventory;
        let declared = arithmetic(inventory.precision(after), None);
        let (sum, unit) = self.rounding(tensors);
        let whole = IndexBox::whole(&inventory.dump.tensors()[after].shape);
        let floor = rule.floor_of_squares();
        let all: Vec<f64> = mean.iter().map(|own| own.sum / own.count.max(1.0) + floor).collect();
        let variance = |(own, mean): (&Squares, &f64)| {
            (2.0 * own.deviation(sum, unit) * mean + unit * mean).powi(2)
        };
        let variances: Vec<f64> = mean.iter().zip(&all).map(variance).collect();
        if all.len() as u64 != whole.elements().unwrap_or(0) {
            return Err(format!("{after} has not the shape of the parameter's rows or columns"));
        }
        let rate = rate(rule, unit);
        let operands = |part: &IndexBox| {
            let elements = part.elements().unwrap_or(0) as usize;
            let before = match before {
                Some(key) => inventory.read_box(key, piece.ranks[0], part)?,
                None => vec![0.0; elements],
            };
            let captured = inventory.read_box(after, piece.ranks[0], part)?;
            let [rate, rate_variance] = rate.operands(part);
            Ok(vec![
                Operand::row("mean", cut(&all, &whole, part), None),
                Operand::row("mean_variance", cut(&variances, &whole, part), None),
                Operand::row("before", before, None),
                rate,
                rate_variance,
                Operand::row("moving", captured, inventory.precision(after)),
            ])
        };
        let compared = self.compare_by(&piece.place, &operands, &|tensors, span| {
            let of = |name: &str| tensors.get(name).map(|own| own.values.to_f64());
            let computed = [("mean", "mean_variance"), ("rate", "rate_variance")];
            let computed = computed.into_iter().filter_map(|(name, variance)| {
                let (values, own) = (of(name)?, of(variance)?);
                let row = vec![0.0; values.len()];
                Some((name, Expected { values, own, row, shared: Vec::new() }))
            });
            tallies_from(&Mean, computed.collect(), tensors, &declared, span)
        })?;
        compared.into_iter().next().ok_or("it has no elements")?.1
    }

    /// The squares of the gradient by rows (0) or columns (1) of the state.
    fn means(
        &self,
        tensors: &Tensors<'_>,
        supposed: &Supposed<'_>,
        rule: &Adafactor,
        which: usize,
    ) -> Result<Vec<Squares>, String> {
        let shape = &self.inventory.dump.tensors()[tensors.after].shape;
        let (rows, columns) = last_two(shape);
        let boxes = self.distinct(tensors.after, tensors.rank)?;
        let whole = IndexBox::whole(shape);
        let gradient = self.gathered(supposed.gradient, &boxes, &whole)?;
        let batches = gradient.len() / (rows * columns).max(1);
        let is_turned = rule.is_optax && rows > columns;
        let by_row = (which == 0) != is_turned;
        let length = if by_row { rows } else { columns };
        let mut means = vec![Squares::default(); batches * length];
        for (at, x) in gradient.iter().enumerate() {
            let (batch, i, j) = (at / (rows * columns), at / columns % rows, at % columns);
            means[batch * length + if by_row { i } else { j }].add(x * supposed.coefficient);
        }
        Ok(means)
    }

    /// Muon: the orthogonal matrix, and how far all of it may be off alike.
    fn orthogonal(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        (supposed, rule): (&Supposed<'_>, &Muon),
    ) -> Result<Vec<Whole>, String> {
        let inventory = self.inventory;
        let boxes = self.whole_pieces(tensors, piece, supposed.is_local)?;
        let place = match supposed.is_local {
            true => piece.place.clone(),
            false => IndexBox::whole(&inventory.dump.tensors()[tensors.after].shape),
        };
        let extent = place.extent();
        let [rows, columns] = extent[..] else { return Err("Muon is known of matrices".into()) };
        let part = match rule.taken {
            Taken::MomentumBefore => Part::StateBefore,
            _ => Part::StateAfter,
        };
        let states = &supposed.rule.names().states[0].recorded;
        let gradient = self.gathered(supposed.gradient, &boxes, &place)?;
        let moment = match self.factor(tensors.parameter, states, part) {
            Some(key) => self.gathered(key, &boxes, &place)?,
            None if rule.taken == Taken::Gradient => gradient.clone(),
            None => return Err("the momentum that is made orthogonal was not recorded".into()),
        };
        let momentum = supposed.rule.names().number(supposed.hyper, "momentum");
        let mixed = gradient.iter().zip(&moment);
        let mixed: Vec<f64> =
            mixed.map(|(g, m)| rule.mixed(g * supposed.coefficient, *m, momentum)).collect();
        let stored = inventory.precision(tensors.after);
        let format = if rule.is_optax { stored.unwrap_or(Precision::F32) } else { Precision::Bf16 };
        let newton = Newton {
            coefficients: rule.coefficients,
            times: rule.times,
            eps: rule.eps,
            adds_eps: rule.is_optax,
            format,
        };
        let made = orthogonalised(&mixed, (rows as usize, columns as usize), &newton)?;
        let names = ("orthogonal", "orthogonal_variance");
        let shape = Shape::Plane(place);
        Ok(vec![
            Whole { names, shape, values: made.values, variances: made.variances },
            Whole::number(("alike", "alike_variance"), 1.0, made.alike),
        ])
    }
}

/// How much of a square enters the second moment.
fn rate(rule: &Adafactor, unit: f64) -> Whole {
    // The power is computed in f32, whatever the parameter is stored in.
    let unit = unit.min(Precision::F32.unit_roundoff());
    Whole::number(("rate", "rate_variance"), rule.rate(), 4.0 * unit * rule.rate())
}

/// The last two dimensions of a shape.
fn last_two(shape: &[u64]) -> (usize, usize) {
    match shape {
        [.., rows, columns] => (*rows as usize, *columns as usize),
        [one] => (1, *one as usize),
        [] => (1, 1),
    }
}
