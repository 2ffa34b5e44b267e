//! The header of a `.safetensors` file of exported tensors.

use serde_json::{Map, Value, json};

use super::{ExportError, Member};
use crate::dump::StepDump;

/// The data starts at a multiple of this, as in files of the safetensors library.
const ALIGNMENT: usize = 8;

/// The bytes before the elements, which follow in the order of the members.
pub(super) fn header(dump: &StepDump, members: &[Member<'_>]) -> Result<Vec<u8>, ExportError> {
    let mut entries = Map::new();
    let metadata = json!({
        "run": dump.run.to_string(),
        "attempt": dump.attempt.0.to_string(),
        "step": dump.step.0.to_string(),
        "backtape": backtape::VERSION,
    });
    entries.insert("__metadata__".into(), metadata);
    let mut start = 0u64;
    for member in members {
        let end = start + member.bytes();
        let entry: Value = json!({
            "dtype": member.stored.safetensors_name(),
            "shape": member.shape,
            "data_offsets": [start, end],
        });
        entries.insert(member.name.to_string(), entry);
        start = end;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    Ok(out)
}
