//! What finite precision does to one step, measured on its own data: how far each
//! way of summing the softmax denominators errs, how far a finite-difference check
//! errs at each step, and whether either can be what a person is looking for.
//!
//! It judges no captured gradient: `replay` does. Numbers come from the dumped q, k,
//! labels and weights; where there are too many tokens, from a stratified sample of
//! them, drawn from a seed that is reported.

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
use crate::kernels::logits;
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix};
use crate::kernels::round::Precision as Stored;
use crate::kernels::tiles::NoProgress;
use crate::replay::stratified_sample::{Sample, stratified};
use crate::replay::{self, Effort, Request};
use difference::{Check, Differences, Input, check, differences, directions, rms};
use loss::{Loss, Terms, lse, max};
use summation::{Method, exact, lambda, relative_error};

/// Version of the object that `--json` writes.
pub const SCHEMA: &str = "backtape.precision/1";

/// Multiply-adds that may go into the denominators, and into the differences: some
/// ten seconds of two cores each.
const SUMMATION_WORK: f64 = 2e9;
const DIFFERENCE_WORK: f64 = 2e10;
/// Losses that the differences evaluate: both inputs, four directions, eleven steps
/// of four, nine points of noise, and the higher derivatives.
const EVALUATIONS: f64 = 500.0;
/// Random directions of each input: one may by chance lie where differences are good.
const DIRECTIONS: usize = 4;
/// Rows of logits held at a time.
const HELD: usize = 64;

/// What to look at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Which microbatch; the first when none is named.
    pub microbatch: Option<u32>,
    /// Tokens to look at; as many as the work allows when not given.
    pub tokens: Option<usize>,
}

/// Why precision cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum PrecisionError {
    /// The head's inputs are not there.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A policy that cannot be.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// Nothing before the logits, or before the log-probabilities, was recorded.
    #[error(
        "the head starts from recorded {scores}, and precision is shown on sums and differences of q and k: record both with tape.record to have them shown"
    )]
    NoProducts {
        /// What it starts from.
        scores: &'static str,
    },
    /// No such microbatch.
    #[error("the dump holds no microbatch {asked}: choose one of {held} with --microbatch")]
    Microbatch {
        /// The one asked for.
        asked: u32,
        /// Those that are there.
        held: String,
    },
    /// Nothing to differentiate.
    #[error(
        "no token of {of} has both a label and a weight: its loss is empty, so there is nothing to differentiate; choose another one with --microbatch"
    )]
    NoTokens {
        /// The microbatch, as words.
        of: String,
    },
}

/// How one way of summing did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SumReport {
    /// What it is called.
    pub method: &'static str,
    /// Largest relative error; NaN if a sum is not finite.
    pub max: f64,
    /// Root mean square relative error.
    pub rms: f64,
    /// What it cannot exceed.
    pub worst: f64,
    /// What it exceeds with a probability of 10^-4 for all rows together.
    pub probable: f64,
    /// The token of the largest error.
    pub token: usize,
}

/// Whether the captured gradients are what the reference says.
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

/// The whole answer.
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
    /// What was assumed of the job's arithmetic.
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
    /// One sentence.
    pub verdict: String,
    /// What was not looked at, and why.
    pub not_checked: Vec<String>,
}

/// Measures one microbatch of a step.
pub fn precision(step: &HeadStep<'_>, options: &Options) -> Result<Precision, PrecisionError> {
    let microbatch = choose(step, options.microbatch)?;
    let inputs = step.inputs(microbatch)?;
    if let Some(wrong) = inputs.wrong_labels() {
        let key = inputs.rows_key.clone();
        let found = "beside labels that name no class".into();
        return Err(StepError::Unfit { key, found, wanted: wrong }.into());
    }
    let (q, k) = match &inputs.scores {
        Scores::Product { q, k } => (q, k),
        Scores::Logits(_) => return Err(PrecisionError::NoProducts { scores: "logits" }),
        Scores::Logprobs | Scores::Lost(_) => {
            return Err(PrecisionError::NoProducts { scores: "log-probabilities" });
        }
    };
    let head = inputs.head(step).expect("products have a head");
    // What the job says its logits are stored as; full precision when it does not say.
    let stored = Roundings::plausible(&step.options, inputs.dtype(step))?.narrowest.logits;
    let terms = Terms {
        smoothing: step.options.smoothing(head.valid_vocab),
        z_loss: step.options.declared.z_loss,
    };
    let seed = seed_of(step.dump.run.as_str(), step.dump.step.0);
    let confidence = confidence(step, &inputs);
    let draw = |work: f64, least: usize| {
        let one = (head.valid_vocab * head.q.cols).max(1) as f64;
        let n = options.tokens.unwrap_or(((work / one) as usize).max(least));
        stratified(&inputs.labels, &confidence, n, seed)
    };
    let rows = draw(SUMMATION_WORK, HELD);
    let summed = sums(&head, &rows.rows, stored);
    let sample = draw(DIFFERENCE_WORK / EVALUATIONS, 4);
    let loss = Loss::new(head, &sample.rows, &inputs.weights, stored, terms);
    if loss.tokens.is_empty() {
        return Err(PrecisionError::NoTokens { of: replay::microbatch::words(microbatch) });
    }
    let mut draw = Draw::new(seed);
    let (differences, check, skipped) = derivatives(&loss, &mut draw);
    let mut found = Precision {
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
    found.verdict = verdict::verdict(&found);
    Ok(found)
}

fn choose(step: &HeadStep<'_>, asked: Option<u32>) -> Result<Option<Microbatch>, PrecisionError> {
    let Some(asked) = asked else { return Ok(step.microbatches[0]) };
    match step.microbatches.iter().find(|mb| mb.is_some_and(|mb| mb.0 == asked)) {
        Some(found) => Ok(*found),
        None => {
            let held: Vec<String> =
                step.microbatches.iter().map(|mb| replay::microbatch::words(*mb)).collect();
            Err(PrecisionError::Microbatch { asked, held: held.join(", ") })
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

/// `p` of each token's label where the dump says; else 0, one class.
fn confidence(step: &HeadStep<'_>, inputs: &MicrobatchInputs) -> Vec<f64> {
    let tokens = inputs.labels.len();
    let column = |role| {
        let tensor = step.assemble(step.find(role, inputs.microbatch)?).ok()?;
        let values = matrix(&tensor).filter(|values| values.len() == tokens)?;
        Some((0..tokens).map(|t| values.get_f64(t)).collect::<Vec<f64>>())
    };
    match column(Role::LabelLogits).zip(column(Role::Lse)) {
        Some((labels, lse)) => {
            labels.iter().zip(&lse).map(|(label, lse)| libm::exp(label - lse)).collect()
        }
        None => vec![0.0; tokens],
    }
}

struct Summed {
    reports: Vec<SumReport>,
    lse_f32: f64,
    nonfinite: usize,
}

/// Every method on the exponentials of every token.
fn sums(head: &HeadInputs<'_>, tokens: &[usize], stored: Stored) -> Summed {
    let n = logits::columns(head).max(1);
    let mut errors: Vec<Vec<f64>> = vec![Vec::new(); Method::ALL.len()];
    let (mut kept, mut lse_f32) = (Vec::new(), 0.0);
    for held in tokens.chunks(HELD) {
        let narrow = logits::logits::<f32>(head, held, None, stored);
        let wide = logits::logits::<f64>(head, held, None, stored);
        for ((&token, row), exact_row) in held.iter().zip(narrow.chunks(n)).zip(wide.chunks(n)) {
            let top = max(row);
            let exponentials: Vec<f32> = row.iter().map(|z| libm::expf(z - top)).collect();
            let truth = exact(&exponentials);
            if !(truth.0.is_finite() && truth.0 > 0.0) {
                continue;
            }
            kept.push(token);
            lse_f32 = larger(lse_f32, (f64::from(lse(row)) - lse(exact_row)).abs());
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

/// Differences along q and k, and the check of single elements; or why not.
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
    let mut found = Vec::new();
    for (input, scale) in [(Input::Q, q_scale), (Input::K, k_scale)] {
        let directions = directions(loss, input, DIRECTIONS, draw);
        found.push(differences(loss, input, scale, &directions));
    }
    let check = check(loss, q_scale, found[0].noise, draw);
    (found, Some(check), None)
}

/// Replays dq and dk where they were recorded.
fn gradients(step: &HeadStep<'_>) -> Gradients {
    let held = |role: &Role| step.tensors.values().any(|info| info.role == Some(*role));
    let roles: Vec<Role> = [Role::Dq, Role::Dk].into_iter().filter(held).collect();
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
