//! The part of the text report that compares two runs.

use std::fmt::Write;

use super::causes;
use super::schema::{AgainstReport, Report, Verdict};
use super::text::{place, word, wrap};
use crate::number::{error, plural, ratio, short};
use crate::replay::against::NamedDifference;
use crate::replay::outcome::Status;

/// Tensors shown one by one.
const SHOWN: usize = 12;

/// Writes the stages of both runs, then the tensors that were compared by name.
pub(super) fn render(out: &mut String, against: &AgainstReport) {
    if !against.differences.is_empty() {
        stages(out, against);
    }
    if !against.tensors.is_empty() {
        tensors(out, against);
    }
    if !against.stages.is_empty() {
        let failing = against.stages.iter().filter(|s| s.status == Status::Fail);
        let failing: Vec<&str> = failing.map(|s| s.name).collect();
        let other = match failing.as_slice() {
            [] => "agrees with its own reference at every stage compared".to_string(),
            names => format!("diverges from its own reference at {}", names.join(", ")),
        };
        wrap(out, "other run ", &other);
        causes::render(out, &against.causes);
    }
    out.push('\n');
}

fn stages(out: &mut String, against: &AgainstReport) {
    let _ = writeln!(
        out,
        "{:<13}{:<7}{:>10} {:>8}  {:<17}{:>10} {:>10}  where",
        "both runs", "status", "difference", "allowed", "worst element", "this", "other"
    );
    for difference in &against.differences {
        let (index, ours, theirs) = match difference.worst {
            Some((at, x, y)) => (format!("[{}, {}]", at.0, at.1), short(x), short(y)),
            None if difference.difference == 0.0 => {
                ("equal bit for bit".into(), String::new(), String::new())
            }
            None => Default::default(),
        };
        let _ = writeln!(
            out,
            "{:<13}{:<7}{:>10} {:>8}  {:<17}{:>10} {:>10}  {}",
            difference.stage.name(),
            if difference.status == Status::Skip { "-" } else { word(difference.status) },
            error(difference.difference),
            difference.allowed.map_or("-".into(), error),
            index,
            ours,
            theirs,
            place(difference.microbatch.map(|mb| mb.0), None),
        );
    }
    // Many stages are aligned in the same way, so each way is written once, with its stages.
    let mut ways: Vec<(&str, Vec<&str>)> = Vec::new();
    for difference in against.differences.iter().filter(|difference| !difference.aligned.is_empty())
    {
        match ways.iter_mut().find(|(how, _)| *how == difference.aligned) {
            Some((_, stages)) => stages.push(difference.stage.name()),
            None => ways.push((&difference.aligned, vec![difference.stage.name()])),
        }
    }
    for (how, stages) in ways {
        wrap(out, "aligned   ", &format!("{}: {how}", stages.join(", ")));
    }
}

fn tensors(out: &mut String, against: &AgainstReport) {
    let all = &against.tensors;
    let differs =
        |tensor: &&NamedDifference| tensor.status != Status::Pass || tensor.measures.mismatches > 0;
    let differ: Vec<&NamedDifference> = all.iter().filter(differs).collect();
    let equal = all.len() - differ.len();
    wrap(
        out,
        "tensors   ",
        &format!(
            "{} by name, in the order of capture: {equal} equal bit for bit, {} not",
            all.len(),
            differ.len()
        ),
    );
    if differ.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "{:<33}{:<7}{:>10} {:>8} {:>9} {:>7}  {:>9} {:>11}",
        "tensor", "status", "difference", "unit", "by chance", "growth", "max abs", "cosine"
    );
    for tensor in differ.iter().take(SHOWN) {
        let _ = writeln!(
            out,
            "{:<33}{:<7}{:>10} {:>8} {:>9} {:>7}  {:>9} {:>11.8}",
            shortened(&tensor.tensor),
            word(tensor.status),
            error(tensor.difference),
            error(tensor.unit),
            error(tensor.expected),
            tensor.growth.map_or("-".into(), |growth| format!("{}x", ratio(growth))),
            error(tensor.measures.max_abs),
            tensor.measures.cosine,
        );
    }
    if differ.len() > SHOWN {
        let more = plural((differ.len() - SHOWN) as u64, "more tensor");
        wrap(out, "", &format!("and {more} that differ: --json names all"));
    }
    match &against.likely {
        Some(likely) => {
            wrap(out, "likely    ", &format!("{} parts first: {}", likely.tensor, likely.why))
        }
        None => wrap(
            out,
            "likely    ",
            "none stands out: each differs by what roundings of its dtype come to by chance",
        ),
    }
}

/// Keeps the end of a long name, where the names of layers differ.
fn shortened(name: &str) -> String {
    const ROOM: usize = 32;
    match name.len() {
        0..=ROOM => name.into(),
        // Names are ASCII.
        n => format!("...{}", &name[n - (ROOM - 3)..]),
    }
}

/// The last sentence of the report, where nothing diverges.
pub(super) fn verdict(report: &Report, verdict: Verdict) -> String {
    let Some(against) = &report.against else {
        return String::new();
    };
    let (stages, tensors) = (against.differences.len(), against.tensors.len());
    let warned =
        against.tensors.iter().filter(|difference| difference.status == Status::Warn).count();
    match verdict {
        Verdict::Agreed => {
            let mut parts = Vec::new();
            if stages > 0 {
                parts.push(format!(
                    "{} of both runs are what the declared precision must give",
                    plural(stages as u64, "comparison")
                ));
            }
            if tensors > warned {
                let n = plural((tensors - warned) as u64, "tensor");
                let passing = |named: &&NamedDifference| named.status == Status::Pass;
                let mut passed = against.tensors.iter().filter(passing);
                let equal = passed.all(|difference| difference.difference == 0.0);
                let how = match equal {
                    true => "equal bit for bit",
                    false => "equal bit for bit or what their own operands give",
                };
                parts.push(format!("{n} outside the head {how}"));
            }
            if let Some(step) = &against.step {
                parts.extend(step.conclusion.iter().cloned());
            }
            if warned > 0 {
                parts.push(format!("{warned} that differ outside the head are not judged"));
            }
            format!("AGREED: {}.", parts.join("; "))
        }
        Verdict::Differs => {
            let step = against.step.iter().flat_map(|step| step.differs.clone());
            let named = (warned > 0).then(|| differs(against, warned));
            let all: Vec<String> = named.into_iter().chain(step).collect();
            format!("DIFFERS: {}.", all.join("; "))
        }
        _ if stages + tensors == 0 && against.step.is_none() => {
            let said = report.reasons.iter().filter(|own| own.verdict == Verdict::Incomplete);
            let said: Vec<&str> = said.map(|own| own.what.as_str()).collect();
            format!("INCOMPLETE: {}.", said.join("; "))
        }
        _ if against.step.as_ref().is_some_and(|step| !step.lacking.is_empty()) => {
            let lacking = against.step.iter().flat_map(|step| step.lacking.clone());
            format!("INCOMPLETE: {}.", lacking.collect::<Vec<_>>().join("; "))
        }
        _ if against.unjudged > 0 => {
            format!(
                "INCOMPLETE: {} could not be compared.",
                plural(against.unjudged as u64, "tensor")
            )
        }
        _ => {
            "INCOMPLETE: no verdict is given on what depends on the missing or altered parts above."
                .into()
        }
    }
}

/// The sentence for tensors that differ and have no bound: the first of them, by how much and
/// where.
fn differs(against: &AgainstReport, warned: usize) -> String {
    let unsettled = |named: &&NamedDifference| named.status == Status::Warn;
    let first = against.tensors.iter().find(unsettled).map_or(String::new(), |difference| {
        let measures = &difference.measures;
        let ulps = measures.ulps.last().map(|(ulps, _)| format!(" by up to {ulps} ulp"));
        let place_and_values = measures.first_mismatch.map(|point| {
            let (row, column) = point.index;
            let values = (short(point.captured), short(point.reference));
            format!(", at first at [{row}, {column}]: {} here, {} there", values.0, values.1)
        });
        format!(
            ", the first {} in {}{}{}",
            difference.tensor,
            plural(measures.mismatches, "element"),
            ulps.unwrap_or_default(),
            place_and_values.unwrap_or_default()
        )
    });
    let likely = match &against.likely {
        Some(likely) => format!("; they likely part at {}", likely.tensor),
        None => String::new(),
    };
    let more = match against.unjudged - warned.min(against.unjudged) {
        0 => String::new(),
        n => format!("; {n} could not be compared"),
    };
    format!(
        "{warned} of {} outside the head differ{first}, and nothing recorded says how much they \
         may{likely}{more}",
        plural(against.tensors.len() as u64, "tensor"),
    )
}
