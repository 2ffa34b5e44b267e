//! Estimates against the full reference, over many seeds: without bias, within their
//! error bars as often as they say, and blind to nothing gross.

use super::*;
use crate::draw::Draw;
use crate::kernels::matrix::Values;
use crate::kernels::tiles::NoProgress;
use crate::kernels::transform::Transform;
use crate::replay::stratified_sample::stratified;

const D: usize = 6;
const T: usize = 1200;
const V: usize = 60;
const SEEDS: u64 = 300;

/// A head with Zipf-like labels and confident tokens, and its exact dk.
struct Head {
    q: Vec<f64>,
    k: Vec<f64>,
    labels: Vec<u32>,
    lse: Vec<f64>,
    label_logits: Vec<f64>,
    g_lse: Vec<f64>,
    g_label: Vec<f64>,
    smooth: Vec<f64>,
    bias: Vec<f64>,
    transform: Transform,
    dk: Vec<f64>,
}

impl Head {
    fn new() -> Head {
        Head::with(Transform::NONE, 0.0)
    }

    /// With a bias of this size, a smoothing of a tenth of it, and this transform.
    fn with(transform: Transform, options: f64) -> Head {
        let mut draw = Draw::new(11);
        let label = |draw: &mut Draw| (58f64.powf(draw.unit()) - 1.0) as u32;
        let labels: Vec<u32> =
            (0..T).map(|t| if t % 11 == 5 { IGNORED } else { label(&mut draw) }).collect();
        let k: Vec<f64> = (0..V * D).map(|_| 0.6 * draw.normal()).collect();
        let mut q: Vec<f64> = (0..T * D).map(|_| draw.normal()).collect();
        for t in (0..T).step_by(7).filter(|&t| labels[t] != IGNORED) {
            (0..D).for_each(|d| q[t * D + d] += 3.0 * k[labels[t] as usize * D + d]);
        }
        let g = |t: usize| if labels[t] == IGNORED { 0.0 } else { 1e-3 * (1 + t % 3) as f64 };
        let g_lse: Vec<f64> = (0..T).map(g).collect();
        let g_label = g_lse.iter().map(|g| -g).collect();
        let smooth = g_lse.iter().map(|g| -0.1 * options * g / (V - 2) as f64).collect();
        let bias = (0..V).map(|_| options * draw.normal()).collect();
        let none = Vec::new;
        let (lse, label_logits, dk) = (none(), none(), none());
        let mut head =
            Head { q, k, labels, lse, label_logits, g_lse, g_label, smooth, bias, transform, dk };
        let forward = reference::forward(&head.inputs(), Tiles::default(), &NoProgress);
        (head.lse, head.label_logits) = (forward.lse, forward.label_logits);
        head.dk = head.exact(&head.labels, &head.g_lse, &head.g_label);
        head
    }

    fn inputs(&self) -> HeadInputs<'_> {
        let (q, k) = (Values::F64(&self.q), Values::F64(&self.k));
        let matrix = |rows, values| Matrix { rows, cols: D, values };
        let plain = HeadInputs::plain(matrix(T, q), matrix(V, k), &self.labels, V - 2);
        HeadInputs { bias: Some(&self.bias), transform: self.transform, ..plain }
    }

    /// dk over all tokens, by the reference.
    fn exact(&self, labels: &[u32], g_lse: &[f64], g_label: &[f64]) -> Vec<f64> {
        let mut dk = vec![0.0; V * D];
        reference::backward(
            &HeadInputs { labels, ..self.inputs() },
            &self.lse,
            &Cotangents { lse: g_lse, label: g_label, smooth: &self.smooth },
            &TermNoise::default(),
            (Tiles::default(), reference::Keep::Both, &NoProgress),
            &mut |block| {
                let parts = block.dk_lse.iter().zip(block.dk_label);
                let target = &mut dk[block.rows.start * D..block.rows.end * D];
                target.iter_mut().zip(parts).for_each(|(x, (a, b))| *x = a + b);
            },
        );
        dk
    }

    fn of(&self) -> Estimated<'_> {
        let (lse, label, smooth) = (&self.g_lse, &self.g_label, &self.smooth);
        Estimated::new(self.inputs(), &self.lse, Cotangents { lse, label, smooth })
    }

    fn sample(&self, n: usize, seed: u64) -> Sample {
        let p = self.label_logits.iter().zip(&self.lse).map(|(z, lse)| (z - lse).exp());
        stratified(&self.labels, &p.collect::<Vec<f64>>(), n, seed)
    }

    fn estimate(&self, n: usize, seed: u64) -> EstimatedRows {
        let mut estimated = None;
        self.of().dk(&self.sample(n, seed), &NoProgress, &mut |rows| estimated = Some(rows));
        estimated.unwrap()
    }

    fn judge(&self, captured: &[f64], n: usize, seed: u64) -> Sampled {
        let captured = Matrix { rows: V, cols: D, values: Values::F64(captured) };
        self.of().against(&captured, &self.sample(n, seed), &NoProgress)
    }
}

fn optioned() -> Head {
    Head::with(Transform { scale: 0.8, softcap: Some(4.0), ..Transform::NONE }, 1.0)
}

#[test]
fn all_tokens_give_dk_itself_and_no_variance_under_every_option() {
    for head in [Head::new(), optioned()] {
        let estimated = head.estimate(T, 1);
        let size = head.dk.iter().map(|x| x.abs()).fold(0.0, f64::max);
        for (x, exact) in estimated.value.iter().zip(&head.dk) {
            assert!((x - exact).abs() <= 1e-13 * size, "{x} {exact}");
        }
        assert!(estimated.variance.iter().all(|v| *v == 0.0));
        let judged = head.judge(&head.dk, T, 1);
        assert!(judged.error < 1e-12 && judged.slope.abs() < 1e-12, "{judged:?}");
        assert_eq!((judged.sampling, judged.slope_bar), (0.0, 0.0));
    }
}

/// Six standard deviations of the mean over the seeds, for every element.
#[test]
fn the_mean_of_the_estimates_is_dk() {
    let head = optioned();
    let (mut sum, mut squares) = (vec![0.0; V * D], vec![0.0; V * D]);
    for seed in 0..SEEDS {
        for (element, x) in head.estimate(60, seed).value.iter().enumerate() {
            let off = x - head.dk[element];
            sum[element] += off;
            squares[element] += off * off;
        }
    }
    let n = SEEDS as f64;
    for element in 0..(V - 2) * D {
        let (mean, sigma) = (sum[element] / n, (squares[element] / n).sqrt());
        assert!(
            mean.abs() <= 6.0 * sigma / n.sqrt(),
            "element {element}: {mean:e}, sigma {sigma:e}"
        );
    }
}

/// Goal: the error bars are the errors. Method: the mean of the variances against the mean
/// of the squared errors, and how often two error bars hold the truth.
#[test]
fn error_bars_have_the_size_of_the_errors_and_hold_the_truth_as_often_as_they_say() {
    let head = Head::new();
    let (mut claimed, mut real, mut inside, mut all) = (0.0, 0.0, 0u32, 0u32);
    for seed in 0..SEEDS {
        let estimated = head.estimate(80, seed);
        for element in 0..(V - 2) * D {
            let off = estimated.value[element] - head.dk[element];
            claimed += estimated.variance[element];
            real += off * off;
            inside += u32::from(off * off <= 4.0 * estimated.variance[element]);
            all += 1;
        }
    }
    assert!((0.9..1.1).contains(&(claimed / real)), "{}", claimed / real);
    let share = f64::from(inside) / f64::from(all);
    assert!(share > 0.88 && share < 0.99, "two error bars hold {share} of the elements");
}

/// Goal: the known defect stays known, and stays no verdict. Method: how often the scale
/// of a correct dk is off by more than three error bars, where a normal is 0.27 % of times.
#[test]
fn few_tokens_of_skewed_terms_make_error_bars_too_short_and_the_sentence_claims_no_more() {
    let head = Head::new();
    let off = |n: usize| {
        let far = |seed| {
            let sampled = head.judge(&head.dk, n, seed);
            sampled.slope.abs() > 3.0 * sampled.slope_bar
        };
        (0..100).filter(|&seed| far(seed)).count()
    };
    assert!(off(400) <= 5, "{}", off(400));
    assert!(off(20) >= 3, "the error bars hold: let them decide ({})", off(20));
    let sentence = head.judge(&head.dk, 20, 1).sentence();
    assert!(sentence.starts_with("estimated from 20 of 1200 tokens: off by "), "{sentence}");
    assert!(sentence.matches("one error bar is").count() == 2, "{sentence}");
}

#[test]
fn gross_divergences_are_seen_from_a_third_of_the_tokens() {
    let head = Head::new();
    let scaled = |by: f64| head.dk.iter().map(|x| x * by).collect::<Vec<f64>>();
    let mut shifted = head.labels.clone();
    shifted.rotate_left(1);
    let g: Vec<f64> =
        (0..T).map(|t| if shifted[t] == IGNORED { 0.0 } else { -head.g_lse[t] }).collect();
    let none = vec![0.0; T];
    let half: Vec<f64> = (0..T).map(|t| if t % 2 == 0 { head.g_lse[t] } else { 0.0 }).collect();
    let half_label: Vec<f64> = half.iter().map(|g| -g).collect();
    let faults = [
        ("twice", scaled(2.0)),
        ("half", scaled(0.5)),
        ("minus", scaled(-1.0)),
        ("zero", scaled(0.0)),
        ("label shift", head.exact(&shifted, &head.g_lse, &g)),
        ("no label part", head.exact(&head.labels, &head.g_lse, &none)),
        ("one of two ranks", head.exact(&head.labels, &half, &half_label)),
    ];
    for (what, captured) in &faults {
        for seed in 0..30 {
            let sampled = head.judge(captured, 400, seed);
            assert!(sampled.off() > 4.0, "{what}, seed {seed}: {sampled:?}");
        }
    }
}

#[test]
fn nan_in_dk_is_seen_by_every_sample() {
    let head = Head::new();
    let mut captured = head.dk.clone();
    captured[V * D - 1] = f64::NAN;
    for n in [1, 2, 40, T] {
        assert_eq!(head.judge(&captured, n, 3).nonfinite, 1);
    }
}
