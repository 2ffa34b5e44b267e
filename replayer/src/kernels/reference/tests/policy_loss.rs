//! Tests policy losses against values computed by hand, and against difference quotients.

use super::differences::derivative;
use crate::kernels::reference::policy_loss::{PolicyInputs, PolicyLoss, policy_loss};
use backtape::head::{GrpoDeclaration, KlEstimator, LossAverage, RatioLevel};
use proptest::prelude::*;
use std::f64::consts::LN_2;

/// The inputs of a policy loss, owned.
#[derive(Debug, Clone)]
struct Batch {
    logp: Vec<f64>,
    old: Option<Vec<f64>>,
    advantages: Vec<f64>,
    reference: Option<Vec<f64>>,
    weights: Vec<f64>,
    sequences: Vec<u32>,
    denominator: f64,
}

impl Batch {
    /// Tokens of one sequence each, of weight 1, by their log-ratios.
    fn new(log_ratios: &[f64], advantages: &[f64]) -> Self {
        let tokens = log_ratios.len();
        Batch {
            logp: vec![-1.0; tokens],
            old: Some(log_ratios.iter().map(|x| -1.0 - x).collect()),
            advantages: advantages.to_vec(),
            reference: None,
            weights: vec![1.0; tokens],
            sequences: (0..tokens as u32).collect(),
            denominator: 1.0,
        }
    }

    fn loss(&self, options: &GrpoDeclaration) -> PolicyLoss {
        self.at(options, &self.logp)
    }

    fn at(&self, options: &GrpoDeclaration, logp: &[f64]) -> PolicyLoss {
        self.within(options, logp, 1e-3)
    }

    fn within(&self, options: &GrpoDeclaration, logp: &[f64], kink_tolerance: f64) -> PolicyLoss {
        let inputs = PolicyInputs {
            logp,
            old: self.old.as_deref(),
            advantages: &self.advantages,
            reference: self.reference.as_deref(),
            weights: &self.weights,
            sequences: &self.sequences,
            denominator: self.denominator,
            kink_tolerance,
        };
        policy_loss(options, &inputs)
    }
}

/// A few roundings of numbers of order `wanted`, and of log-ratios of order 1.
fn assert_are(what: &str, got: &[f64], wanted: &[f64]) {
    assert_eq!(got.len(), wanted.len());
    for (got, wanted) in got.iter().zip(wanted) {
        let allowed = 16.0 * f64::EPSILON * (1.0 + wanted.abs());
        assert!((got - wanted).abs() <= allowed, "{what}: {got} is not {wanted}");
    }
}

/// r = 2 above, 1/2 below and 1 inside the bounds 0.8 and 1.3, for both signs of A.
#[test]
fn the_clip_stops_the_gradient_on_the_side_that_the_advantage_gains_on() {
    let batch =
        Batch::new(&[LN_2, LN_2, -LN_2, -LN_2, 0.0, 0.0], &[1.0, -1.0, 1.0, -1.0, 2.0, -2.0]);
    let options = GrpoDeclaration { clip_high: 0.3, ..GrpoDeclaration::default() };
    let result = batch.loss(&options);
    assert_are("loss", &result.terms, &[-1.3, 2.0, -0.5, 0.8, -2.0, 2.0]);
    assert_are("dlogp", &result.dlogp, &[0.0, 2.0, -0.5, 0.0, -2.0, 2.0]);
    assert_eq!(result.at_kink, [false; 6]);
}

#[test]
fn without_old_log_probabilities_the_ratio_is_one_and_has_a_gradient() {
    let batch = Batch { old: None, ..Batch::new(&[9.0, 9.0], &[3.0, -0.5]) };
    for ratio in [RatioLevel::Token, RatioLevel::Sequence] {
        let result = batch.loss(&GrpoDeclaration { ratio, ..GrpoDeclaration::default() });
        assert_are("loss", &result.terms, &[-3.0, 0.5]);
        assert_are("dlogp", &result.dlogp, &[-3.0, 0.5]);
    }
}

#[test]
fn the_dual_clip_bounds_the_loss_of_negative_advantages_alone() {
    let options = GrpoDeclaration { dual_clip: Some(3.0), ..GrpoDeclaration::default() };
    let batch = Batch::new(&[2.0 * LN_2, LN_2, 2.0 * LN_2], &[-1.0, -1.0, 1.0]);
    let result = batch.loss(&options);
    assert_are("loss", &result.terms, &[3.0, 2.0, -1.2]);
    assert_are("dlogp", &result.dlogp, &[0.0, 2.0, 0.0]);
}

/// A ratio that overflows is clipped, and has a gradient of 0, not 0 times infinity.
#[test]
fn an_infinite_ratio_is_clipped_like_any_other() {
    let options = GrpoDeclaration { dual_clip: Some(3.0), ..GrpoDeclaration::default() };
    let result = Batch::new(&[800.0, 800.0], &[1.0, -1.0]).loss(&options);
    assert_are("loss", &result.terms, &[-1.2, 3.0]);
    assert_eq!(result.dlogp, [0.0, 0.0]);
}

/// The ratio is exactly at a bound: without `old` it is exactly 1, and the bounds are set to 1.
#[test]
fn subgradients_at_ties_are_those_of_torch_and_are_flagged() {
    let at_one = |a: f64| Batch { old: None, ..Batch::new(&[0.0], &[a]) };
    let upper = GrpoDeclaration { clip_high: 0.0, ..GrpoDeclaration::default() };
    let lower = GrpoDeclaration { clip_low: 0.0, ..GrpoDeclaration::default() };
    let dual = GrpoDeclaration { dual_clip: Some(1.0), ..GrpoDeclaration::default() };
    for (options, advantage, wanted, kink) in [
        (&upper, 1.0, -1.0, true),
        (&lower, -1.0, 1.0, true),
        (&upper, -1.0, 1.0, false),
        (&lower, 1.0, -1.0, false),
        (&dual, -1.0, 0.5, true),
        (&dual, 1.0, -1.0, false),
    ] {
        let result = at_one(advantage).loss(options);
        assert_eq!((result.dlogp[0], result.at_kink[0]), (wanted, kink), "{options:?}");
    }
    // 1.2 + 5e-4 lies within the tolerance of 1e-3, 1.2 + 2e-3 does not.
    let near = Batch::new(&[1.2005f64.ln(), 1.202f64.ln()], &[1.0, 1.0]);
    assert_eq!(near.loss(&GrpoDeclaration::default()).at_kink, [true, false]);
}

/// d = ref - logp = ln 2.
#[test]
fn the_kl_estimators_are_schulmans() {
    let mut batch = Batch::new(&[0.0], &[0.0]);
    batch.reference = Some(vec![-1.0 + LN_2]);
    for (kl, term, slope) in [
        (KlEstimator::K1, -LN_2, 1.0),
        (KlEstimator::K2, LN_2 * LN_2 / 2.0, -LN_2),
        (KlEstimator::K3, 1.0 - LN_2, -1.0),
    ] {
        let options = GrpoDeclaration { kl, kl_beta: 0.5, ..GrpoDeclaration::default() };
        let result = batch.loss(&options);
        assert_are("kl", &result.terms, &[0.5 * term]);
        assert_are("slope", &result.dlogp, &[0.5 * slope]);
    }
}

/// Log-ratios ln 2 and 0 of one sequence: its ratio is √2, inside wide bounds; each
/// token's half of the mean carries the gradient of both.
#[test]
fn a_sequences_ratio_is_the_geometric_mean_and_every_token_moves_it() {
    let mut batch = Batch::new(&[LN_2, 0.0, 5.0], &[1.0, 3.0, f64::NAN]);
    batch.sequences = vec![7, 7, 7];
    batch.weights[2] = 0.0;
    let wide = GrpoDeclaration {
        ratio: RatioLevel::Sequence,
        clip_high: 1.0,
        ..GrpoDeclaration::default()
    };
    let root = 2f64.sqrt();
    let result = batch.loss(&wide);
    assert_are("loss", &result.terms, &[-root, -3.0 * root, 0.0]);
    assert_are("dlogp", &result.dlogp, &[-2.0 * root, -2.0 * root, 0.0]);
    let clipped = batch.loss(&GrpoDeclaration { clip_high: 0.2, ..wide });
    assert_are("loss", &clipped.terms, &[-1.2, -3.6, 0.0]);
    assert_are("dlogp", &clipped.dlogp, &[0.0; 3]);
}

/// √2 is near the upper bound, where the gradient of a positive advantage jumps: that gradient
/// reaches every token of the sequence.
#[test]
fn a_kink_of_one_token_is_one_of_all_that_share_its_ratio() {
    let mut batch = Batch::new(&[LN_2, 0.0, 0.5 * LN_2], &[1.0, -1.0, -1.0]);
    batch.sequences = vec![1, 1, 2];
    let clip_high = 2f64.sqrt() - 1.0 + 5e-4;
    let ratio = RatioLevel::Sequence;
    let result = batch.loss(&GrpoDeclaration { ratio, clip_high, ..GrpoDeclaration::default() });
    assert_eq!(result.at_kink, [true, true, false]);
}

/// Sequences of one and three tokens, and one that is masked away.
#[test]
fn averages_are_over_tokens_or_over_sequences() {
    let mut batch = Batch::new(&[0.0; 5], &[1.0, 2.0, 4.0, 6.0, f64::NAN]);
    batch.sequences = vec![4, 9, 9, 9, 2];
    batch.weights = vec![1.0, 1.0, 0.5, 0.5, 0.0];
    batch.denominator = 2.0;
    let token = batch.loss(&GrpoDeclaration::default());
    assert_are("token", &token.terms, &[-0.5, -1.0, -1.0, -1.5, 0.0]);
    let average = LossAverage::Sequence;
    let sequence = batch.loss(&GrpoDeclaration { average, ..GrpoDeclaration::default() });
    assert_are("sequence", &sequence.terms, &[-0.5, -0.5, -0.5, -0.75, 0.0]);
    assert_are("dlogp", &sequence.dlogp, &sequence.terms);
    batch.weights.fill(0.0);
    batch.denominator = 0.0;
    let nothing = batch.loss(&GrpoDeclaration::default());
    assert_eq!((nothing.terms, nothing.dlogp), (vec![0.0; 5], vec![0.0; 5]));
}

fn batches() -> impl Strategy<Value = Batch> {
    let token = (-3.0f64..-0.1, -0.9f64..0.9, -2.0f64..2.0, -1.0f64..1.0, 0usize..4, 0u32..3);
    (prop::collection::vec(token, 1..9), 0.5f64..5.0).prop_map(|(tokens, denominator)| Batch {
        logp: tokens.iter().map(|t| t.0).collect(),
        old: Some(tokens.iter().map(|t| t.0 - t.1).collect()),
        advantages: tokens.iter().map(|t| t.2).collect(),
        reference: Some(tokens.iter().map(|t| t.0 + t.3).collect()),
        weights: tokens.iter().map(|t| [0.0, 1.0, 1.0, 0.25][t.4]).collect(),
        sequences: tokens.iter().map(|t| t.5 * 1_000_000_007).collect(),
        denominator,
    })
}

fn options() -> impl Strategy<Value = GrpoDeclaration> {
    let dual_clip = prop_oneof![Just(None), (1.3f64..2.0).prop_map(Some)];
    let kl = prop_oneof![Just(KlEstimator::K1), Just(KlEstimator::K2), Just(KlEstimator::K3)];
    let switches = (any::<bool>(), any::<bool>());
    let bounds = (0.05f64..0.5, 0.05f64..0.5);
    (bounds, dual_clip, prop_oneof![Just(0.0), 0.01f64..1.0], kl, switches).prop_map(
        |((clip_low, clip_high), dual_clip, kl_beta, kl, (shared, sequences))| GrpoDeclaration {
            clip_low,
            clip_high,
            dual_clip,
            kl_beta,
            kl,
            ratio: if shared { RatioLevel::Sequence } else { RatioLevel::Token },
            average: if sequences { LossAverage::Sequence } else { LossAverage::Token },
        },
    )
}

proptest! {
    #[test]
    fn dlogp_is_the_difference_of_the_loss_away_from_kinks(
        batch in batches(),
        options in options(),
    ) {
        // The coarsest step is 2e-2, which moves a ratio of up to e^0.9 by up to 6e-2:
        // bounds that near are left out.
        let result = batch.within(&options, &batch.logp, 6e-2);
        for token in 0..batch.logp.len() {
            if batch.weights[token] == 0.0 {
                prop_assert_eq!((result.terms[token], result.dlogp[token]), (0.0, 0.0));
                continue;
            }
            if result.at_kink[token] {
                continue;
            }
            let along = |offset: f64| {
                let mut logp = batch.logp.clone();
                logp[token] += offset;
                batch.at(&options, &logp).terms.iter().sum()
            };
            let (wanted, allowed) = derivative(&along);
            let got = result.dlogp[token];
            prop_assert!((got - wanted).abs() <= allowed, "{} is not {} +- {}", got, wanted, allowed);
        }
    }
}
