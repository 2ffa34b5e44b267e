//! The causes of a step's divergences: one table, which docs/step-causes.md repeats for people.

use super::outcome::{Aside, Reading};

/// A known cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cause {
    /// Its name in every output.
    pub name: &'static str,
    /// What the job does, in one clause.
    pub meaning: &'static str,
    /// What to look at.
    pub look: &'static str,
}

macro_rules! causes {
    ($($constant:ident = $name:literal, $meaning:literal, $look:literal;)*) => {
        $(
            #[doc = $meaning]
            pub(crate) const $constant: Cause =
                Cause { name: $name, meaning: $meaning, look: $look };
        )*

        /// Every cause, in the order of the stages.
        pub(crate) const CAUSES: &[Cause] = &[$($constant,)*];
    };
}

causes! {
    NOT_CLEARED = "not-cleared",
        "a gradient of before the step is still in it",
        "zero_grad: it must run before the first backward of each step, for every parameter";
    ACCUMULATE_WINDOW = "accumulate-window",
        "some microbatches are not in the sum",
        "when gradients are cleared and when they are reduced, against the microbatches";
    ACCUMULATE_DOUBLES = "accumulate-doubles",
        "what was summed before is added once more with each microbatch",
        "where a buffer of gradients is added to itself: the copy between accumulator and `.grad`";
    DIVIDE_OLD_SHARD = "divide-old-shard",
        "what was reduced before is divided by the size of the group again with each microbatch",
        "the division by the size of the group: it is of the new addend alone, and not of the buffer that holds the sum";
    BUCKET_STALE = "bucket-stale",
        "the gradient is that of before the step, and none of this step is in it",
        "when the buffer of the reduction is filled and read: the copy out of it must wait for this step's reduction";
    LOW_PRECISION = "accumulate-low-precision",
        "the sum errs as one in fewer bits than declared",
        "the dtype of the buffer that gradients are added up in, and of what is sent";
    MICROBATCH_SCALE = "microbatch-scale",
        "the gradient is multiplied or divided by the number of microbatches",
        "the division of the loss, or of the gradient, by the number of microbatches";
    SUM_FOR_MEAN = "reduce-sum-for-mean",
        "the reduction sums and is declared to average",
        "the division by the size of the group, which is missing, or a second reduction that sums what was averaged";
    MEAN_FOR_SUM = "reduce-mean-for-sum",
        "the reduction averages and is declared to sum",
        "the operation of the reduction";
    MEAN_TWICE = "reduced-mean-twice",
        "the average is divided by the size of the group once more",
        "a second division by the size of the group";
    REDUCED_TWICE = "reduced-twice",
        "the gradient is multiplied by the size of an axis",
        "a second reduction of the same gradient, or a parameter that is replicated along the axis and is summed over it";
    NOT_REDUCED = "not-reduced-over-axis",
        "a rank keeps its own gradient",
        "whether this parameter is registered with the reduction";
    RANK_LEFT_OUT = "rank-left-out",
        "the gradients of some ranks are not in the sum",
        "the group of ranks that this reduction is called with";
    WRONG_GROUP = "wrong-group",
        "the gradients of other ranks are in the sum",
        "the group of ranks that this reduction is called with";
    RANKS_WEIGHTED = "ranks-weighted",
        "ranks have other weights than declared",
        "what each rank divides its loss by: ranks with fewer tokens must not weigh more";
    SCALED = "gradient-scaled",
        "the gradient is multiplied by a number that is no size of the job",
        "what multiplies this gradient between the backward and here; clipping by code of the job's own, and a loss scale, have to be declared";
    TOKENS = "tokens-miscounted",
        "gradients are divided by the tokens of one microbatch or rank, and hold those of all",
        "where the tokens are counted that gradients are divided by: over all microbatches, and over all ranks";
    SCALE_LEFT = "loss-scale-left-in",
        "the loss scale was not taken out",
        "where the loss scale is taken out: it must happen once, before the norm";
    SCALE_TWICE = "loss-scale-taken-out-twice",
        "the loss scale was taken out twice",
        "where the loss scale is taken out: it must happen once, before the norm";
    CLIP_BEFORE_UNSCALE = "clip-before-unscale",
        "the norm and the clipping are of gradients that have the loss scale in them",
        "the order: the loss scale is taken out first, and then the norm is taken";
    NORM_LOCAL = "norm-local-not-global",
        "the norm is of what one rank holds",
        "the reduction of the squared norms over the ranks that hold other parts";
    NORM_COPIES = "norm-counts-copies",
        "copies of a gradient are counted in the norm",
        "over which ranks the squared norms are added: copies must count once";
    NORM_MISSES = "norm-misses-group",
        "some parameters are not in the norm",
        "which parameters, and which ranks' parts of them, the norm adds up";
    NORM_LOW = "norm-low-precision",
        "the norm errs as one in few bits does",
        "the dtype in which norms of parameters are computed and added up";
    NOT_CLIPPED = "clip-recorded-not-applied",
        "the gradient is not clipped",
        "the code between the norm and the optimizer's step";
    CLIP_TWICE = "clip-twice",
        "the coefficient was applied twice",
        "the code between the norm and the optimizer's step";
    UNCORRECTED = "bias-correction-missing",
        "the moments are used without bias correction",
        "the division of both moments by 1 - β^step";
    CORRECTED_TWICE = "bias-correction-twice",
        "the moments are divided by 1 - β^step twice",
        "the division of both moments by 1 - β^step";
    EPS_INSIDE = "eps-inside-sqrt",
        "eps stands on the other side of the root",
        "where the optimizer adds eps";
    DECAY_COUPLED = "decay-coupled",
        "the weight decay is coupled where it is declared decoupled, or the reverse",
        "whether this optimizer is Adam or AdamW, and where it applies weight decay";
    DECAY_EXCLUDED = "decay-on-excluded",
        "a parameter decays that is declared not to",
        "which parameters the optimizer's groups exclude from weight decay";
    DECAY_OTHER = "decay-other",
        "the parameter decays by another weight decay than declared",
        "the weight decay of the parameter's group";
    LR_SCALED = "lr-scaled",
        "the change is that of another learning rate",
        "the schedule, and what multiplies the learning rate";
    SETTING_OTHER = "setting-other",
        "a setting of the optimizer is another than the declared one",
        "where the optimizer is built: its betas, momentum and eps, and what changes them afterwards";
    STEP_COUNTER = "step-counter",
        "the bias correction is that of another step",
        "where the step counter is kept, restored and counted up";
    STATE_RESET = "state-reset",
        "the state before the step is not in the state after it",
        "what clears or reloads the optimizer's state";
    STATE_SWAPPED = "state-swapped",
        "the optimizer has the state of another parameter",
        "how states are assigned to parameters after a load or a wrap: by name, and not by position";
    UPDATED_TWICE = "tied-updated-twice",
        "the optimizer's step is applied to it twice",
        "whether the parameter is in the optimizer's groups twice, under two names, or in two optimizers";
    INF_SKIPPED = "inf-skipped-on-some-ranks",
        "some ranks left the optimizer's step out, and others took it",
        "whether ranks share what they found of infinite gradients before any of them steps";
    NESTEROV = "nesterov",
        "the momentum is Nesterov's where plain is declared, or the reverse",
        "the optimizer's switch nesterov";
    ASCENDS = "update-ascends",
        "the parameter moves along the gradient, not against it",
        "the sign of the update, and maximize";
    CORRECTION_ADDED = "bias-correction-added",
        "the moments are corrected where the rule does not",
        "the division of the moments by 1 - β^step";
    EPS_ELSEWHERE = "eps-elsewhere",
        "eps is added where it divides, not where the largest gradient is taken",
        "where the optimizer adds eps";
    NOT_CENTERED = "not-centered",
        "the mean of the gradient is subtracted where it is not declared, or the reverse",
        "the optimizer's switch centered";
    LR_IN_MOMENTUM = "lr-in-momentum",
        "the momentum holds changes where gradients are declared, or the reverse",
        "whether the learning rate multiplies what enters the momentum";
    MOMENTUM_SCHEDULE = "momentum-schedule",
        "the momentum follows another schedule",
        "the momentum of each step, and momentum_decay";
    UNRECTIFIED = "rectification-missing",
        "the update is not rectified",
        "where the optimizer multiplies the update by the rectification";
    THRESHOLD = "rectification-threshold",
        "the rectification begins at another step",
        "the length of the average from which the optimizer rectifies";
    BETAS_EXCHANGED = "betas-exchanged",
        "beta1 and beta2 are exchanged",
        "which beta mixes the update, and which the moment";
    FROM_NEW_MOMENT = "update-from-new-moment",
        "the update is taken from the moment after the step",
        "whether the moment changes before the update is taken from it";
    UNSIGNED = "sign-missing",
        "the update is not the sign of the mixture",
        "where the optimizer takes the sign";
    ORTHOGONALISED = "orthogonalised-wrong-tensor",
        "the matrix that is made orthogonal is not the momentum",
        "which tensor the iteration takes: the momentum after this step";
    SHARDED_NORM = "sharded-norm-inside-update",
        "a norm or a matrix inside the update is of one rank's part of the parameter",
        "whether the optimizer adds its norms up over the ranks that hold other parts";
    NO_OP = "update-is-no-op",
        "the parameter did not change",
        "whether the optimizer holds this parameter, or a copy of it that is not written back";
    NOT_HELD = "param-not-in-optimizer",
        "no optimizer holds it, and one holds another tensor in its place",
        "when the optimizer was made: before parameters were replaced, wrapped or moved";
    OTHER_GRADIENT = "update-from-other-gradient",
        "the optimizer took the gradient of another stage",
        "which gradient the optimizer reads: `.grad` was replaced after the stage before, or a copy is read";
    MASTER_STALE = "master-stale",
        "the working copy is not the master copy rounded",
        "when the master copy is written back, and what else writes to the parameter";
    COPIES_DRIFT = "data-parallel-copies-drift",
        "ranks hold different values of one parameter",
        "what ranks do differently: the gradient that each one's optimizer takes, and parameters that are not broadcast at the start";
    UNKNOWN = "unknown",
        "nothing that is known reproduces it",
        "what else writes to this tensor between the stage before and here";
}

/// A cause by its name; `unknown` for a name that is none.
pub(crate) fn named(name: &str) -> Cause {
    CAUSES.iter().find(|cause| cause.name == name).copied().unwrap_or(UNKNOWN)
}

impl Cause {
    /// What reproduces a divergence, in words of the job.
    pub(crate) fn reads(self, words: impl Into<String>) -> Reading {
        let (words, misfit, weights) = (words.into(), Aside::default(), Aside::default());
        Reading { cause: self.name, words, look: self.look, misfit, weights }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_page_has_every_cause_once_and_no_other() {
        let page = include_str!("../../../docs/step-causes.md");
        let (_, table) = page.split_once("## Causes").expect("the page has the section");
        let table = table.split("\n## ").next().unwrap_or_default();
        let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| [`")).collect();
        let named = |row: &&str| row.split('`').nth(1).unwrap_or_default().to_string();
        let listed: Vec<String> = rows.iter().map(named).collect();
        let known: Vec<String> = CAUSES.iter().map(|cause| cause.name.to_string()).collect();
        assert_eq!(listed, known);
        assert_eq!(known.iter().collect::<BTreeSet<_>>().len(), known.len());
        for (row, cause) in rows.iter().zip(CAUSES) {
            assert!(row.contains(cause.meaning) && row.contains(cause.look), "{row}");
        }
    }
}
