//! Writes one microbatch of a loss head as a script that runs without backtape: a directory with
//! `repro.py` and its data, to be sent to the owner of the kernel.
//!
//! The script computes the head with the framework's operations and its automatic differentiation,
//! so it is also an independent check of the replay's formulas. The factor of each token
//! (cotangent, weight and denominator over the declared scope) is computed by the replay, as it may
//! depend on other microbatches and ranks.

mod script;

use std::io;
use std::path::{Path, PathBuf};

use backtape::dtype::Dtype;
use backtape::head::LossAverage;
use backtape::identity::Microbatch;
use backtape::placement::Reduction;
use backtape::role::Role;
use backtape::shard::TensorKey;

use self::script::{Facts, Start};
use super::{ExportError, Made, Member, safetensors, save};
use crate::assemble;
use crate::dump::StepDump;
use crate::head::step::{StepError, addends_of_elements, flat_rows};
use crate::head::units::share;
use crate::head::{HeadStep, MicrobatchInputs, Scores};
use crate::kernels::NoProgress;
use crate::kernels::matrix::IGNORED;
use crate::kernels::text::Language;

/// The framework that the script uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framework {
    /// JAX.
    Jax,
    /// PyTorch.
    Torch,
}

impl Framework {
    fn name(self) -> &'static str {
        match self {
            Framework::Jax => "JAX",
            Framework::Torch => "PyTorch",
        }
    }

    fn language(self) -> Language {
        match self {
            Framework::Jax => Language::JAX,
            Framework::Torch => Language::TORCH,
        }
    }
}

/// Why no script was written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ReproError {
    #[error(transparent)]
    Step(#[from] Box<StepError>),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error("the step has microbatches {recorded}: choose one with --microbatch")]
    Microbatch { recorded: String },
    #[error("what the tokens of {what} are divided by is not known: {why}")]
    Denominator { what: String, why: String },
    #[error("{path} cannot be made: check that its directory exists and has room", path = path.display())]
    Make { path: PathBuf, source: io::Error },
}

/// Writes `repro.py` and `data.safetensors` into a new directory; returns the bytes of the data.
pub fn repro(
    dump: &StepDump,
    microbatch: Option<u32>,
    framework: Framework,
    target: &Path,
) -> Result<u64, ReproError> {
    let step = HeadStep::new(dump, None, |_| None).map_err(Box::new)?.holding();
    let microbatch = choose(&step, microbatch)?;
    let inputs: Vec<MicrobatchInputs> = step
        .microbatches
        .iter()
        .map(|&microbatch| step.inputs(microbatch))
        .collect::<Result<_, _>>()
        .map_err(Box::new)?;
    let inputs_here =
        inputs.iter().find(|inputs| inputs.microbatch == microbatch).expect("it was chosen");
    let mut data = Data::default();
    let start = leaves(&step, inputs_here, &mut data);
    tokens(&step, &inputs, inputs_here, &mut data)?;
    captured(&step, inputs_here, start, &mut data)?;
    let facts = facts(&step, inputs_here, start, &data);
    write(dump, &data, &script::text(&facts, framework), target)
}

fn choose(step: &HeadStep<'_>, asked: Option<u32>) -> Result<Option<Microbatch>, ReproError> {
    let asked = asked.map(Microbatch);
    match step.microbatches.as_slice() {
        [microbatch] if asked.is_none() || *microbatch == asked => Ok(*microbatch),
        several if asked.is_some() && several.contains(&asked) => Ok(asked),
        several => {
            let names: Vec<String> = several.iter().flatten().map(Microbatch::to_string).collect();
            Err(ReproError::Microbatch { recorded: names.join(", ") })
        }
    }
}

/// The tensors of the data file, in order.
#[derive(Default)]
struct Data {
    items: Vec<Item>,
}

/// One tensor of the data file.
struct Item {
    name: String,
    key: TensorKey,
    dtype: Dtype,
    shape: Vec<u64>,
    /// The bytes, if they were computed here; else they are read from the dump.
    bytes: Option<Vec<u8>>,
}

impl Item {
    fn member(&self) -> Member<'_> {
        Member {
            name: &self.name,
            key: &self.key,
            dtype: self.dtype,
            stored: self.dtype,
            shape: self.shape.clone(),
            made: self.bytes.as_deref().map(Made::Bytes),
        }
    }
}

impl Data {
    /// Adds a tensor of the dump, with another shape of as many elements.
    fn dumped(&mut self, name: &str, key: &TensorKey, dtype: Dtype, shape: Vec<u64>) {
        let (name, key) = (name.into(), key.clone());
        self.items.push(Item { name, key, dtype, shape, bytes: None });
    }

    fn numbers(&mut self, name: &str, key: &TensorKey, shape: Vec<u64>, values: &[f64]) {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.made(name, key, Dtype::F64, shape, bytes);
    }

    fn made(&mut self, name: &str, key: &TensorKey, dtype: Dtype, shape: Vec<u64>, bytes: Vec<u8>) {
        let (name, key, bytes) = (name.into(), key.clone(), Some(bytes));
        self.items.push(Item { name, key, dtype, shape, bytes });
    }

    fn has(&self, name: &str) -> bool {
        self.items.iter().any(|item| item.name == name)
    }
}

/// Adds the tensors that the loss is differentiated with respect to.
fn leaves(step: &HeadStep<'_>, own_inputs: &MicrobatchInputs, data: &mut Data) -> Start {
    let rows = own_inputs.tokens() as u64;
    let of_rows = &step.tensors[&own_inputs.rows_key];
    let last = of_rows.shape.last().copied().unwrap_or(0);
    let start = match &own_inputs.scores {
        Scores::Product { .. } => {
            data.dumped("q", &own_inputs.rows_key, of_rows.dtype, vec![rows, last]);
            let key =
                step.recorded(Role::K, own_inputs.microbatch).expect("its inputs were gathered");
            let k = &step.tensors[key];
            data.dumped("k", key, k.dtype, k.shape.clone());
            Start::Product
        }
        Scores::Logits(_) => {
            data.dumped("logits", &own_inputs.rows_key, of_rows.dtype, vec![rows, last]);
            Start::Logits
        }
        Scores::Logprobs | Scores::Lost(_) => {
            data.dumped("logprobs", &own_inputs.rows_key, of_rows.dtype, vec![rows]);
            Start::Logprobs
        }
    };
    if let (Some(_), Some(key)) =
        (&own_inputs.bias, step.recorded(Role::Bias, own_inputs.microbatch))
    {
        let bias = &step.tensors[key];
        data.dumped("bias", key, bias.dtype, vec![bias.shape.iter().product()]);
    }
    start
}

/// Adds labels, shares, and the inputs of a policy loss.
fn tokens(
    step: &HeadStep<'_>,
    all: &[MicrobatchInputs],
    inputs: &MicrobatchInputs,
    data: &mut Data,
) -> Result<(), ReproError> {
    let (key, shape) = (&inputs.rows_key, vec![inputs.tokens() as u64]);
    // An ignored token has a share of 0, so its label may be any class.
    let label = |&label: &u32| if label == IGNORED { 0 } else { i64::from(label) };
    let labels = inputs.labels.iter().map(label).flat_map(i64::to_le_bytes).collect();
    data.made("labels", key, Dtype::I64, shape.clone(), labels);
    let counted = |t: usize| if inputs.labels[t] == IGNORED { 0.0 } else { inputs.weights[t] };
    data.numbers("share", key, shape.clone(), &shares(step, all, inputs)?);
    if !step.is_policy_loss() {
        return Ok(());
    }
    let weights: Vec<f64> = (0..inputs.tokens()).map(counted).collect();
    data.numbers("weights", key, shape.clone(), &weights);
    let advantages = step.advantages(inputs).map_err(Box::new)?;
    data.numbers("advantages", key, shape.clone(), &advantages);
    for (name, role) in [("old_logprobs", Role::OldLogprobs), ("ref_logprobs", Role::RefLogprobs)] {
        let column = step.optional(role, inputs.microbatch, inputs.tokens()).map_err(Box::new)?;
        if let Some(values) = column {
            data.numbers(name, key, shape.clone(), &values);
        }
    }
    Ok(())
}

/// The factor of each token's loss, `[T]`: `cotangent weight / denominator`, and for a mean over
/// sequences divided by the sequence's total weight.
fn shares(
    step: &HeadStep<'_>,
    all: &[MicrobatchInputs],
    inputs: &MicrobatchInputs,
) -> Result<Vec<f64>, ReproError> {
    let all: Vec<&MicrobatchInputs> = all.iter().collect();
    let unknown = |why| ReproError::Denominator { what: inputs.rows_key.to_string(), why };
    let by_sequence =
        step.options.grpo.as_ref().is_some_and(|grpo| grpo.average == LossAverage::Sequence);
    let sequences = inputs.sequences();
    let mut factors = vec![0.0; inputs.tokens()];
    for (unit, denominator) in step.denominators(&all, inputs).map_err(unknown)? {
        let rows = || unit.rows.iter().copied().filter(|&t| inputs.labels[t] != IGNORED);
        let mut total = vec![0.0; inputs.tokens()];
        rows().for_each(|t| total[sequences[t] as usize] += inputs.weights[t]);
        for t in rows() {
            let of_sequence = if by_sequence { total[sequences[t] as usize] } else { 1.0 };
            let weight = share(inputs.weights[t] * inputs.cotangent[t], of_sequence);
            factors[t] = step.options.cotangent * share(weight, denominator);
        }
    }
    Ok(factors)
}

/// Adds the tensors that the job captured and the script computes too.
fn captured(
    step: &HeadStep<'_>,
    inputs: &MicrobatchInputs,
    start: Start,
    data: &mut Data,
) -> Result<(), ReproError> {
    let of_logits = [(Role::Lse, "lse"), (Role::LabelLogits, "label_logits")];
    let of_product = [(Role::Dq, "dq"), (Role::Dk, "dk"), (Role::Dbias, "dbias")];
    let roles: Vec<(Role, &'static str)> = match start {
        Start::Product => of_logits.into_iter().chain(of_product).collect(),
        Start::Logits => {
            of_logits.into_iter().chain([(Role::Dlogits, "dlogits"), of_product[2]]).collect()
        }
        Start::Logprobs => vec![(Role::Dlogprobs, "dlogprobs")],
    };
    for (role, name) in roles {
        let Some(key) = step.find(role, inputs.microbatch) else { continue };
        let info = &step.tensors[key];
        let called = format!("captured.{name}");
        match info.partial {
            None => data.dumped(&called, key, info.dtype, info.shape.clone()),
            Some(reduction) => {
                let sum = sum(step, key, reduction)?;
                data.numbers(&called, key, info.shape.clone(), &sum);
            }
        }
    }
    Ok(())
}

/// The sum (or mean) of the ranks' addends, in f64 and in the order of the ranks.
fn sum(step: &HeadStep<'_>, key: &TensorKey, reduction: Reduction) -> Result<Vec<f64>, ReproError> {
    let shape = &step.tensors[key].shape;
    let wrong =
        |source| ReproError::Step(Box::new(StepError::Assemble { key: key.clone(), source }));
    let mut total = vec![0.0; shape.iter().product::<u64>() as usize];
    for rank in assemble::holders(step.dump, key) {
        for part in assemble::addend_parts(step.dump, key, rank).map_err(wrong)? {
            let width = part.dtype.width();
            for (index, position) in flat_rows(&part.place.0, shape).into_iter().enumerate() {
                let bits = crate::bits::bits(part.bytes(), width, index);
                total[position] += crate::bits::value(part.dtype, bits);
            }
        }
    }
    if reduction == Reduction::Mean {
        let counts = addends_of_elements(step, key);
        total.iter_mut().zip(counts).for_each(|(x, n)| *x /= f64::from(n.max(1)));
    }
    Ok(total)
}

fn facts(step: &HeadStep<'_>, inputs: &MicrobatchInputs, start: Start, data: &Data) -> Facts {
    let (dump, options) = (step.dump, &step.options);
    let part = inputs.microbatch.map_or(String::new(), |mb| format!(", microbatch {mb}"));
    let vocabulary = match &inputs.scores {
        Scores::Product { k, .. } => k.shape[0] as usize,
        Scores::Logits(logits) => logits.shape.last().map_or(0, |&n| n as usize),
        Scores::Logprobs | Scores::Lost(_) => 0,
    };
    let classes = inputs.valid_vocab.min(vocabulary);
    let leaves = ["q", "k", "logits", "logprobs", "bias"];
    Facts {
        title: format!("run {}, attempt {}, step {}{part}", dump.run, dump.attempt, dump.step),
        start,
        leaves: leaves.into_iter().filter(|name| data.has(name)).collect(),
        transposed: options.transposed(),
        transform: options.transform,
        vocabulary,
        classes,
        mask: options.mask,
        smoothing: options.smoothing(classes),
        z_loss: options.declared.z_loss,
        grpo: options.grpo.clone(),
        old_logprobs: data.has("old_logprobs"),
        sequence: inputs.sequence.max(1),
        memory: inputs.tokens() as u64 * vocabulary as u64 * 8,
    }
}

/// Writes both files or none: the directory gets its name when both are complete.
fn write(dump: &StepDump, data: &Data, script: &str, target: &Path) -> Result<u64, ReproError> {
    if target.symlink_metadata().is_ok() {
        return Err(ExportError::Exists { path: target.into() }.into());
    }
    let wrong = |source| ReproError::Make { path: target.into(), source };
    let parent = target.parent().filter(|parent| *parent != Path::new(""));
    let mut builder = tempfile::Builder::new();
    let scratch = builder.prefix(".backtape-").tempdir_in(parent.unwrap_or(Path::new(".")));
    let scratch = scratch.map_err(wrong)?;
    let inside = scratch.path().join("repro");
    std::fs::create_dir(&inside).map_err(wrong)?;
    let members: Vec<Member<'_>> = data.items.iter().map(Item::member).collect();
    let header = safetensors::header(dump, &members)?;
    let written = save(dump, &header, &members, &inside.join("data.safetensors"), &NoProgress)?;
    std::fs::write(inside.join("repro.py"), script).map_err(wrong)?;
    std::fs::rename(&inside, target).map_err(wrong)?;
    Ok(written)
}
