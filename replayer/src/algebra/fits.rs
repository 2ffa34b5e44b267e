//! Numbers that fit a recorded step of an optimizer best, by least squares. They decide nothing by
//! themselves: a supposition with them is judged like any other.

use backtape::shard::TensorKey;

use super::inventory::Piece;
use super::judge::{Judge, Operand, arithmetic};
use super::supposed::{Supposed, Tensors, hyper_numbers};

/// What fits the change of a parameter.
pub(super) struct Fit {
    /// The factor of the whole change, its weight decay included.
    pub factor: f64,
    /// The weight decay, where the rest of the change is as the rule gives it; NaN where the rule has none.
    pub weight_decay: f64,
    /// The factor of the change without its weight decay, and the weight decay beside it.
    pub apart: Option<(f64, f64)>,
}

/// Sums of products of two directions x and y with each other and with a vector z.
#[derive(Default)]
struct Plane {
    xx: f64,
    xy: f64,
    yy: f64,
    xz: f64,
    yz: f64,
    zz: f64,
}

impl Plane {
    fn add(&mut self, weight: f64, [x, y, z]: [f64; 3]) {
        self.xx += weight * x * x;
        self.xy += weight * x * y;
        self.yy += weight * y * y;
        self.xz += weight * x * z;
        self.yz += weight * y * z;
        self.zz += weight * z * z;
    }

    /// The coefficients of z by both directions, where these are two.
    fn solved(&self) -> Option<(f64, f64)> {
        let determinant = self.xx * self.yy - self.xy * self.xy;
        // Directions that are one but for rounding.
        let is_two = determinant > 1e-9 * self.xx * self.yy;
        is_two.then(|| {
            let x = (self.xz * self.yy - self.yz * self.xy) / determinant;
            (x, (self.yz * self.xx - self.xz * self.xy) / determinant)
        })
    }

    /// The share of z, in its norm, that both directions leave.
    fn left(&self, (x, y): (f64, f64)) -> f64 {
        let left = self.zz - x * self.xz - y * self.yz;
        (left.max(0.0) / self.zz.max(f64::MIN_POSITIVE)).sqrt()
    }
}

impl Judge<'_> {
    /// The numbers that fit the change of a parameter best.
    pub(super) fn fitted(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
    ) -> Option<Fit> {
        let declared = arithmetic(self.inventory.precision(tensors.after), None);
        let still = Supposed { weight_decay: Some(0.0), ..supposed.clone() };
        let (mut whole, mut apart) = (Plane::default(), Plane::default());
        let wholes = self.wholes(tensors, piece, supposed).ok()?;
        for part in crate::assemble::pieces(&piece.place, 8) {
            let operands = self.operands(tensors, supposed, &wholes, &part).ok()?;
            let rule = supposed.rule.stage(&operands, &declared, "update").ok()?;
            let alone = self.operands(tensors, &still, &wholes, &part).ok()?;
            let alone = supposed.rule.stage(&alone, &declared, "update").ok()?;
            let before = widened(&operands, "before")?;
            // Of a parameter that is large beside its change the difference is coarse.
            let change = widened(&operands, "update").or_else(|| {
                let after = widened(&operands, "after")?;
                Some(after.iter().zip(&before).map(|(after, before)| after - before).collect())
            })?;
            for (at, (p, change)) in before.iter().zip(&change).enumerate() {
                // The change is rounded as the parameter is, and by itself: the finer it was kept the
                // more it says.
                let squares = (p + change).powi(2) + rule[at].powi(2);
                let weight = if squares > 0.0 { 1.0 / squares } else { 0.0 };
                whole.add(weight, [rule[at], *p, *change]);
                apart.add(weight, [alone[at], *p, *change]);
            }
        }
        let lr = self.learning_rate(supposed)?;
        let numbers = hyper_numbers(supposed).ok()?;
        // A declared formula need not have one.
        let decay = numbers.iter().find(|(name, _)| *name == "weight_decay");
        let decay = decay.map_or(f64::NAN, |(_, value)| *value);
        // With the rule's change as it is, what is left is a multiple of the parameter.
        let along = (whole.yz - whole.xy) / whole.yy;
        let of_apart = |(factor, along): (f64, f64)| (factor, -along / (lr * factor));
        (whole.xx > 0.0 && whole.yy > 0.0 && lr != 0.0).then(|| Fit {
            factor: whole.xz / whole.xx,
            weight_decay: decay - along / lr,
            apart: apart.solved().map(of_apart).filter(|(factor, _)| *factor != 0.0),
        })
    }

    /// What a tensor of the state is of the state before and of the gradient, or its square, where
    /// it is a combination of the two, in words. `explained`: the relative error of rounding.
    pub(super) fn combination(
        &self,
        tensors: &Tensors<'_>,
        piece: &Piece,
        supposed: &Supposed<'_>,
        (name, key, explained): (&str, &TensorKey, f64),
    ) -> Option<String> {
        let state = supposed.rule.names().states.iter().find(|state| state.after == name)?;
        let declared = arithmetic(self.inventory.precision(tensors.after), None);
        let wholes = self.wholes(tensors, piece, supposed).ok()?;
        let mut planes = [(); 4].map(|()| Plane::default());
        for part in crate::assemble::pieces(&piece.place, 8) {
            let operands = self.operands(tensors, supposed, &wholes, &part).ok()?;
            let right = supposed.rule.stage(&without(operands, name), &declared, name).ok()?;
            let operands = self.operands(tensors, supposed, &wholes, &part).ok()?;
            let (before, grad) = (widened(&operands, state.before)?, widened(&operands, "grad")?);
            let captured = self.inventory.read_box(key, tensors.rank, &part).ok()?;
            for (at, g) in grad.iter().enumerate() {
                planes[0].add(1.0, [before[at], *g, captured[at]]);
                planes[1].add(1.0, [before[at], *g, right[at]]);
                planes[2].add(1.0, [before[at], g * g, captured[at]]);
                planes[3].add(1.0, [before[at], g * g, right[at]]);
            }
        }
        [(0, "the gradient"), (2, "the square of the gradient")].into_iter().find_map(|(at, of)| {
            let is_made = |at: usize| {
                let solved = planes[at].solved()?;
                (planes[at].left(solved) <= 4.0 * explained).then_some(solved)
            };
            let ((a, b), (x, y)) = (is_made(at)?, is_made(at + 1)?);
            let is_same = |one: f64, other: f64| (one - other).abs() <= 8.0 * explained.max(1e-9);
            if is_same(a, x) && is_same(b, y) {
                return None;
            }
            // As many decimals as rounding leaves.
            let digits = (-(8.0 * explained).log10()).floor().clamp(1.0, 4.0) as usize;
            let [a, b, x, y] = [a, b, x, y].map(|number| format!("{number:.digits$}"));
            Some(format!(
                "it is {a} x the state before and {b} x {of}, and should be {x} x and {y} x"
            ))
        })
    }
}

/// The operands without a stage, so that it is computed and not read.
pub(super) fn without<'a>(operands: Vec<Operand<'a>>, name: &str) -> Vec<Operand<'a>> {
    operands.into_iter().filter(|operand| operand.name != name).collect()
}

pub(super) fn widened(operands: &[Operand<'_>], name: &str) -> Option<Vec<f64>> {
    Some(operands.iter().find(|operand| operand.name == name)?.values.clone().widened())
}
