//! `replay precision`: from parsed arguments to numbers and an exit code.

use std::path::Path;

use backtape::shard::TensorKey;

use super::args::PrecisionArguments;
use super::error::RunError;
use super::exit;
use super::run::selection;
use super::written::Json;
use crate::dump::{self, Selection};
use crate::head::HeadStep;
use crate::precision::{self, Gradients, Precision};
use crate::report::precision as shown;
use crate::verify::verify;

pub(super) fn run(arguments: &PrecisionArguments) -> Result<(String, i32), RunError> {
    let written = Json::asked(arguments.dump.json.as_deref())?;
    let path = &arguments.dump.dump;
    let tokens = arguments.tokens.map(|n| n as usize);
    let options = precision::Options { microbatch: arguments.microbatch, tokens };
    let found = precision_report(path, &selection(&arguments.dump.which), &options)?;
    let code = match found.gradients {
        Gradients::Diverge(_) => exit::DIVERGED,
        _ if found.nonfinite > 0 || found.check.is_none() => exit::INCOMPLETE,
        _ => exit::AGREED,
    };
    let json = || serde_json::to_string_pretty(&found).expect("plain data");
    Ok((written.output(json, || shown::render(&found))?, code))
}

/// What `replay precision` finds, without a terminal.
pub fn precision_report(
    path: &Path,
    selection: &Selection,
    options: &precision::Options,
) -> Result<Precision, RunError> {
    let dump = dump::open(path, selection)?;
    let proof = verify(&dump, &|_| {});
    let wrong = |source| RunError::Precision { path: path.into(), source: Box::new(source) };
    let unusable = |key: &TensorKey| proof.unusable(key).map(str::to_string);
    let step = HeadStep::new(&dump, None, unusable).map_err(|source| wrong(source.into()))?;
    precision::precision(&step, options).map_err(wrong)
}
