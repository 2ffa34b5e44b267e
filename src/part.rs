//! The parts of an optimizer's step that are recorded of each parameter, and the names of their tensors:
//! `step.PART:PARAMETER` (docs/step-format.md).

/// What of a parameter a tensor is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The rank's `.grad` before the first backward of the step.
    Stale,
    /// The rank's gradient of one microbatch.
    Grad,
    /// The rank's gradient summed over its microbatches.
    Accumulated,
    /// The gradient after communication.
    Reduced,
    /// The gradient after the loss scale was taken out.
    Unscaled,
    /// The gradient that the optimizer takes.
    Clipped,
    /// The parameter before the optimizer's step.
    Before,
    /// The parameter after it.
    After,
    /// What the optimizer adds to the parameter.
    Update,
    /// The copy of more bits that the optimizer updates, before its step.
    MasterBefore,
    /// The same after it.
    MasterAfter,
    /// The gradients of one microbatch by the devices along a mesh axis, side by side.
    GradBy(String),
    /// The same summed over microbatches.
    AccumulatedBy(String),
    /// A tensor of the optimizer's state before its step, by its name.
    StateBefore(String),
    /// The same after it.
    StateAfter(String),
}

/// The parts whose name is one word.
const WORDS: [(&str, Part); 11] = [
    ("stale", Part::Stale),
    ("grad", Part::Grad),
    ("accumulated", Part::Accumulated),
    ("reduced", Part::Reduced),
    ("unscaled", Part::Unscaled),
    ("clipped", Part::Clipped),
    ("before", Part::Before),
    ("after", Part::After),
    ("update", Part::Update),
    ("master_before", Part::MasterBefore),
    ("master_after", Part::MasterAfter),
];

/// The parts that a gradient goes through after it was summed, in their order.
pub const OF_GRADIENT: [Part; 3] = [Part::Reduced, Part::Unscaled, Part::Clipped];

impl Part {
    /// The part and the parameter that a tensor's name says; `None` for a tensor that is no part of
    /// a step.
    pub fn of_tensor(name: &str) -> Option<(Part, &str)> {
        let (part, parameter) = name.strip_prefix("step.")?.split_once(':')?;
        let state = |prefix: &str| part.strip_prefix(prefix).map(str::to_string);
        let word = WORDS.iter().find(|(word, _)| *word == part).map(|(_, part)| part.clone());
        let part = word
            .or_else(|| state("state_before.").map(Part::StateBefore))
            .or_else(|| state("state_after.").map(Part::StateAfter))
            .or_else(|| state("grad_by.").map(Part::GradBy))
            .or_else(|| state("accumulated_by.").map(Part::AccumulatedBy))?;
        (!parameter.is_empty()).then_some((part, parameter))
    }

    /// The rank whose declaration a tensor is.
    pub fn declaring_rank(name: &str) -> Option<u32> {
        name.strip_prefix("step.declared:")?.parse().ok()
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Part::StateBefore(name) => write!(f, "state_before.{name}"),
            Part::StateAfter(name) => write!(f, "state_after.{name}"),
            Part::GradBy(axis) => write!(f, "grad_by.{axis}"),
            Part::AccumulatedBy(axis) => write!(f, "accumulated_by.{axis}"),
            word => {
                let known = WORDS.iter().find(|(_, part)| part == word);
                f.write_str(known.map_or("", |(name, _)| name))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written_and_others_are_no_part_of_a_step() {
        let written = |part: &Part| format!("step.{part}:layers.0.weight");
        for (_, part) in WORDS {
            assert_eq!(Part::of_tensor(&written(&part)), Some((part, "layers.0.weight")));
        }
        let state = Part::StateAfter("exp_avg".into());
        assert_eq!(Part::of_tensor("step.state_after.exp_avg:w"), Some((state, "w")));
        for other in ["w", "step.w", "step.grad:", "step.gradient:w", "step.declared:3"] {
            assert_eq!(Part::of_tensor(other), None, "{other}");
        }
        assert_eq!(Part::declaring_rank("step.declared:3"), Some(3));
        assert_eq!(Part::declaring_rank("step.declared:x"), None);
    }
}
