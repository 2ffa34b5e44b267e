//! RMSNorm, forward and backward: `y = x / √(mean(x²) + ε) (w + offset)` over the columns of each
//! row (Zhang and Sennrich 2019).

use super::table::op;
use crate::kernels::number::Number;

/// The options of an RMSNorm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub epsilon: f64,
    /// Added to the weight: 1 in Gemma's layers, else 0.
    pub offset: f64,
}

impl RmsNorm {
    /// `x / √(mean(x²) + ε)`; a job may keep it in the dtype of its inputs.
    fn normalised<N: Number>(&self, x: N, rstd: N) -> N {
        (x * rstd).step()
    }

    fn factor<N: Number>(&self, weight: N) -> N {
        weight.plus(self.offset)
    }

    /// The gradient of the normalised rows; a job may keep it in the dtype of its inputs.
    fn upstream<N: Number>(&self, weight: N, dy: N) -> N {
        (dy * self.factor(weight)).step()
    }
}

op! {
    RmsNorm = "rms_norm";
    inputs {
        x: Plane, "the rows that are normalised";
        weight: Columns, "the factor of each column";
        dy: Plane, "the gradient of y";
    }
    stages {
        rstd: Rows Forward OverColumns |op, x| x.clone() * x,
            then |op, sum, columns| {
                let root = sum.over(columns).plus(op.epsilon).sqrt();
                root.constant(1.0) / root
            },
            "one over the root of each row's mean square";
        y: Plane Forward Each
            |op, x, rstd, weight| op.normalised(x, rstd) * op.factor(weight),
            "the normalised rows times the weight";
        projection: Rows Backward OverColumns
            |op, x, rstd, weight, dy| op.upstream(weight, dy) * op.normalised(x, rstd),
            then |op, sum, columns| sum.over(columns),
            "how much of each row's gradient lies along the row itself, a mean over its columns";
        dx: Plane Backward Each
            |op, x, rstd, weight, dy, projection| {
                let along = op.normalised(x, rstd.clone()) * projection;
                rstd * (op.upstream(weight, dy) - along)
            },
            "the gradient of x";
        dweight: Columns Backward OverRows |op, x, rstd, dy| dy * op.normalised(x, rstd),
            "the gradient of the weight, a sum over the rows";
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;
    use crate::kernels::matrix::{Matrix, Values};
    use crate::kernels::policy::Sum;
    use crate::kernels::round::Precision;
    use crate::ops::walker::Recorded;
    use crate::ops::{Declared, Judged, Judgement, Op, Tensors, walk};

    /// What a job may get wrong.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Fault {
        None,
        EpsilonForgotten,
        OffsetForgotten,
        ProjectionForgotten,
        ProjectionOfOneColumnLess,
        RstdSquaredInDx,
        LastRowLost,
        SumInBf16,
    }

    /// A job's tensors, each in f32 as it was stored.
    struct Job {
        rows: usize,
        columns: usize,
        op: RmsNorm,
        stored: Precision,
        tensors: Vec<(&'static str, Vec<f32>)>,
    }

    /// The oracle: a job in loops of f32 that shares nothing with the formulas above. `eager`: as
    /// Llama's layer, which keeps steps in the dtype of its inputs; else a fused kernel.
    fn job(draw: &mut Draw, fault: Fault, (stored, eager): (Precision, bool)) -> Job {
        let (rows, columns) = (1 + draw.below(40), 2 + draw.below(300));
        let op = RmsNorm {
            epsilon: if fault == Fault::EpsilonForgotten {
                0.1
            } else {
                [1e-6, 1e-2][draw.below(2)]
            },
            offset: if fault == Fault::OffsetForgotten { 1.0 } else { draw.below(2) as f64 },
        };
        let keep = |x: f32| stored.round(x);
        let step = |x: f32| if eager { keep(x) } else { x };
        let size = 10f64.powf(2.0 * draw.unit() - 1.5);
        let mut numbers = |n: usize, size: f64| -> Vec<f32> {
            (0..n).map(|_| keep((size * draw.normal()) as f32)).collect()
        };
        let (x, dy) = (numbers(rows * columns, size), numbers(rows * columns, 1.0));
        let weight = numbers(columns, 0.5);
        let epsilon = if fault == Fault::EpsilonForgotten { 0.0 } else { op.epsilon as f32 };
        let offset = if fault == Fault::OffsetForgotten { 0.0 } else { op.offset as f32 };
        let n = columns as f32;
        let (mut rstds, mut ys, mut projections) = (Vec::new(), Vec::new(), Vec::new());
        let (mut dx, mut dweight) = (Vec::new(), vec![0f32; columns]);
        for row in 0..rows {
            let at = |column: usize| row * columns + column;
            let squares = (0..columns).fold(0f32, |sum, c| sum + x[at(c)] * x[at(c)]);
            let rstd = 1.0 / (squares / n + epsilon).sqrt();
            let normalised: Vec<f32> = (0..columns).map(|c| step(x[at(c)] * rstd)).collect();
            let upstream: Vec<f32> =
                (0..columns).map(|c| step(dy[at(c)] * (weight[c] + offset))).collect();
            let counted = columns - usize::from(fault == Fault::ProjectionOfOneColumnLess);
            let along = (0..counted).fold(0f32, |sum, c| sum + upstream[c] * normalised[c]) / n;
            for c in 0..columns {
                ys.push(keep(normalised[c] * (weight[c] + offset)));
                let back = if fault == Fault::ProjectionForgotten { 0.0 } else { along };
                let factor = if fault == Fault::RstdSquaredInDx { rstd * rstd } else { rstd };
                dx.push(keep(factor * (upstream[c] - normalised[c] * back)));
                if fault == Fault::LastRowLost && row + 1 == rows {
                    continue;
                }
                let sum = dweight[c] + dy[at(c)] * normalised[c];
                dweight[c] =
                    if fault == Fault::SumInBf16 { Precision::Bf16.round(sum) } else { sum };
            }
            rstds.push(rstd);
            projections.push(along);
        }
        let dweight = dweight.into_iter().map(keep).collect();
        let tensors = vec![
            ("x", x),
            ("weight", weight),
            ("dy", dy),
            ("rstd", rstds),
            ("y", ys),
            ("projection", projections),
            ("dx", dx),
            ("dweight", dweight),
        ];
        Job { rows, columns, op, stored, tensors }
    }

    /// Judges a job of which some tensors were not recorded.
    fn judged(job: &Job, without: &[&str], eager: bool) -> Vec<Judged> {
        let extent = |name: &str| match name {
            "weight" | "dweight" => (1, job.columns),
            "rstd" | "projection" => (job.rows, 1),
            _ => (job.rows, job.columns),
        };
        let recorded = job.tensors.iter().filter(|(name, _)| !without.contains(name));
        let tensors: Tensors<'_> = recorded
            .map(|(name, values)| {
                let (rows, cols) = extent(name);
                let is_kept_wide = matches!(*name, "rstd" | "projection");
                let stored = if is_kept_wide { Precision::F32 } else { job.stored };
                let values = Matrix { rows, cols, values: Values::F32(values) };
                (*name, Recorded { values, stored: Some(stored), used_in: None })
            })
            .collect();
        let between = eager.then_some(job.stored);
        let declared = Declared { compute: Precision::F32, between, sum: Sum::NATIVE };
        walk(&job.op, &tensors, &declared)
    }

    fn diverged(judged: &[Judged]) -> Vec<&'static str> {
        judged.iter().filter(|one| one.is_diverged()).map(|one| one.stage.name).collect()
    }

    const KINDS: [(Precision, bool); 3] =
        [(Precision::F32, false), (Precision::Bf16, false), (Precision::Bf16, true)];

    /// Goal: no false alarm, whether the stages in between were recorded or not.
    #[test]
    fn a_right_job_agrees_in_f32_and_bf16_with_fused_and_eager_arithmetic() {
        let mut draw = Draw::new(11);
        for trial in 0..300 {
            let kind = KINDS[trial % 3];
            let job = job(&mut draw, Fault::None, kind);
            for without in [&[][..], &["rstd", "projection"], &["rstd", "y", "projection"]] {
                let judged = judged(&job, without, kind.1);
                for one in &judged {
                    if let Judgement::Diverged(why, _) = &one.judgement {
                        panic!("{trial} {kind:?} without {without:?}: {}: {why}", one.stage.name);
                    }
                }
            }
        }
    }

    /// Goal: the first stage that a fault touches is named, and no stage that it does not touch.
    #[test]
    fn each_fault_is_seen_at_its_stage_and_at_no_other() {
        let mut draw = Draw::new(12);
        let faults: [(Fault, &[&str]); 7] = [
            (Fault::EpsilonForgotten, &["rstd"]),
            (Fault::OffsetForgotten, &["y", "projection", "dx"]),
            (Fault::ProjectionForgotten, &["dx"]),
            (Fault::ProjectionOfOneColumnLess, &["projection"]),
            (Fault::RstdSquaredInDx, &["dx"]),
            (Fault::LastRowLost, &["dweight"]),
            (Fault::SumInBf16, &["dweight"]),
        ];
        for (fault, wanted) in faults {
            let mut seen = 0;
            for _ in 0..30 {
                let job = job(&mut draw, fault, (Precision::F32, false));
                let found = diverged(&judged(&job, &[], false));
                assert!(found.iter().all(|stage| wanted.contains(stage)), "{fault:?}: {found:?}");
                seen += usize::from(found == wanted);
            }
            assert!(seen > 25, "{fault:?} was seen {seen} times of 30");
        }
    }

    #[test]
    fn a_value_that_is_no_number_diverges_and_what_was_not_recorded_is_unchecked() {
        let mut job = job(&mut Draw::new(13), Fault::None, (Precision::F32, false));
        let dx = job.tensors.iter_mut().find(|(name, _)| *name == "dx").unwrap();
        dx.1[0] = f32::NAN;
        let judged = judged(&job, &["dy"], false);
        assert_eq!(diverged(&judged), [""; 0], "without dy nothing of the backward is known");
        assert_eq!(diverged(&self::judged(&job, &[], false)), ["dx"]);
    }

    /// Goal: the backward is the derivative of the forward. Method: central differences in f64 of
    /// `Σ dy y`, the formulas read with plain numbers.
    #[test]
    fn dx_is_the_derivative_of_y() {
        let (mut draw, columns) = (Draw::new(14), 7);
        let op = RmsNorm { epsilon: 1e-3, offset: 1.0 };
        let [x, weight, dy] = [(); 3].map(|()| (0..columns).map(|_| draw.normal()).collect());
        let (x, weight, dy): (Vec<f64>, Vec<f64>, Vec<f64>) = (x, weight, dy);
        let stage = |name: &str| op.stages().iter().position(|s| s.name == name).unwrap();
        let sum = |name: &str, of: &dyn Fn(usize) -> Vec<f64>| {
            let total = (0..columns).map(|c| op.element(stage(name), &of(c))).sum();
            op.finish(stage(name), total, columns as f64)
        };
        let rstd = |x: &[f64]| sum("rstd", &|c| vec![x[c]]);
        let loss = |x: &[f64]| {
            let r = rstd(x);
            (0..columns).map(|c| dy[c] * op.element(stage("y"), &[x[c], r, weight[c]])).sum::<f64>()
        };
        let r = rstd(&x);
        let projection = sum("projection", &|c| vec![x[c], r, weight[c], dy[c]]);
        for c in 0..columns {
            let moved = |by: f64| {
                let mut x = x.clone();
                x[c] += by;
                loss(&x)
            };
            let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            let dx = op.element(stage("dx"), &[x[c], r, weight[c], dy[c], projection]);
            assert!((dx - slope).abs() < 1e-8, "{c}: {dx} {slope}");
        }
    }
}
