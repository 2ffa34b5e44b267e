//! The parts that tensors play in a loss head.

use serde::{Deserialize, Serialize};

macro_rules! roles {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// The part that a tensor plays in the loss head; docs/heads.md defines the computation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Role { $($(#[$doc])* #[serde(rename = $name)] $variant,)* }

        impl Role {
            /// Every role: inputs first, then results in the order in which the head computes them.
            pub const ALL: &'static [Role] = &[$(Role::$variant,)*];

            /// The role's name, as `record` and `--compare` take it.
            pub fn name(self) -> &'static str {
                match self { $(Role::$variant => $name,)* }
            }
        }
    };
}

roles! {
    /// Hidden states that enter the head, `[T, D]`.
    Q = "q",
    /// The unembedding, `[V, D]` (or `[D, V]`).
    K = "k",
    /// Target ids, `[T]`.
    Labels = "labels",
    /// Token weights, `[T]`.
    Weights = "weights",
    /// Bias of the logits, `[V]`.
    Bias = "bias",
    /// Upstream cotangent of each token's loss, `[T]`; of a reduced loss, that of the loss it is in.
    Cotangent = "cotangent",
    /// Which token each row of q is, `[T]`: indices that match rows of two runs.
    TokenOrder = "token_order",
    /// Advantage of each token, `[T]`, or of each sequence, `[B]`.
    Advantages = "advantages",
    /// Log-probabilities of the policy that sampled the tokens, `[T]`.
    OldLogprobs = "old_logprobs",
    /// Log-probabilities of the reference policy of the KL term, `[T]`.
    RefLogprobs = "ref_logprobs",
    /// `q kᵀ (+ bias)` after transform and mask, `[T, V]`.
    Logits = "logits",
    /// Log of the softmax denominator, `[T]`.
    Lse = "lse",
    /// The logit of each token's label, `[T]`.
    LabelLogits = "label_logits",
    /// Log-probability of each token's label, `[T]`, or of every class, `[T, V]`.
    Logprobs = "logprobs",
    /// The loss: one number, or `[T]` where it is not reduced.
    Loss = "loss",
    /// Gradient of the label's log-probability, `[T]`.
    Dlogprobs = "dlogprobs",
    /// Gradient of the logits, `[T, V]`.
    Dlogits = "dlogits",
    /// The log-sum-exp part of dq.
    DqLse = "dq_lse",
    /// The label part of dq.
    DqLabel = "dq_label",
    /// Gradient of q, `[T, D]`.
    Dq = "dq",
    /// The log-sum-exp part of dk.
    DkLse = "dk_lse",
    /// The label part of dk.
    DkLabel = "dk_label",
    /// Gradient of k, in k's layout.
    Dk = "dk",
    /// Gradient of the bias, `[V]`.
    Dbias = "dbias",
    /// Norm over all gradients: one number.
    GradNorm = "grad_norm",
}

impl Role {
    /// Finds a role by its name.
    pub fn from_name(name: &str) -> Option<Role> {
        Role::ALL.iter().copied().find(|role| role.name() == name)
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Role;

    #[test]
    fn the_table_in_the_docs_names_every_role_once_and_nothing_else() {
        let page = include_str!("../docs/heads.md");
        let (_, table) = page.split_once("## What can be recorded").expect("the section is there");
        let (table, _) = table.split_once("\n## ").expect("another section follows");
        let rows = table.lines().filter(|line| line.starts_with("| `"));
        let first = rows.map(|row| row.split('|').nth(1).expect("a first column"));
        let mut named: Vec<&str> =
            first.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
        let mut roles: Vec<&str> = Role::ALL.iter().map(|role| role.name()).collect();
        named.sort_unstable();
        roles.sort_unstable();
        assert_eq!(named, roles);
    }
}
