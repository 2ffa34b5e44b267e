//! The stages of softmax cross-entropy, forward and backward, in the order in which every output
//! lists them (docs/decisions/head.md, docs/heads.md).

use backtape::role::Role;
use serde::{Serialize, Serializer};

/// Which part of the computation a stage belongs to. One part may be right while another is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// An input: it is checked, but there is nothing to compare it with.
    Input,
    /// The forward pass and the loss.
    Forward,
    /// The backward pass from the loss to the entries of dlogits.
    Entries,
    /// The gradient of q and its parts.
    OfQ,
    /// The gradients of k and of the bias, and their parts.
    OfK,
    /// Sums of dk over microbatches and ranks, and the norm of the summed gradients.
    Sums,
}

/// The shape of a stage's tensor, for T tokens, V classes and D hidden units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// `[T]`
    Tokens,
    /// `[T, D]`
    TokenRows,
    /// `[T, V]`
    Plane,
    /// `[V]`
    Classes,
    /// `[V, D]`
    ClassRows,
    /// One number.
    Number,
}

/// Which part of a gradient a stage is. The gradients have two parts, since the logit of a label
/// enters the loss both through lse and by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Share {
    /// The part through lse: a product with the softmax.
    Softmax,
    /// The part through the label's own logit: one class for each token.
    Label,
    /// Both parts together, or a stage that is not a gradient.
    Whole,
}

macro_rules! stages {
    ($(
        $variant:ident = $name:literal $role:expr, $side:ident $kind:ident $share:ident,
        [$($parent:ident),*], $words:literal;
    )*) => {
        /// A node of the head's forward or backward graph.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs)] // `words` says what each one is.
        pub enum Stage { $($variant,)* }

        impl Stage {
            /// Every stage, in order.
            pub const ALL: &'static [Stage] = &[$(Stage::$variant,)*];

            /// The stage's name in every output.
            pub fn name(self) -> &'static str {
                match self { $(Stage::$variant => $name,)* }
            }

            /// The role under which a job records what this stage produces.
            pub const fn role(self) -> Option<Role> {
                match self { $(Stage::$variant => $role,)* }
            }

            /// Which part of the computation it belongs to.
            pub const fn side(self) -> Side {
                match self { $(Stage::$variant => Side::$side,)* }
            }

            /// The shape of its tensor; log-probabilities may also be recorded for all classes.
            pub const fn kind(self) -> Kind {
                match self { $(Stage::$variant => Kind::$kind,)* }
            }

            /// Which part of a gradient it is.
            pub const fn share(self) -> Share {
                match self { $(Stage::$variant => Share::$share,)* }
            }

            /// The stages it is computed from.
            pub fn parents(self) -> &'static [Stage] {
                match self { $(Stage::$variant => &[$(Stage::$parent,)*],)* }
            }

            /// What the stage is, in words.
            pub fn words(self) -> &'static str {
                match self { $(Stage::$variant => $words,)* }
            }
        }
    };
}

stages! {
    Q = "q" Some(Role::Q), Input TokenRows Whole,
        [], "the hidden states, one row a token";
    K = "k" Some(Role::K), Input ClassRows Whole,
        [], "the weights of the head, one row a class of the vocabulary";
    Labels = "labels" Some(Role::Labels), Input Tokens Whole,
        [], "the class that each token should have";
    Weights = "weights" Some(Role::Weights), Input Tokens Whole,
        [], "how much each token counts";
    Bias = "bias" Some(Role::Bias), Input Classes Whole,
        [], "a constant for each class";
    Cotangent = "cotangent" Some(Role::Cotangent), Input Tokens Whole,
        [], "what the loss is multiplied by before the backward";
    TokenOrder = "token_order" Some(Role::TokenOrder), Input Tokens Whole,
        [], "which token of the batch each row is";
    Advantages = "advantages" Some(Role::Advantages), Input Tokens Whole,
        [], "an input of a policy loss";
    OldLogprobs = "old_logprobs" Some(Role::OldLogprobs), Input Tokens Whole,
        [], "an input of a policy loss";
    RefLogprobs = "ref_logprobs" Some(Role::RefLogprobs), Input Tokens Whole,
        [], "an input of a policy loss";
    Logits = "logits" Some(Role::Logits), Forward Plane Whole,
        [Q, K, Bias], "q times k: a score for each token and class";
    Lse = "lse" Some(Role::Lse), Forward Tokens Whole,
        [Logits], "the logarithm of the sum of the exponentials of a token's logits";
    LabelLogits = "label_logits" Some(Role::LabelLogits), Forward Tokens Whole,
        [Logits, Labels], "each token's logit of its own label";
    Logprobs = "logprobs" Some(Role::Logprobs), Forward Tokens Whole,
        [Lse, LabelLogits], "the logarithm of each label's probability";
    Nll = "nll" None, Forward Tokens Whole,
        [Lse, LabelLogits], "each token's negative log-likelihood";
    Loss = "loss" Some(Role::Loss), Forward Number Whole,
        [Nll, Logprobs, Weights, Advantages, OldLogprobs, RefLogprobs],
        "the mean or sum over the tokens";
    Dlogprobs = "dlogprobs" Some(Role::Dlogprobs), Entries Tokens Whole,
        [Logprobs, Weights, Advantages, OldLogprobs, RefLogprobs],
        "the loss's derivative by the log-probabilities";
    G = "g" None, Entries Tokens Whole,
        [Weights, Labels, Cotangent, Dlogprobs], "what each token's gradient is multiplied by";
    GLse = "g_lse" None, Entries Tokens Whole,
        [G, Lse], "the cotangent of the log-sum-exp";
    GLabel = "g_label" None, Entries Tokens Whole,
        [G], "the cotangent of the label's logit";
    P = "p" None, Entries Plane Whole,
        [Logits, Lse], "the softmax";
    Dlogits = "dlogits" Some(Role::Dlogits), Entries Plane Whole,
        [P, GLse, GLabel], "the loss's derivative by the logits";
    DqLse = "dq_lse" Some(Role::DqLse), OfQ TokenRows Softmax,
        [P, GLse, K], "the log-sum-exp part of the gradient of q";
    DqLabel = "dq_label" Some(Role::DqLabel), OfQ TokenRows Label,
        [GLabel, K, Labels], "the label part of the gradient of q";
    Dq = "dq" Some(Role::Dq), OfQ TokenRows Whole,
        [DqLse, DqLabel, Dlogits], "the gradient of q";
    DkLse = "dk_lse" Some(Role::DkLse), OfK ClassRows Softmax,
        [P, GLse, Q], "the log-sum-exp part of the gradient of k";
    DkLabel = "dk_label" Some(Role::DkLabel), OfK ClassRows Label,
        [GLabel, Q, Labels], "the label part of the gradient of k: a sum of q's rows by label";
    Dk = "dk" Some(Role::Dk), OfK ClassRows Whole,
        [DkLse, DkLabel, Dlogits], "the gradient of k";
    Dbias = "dbias" Some(Role::Dbias), OfK Classes Whole,
        [Dlogits], "the gradient of the bias";
    Accumulate = "accumulate" None, Sums ClassRows Whole,
        [Dk], "the sum of dk over microbatches";
    Reduce = "reduce" None, Sums ClassRows Whole,
        [Accumulate], "the sum of dk over ranks";
    GradNorm = "grad_norm" Some(Role::GradNorm), Sums Number Whole,
        [Reduce], "the norm of the gradients";
}

/// An array of the `$count` stages for which an expression is true, in the order of the table. It
/// is computed by the compiler, which fails if there are more or fewer.
macro_rules! those {
    ($count:literal where $stage:ident is $true:expr) => {{
        let (mut found, mut count, mut at) = ([Stage::Q; $count], 0, 0);
        while at < Stage::ALL.len() {
            let $stage = Stage::ALL[at];
            if $true {
                found[count] = $stage;
                count += 1;
            }
            at += 1;
        }
        assert!(count == $count, "the table has another number of such stages");
        found
    }};
}

/// Subsets of the stages, taken from the table.
impl Stage {
    /// The gradient of q and its parts.
    pub const OF_Q: [Stage; 3] = those!(3 where stage is stage.is_of_q());
    /// The gradient of k and its parts.
    pub const OF_K: [Stage; 3] =
        those!(3 where stage is stage.is_of_k() && matches!(stage.kind(), Kind::ClassRows));
    /// Gradients that have one row for each class: those of k and of the bias, with their parts.
    pub const OF_CLASSES: [Stage; 4] = those!(4 where stage is stage.is_of_k());
    /// dlogits and the gradients that are computed from it.
    pub const GRADIENTS: [Stage; 8] = those!(8 where stage is stage.is_gradient());
    /// Stages of the forward pass that a job can record.
    pub const FORWARD: [Stage; 5] =
        those!(5 where stage is matches!(stage.side(), Side::Forward) && stage.role().is_some());
    /// The gradients of q and k and their parts, which are products with dlogits.
    pub const PRODUCTS: [Stage; 6] = those!(6 where stage is
        !matches!(stage.kind(), Kind::Classes) && (stage.is_of_q() || stage.is_of_k()));
    /// The two parts of the gradients of q and k.
    pub const PARTS: [Stage; 4] = those!(4 where stage is !matches!(stage.share(), Share::Whole));
    /// Sums of dk, over microbatches and over ranks.
    pub const SUMS: [Stage; 2] = those!(2 where stage is stage.is_sum());

    /// Whether it is dlogits or a gradient that is computed from it.
    pub const fn is_gradient(self) -> bool {
        matches!(self, Stage::Dlogits) || self.is_of_q() || self.is_of_k()
    }

    /// Whether it is the gradient of q or one of its parts.
    pub const fn is_of_q(self) -> bool {
        matches!(self.side(), Side::OfQ)
    }

    /// Whether it is the gradient of k or of the bias, or a part of one.
    pub const fn is_of_k(self) -> bool {
        matches!(self.side(), Side::OfK)
    }

    /// Whether it is a sum of gradients, over microbatches or ranks.
    pub const fn is_sum(self) -> bool {
        matches!((self.side(), self.kind()), (Side::Sums, Kind::ClassRows))
    }
}

impl Stage {
    /// The stage whose result is recorded under this role.
    pub fn of_role(role: Role) -> Option<Stage> {
        Stage::ALL.iter().copied().find(|stage| stage.role() == Some(role))
    }

    /// Whether it is an input, which is checked but not compared.
    pub fn is_input(self) -> bool {
        self.side() == Side::Input
    }

    /// True when this stage is `other` or is computed from it.
    pub fn depends_on(self, other: Stage) -> bool {
        self == other || self.parents().iter().any(|parent| parent.depends_on(other))
    }

    /// True when a report about `asked` needs this stage: every stage that `asked` is computed
    /// from, and for dk also its sums over microbatches and ranks.
    pub fn serves(self, asked: Stage) -> bool {
        asked.depends_on(self) || (asked == Stage::Dk && self.is_sum())
    }
}

impl Serialize for Stage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_stands_after_the_stages_it_is_computed_from() {
        for &stage in Stage::ALL {
            assert!(stage.parents().iter().all(|&parent| parent < stage), "{stage}");
        }
    }

    #[test]
    fn parts_of_gradients_stand_before_their_whole() {
        assert_eq!(Stage::OF_Q, [Stage::DqLse, Stage::DqLabel, Stage::Dq]);
        assert_eq!(Stage::OF_K, [Stage::DkLse, Stage::DkLabel, Stage::Dk]);
        let all = [&[Stage::Dlogits][..], &Stage::OF_Q, &Stage::OF_K, &[Stage::Dbias]].concat();
        assert_eq!(&Stage::GRADIENTS[..], all);
        for stage in Stage::ALL.iter().filter(|stage| stage.is_gradient()) {
            let share = match stage.name().split_once('_') {
                Some((_, "lse")) => Share::Softmax,
                Some((_, "label")) => Share::Label,
                _ => Share::Whole,
            };
            assert_eq!(stage.share(), share, "{stage}");
        }
    }

    #[test]
    fn every_role_belongs_to_one_stage() {
        for &role in Role::ALL {
            assert_eq!(Stage::of_role(role).map(Stage::name), Some(role.name()));
        }
    }
}
