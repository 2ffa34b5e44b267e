//! Every option of the head against loops over f64 scalars, on every path, fast and
//! emulated. The loops are written out here and know no tiles; the bounds are worst
//! cases of the operations counted one by one, first order, and 5 % for the higher ones.

use super::*;
use crate::kernels::matrix::{Matrix, Values};
use crate::kernels::transform::Transform;
use proptest::prelude::*;

/// tanh errs by 4 units in the last place, 8 u.
const TANH: f64 = 8.0;

#[derive(Debug, Clone)]
struct Options {
    bias: bool,
    given: bool,
    scale: f64,
    softcap: Option<f64>,
    mask: Option<f64>,
    smooth: bool,
}

/// A head with its options, and what each token's loss has upstream.
struct Head {
    fixture: Fixture,
    options: Options,
    bias: Vec<f64>,
    given: Vec<f32>,
    cotangents: [Vec<f64>; 3],
}

impl Head {
    fn new(sizes: (usize, usize, usize, usize), options: Options) -> Self {
        let (tokens, depth, vocab, valid) = sizes;
        let depth = if options.given { 0 } else { depth };
        let fixture = Fixture::new(tokens, depth, vocab, valid);
        let wave = |count: usize, step: f32| (0..count).map(move |i| 3.0 * (i as f32 * step).sin());
        // Columns beyond the valid vocabulary must not be read.
        let poison = |value: f32, col: usize| if col < valid { value } else { f32::NAN };
        let given = wave(tokens * vocab, 0.7).enumerate();
        let smooth = |g: &f32| if options.smooth { -0.1 * f64::from(*g) } else { 0.0 };
        let smooth = fixture.g_lse.iter().map(smooth).collect();
        Head {
            bias: wave(vocab, 1.3).enumerate().map(|(v, x)| poison(x, v).into()).collect(),
            given: given.map(|(i, x)| poison(x, i % vocab)).collect(),
            cotangents: [fixture.g_lse_f64(), fixture.g_label_f64(), smooth],
            fixture,
            options,
        }
    }

    fn inputs(&self) -> HeadInputs<'_> {
        let Fixture { tokens, vocab, .. } = self.fixture;
        let given = Matrix { rows: tokens, cols: vocab, values: Values::F32(&self.given) };
        let Options { scale, softcap, mask, .. } = self.options;
        HeadInputs {
            bias: self.options.bias.then_some(&self.bias),
            given: self.options.given.then_some(given),
            transform: Transform { scale, softcap, ..Transform::NONE },
            mask,
            ..self.fixture.inputs()
        }
    }

    fn cotangents(&self) -> Cotangents<'_, f64> {
        let [lse, label, smooth] = &self.cotangents;
        Cotangents { lse, label, smooth }
    }
}

/// A value, with how far a policy's result may be from it.
#[derive(Clone, Copy, Default)]
struct Bounded {
    value: f64,
    error: f64,
}

impl Bounded {
    fn check(self, got: f64, what: &str) {
        let bound = 1.05 * self.error + 1e-37;
        let Bounded { value, .. } = self;
        let close = (got - value).abs() <= bound || got == value;
        assert!(close, "{what}: {got:e} is not {value:e} within {bound:e}");
    }
}

/// Exact results of one head, with bounds in a unit roundoff.
struct Exact {
    logits: Vec<Bounded>,
    /// Computes them from the raw logits and the sums of magnitudes of those.
    dlogits: Vec<(Bounded, f64)>,
    lse: Vec<Bounded>,
    logit_sum: Vec<Bounded>,
}

impl Exact {
    fn new(head: &Head, u: f64) -> Self {
        let Fixture { tokens, valid, .. } = head.fixture;
        let logits: Vec<Bounded> =
            (0..tokens * valid).map(|i| Exact::logit(head, i / valid, i % valid, u)).collect();
        let row = |t: usize| &logits[t * valid..(t + 1) * valid];
        let lse: Vec<Bounded> = (0..tokens).map(|t| Exact::lse(head, row(t), u)).collect();
        let dlogits = (0..tokens * valid)
            .map(|i| {
                Exact::dlogit(head, (i / valid, i % valid), logits[i], lse[i / valid].value, u)
            })
            .collect();
        let logit_sum = (0..tokens).map(|t| Bounded {
            value: row(t).iter().map(|x| x.value).sum(),
            error: row(t).iter().map(|x| x.error + (valid + 4) as f64 * u * x.value.abs()).sum(),
        });
        let logit_sum = logit_sum.collect();
        Exact { logits, dlogits, lse, logit_sum }
    }

    /// The dot product errs by (D + 1) u sum |q k|; bias, its cast and its addition, the
    /// factor, its cast and the product, by u each; `x / cap`, cap's cast, tanh and the
    /// product by u each of at most |x|, tanh by more. All slopes are at most the scale.
    fn logit(head: &Head, t: usize, v: usize, u: f64) -> Bounded {
        let Fixture { depth, vocab, .. } = head.fixture;
        let dot = |f: &dyn Fn(f64) -> f64| -> f64 {
            let terms = head.fixture.q(t).iter().zip(head.fixture.k(v));
            terms.map(|(&q, &k)| f(f64::from(q) * f64::from(k))).sum()
        };
        let Options { scale, softcap, .. } = head.options;
        let (mut x, mut error) = (dot(&|x| x), (depth + 1) as f64 * u * dot(&f64::abs));
        if head.options.given {
            x = f64::from(head.given[t * vocab + v]);
        }
        if head.options.bias {
            x += head.bias[v];
            error += u * head.bias[v].abs() + u * x.abs();
        }
        x *= scale;
        error = scale.abs() * error + 2.0 * u * x.abs();
        if let Some(cap) = softcap {
            error += (4.0 + TANH) * u * x.abs();
            x = cap * (x / cap).tanh();
        }
        Bounded { value: x, error }
    }

    /// The largest error of a logit; exp: its argument's rounding, at most the range of
    /// the logits in all, and 2 u; a sum of V + P terms and a merge of 4 roundings a tile;
    /// the log, the last addition.
    fn lse(head: &Head, row: &[Bounded], u: f64) -> Bounded {
        let Fixture { vocab, valid, .. } = head.fixture;
        let masked = vocab - valid;
        let mask = head.options.mask.map_or(f64::NEG_INFINITY, |mask| mask);
        let max = row.iter().map(|x| x.value).fold(f64::NEG_INFINITY, f64::max);
        let shift = if masked > 0 { max.max(mask) } else { max };
        let exponentials: f64 = row.iter().map(|x| (x.value - shift).exp()).sum();
        let sum = exponentials + masked as f64 * (mask - shift).exp();
        let value = shift + sum.ln();
        let least = row.iter().map(|x| x.value).fold(shift, f64::min);
        let logits = row.iter().map(|x| x.error).fold(u * mask.abs().min(100.0), f64::max);
        let tiles = vocab.div_ceil(SMALL_TILES.vocab) + 1;
        let steps = (vocab + 4 * tiles + 8) as f64 + 2.0 * (shift - least).max(100.0);
        let error = 2.0 * logits + steps * u + u * (sum.ln().abs() + value.abs() + shift.abs());
        Bounded { value, error }
    }

    /// p: its exponent's error and 2 u; each cotangent its cast, product and addition;
    /// the slope `s (1 - t²)` twice the error of t, and 4 u for its own operations.
    fn dlogit(
        head: &Head,
        element: (usize, usize),
        z: Bounded,
        lse: f64,
        u: f64,
    ) -> (Bounded, f64) {
        let (t, v) = element;
        let g = head.cotangents();
        let Options { scale, softcap, .. } = head.options;
        let exponent = z.value - lse;
        let p = exponent.exp();
        let relative = z.error + u * (lse.abs() + exponent.abs() + 2.0);
        let label = if head.fixture.labels[t] as usize == v { g.label[t] } else { 0.0 };
        let parts = [g.lse[t] * p, g.smooth[t], label];
        let size: f64 = parts.iter().map(|x| x.abs()).sum();
        let error = parts[0].abs() * relative + 4.0 * u * size;
        let bend = softcap.map_or((1.0, 0.0), |cap| {
            let tanh = z.value / cap;
            (1.0 - tanh * tanh, 2.0 * (z.error / cap + 2.0 * u) + 4.0 * u)
        });
        let (slope, slope_error) = (scale * bend.0, scale.abs() * (bend.1 + 2.0 * u));
        let total = size * slope_error + slope.abs() * (error + u * size);
        let value = parts.iter().sum::<f64>() * slope;
        (Bounded { value, error: total }, size * slope.abs())
    }

    /// `sum factor dlogits`: the error of each term, and as many roundings as there are terms, plus
    /// 8.
    fn sum(terms: impl Iterator<Item = ((Bounded, f64), f64)>, u: f64) -> Bounded {
        let mut sum = Bounded::default();
        let (mut size, mut count) = (0.0, 8.0 + 8.0);
        for ((g, added), factor) in terms {
            sum.value += g.value * factor;
            sum.error += g.error * factor.abs();
            size += added * factor.abs();
            count += 1.0;
        }
        sum.error += count * u * size;
        sum
    }
}

/// Forward, backward and plane of one policy. A reference in f64 rounds as much as a
/// policy in f64 does: `u` is then twice the unit roundoff.
fn assert_policy(policy: &Policy, head: &Head, exact: &Exact, u: f64) {
    let Fixture { tokens, depth, vocab, valid, .. } = head.fixture;
    let inputs = head.inputs();
    let computed = forward(policy, &inputs, SMALL_TILES, &NoProgress);
    let given: Vec<f64> = exact.lse.iter().map(|lse| lse.value).collect();
    for t in 0..tokens {
        exact.lse[t].check(computed.lse[t], &format!("lse[{t}]"));
        exact.logit_sum[t].check(computed.logit_sum[t], &format!("logit_sum[{t}]"));
        let label = inputs.label(t).map_or(Bounded::default(), |y| exact.logits[t * valid + y]);
        label.check(computed.label_logits[t], &format!("label_logits[{t}]"));
    }
    let k = |v: usize, d: usize| f64::from(head.fixture.k[v * depth + d]);
    let q = |t: usize, d: usize| f64::from(head.fixture.q[t * depth + d]);
    let exact_dlogit = |t: usize, v: usize| exact.dlogits[t * valid + v];
    let cotangents = head.cotangents();
    let mut seen = 0;
    let mut on_dk = |block: DkParts| {
        for (index, v) in block.rows.clone().enumerate() {
            seen += 1;
            let column = |factor: &dyn Fn(usize) -> f64| match v < valid {
                true => Exact::sum((0..tokens).map(|t| (exact_dlogit(t, v), factor(t))), u),
                false => Bounded { value: 0.0, error: -1e-37 / 1.05 },
            };
            column(&|_| 1.0).check(block.dbias[index], &format!("dbias[{v}]"));
            for d in 0..depth {
                column(&|t| q(t, d)).check(block.dk[index * depth + d], &format!("dk[{v}, {d}]"));
            }
        }
    };
    let dq = backward(policy, &inputs, &given, &cotangents, SMALL_TILES, &NoProgress, &mut on_dk);
    assert_eq!(seen, vocab);
    assert_eq!(dq.dq_lse.len(), if policy.path == Path::Fused { tokens * depth } else { 0 });
    for t in 0..tokens {
        for d in 0..depth {
            let wanted = Exact::sum((0..valid).map(|v| (exact_dlogit(t, v), k(v, d))), u);
            wanted.check(dq.dq[t * depth + d], &format!("dq[{t}, {d}]"));
        }
    }
    assert_plane(policy, head, exact, &given);
}

fn assert_plane(policy: &Policy, head: &Head, exact: &Exact, lse: &[f64]) {
    let Fixture { tokens, vocab, valid, .. } = head.fixture;
    let (inputs, cotangents) = (head.inputs(), head.cotangents());
    let mask = head.options.mask.unwrap_or(f64::NEG_INFINITY);
    let mut seen = vec![false; tokens * vocab];
    plane(policy, &inputs, lse, &cotangents, SMALL_TILES, &NoProgress, &mut |tile| {
        let width = tile.cols.len();
        for (index, (&logit, &dlogit)) in tile.logits.iter().zip(tile.dlogits).enumerate() {
            let (t, v) = (tile.tokens.start + index / width, tile.cols.start + index % width);
            assert!(!std::mem::replace(&mut seen[t * vocab + v], true), "each once");
            if v < valid {
                exact.logits[t * valid + v].check(logit, &format!("logit[{t}, {v}]"));
                exact.dlogits[t * valid + v].0.check(dlogit, &format!("dlogit[{t}, {v}]"));
            } else {
                let masked = logit == mask || (logit - mask).abs() <= 6e-8 * mask.abs();
                assert!(masked && dlogit == 0.0, "{logit} {dlogit} beyond the vocabulary");
            }
        }
    });
    assert!(seen.iter().all(|&seen| seen));
}

/// Every path by GEMMs, by the emulator in each order, and in f64.
fn f32_policies() -> Vec<Policy> {
    let orders =
        [Order::Sequential, Order::Blocked(5), Order::Pairwise, Order::Kahan, Order::Neumaier];
    let sum = |order| Sum { precision: Precision::F32, order };
    let base = [Policy::plain_f32(), Policy::fused_f32(), Policy::chunked_f32()];
    let emulated = base
        .into_iter()
        .flat_map(|policy| orders.map(|order| Policy { sums: Sums::all(sum(order)), ..policy }));
    base.into_iter().chain(emulated).collect()
}

fn assert_all(head: &Head) {
    let u = Precision::F32.unit_roundoff();
    let exact = Exact::new(head, u);
    for policy in f32_policies() {
        assert_policy(&policy, head, &exact, u);
    }
    let u = 2.0 * Precision::F64.unit_roundoff();
    let exact = Exact::new(head, u);
    let chunked = Policy { path: Path::Chunked, ..Policy::plain_f64() };
    for policy in [Policy::plain_f64(), Policy::fused_f64(), chunked] {
        assert_policy(&policy, head, &exact, u);
    }
}

fn options() -> impl Strategy<Value = Options> {
    let softcap = prop_oneof![Just(None), (2.0f64..30.0).prop_map(Some)];
    let mask = prop_oneof![
        Just(None),
        Just(Some(f64::NEG_INFINITY)),
        (-5.0f64..15.0).prop_map(Some),
        Just(Some(-1e4)),
    ];
    let scale = prop_oneof![Just(1.0), 0.3f64..2.0];
    (any::<bool>(), any::<bool>(), scale, softcap, mask, any::<bool>()).prop_map(
        |(bias, given, scale, softcap, mask, smooth)| Options {
            bias,
            given,
            scale,
            softcap,
            mask,
            smooth,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_options_on_any_path_are_what_loops_over_f64_scalars_give(options in options()) {
        assert_all(&Head::new((22, 13, 61, 57), options));
    }
}

const NONE: Options =
    Options { bias: false, given: false, scale: 1.0, softcap: None, mask: None, smooth: false };

#[test]
fn each_option_alone_is_what_loops_over_f64_scalars_give() {
    for options in [
        NONE,
        Options { bias: true, ..NONE },
        Options { given: true, ..NONE },
        Options { scale: 0.5, ..NONE },
        Options { softcap: Some(3.0), ..NONE },
        Options { mask: Some(2.0), ..NONE },
        // A mask value far above every logit: exp overflows unless the maximum includes it.
        Options { mask: Some(300.0), ..NONE },
        Options { smooth: true, ..NONE },
    ] {
        assert_all(&Head::new((13, 5, 40, 37), options.clone()));
        assert_all(&Head::new((7, 3, 33, 33), options));
    }
}

/// Steps with these options have the bits of the emulation, with stored and with recomputed logits.
#[test]
fn a_step_has_the_bits_of_the_emulation_whatever_the_options() {
    let options = Options {
        bias: true,
        given: false,
        scale: 0.7,
        softcap: Some(5.0),
        mask: Some(1.0),
        smooth: true,
    };
    let head = Head::new((22, 13, 61, 57), options);
    let Fixture { tokens, depth, vocab, valid, .. } = head.fixture;
    let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let cotangents = head.cotangents.each_ref().map(|values| narrow(values));
    let [g_lse, g_label, smooth] = &cotangents;
    let narrow = &Cotangents { lse: &g_lse[..], label: g_label, smooth };
    let inputs = head.inputs();
    for policy in policies() {
        let tiles = match policy.path {
            Path::Plain => Tiles { tokens, vocab: valid },
            _ => SMALL_TILES,
        };
        let emulated = forward(&policy, &inputs, tiles, &NoProgress);
        let mut dk = Vec::new();
        let wide = &head.cotangents();
        let dq =
            backward(&policy, &inputs, &emulated.lse, wide, tiles, &NoProgress, &mut |block| {
                dk.extend_from_slice(block.dk);
            });
        for limit in [0, 64 << 20] {
            let (mut lse, mut labels) = (vec![f32::NAN; tokens], vec![f32::NAN; tokens]);
            let (mut step_dq, mut step_dk) =
                (vec![f32::NAN; tokens * depth], vec![f32::NAN; vocab * depth]);
            let outputs = StepOutputs {
                lse: &mut lse,
                label_logits: &mut labels,
                dq: &mut step_dq,
                dk: &mut step_dk,
            };
            let mut space = Workspace::new(limit);
            match policy.path {
                Path::Plain => {
                    plain_step(&policy, &inputs, narrow, &mut space, &NoProgress, outputs)
                }
                _ => fused_step(&policy, &inputs, narrow, tiles, &mut space, &NoProgress, outputs),
            }
            assert!(widened(&lse) == emulated.lse && widened(&labels) == emulated.label_logits);
            assert!(widened(&step_dq) == dq.dq && widened(&step_dk) == dk, "{policy:?} {limit}");
        }
    }
}

/// As an eager bf16 job does it: the product, then bias, factor and softcap, each a bf16
/// tensor of its own.
#[test]
fn logits_are_rounded_after_each_option() {
    let half = Precision::Bf16;
    let options = Options { bias: true, scale: 0.7, softcap: Some(5.0), ..NONE };
    let mut head = Head::new((9, 4, 20, 18), options);
    // Sums of products of small integers are exact in any order.
    head.fixture.q.iter_mut().for_each(|q| *q = (*q * 8.0).round());
    head.fixture.k.iter_mut().for_each(|k| *k = (*k * 8.0).round());
    let lse = vec![3.0; 9];
    let (inputs, cotangents) = (head.inputs(), head.cotangents());
    let fast = Policy { logits: half, ..Policy::fused_f32() };
    let slow = Policy { product: Precision::Tf32, ..fast };
    for policy in [fast, slow] {
        plane(&policy, &inputs, &lse, &cotangents, SMALL_TILES, &NoProgress, &mut |tile| {
            for (index, &got) in tile.logits.iter().enumerate() {
                let (t, v) = (index / tile.cols.len(), index % tile.cols.len());
                let (t, v) = (tile.tokens.start + t, tile.cols.start + v);
                if v >= head.fixture.valid {
                    continue;
                }
                let terms = head.fixture.q(t).iter().zip(head.fixture.k(v));
                let x = half.round(terms.map(|(q, k)| q * k).sum());
                let x = half.round(x + head.bias[v] as f32);
                let x = half.round(x * 0.7);
                let z = f64::from(5.0 * (f64::from(x / 5.0).tanh() as f32));
                // tanh may differ in its last bits: then by one bf16 number at most, and
                // only next to a tie.
                let near = [z * (1.0 - 4e-7), z * (1.0 + 4e-7)].map(|z| half.round64(z));
                assert!(near.contains(&got), "{policy:?} {t} {v}: {got} is none of {near:?}");
            }
        });
    }
}
