//! Other declarations of a policy loss.

use backtape::head::{GrpoDeclaration, HeadDeclaration, KlEstimator, LossAverage, RatioLevel};

/// Another value of an option of a policy loss.
pub(crate) struct PolicyEdit {
    /// Its name in `tape.head`.
    pub(crate) option: &'static str,
    /// Where to look in the job to distinguish a wrong declaration from wrong code.
    pub(crate) look: &'static str,
    edit: Box<dyn Fn(&mut GrpoDeclaration)>,
}

impl PolicyEdit {
    /// The declaration with this value.
    pub(crate) fn of(&self, declared: &HeadDeclaration) -> HeadDeclaration {
        let mut other = declared.clone();
        (self.edit)(other.grpo.get_or_insert_default());
        other
    }
}

/// All such values that need no fit.
pub(crate) fn edits(declared: &HeadDeclaration) -> Vec<PolicyEdit> {
    let mut edits = Vec::new();
    let mut add = |option, look, edit: Box<dyn Fn(&mut GrpoDeclaration)>| {
        edits.push(PolicyEdit { option, look, edit });
    };
    let look =
        "how the loss's code averages token losses: over all tokens, or over each sequence first";
    for average in [LossAverage::Token, LossAverage::Sequence] {
        add("grpo.average", look, Box::new(move |grpo| grpo.average = average));
    }
    let look = "whether the ratio of policies is taken of each token, or over the sequence (GSPO)";
    for level in [RatioLevel::Token, RatioLevel::Sequence] {
        add("grpo.ratio", look, Box::new(move |grpo| grpo.ratio = level));
    }
    let look = "the clip bounds that the loss is called with (epsilon, epsilon_high)";
    add("grpo.clip_high", look, Box::new(|grpo| grpo.clip_high = grpo.clip_low));
    add("grpo.clip_low", look, Box::new(|grpo| grpo.clip_low = grpo.clip_high));
    add("grpo.dual_clip", look, Box::new(|grpo| grpo.dual_clip = None));
    add("grpo.kl_beta", KL, Box::new(|grpo| grpo.kl_beta = 0.0));
    if declared.grpo.as_ref().is_some_and(|grpo| grpo.kl_beta != 0.0) {
        for estimator in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3] {
            add("grpo.kl", KL, Box::new(move |grpo| grpo.kl = estimator));
        }
    }
    edits
}

/// Where to look for the KL term's options.
pub(crate) const KL: &str = "the KL term's factor and estimator in the loss's code";
