//! Whether a token's captured row is what another label gives.
//!
//! A label's logit, or a row of dq, distinguishes a label from almost all others. So a few tokens
//! are enough to recognise that labels were shifted or permuted; the labels at the ends of the runs
//! are then read off one by one.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::captured::Values;
use super::reference::Reference;
use super::single_tokens::{Direct, distance, energy};
use crate::assemble::Row;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::{IGNORED, TokenCotangents};

/// How far, relatively, a captured logit may be from a label's: bf16 rounds a logit by up to 2⁻⁸ of
/// itself.
const LOGIT: f64 = 0.01;
/// Another label may leave this share of the squared norm of the change that it makes.
const LEFT: f64 = 0.05;
/// Searching a label among all classes may take this many multiply-adds in all: classes times D
/// times tokens.
const SEARCH: usize = 1 << 28;

/// Tests labels against the captured tensors of a microbatch.
pub struct LabelTest<'a> {
    direct: Direct<'a>,
    inputs: &'a MicrobatchInputs,
    label_logits: Option<Rc<Values>>,
    /// Captured dq, which stage it is, and each token's cotangent of its label logit.
    dq: Option<(Rc<Values>, Stage, &'a Cotangents)>,
    /// The reference: of the tokens of every rank, not of one alone.
    reference: &'a Reference,
}

/// Cotangents of lse, of the label's logit and of all logits, by token.
type Cotangents = BTreeMap<usize, TokenCotangents>;

impl<'a> LabelTest<'a> {
    /// `None` where neither label logits nor dq (or its label part) fails.
    pub fn new(evidence: &'a Evidence<'_>, inputs: &'a MicrobatchInputs) -> Option<LabelTest<'a>> {
        let failing_key = |stage| {
            let mut all = evidence.failing.iter();
            all.find(|key| key.stage == stage && key.microbatch == inputs.microbatch).copied()
        };
        let direct = Direct::new(evidence, inputs)?;
        let reference = evidence.reference();
        let dq = failing_key(Stage::Dq).or(failing_key(Stage::DqLabel)).and_then(|key: Key| {
            let captured = evidence.captured(key)?;
            let cotangents = reference.cotangents.get(&inputs.microbatch)?;
            Some((captured, key.stage, cotangents))
        });
        let label_logits = failing_key(Stage::LabelLogits).and_then(|key| evidence.captured(key));
        let test = LabelTest { direct, inputs, label_logits, dq, reference };
        (test.dq.is_some() || test.label_logits.is_some()).then_some(test)
    }

    /// True when the token's row is what this label gives.
    pub fn fits(&self, token: usize, label: u32) -> bool {
        match (&self.dq, &self.label_logits) {
            (Some((captured, stage, cotangents)), _) => {
                let place = (*stage, self.inputs.microbatch);
                let (Some(reference), Some(cotangents)) =
                    (self.reference.of_token(place, token), cotangents.get(&token))
                else {
                    return false;
                };
                self.fits_dq(token, label, (captured.row(token), reference), cotangents.label)
            }
            (None, Some(captured)) => label != IGNORED && self.fits_logit(token, label, captured),
            _ => false,
        }
    }

    fn fits_logit(&self, token: usize, label: u32, captured: &Values) -> bool {
        let z = self.direct.logit_of(&self.direct.q(Row::From(token)), label as usize).0;
        let x = captured.values[token];
        (x - z).abs() <= LOGIT * (1.0 + x.abs())
    }

    fn fits_dq(
        &self,
        token: usize,
        label: u32,
        (captured, reference): (&[f64], &[f64]),
        cotangent: f64,
    ) -> bool {
        if label == IGNORED {
            return energy(captured) <= LEFT * LEFT * energy(reference);
        }
        let q = self.direct.q(Row::From(token));
        let row = |label: u32| {
            let slope = self.direct.logit_of(&q, label as usize).1;
            let k = self.direct.k(Row::From(label as usize));
            k.iter().map(|k| cotangent * slope * k).collect::<Vec<f64>>()
        };
        let (declared, other) = (row(self.inputs.labels[token]), row(label));
        let moved: Vec<f64> = other.iter().zip(&declared).map(|(a, b)| a - b).collect();
        let off: Vec<f64> = captured.iter().zip(reference).map(|(a, b)| a - b).collect();
        let noise = (0.01f64).powi(2) * (energy(captured) + energy(reference));
        distance(&off, &moved) <= LEFT * energy(&moved).max(energy(&off)) + noise
    }

    /// Among the tokens to which `label` gives another label than recorded, the share whose
    /// captured row fits it.
    pub fn share(&self, tokens: &[usize], label: &dyn Fn(usize) -> Option<u32>) -> f64 {
        let (mut all, mut fit) = (0.0, 0.0);
        for &t in tokens {
            let Some(label) = label(t).filter(|&label| label != self.inputs.labels[t]) else {
                continue;
            };
            all += 1.0;
            fit += f64::from(u8::from(label != IGNORED && self.fits(t, label)));
        }
        if all > 0.0 { fit / all } else { 0.0 }
    }

    /// The label that the token's row shows, searched among all classes; none where no label fits,
    /// or two do.
    pub fn read(&self, token: usize) -> Option<u32> {
        let classes = 0..self.direct.head.valid_vocab as u32;
        let mut fit = classes.filter(|&label| self.fits(token, label));
        let label = fit.next()?;
        // If two labels fit, neither is shown.
        fit.next().is_none().then_some(label)
    }

    /// How many tokens' labels may be searched among all classes.
    pub fn readable(&self) -> usize {
        SEARCH / self.direct.work()
    }
}
