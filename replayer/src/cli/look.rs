//! Looking at a dump: `replay ls`, `show`, `export`.

use backtape::identity::Rank;
use backtape::index_box::IndexBox;

use super::args::{ExportArguments, FrameworkArgument, ListArguments, ShowArguments};
use super::error::CommandError;
use super::exit;
use super::progress::Bar;
use super::run::selection;
use super::written::Json;
use crate::assemble;
use crate::dump::{self, StepDump};
use crate::export::{self, Framework, Wanted};
use crate::number::bytes;
use crate::postmortem::{Watch, Work};
use crate::report::{listed, shown};

/// Most values that `show` prints.
const MOST: u64 = 10_000;
/// Of the last two dimensions, what `show` prints where no box is given.
const CORNER: u64 = 8;

pub(super) fn list(arguments: &ListArguments) -> Result<(String, i32), CommandError> {
    let runs = dump::list(&arguments.place, arguments.run.as_deref())?;
    let json = || serde_json::to_string_pretty(&runs).expect("plain data");
    let written = Json::asked(arguments.json.as_deref())?;
    Ok((written.output(json, || listed::render(&runs))?, exit::AGREED))
}

pub(super) fn show(arguments: &ShowArguments) -> Result<(String, i32), CommandError> {
    let dump = dump::open(&arguments.dump, &selection(&arguments.which))?;
    let asked = &arguments.tensor;
    let key = dump.find(&arguments.name, asked.microbatch, asked.when)?;
    let shape = dump.tensors().get(&key).map(|info| info.shape.clone()).unwrap_or_default();
    let place = match &arguments.place {
        Some(text) => parse(text, &shape)?,
        None => corner(&shape),
    };
    let elements = place.elements().unwrap_or(u64::MAX);
    if elements > MOST {
        let text = arguments.place.clone().unwrap_or_else(|| place.to_string());
        return Err(CommandError::Box { text, why: shown::too_many(elements, MOST), shape });
    }
    let tensor = match asked.rank {
        None => assemble::assemble_box(&dump, &key, &place)?,
        Some(rank) => {
            let whole = assemble::addend(&dump, &key, Rank(rank))?;
            // The rank may hold less than the tensor: what it holds is named.
            let outside = || CommandError::Box {
                text: place.to_string(),
                why: format!("rank {rank} holds {} of it", whole.place),
                shape: shape.clone(),
            };
            whole.part(&place).ok_or_else(outside)?
        }
    };
    let shown = shown::render(&tensor, &shape, arguments.bits);
    Ok((format!("{}{shown}", note(&dump)), exit::of_step(&dump)))
}

/// A line that says why a step is not committed; nothing of one that is.
fn note(dump: &StepDump) -> String {
    let mut said = dump.passed_over();
    let why = dump.state.why();
    said.extend(why.map(|why| format!("step {} is not committed: {why}", dump.step)));
    said.into_iter().map(|sentence| sentence + "\n").collect()
}

pub(super) fn export(arguments: &ExportArguments) -> Result<(String, i32), CommandError> {
    let dump = dump::open(&arguments.dump, &selection(&arguments.which))?;
    let asked = &arguments.tensor;
    let Some(target) = &arguments.to else {
        return repro(&dump, arguments);
    };
    let mut wanted = Vec::new();
    for name in &arguments.names {
        // Weights have no microbatch, and are asked for beside what has one.
        let in_dump = dump.find(name, asked.microbatch, asked.when);
        let key = match (in_dump, asked.microbatch) {
            (Err(dump::FindError::Absent { .. }), Some(_)) => dump.find(name, None, asked.when)?,
            (key, _) => key?,
        };
        wanted.push(Wanted { key, rank: asked.rank.map(Rank), name: name.clone() });
    }
    let bar = Bar::new(arguments.quiet);
    let sizes = wanted
        .iter()
        .filter_map(|wanted| dump.tensors().get(&wanted.key))
        .map(|info| info.shape.iter().product::<u64>().saturating_mul(info.dtype.width() as u64));
    bar.begin("export", Work::Bytes, sizes.sum());
    let written = export::export(&dump, &wanted, target, arguments.widen, &bar)?;
    bar.finish();
    let names = arguments.names.join(", ");
    let said = format!("{names}: {} in {}\n", bytes(written), target.display());
    Ok((format!("{}{said}", note(&dump)), exit::of_step(&dump)))
}

fn repro(dump: &StepDump, arguments: &ExportArguments) -> Result<(String, i32), CommandError> {
    let framework = match arguments.framework {
        FrameworkArgument::Jax => Framework::Jax,
        FrameworkArgument::Torch => Framework::Torch,
    };
    let target = arguments.repro.as_deref().expect("clap asks for it where there is no --to");
    let written = export::repro(dump, arguments.tensor.microbatch, framework, target)?;
    let script = target.join("repro.py");
    let said = format!("{} of data beside it: python {}\n", bytes(written), script.display());
    Ok((format!("{}{said}", note(dump)), exit::of_step(dump)))
}

/// The first rows and columns of a tensor's first matrix.
fn corner(shape: &[u64]) -> IndexBox {
    let matrix = shape.len().saturating_sub(2);
    let most = |dim: usize| if dim < matrix { 1 } else { CORNER };
    IndexBox(shape.iter().enumerate().map(|(dim, &size)| (0, size.min(most(dim)))).collect())
}

/// `0:4,8,:` as a box: ranges, one index, all.
fn parse(text: &str, shape: &[u64]) -> Result<IndexBox, CommandError> {
    let wrong = |why: String| CommandError::Box { text: text.into(), why, shape: shape.to_vec() };
    let words: Vec<&str> = text.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    if words.len() != shape.len() {
        return Err(wrong(format!("it has {} ranges for {} dimensions", words.len(), shape.len())));
    }
    let number = |word: &str, otherwise: u64| match word {
        "" => Ok(otherwise),
        _ => word.parse::<u64>().map_err(|_| wrong(format!("{word:?} is no index"))),
    };
    let mut ranges = Vec::new();
    for (word, &size) in words.iter().zip(shape) {
        let range = match word.split_once(':') {
            Some((lo, hi)) => (number(lo, 0)?, number(hi, size)?),
            None => {
                let index = number(word, 0)?;
                (index, index.saturating_add(1))
            }
        };
        ranges.push(range);
    }
    let place = IndexBox(ranges);
    place.check(shape).map_err(|error| wrong(error.to_string()))?;
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_is_typed_as_ranges_indices_or_all_of_a_dimension() {
        let typed = |text| parse(text, &[4, 10, 8]).map(|place| place.0);
        assert_eq!(typed("1:3, 4, :").unwrap(), [(1, 3), (4, 5), (0, 8)]);
        assert_eq!(typed(":2,5:,0").unwrap(), [(0, 2), (5, 10), (0, 1)]);
        for (text, why) in [
            ("1:3", "1 ranges for 3"),
            ("a,0,0", "no index"),
            ("0:5,0,0", "does not fit"),
            ("3:1,0,0", "does not fit"),
        ] {
            let said = typed(text).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
        assert_eq!(corner(&[3, 100, 4]).0, [(0, 1), (0, 8), (0, 4)]);
    }
}
