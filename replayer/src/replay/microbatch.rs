//! A microbatch as a replay holds it: its inputs, and the units whose gradients are judged together.

use backtape::identity::Microbatch;

use super::world::World;
use crate::head::step::StepError;
use crate::head::{HeadStep, MicrobatchInputs, Scores, Unit};

/// A microbatch with its units.
pub(crate) struct HeadMicrobatch {
    pub(super) inputs: MicrobatchInputs,
    pub(super) units: Vec<Unit>,
    /// Tokens by what their loss is divided by.
    pub(super) denominators: Vec<(Unit, f64)>,
    /// Why addends could not be told apart, if they could not.
    pub(super) blocked: Option<String>,
}

/// How the inputs of a microbatch are gathered.
type Gather<'a> = fn(&HeadStep<'a>, Option<Microbatch>) -> Result<MicrobatchInputs, StepError>;

impl HeadMicrobatch {
    /// True when nothing of it can be computed.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self.inputs.scores, Scores::Lost(_))
    }
}

pub(super) fn head_microbatches<'a>(
    step: &HeadStep<'a>,
    world: &dyn World,
    gather: Gather<'a>,
) -> Result<Vec<HeadMicrobatch>, StepError> {
    let gather = |&microbatch: &Option<Microbatch>| {
        let mut inputs = gather(step, microbatch)?;
        world.inputs(step, &mut inputs);
        Ok(inputs)
    };
    let inputs: Vec<MicrobatchInputs> =
        step.microbatches.iter().map(gather).collect::<Result<_, StepError>>()?;
    let all: Vec<&MicrobatchInputs> = inputs.iter().collect();
    let counted = |inputs: &MicrobatchInputs| {
        if matches!(inputs.scores, Scores::Lost(_)) {
            return Ok(Vec::new());
        }
        let counted = step.denominators(&all, inputs).map_err(|why| StepError::Unfit {
            key: inputs.rows_key.clone(),
            found: "of ranks that cannot be counted as declared".into(),
            wanted: format!("tokens counted over {}: {why}", step.options.scope),
        });
        counted.map(|mut denominators| {
            world.denominators(step, &all, inputs, &mut denominators);
            denominators
        })
    };
    let counted: Vec<_> = inputs.iter().map(counted).collect::<Result<_, _>>()?;
    let microbatch = |(inputs, denominators): (MicrobatchInputs, Vec<(Unit, f64)>)| {
        let (units, blocked) = match step.units(&inputs) {
            _ if matches!(inputs.scores, Scores::Lost(_)) => (Vec::new(), None),
            Ok(units) => (units, None),
            // Rows of dq are known all the same.
            Err(why) => {
                let rows = (0..inputs.tokens()).collect();
                (vec![Unit { ranks: Vec::new(), rows }], Some(why))
            }
        };
        HeadMicrobatch { inputs, units, denominators, blocked }
    };
    Ok(inputs.into_iter().zip(counted).map(microbatch).collect())
}

/// A microbatch as words.
pub(crate) fn words(microbatch: Option<Microbatch>) -> String {
    microbatch.map_or("the step".into(), |mb| format!("microbatch {mb}"))
}
