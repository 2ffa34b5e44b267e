//! The text of the script, with only the lines that the head's options need.

use std::fmt::Write;

use backtape::head::{GrpoDeclaration, RatioLevel};

use super::Framework;
use crate::kernels::formula::TokenLoss;
use crate::kernels::number::Number;
use crate::kernels::surrogate::{kl, surrogate};
use crate::kernels::text::{Program, number};
use crate::kernels::transform::Transform;

/// The tensors that the script starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    Product,
    Logits,
    Logprobs,
}

/// What the script has to know of the microbatch.
pub(super) struct Facts {
    /// Run, attempt, step and microbatch, in words.
    pub(super) title: String,
    pub(super) start: Start,
    /// The tensors that the loss is differentiated with respect to: q, k and bias, or logits, or
    /// logprobs.
    pub(super) leaves: Vec<&'static str>,
    /// Whether k is stored as `[D, V]`.
    pub(super) transposed: bool,
    pub(super) transform: Transform,
    /// Columns of the logits; below, how many of them are classes.
    pub(super) vocabulary: usize,
    pub(super) classes: usize,
    /// Logit of the other columns, where it is finite.
    pub(super) mask: Option<f64>,
    pub(super) smoothing: f64,
    pub(super) z_loss: f64,
    pub(super) grpo: Option<GrpoDeclaration>,
    pub(super) old_logprobs: bool,
    /// Tokens of a sequence.
    pub(super) sequence: usize,
    /// Bytes that the logits take in f64.
    pub(super) memory: u64,
}

/// The whole script.
pub(super) fn text(facts: &Facts, framework: Framework) -> String {
    let mut out = header(facts, framework);
    out.push_str(match framework {
        Framework::Jax => include_str!("jax_before.py"),
        Framework::Torch => include_str!("torch_before.py"),
    });
    let _ = writeln!(out, "LEAVES = {}", names(&facts.leaves));
    out.push_str("\n\ndef loss(x):\n");
    out.push_str(
        "    \"\"\"The part of the loss that these tokens are, and what it passed through.\"\"\"\n",
    );
    let xp = match framework {
        Framework::Jax => "jnp",
        Framework::Torch => "torch",
    };
    for line in body(facts, framework, xp) {
        let _ = writeln!(out, "    {line}");
    }
    out.push_str(match framework {
        Framework::Jax => include_str!("jax_after.py"),
        Framework::Torch => include_str!("torch_after.py"),
    });
    out
}

fn header(facts: &Facts, framework: Framework) -> String {
    let needs = match framework {
        Framework::Jax => "jax, safetensors",
        Framework::Torch => "torch, safetensors",
    };
    format!(
        "#!/usr/bin/env python3\n\
         \"\"\"The loss head of {}, from the data that lies beside this file.\n\n\
         Its forward in plain {}; every gradient is the framework's own. Printed are the relative\n\
         errors against the same in f64: of what the job captured, and of this script in the job's\n\
         dtypes. Where the first is much larger than the second, the job's kernel is what differs.\n\n\
         Needs {needs}; about {:.1} GiB of memory for each copy of the logits in f64.\n\"\"\"\n\n",
        facts.title,
        framework.name(),
        facts.memory as f64 / f64::from(1 << 30),
    )
}

fn names(all: &[&str]) -> String {
    let quoted: Vec<String> = all.iter().map(|name| format!("{name:?}")).collect();
    format!("[{}]", quoted.join(", "))
}

fn body(facts: &Facts, framework: Framework, xp: &str) -> Vec<String> {
    let mut lines = Vec::new();
    if facts.start == Start::Logprobs {
        lines.push("logprobs = wide(x[\"logprobs\"])".into());
        lines.push("seen = {}".into());
    } else {
        logits(facts, framework, xp, &mut lines);
        softmax(framework, &mut lines);
    }
    match &facts.grpo {
        Some(grpo) => policy(facts, grpo, framework, xp, &mut lines),
        None => lines.push(format!("token = {}", cross_entropy(facts, framework))),
    }
    // A share is the product of cotangent and weight over the denominator; it is 0 for an ignored
    // token, whose loss may be NaN.
    lines.push("share = as_is(given[\"share\"], token)".into());
    lines.push(format!("return {xp}.where(share != 0, share * token, 0.0).sum(), seen"));
    lines
}

fn logits(facts: &Facts, framework: Framework, xp: &str, lines: &mut Vec<String>) {
    match facts.start {
        Start::Product => {
            let spec = if facts.transposed { "td,dv->tv" } else { "td,vd->tv" };
            lines.push(format!("z = {xp}.einsum(\"{spec}\", wide(x[\"q\"]), wide(x[\"k\"]))"));
        }
        _ => lines.push("z = wide(x[\"logits\"])".into()),
    }
    if facts.leaves.contains(&"bias") {
        lines.push("z = z + wide(x[\"bias\"])".into());
    }
    let program = Program::new(framework.language(), "z");
    facts.transform.value(program.name("z"));
    lines.extend(program.lines());
    match facts.mask {
        _ if facts.classes == facts.vocabulary => {}
        // The masked columns are left out of the softmax.
        None => lines.push(format!("z = z[:, :{}]", facts.classes)),
        Some(mask) => lines.push(format!(
            "z = {xp}.where({xp}.arange({}) < {}, z, {})",
            facts.vocabulary,
            facts.classes,
            number(mask)
        )),
    }
}

fn softmax(framework: Framework, lines: &mut Vec<String>) {
    let (lse, label) = match framework {
        Framework::Jax => (
            "jax.nn.logsumexp(z, -1)",
            "jnp.take_along_axis(z, given[\"labels\"][:, None], 1)[:, 0]",
        ),
        Framework::Torch => {
            ("torch.logsumexp(z, -1)", "z.gather(1, given[\"labels\"][:, None])[:, 0]")
        }
    };
    lines.push(format!("lse = {lse}"));
    lines.push(format!("label = {label}"));
    lines.push("seen = {\"lse\": lse, \"label_logits\": label}".into());
}

/// The loss of each token, before its share.
fn cross_entropy(facts: &Facts, framework: Framework) -> String {
    let program = Program::new(framework.language(), "token");
    let name = |name: &str| program.name(name);
    let mean = || name(&format!("z[:, :{}].mean(-1)", facts.classes));
    let loss = TokenLoss { smoothing: facts.smoothing, z_loss: facts.z_loss };
    loss.value(name("lse"), name("label"), mean).to_string()
}

fn policy(
    facts: &Facts,
    grpo: &GrpoDeclaration,
    framework: Framework,
    xp: &str,
    lines: &mut Vec<String>,
) {
    if facts.start != Start::Logprobs {
        lines.push("logprobs = label - lse".into());
    }
    let fixed_logprobs = match framework {
        Framework::Jax => "jax.lax.stop_gradient(logprobs)",
        Framework::Torch => "logprobs.detach()",
    };
    let old = if facts.old_logprobs {
        "as_is(given[\"old_logprobs\"], logprobs)"
    } else {
        fixed_logprobs
    };
    lines.push(format!("log_ratio = logprobs - {old}"));
    if grpo.ratio == RatioLevel::Sequence {
        let rows = facts.sequence;
        lines.push(format!("weights = as_is(given[\"weights\"], logprobs).reshape(-1, {rows})"));
        lines.push("total = weights.sum(-1)".into());
        lines.push(format!(
            "mean = (weights * log_ratio.reshape(-1, {rows})).sum(-1) / {xp}.where(total == 0, 1, total)"
        ));
        lines.push(match framework {
            Framework::Jax => format!("log_ratio = jnp.repeat(mean, {rows})"),
            Framework::Torch => format!("log_ratio = mean.repeat_interleave({rows})"),
        });
    }
    lines.push(format!("ratio = {xp}.exp(log_ratio)"));
    lines.push("advantages = as_is(given[\"advantages\"], logprobs)".into());
    let program = Program::new(framework.language(), "gain");
    let name = |name: &str| program.name(name);
    let loss = surrogate(grpo, name("ratio"), name("advantages"));
    if grpo.kl_beta == 0.0 {
        let token = format!("token = {loss}");
        lines.extend(program.lines());
        lines.push(token);
        return;
    }
    let token = loss + kl(grpo.kl, name("d")).times(grpo.kl_beta);
    let token = format!("token = {token}");
    lines.extend(program.lines());
    lines.push("d = as_is(given[\"ref_logprobs\"], logprobs) - logprobs".into());
    lines.push(token);
}
