//! What is found of two runs' steps.

use serde::Serialize;

use super::apart::Worst;
use super::norm::GapOfRuns;
use super::settings::Setting;
use crate::algebra::outcome::Stage;

/// A tensor of a step that two runs are compared at, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum At {
    /// The parameters before the step.
    Before,
    /// The optimizer's state before it.
    StateBefore,
    /// The sum of all gradients as they were computed, before any communication.
    Grad,
    /// The gradient after the reduction.
    Reduce,
    /// The same without the loss scale.
    Unscale,
    /// The gradient that the optimizer takes.
    Clip,
    /// The optimizer's state after the step.
    State,
    /// The parameters after it.
    After,
}

impl At {
    /// Every place, in order.
    pub(crate) const ALL: [At; 8] = [
        At::Before,
        At::StateBefore,
        At::Grad,
        At::Reduce,
        At::Unscale,
        At::Clip,
        At::State,
        At::After,
    ];

    /// Its name in every output.
    pub(crate) fn name(self) -> &'static str {
        match self {
            At::Before => "before",
            At::StateBefore => "state before",
            At::Grad => "grad",
            At::Reduce => "reduce",
            At::Unscale => "unscale",
            At::Clip => "clip",
            At::State => "state",
            At::After => "after",
        }
    }

    /// The stages of a run's own judgement that make it; none makes what a step is given.
    pub(super) fn stages(self) -> &'static [Stage] {
        match self {
            At::Before | At::StateBefore | At::Grad => &[],
            At::Reduce => &[Stage::Accumulate, Stage::Reduce],
            At::Unscale => &[Stage::Unscale],
            At::Clip => &[Stage::Clip],
            At::State => &[Stage::State],
            At::After => &[Stage::Update, Stage::Param],
        }
    }
}

/// Why a tensor of two runs differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It is the same, bit for bit or number for number.
    Equal,
    /// Rounding explains the difference.
    Rounding,
    /// It differs as what it was made from does: both runs make it as they declare.
    Carried,
    /// This run makes it wrongly.
    ThisIsWrong,
    /// The other run does.
    OtherIsWrong,
    /// Both do.
    BothAreWrong,
    /// The runs declare other settings of the stage.
    Declared,
    /// It differs, and no judgement of either run says why: it is given to the step, or it could
    /// not be judged.
    Differs,
}

impl Status {
    /// Whether a difference comes in here.
    pub(crate) fn enters(self) -> bool {
        self > Status::Carried
    }
}

/// A tensor of a parameter in both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The parameter, as this run calls it.
    pub parameter: String,
    /// What it is in the other run, where that is another name or view.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other: Option<String>,
    /// Which of its tensors.
    pub at: At,
    /// The part, as it is recorded: `state_after.exp_avg`.
    pub part: String,
    /// Why it differs.
    pub status: Status,
    /// The difference as a share of the larger norm; NaN where it is no number in one run.
    pub difference: f64,
    /// The same that roundings come to.
    pub floor: f64,
    /// This run over the other, where one number is the whole difference.
    pub factor: Option<f64>,
    /// Elements that are not the same.
    pub unequal: u64,
    /// The element that is furthest apart.
    pub worst: Option<Worst>,
    /// The cause that a run's own judgement names where it is wrong.
    pub cause: Option<String>,
}

/// How the parameters fare at one place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The place.
    pub at: At,
    /// Parameters that are equal.
    pub equal: usize,
    /// Those whose difference rounding, or what they were made from, explains.
    pub explained: usize,
    /// Those at which a difference comes in.
    pub differ: usize,
    /// The largest difference.
    pub largest: f64,
    /// The largest that roundings come to by chance; absent where nothing but what is given
    /// decides.
    pub floor: Option<f64>,
}

/// Parameters at which the same difference comes in.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupApart {
    /// The place.
    pub at: At,
    /// Why.
    pub status: Status,
    /// The parameters in words.
    pub what: String,
    /// Their names.
    pub parameters: Vec<String>,
    /// This run over the other, one number for all of them.
    pub factor: Option<f64>,
    /// Which sizes of the runs that number is.
    pub readings: Vec<String>,
    /// Of the one that is furthest apart: its difference, and what roundings come to.
    pub difference: f64,
    /// What roundings come to.
    pub floor: f64,
    /// Its element that is furthest apart.
    pub worst: Option<(String, Worst)>,
    /// The cause that a run's own judgement names.
    pub cause: Option<String>,
}

/// Everything that two runs' steps say of each other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepsApart {
    /// What to conclude, in sentences: which run is wrong, or where the two part.
    pub conclusion: Vec<String>,
    /// Of it, in what the two differ though neither is wrong by itself.
    pub differs: Vec<String>,
    /// Parameters that were compared.
    pub pairs: usize,
    /// Ranks, microbatches and reductions of this run, and of the other.
    pub split: [String; 2],
    /// How parameters of other names were brought together.
    pub found: Vec<String>,
    /// Parameters that could not be compared, in sentences.
    pub lacking: Vec<String>,
    /// Settings that differ.
    pub settings: Vec<Setting>,
    /// Place by place.
    pub stages: Vec<Row>,
    /// Where differences come in, the first place first.
    pub groups: Vec<GroupApart>,
    /// The difference of the two norms of the gradients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm: Option<GapOfRuns>,
    /// What was not compared: of which parameters, and why.
    pub not_compared: Vec<(String, String)>,
    /// Every tensor of every parameter.
    pub compared: Vec<Compared>,
}
