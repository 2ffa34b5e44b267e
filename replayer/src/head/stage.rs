//! The stages of softmax cross-entropy, forward and backward, in the order of
//! every output (NUMERICS: stages).

use backtape::role::Role;
use serde::{Serialize, Serializer};

macro_rules! stages {
    ($($variant:ident = $name:literal $role:expr, [$($parent:ident),*];)*) => {
        /// A node of the head's forward or backward graph.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs)] // Named as in NUMERICS.
        pub enum Stage { $($variant,)* }

        impl Stage {
            /// Every stage, in order.
            pub const ALL: &'static [Stage] = &[$(Stage::$variant,)*];

            /// The stage's name in every output.
            pub fn name(self) -> &'static str {
                match self { $(Stage::$variant => $name,)* }
            }

            /// The role under which a job records what this stage produces.
            pub fn role(self) -> Option<Role> {
                match self { $(Stage::$variant => $role,)* }
            }

            /// The stages it is computed from.
            pub fn parents(self) -> &'static [Stage] {
                match self { $(Stage::$variant => &[$(Stage::$parent,)*],)* }
            }
        }
    };
}

stages! {
    Q = "q" Some(Role::Q), [];
    K = "k" Some(Role::K), [];
    Labels = "labels" Some(Role::Labels), [];
    Weights = "weights" Some(Role::Weights), [];
    Bias = "bias" Some(Role::Bias), [];
    Cotangent = "cotangent" Some(Role::Cotangent), [];
    TokenOrder = "token_order" Some(Role::TokenOrder), [];
    Advantages = "advantages" Some(Role::Advantages), [];
    OldLogprobs = "old_logprobs" Some(Role::OldLogprobs), [];
    RefLogprobs = "ref_logprobs" Some(Role::RefLogprobs), [];
    Logits = "logits" Some(Role::Logits), [Q, K, Bias];
    Lse = "lse" Some(Role::Lse), [Logits];
    LabelLogits = "label_logits" Some(Role::LabelLogits), [Logits, Labels];
    Logprobs = "logprobs" Some(Role::Logprobs), [Lse, LabelLogits];
    Nll = "nll" None, [Lse, LabelLogits];
    Loss = "loss" Some(Role::Loss), [Nll, Logprobs, Weights, Advantages, OldLogprobs, RefLogprobs];
    Dlogprobs = "dlogprobs" Some(Role::Dlogprobs), [Logprobs, Weights, Advantages, OldLogprobs, RefLogprobs];
    G = "g" None, [Weights, Labels, Cotangent, Dlogprobs];
    GLse = "g_lse" None, [G, Lse];
    GLabel = "g_label" None, [G];
    P = "p" None, [Logits, Lse];
    Dlogits = "dlogits" Some(Role::Dlogits), [P, GLse, GLabel];
    DqLse = "dq_lse" Some(Role::DqLse), [P, GLse, K];
    DqLabel = "dq_label" Some(Role::DqLabel), [GLabel, K, Labels];
    Dq = "dq" Some(Role::Dq), [DqLse, DqLabel, Dlogits];
    DkLse = "dk_lse" Some(Role::DkLse), [P, GLse, Q];
    DkLabel = "dk_label" Some(Role::DkLabel), [GLabel, Q, Labels];
    Dk = "dk" Some(Role::Dk), [DkLse, DkLabel, Dlogits];
    Dbias = "dbias" Some(Role::Dbias), [Dlogits];
    Accumulate = "accumulate" None, [Dk];
    Reduce = "reduce" None, [Accumulate];
    GradNorm = "grad_norm" Some(Role::GradNorm), [Reduce];
}

impl Stage {
    /// The stage that produces what is recorded under this role.
    pub fn of_role(role: Role) -> Option<Stage> {
        Stage::ALL.iter().copied().find(|stage| stage.role() == Some(role))
    }

    /// An input: checked for being usable, not compared.
    pub fn is_input(self) -> bool {
        self <= Stage::RefLogprobs
    }

    /// True when this stage is `other` or is computed from it.
    pub fn depends_on(self, other: Stage) -> bool {
        self == other || self.parents().iter().any(|parent| parent.depends_on(other))
    }

    /// True when a comparison of `asked` has to look at this stage: what leads
    /// to it, and, for dk, its way through microbatches and ranks.
    pub fn serves(self, asked: Stage) -> bool {
        let onward = matches!(self, Stage::Accumulate | Stage::Reduce);
        asked.depends_on(self) || (asked == Stage::Dk && onward)
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
    fn every_role_belongs_to_one_stage() {
        for &role in Role::ALL {
            assert_eq!(Stage::of_role(role).map(Stage::name), Some(role.name()));
        }
    }
}
