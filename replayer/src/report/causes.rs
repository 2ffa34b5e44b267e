//! The causes of a divergence as text: named, tied or unknown, each with its evidence.

use super::text::wrap;
use crate::diagnose::{CauseReport, Standing, VariantStage};
use crate::head::contradictions::Contradiction;
use crate::number::{error, ratio};
use crate::replay::other_declaration::OtherDeclaration;

/// Writes all causes; nothing where nothing diverged.
pub(super) fn render(out: &mut String, causes: &[CauseReport]) {
    let tied = causes.iter().filter(|cause| cause.standing == Standing::Tied);
    let tied: Vec<&str> = tied.map(|cause| cause.id.as_str()).collect();
    if !tied.is_empty() {
        let words =
            format!("TIED: {}; the captured tensors cannot tell them apart", tied.join(", "));
        wrap(out, "cause     ", &words);
    }
    for cause in causes {
        wrap(out, "cause     ", &format!("{}{}", cause.id, figures(cause)));
        wrap(out, "          ", &format!("{}.", cause.evidence));
        if !cause.parameters.is_empty() {
            let parameters =
                cause.parameters.iter().map(|(name, value)| format!("{name}: {value}"));
            wrap(out, "          ", &parameters.collect::<Vec<_>>().join("; "));
        }
        wrap(out, "          ", &format!("To do: {}.", cause.advice));
    }
    if !causes.is_empty() {
        out.push('\n');
    }
}

/// Writes what was declared by hand and is not what the job has.
pub(super) fn contradictions(out: &mut String, all: &[Contradiction]) {
    for contradiction in all {
        wrap(out, "declared  ", &format!("{}.", contradiction.sentence));
    }
    if !all.is_empty() {
        out.push('\n');
    }
}

/// Writes another declaration of the head with which everything agrees, if there is one.
pub(super) fn declaration(out: &mut String, other: Option<&OtherDeclaration>) {
    let Some(other) = other else { return };
    wrap(out, "declared  ", &format!("{}.", other.sentence()));
    wrap(out, "          ", &format!("To tell: look at {}.", other.look));
    if other.fitted {
        wrap(out, "          ", "The value was fitted to what was captured.");
    }
    out.push('\n');
}

/// Writes how the user's own functions compare with the reference and with what was captured.
pub(super) fn variants(out: &mut String, all: &[VariantStage]) {
    for variant in all {
        let right = match variant.agrees {
            true => format!("right: ratio {} to the floor", ratio(variant.ratio)),
            false => format!("WRONG: {}", variant.reason),
        };
        let like = match (variant.explains, variant.distance) {
            (Some(true), _) => "; it is what was captured, but for rounding".to_string(),
            (Some(false), Some(distance)) => {
                format!("; what was captured is {} away from it", error(distance))
            }
            _ => "; the stage was not captured".to_string(),
        };
        wrap(out, "variant   ", &format!("{}, {}: {right}{like}", variant.variant, variant.stage));
    }
}

pub(super) fn figures(cause: &CauseReport) -> String {
    if cause.standing == Standing::Unknown {
        return String::new();
    }
    let mut words = vec![format!("{:.1} % of the divergence", 100.0 * cause.explained)];
    if let Some(share) = cause.norm_gap_explained {
        words.push(format!("{:.1} % of the gap of |dk|²", 100.0 * share));
    }
    if cause.bit_equal {
        words.push("bit for bit".into());
    }
    if let Some((by, next)) = cause.beats_next_by.zip(cause.next.as_ref()) {
        // Below 1 the next hypothesis leaves a smaller error, but does not win as it explains less
        // or has a fitted number.
        if by >= 1.0 {
            words.push(format!("{}x nearer than {next}", ratio(by)));
        }
    }
    format!(" explains {}", words.join(", "))
}
