//! Measures what finite precision does to one step, on its own data: the error of each way of
//! summing the softmax denominators, the error of a finite-difference check at each step size, and
//! whether either can explain a failed gradient check.
//!
//! Captured gradients are only judged by calling `replay`. All numbers are computed from the dumped
//! q, k, labels and weights; where there are too many tokens, from a stratified sample with a seed
//! that is reported.

pub mod difference;
pub mod loss;
pub mod noise;
pub mod summation;
mod verdict;

use backtape::identity::Microbatch;
use backtape::nan::{by_size, larger};
use backtape::role::Role;
use serde::Serialize;

use crate::compare::bound::FALSE_ALARM;
use crate::draw::{Draw, seed_of};
use crate::head::options::HeadError;
use crate::head::step::{StepError, matrix};
use crate::head::{HeadStep, MicrobatchInputs, Roundings, Scores};
use crate::kernels::formula::{log_sum_exp, probability};
use crate::kernels::logits;
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix};
use crate::kernels::round::Precision as Stored;
use crate::kernels::tiles::NoProgress;
use crate::replay::stratified_sample::{Sample, stratified};
use crate::replay::{self, Effort, Request};
use difference::{Check, Differences, Input, check, differences, directions, rms};
use loss::{Loss, max};
use summation::{Method, exact, lambda, relative_error};

/// Name and version of the schema that `--json` writes.
pub const SCHEMA: &str = "backtape.precision/1";

/// Most multiply-adds for the denominators and for the differences, each some ten seconds on two
/// cores.
const SUMMATION_WORK: f64 = 2e9;
const DIFFERENCE_WORK: f64 = 2e10;
/// About how many losses the differences evaluate: for both inputs and four directions, four losses
/// at eleven steps, nine points for the noise, and the higher derivatives.
const EVALUATIONS: f64 = 500.0;
/// Random directions of each input, since differences may be accurate in a single one by chance.
const DIRECTIONS: usize = 4;
/// Rows of logits that are in memory at a time.
const HELD: usize = 64;

/// Which part of the step to measure.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Which microbatch; the first when none is named.
    pub microbatch: Option<u32>,
    /// How many tokens to sample; by default as many as the work limit allows.
    pub tokens: Option<usize>,
}

/// Why precision cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum PrecisionError {
    /// The head's inputs cannot be read.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The declared policy is invalid.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// The head starts from logits or log-probabilities, so that q and k were not recorded.
    #[error(
        "the head starts from recorded {scores}, and precision is shown on sums and differences of q and k: record both with tape.record to have them shown"
    )]
    NoProducts {
        /// The tensor that it starts from.
        scores: &'static str,
    },
    /// No such microbatch.
    #[error("the dump holds no microbatch {asked}: choose one of {recorded} with --microbatch")]
    Microbatch {
        /// The microbatch that was asked for.
        asked: u32,
        /// The microbatches of the dump.
        recorded: String,
    },
    /// The loss has no tokens.
    #[error(
        "no token of {microbatch} has both a label and a weight: its loss is empty, so there is nothing to differentiate; choose another one with --microbatch"
    )]
    NoTokens {
        /// The microbatch, in words.
        microbatch: String,
    },
}

/// The errors of one way of summing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SumReport {
    /// Its name.
    pub method: &'static str,
    /// Largest relative error; NaN if a sum is not finite.
    pub max: f64,
    /// Root mean square relative error.
    pub rms: f64,
    /// The relative error that it cannot exceed.
    pub worst: f64,
    /// The relative error that any of the rows exceeds with a probability of at most 10^-4.
    pub probable: f64,
    /// The token of the largest error.
    pub token: usize,
}

/// Whether the captured gradients agree with the reference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "status", content = "what", rename_all = "snake_case")]
pub enum Gradients {
    /// None were recorded.
    NotRecorded,
    /// These agree.
    Agree(String),
    /// The first stage that diverges.
    Diverge(String),
    /// Why they were not judged.
    NotJudged(String),
}

/// The whole report.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Precision {
    pub schema: &'static str,
    pub run: String,
    pub step: u64,
    /// `microbatch 0`, or `the step`.
    pub of: String,
    /// `q bf16 [64, 16], k bf16 [34, 16]`
    pub inputs: String,
    /// Seed of the sample and of the directions.
    pub seed: u64,
    /// Tokens of the microbatch, those whose denominators were summed, and those whose
    /// loss was differentiated.
    pub tokens: (usize, usize, usize),
    /// Exponentials of one denominator.
    pub terms: usize,
    /// What was assumed about the job's arithmetic.
    pub assumed: String,
    pub sums: Vec<SumReport>,
    /// Largest absolute error of lse with every step in f32, against f64.
    pub lse_f32: f64,
    /// Tokens whose exponentials are not all finite; they are in no other number.
    pub nonfinite: usize,
    /// The f64 loss of the tokens that were differentiated.
    pub loss: f64,
    pub differences: Vec<Differences>,
    pub check: Option<Check>,
    pub gradients: Gradients,
    /// The verdict in one sentence.
    pub verdict: String,
    /// What was not checked, and why.
    pub not_checked: Vec<String>,
}

/// Measures one microbatch of a step.
pub fn precision(step: &HeadStep<'_>, options: &Options) -> Result<Precision, PrecisionError> {
    let microbatch = choose(step, options.microbatch)?;
    let inputs = step.inputs(microbatch)?;
    if let Some(wrong) = inputs.wrong_labels() {
        let key = inputs.rows_key.clone();
        let reason = "beside labels that name no class".into();
        return Err(StepError::Unfit { key, found: reason, wanted: wrong }.into());
    }
    let (q, k) = match &inputs.scores {
        Scores::Product { q, k } => (q, k),
        Scores::Logits(_) => return Err(PrecisionError::NoProducts { scores: "logits" }),
        Scores::Logprobs | Scores::Lost(_) => {
            return Err(PrecisionError::NoProducts { scores: "log-probabilities" });
        }
    };
    let head = inputs.head(step).expect("products have a head");
    // The precision that the job declares for its logits; full precision if it declares none.
    let stored = Roundings::plausible(&step.options, inputs.dtype(step))?.narrowest.logits;
    let terms = step.options.token_loss(head.valid_vocab);
    let seed = seed_of(step.dump.run.as_str(), step.dump.step.0);
    let confidence = confidence(step, &inputs);
    let draw = |work: f64, least: usize| {
        let products_per_token = (head.valid_vocab * head.q.cols).max(1) as f64;
        let n = options.tokens.unwrap_or(((work / products_per_token) as usize).max(least));
        stratified(&inputs.labels, &confidence, n, seed)
    };
    let rows = draw(SUMMATION_WORK, HELD);
    let summed = sums(&head, &rows.rows, stored);
    let sample = draw(DIFFERENCE_WORK / EVALUATIONS, 4);
    let loss = Loss::new(head, &sample.rows, &inputs.weights, stored, terms);
    if loss.tokens.is_empty() {
        return Err(PrecisionError::NoTokens { microbatch: replay::microbatch::words(microbatch) });
    }
    let mut draw = Draw::new(seed);
    let (differences, check, skipped) = derivatives(&loss, &mut draw);
    let mut report = Precision {
        schema: SCHEMA,
        run: step.dump.run.to_string(),
        step: step.dump.step.0,
        of: replay::microbatch::words(microbatch),
        inputs: format!("q {}, k {}", about(q), about(k)),
        seed,
        tokens: (inputs.labels.len(), rows.rows.len(), loss.tokens.len()),
        terms: logits::columns(&head),
        assumed: assumed(stored),
        sums: summed.reports,
        lse_f32: summed.lse_f32,
        nonfinite: summed.nonfinite,
        loss: loss.total(&loss.token_losses::<f64>(None)),
        differences,
        check,
        gradients: gradients(step),
        verdict: String::new(),
        not_checked: not_checked(step, &inputs, &rows, skipped),
    };
    report.verdict = verdict::verdict(&report);
    Ok(report)
}

fn choose(step: &HeadStep<'_>, asked: Option<u32>) -> Result<Option<Microbatch>, PrecisionError> {
    let Some(asked) = asked else { return Ok(step.microbatches[0]) };
    match step.microbatches.iter().find(|mb| mb.is_some_and(|mb| mb.0 == asked)) {
        Some(microbatch) => Ok(*microbatch),
        None => {
            let names: Vec<String> =
                step.microbatches.iter().map(|mb| replay::microbatch::words(*mb)).collect();
            Err(PrecisionError::Microbatch { asked, recorded: names.join(", ") })
        }
    }
}

fn assumed(stored: Stored) -> String {
    let logits = match stored.keeps_f32() {
        true => "logits kept in f32".to_string(),
        false => format!("logits rounded to {}, as declared", stored.name()),
    };
    format!(
        "dot products in f32 of eight lanes; {logits}; exponentials, their sum, its logarithm and the loss in f32"
    )
}

/// The probability of each token's label, if the dump has lse and the label's logit; else 0 for
/// all, which makes them one stratum.
fn confidence(step: &HeadStep<'_>, inputs: &MicrobatchInputs) -> Vec<f64> {
    let tokens = inputs.labels.len();
    let column = |role| {
        let tensor = step.assemble(step.find(role, inputs.microbatch)?).ok()?;
        let values = matrix(&tensor).filter(|values| values.len() == tokens)?;
        Some((0..tokens).map(|t| values.get_f64(t)).collect::<Vec<f64>>())
    };
    match column(Role::LabelLogits).zip(column(Role::Lse)) {
        Some((labels, lse)) => {
            labels.iter().zip(&lse).map(|(&label, &lse)| probability(label, lse)).collect()
        }
        None => vec![0.0; tokens],
    }
}

struct Summed {
    reports: Vec<SumReport>,
    lse_f32: f64,
    nonfinite: usize,
}

/// Applies every method to the exponentials of every token.
fn sums(head: &HeadInputs<'_>, tokens: &[usize], stored: Stored) -> Summed {
    let n = logits::columns(head).max(1);
    let mut errors: Vec<Vec<f64>> = vec![Vec::new(); Method::ALL.len()];
    let (mut kept, mut lse_f32) = (Vec::new(), 0.0);
    for chunk in tokens.chunks(HELD) {
        let narrow = logits::logits::<f32>(head, chunk, None, stored);
        let wide = logits::logits::<f64>(head, chunk, None, stored);
        for ((&token, row), exact_row) in chunk.iter().zip(narrow.chunks(n)).zip(wide.chunks(n)) {
            let top = max(row);
            let exponentials: Vec<f32> = row.iter().map(|z| libm::expf(z - top)).collect();
            let truth = exact(&exponentials);
            if !(truth.0.is_finite() && truth.0 > 0.0) {
                continue;
            }
            kept.push(token);
            let lse = (log_sum_exp(row, None), log_sum_exp(exact_row, None));
            lse_f32 = larger(lse_f32, (f64::from(lse.0) - lse.1).abs());
            for (errors, method) in errors.iter_mut().zip(Method::ALL) {
                errors.push(relative_error(method.sum(&exponentials), truth));
            }
        }
    }
    let lambda = lambda(kept.len(), n, FALSE_ALARM);
    let report = |(method, errors): (Method, Vec<f64>)| {
        let worst = (0..errors.len()).max_by(|&a, &b| by_size(&errors[a], &errors[b]));
        SumReport {
            method: method.name(),
            max: worst.map_or(f64::NAN, |worst| errors[worst]),
            rms: rms(errors.iter().copied()),
            worst: method.worst(n),
            probable: method.probable(n, lambda),
            token: worst.map_or(0, |worst| kept[worst]),
        }
    };
    let reports = Method::ALL.into_iter().zip(errors).map(report).collect();
    Summed { reports, lse_f32, nonfinite: tokens.len() - kept.len() }
}

/// Computes differences along q and k, and the check of single elements, or says why not.
fn derivatives(
    loss: &Loss<'_>,
    draw: &mut Draw,
) -> (Vec<Differences>, Option<Check>, Option<String>) {
    let head = &loss.head;
    let total = loss.total(&loss.token_losses::<f64>(None));
    if !total.is_finite() {
        let why = format!("finite differences: the f64 loss of the sampled tokens is {total}");
        return (Vec::new(), None, Some(why));
    }
    let d = head.q.cols;
    let of_tokens = loss.tokens.iter().flat_map(|&t| t * d..(t + 1) * d).collect::<Vec<_>>();
    let q_scale = rms(of_tokens.iter().map(|&at| head.q.get_f64(at)));
    let k_scale = rms((0..head.valid_vocab * d).map(|at| head.k.get_f64(at)));
    let mut differences_of_inputs = Vec::new();
    for (input, scale) in [(Input::Q, q_scale), (Input::K, k_scale)] {
        let directions = directions(loss, input, DIRECTIONS, draw);
        differences_of_inputs.push(differences(loss, input, scale, &directions));
    }
    let check = check(loss, q_scale, differences_of_inputs[0].noise, draw);
    (differences_of_inputs, Some(check), None)
}

/// Replays dq and dk, if they were recorded.
fn gradients(step: &HeadStep<'_>) -> Gradients {
    let has_role = |role: &Role| step.tensors.values().any(|info| info.role == Some(*role));
    let roles: Vec<Role> = [Role::Dq, Role::Dk].into_iter().filter(has_role).collect();
    if roles.is_empty() {
        return Gradients::NotRecorded;
    }
    let request = Request {
        compare: &roles,
        effort: Effort::All,
        progress: &NoProgress,
        total: &|_| {},
        draws: false,
        cluster: None,
        device: None,
    };
    match replay::replay(step, &request) {
        Err(error) => Gradients::NotJudged(error.to_string()),
        Ok(outcome) => match outcome.first_divergence() {
            Some(stage) => Gradients::Diverge(stage.stage.to_string()),
            None if outcome.compared() == 0 => {
                Gradients::NotJudged("nothing of them could be compared".into())
            }
            None => {
                let names: Vec<&str> = roles.iter().map(|role| role.name()).collect();
                Gradients::Agree(names.join(" and "))
            }
        },
    }
}

fn not_checked(
    step: &HeadStep<'_>,
    inputs: &MicrobatchInputs,
    sample: &Sample,
    skipped: Option<String>,
) -> Vec<String> {
    let mut items: Vec<String> = skipped.into_iter().collect();
    if step.is_policy_loss() {
        items.push("the policy loss: differences are of the log-likelihood it is made of".into());
    }
    let ignored = inputs.labels.iter().filter(|&&label| label == IGNORED).count();
    if ignored > 0 {
        items.push(format!("the losses of {ignored} ignored tokens: they have none"));
    }
    if sample.rows.len() < inputs.labels.len() {
        let left = inputs.labels.len() - sample.rows.len();
        items.push(format!("the denominators of {left} tokens: not in the sample"));
    }
    items.push("the backward pass itself: `replay --dump` compares captured gradients".into());
    items
}

fn about(tensor: &crate::assemble::Tensor) -> String {
    let shape: Matrix<'_> = matrix(tensor).expect("checked when it was gathered");
    format!("{} [{}, {}]", tensor.dtype, shape.rows, shape.cols)
}
