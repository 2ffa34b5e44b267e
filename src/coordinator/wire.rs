//! Converts wire types to domain types and checks every message: only here.

pub mod asking;
pub mod channel;
pub mod doubt;
pub mod sending;
pub(super) mod steering;

use backtape_proto as proto;

use super::event::Closing;
use super::limits::{
    MAX_DECLARATION_BYTES, MAX_FILE_BYTES, MAX_FILES_PER_REPORT, MAX_MESH_BYTES, MAX_VERSIONS_BYTES,
};
use super::refusal::Refusal;
use super::request::{Answered, FileClaim, Join, Member, StepAsk};
use super::scalars::SentRows;
use super::status::{Overview, Progress};
use crate::hash::TrustHash;
use crate::identity::{Attempt, LaunchName, Microbatch, Name, Rank, Step};
use crate::manifest::{EVERYTHING, Omission};
use crate::scalars::Line;

/// Most bytes of an omission's tensor name or reason.
const MAX_TEXT_BYTES: usize = 4096;

fn malformed(error: impl ToString) -> Refusal {
    Refusal::Malformed(error.to_string())
}

/// Refuses a text that is too long before it is parsed, which takes several times its memory.
fn bounded(what: &str, bytes: usize, most: usize) -> Result<(), Refusal> {
    match bytes > most {
        true => Err(malformed(format!("{what} has {bytes} bytes, at most {most} are accepted"))),
        false => Ok(()),
    }
}

fn name(text: String) -> Result<Name, Refusal> {
    Name::new(text).map_err(malformed)
}

pub(super) fn join(wire: proto::JoinRequest) -> Result<Join, Refusal> {
    let mesh = match wire.mesh.as_str() {
        "" => Default::default(),
        text => {
            bounded("a mesh", text.len(), MAX_MESH_BYTES)?;
            serde_json::from_str(text).map_err(malformed)?
        }
    };
    let versions = wire.versions.iter().map(|(name, version)| name.len() + version.len());
    bounded("the versions of a rank", versions.sum(), MAX_VERSIONS_BYTES)?;
    Ok(Join {
        run: name(wire.run)?,
        rank: Rank(wire.rank),
        world_size: wire.world_size,
        incarnation: wire.incarnation,
        host: name(wire.host)?,
        attempt: wire.attempt.map(Attempt),
        format_version: wire.format_version,
        mesh,
        versions: wire.versions.into_iter().collect(),
        launch: match wire.launch.as_str() {
            "" => None,
            text => Some(LaunchName::new(text).map_err(malformed)?),
        },
        heard: wire.heard,
    })
}

pub(super) fn answered(answered: Answered) -> proto::JoinResponse {
    let answer = proto::JoinResponse {
        arrivals: answered.arrivals,
        version: crate::VERSION.into(),
        ..Default::default()
    };
    match answered.entry {
        Ok(entry) => proto::JoinResponse {
            attempt: entry.attempt.0,
            directory: entry.directory.to_string_lossy().into_owned(),
            run_record: entry.run_record.0.to_vec().into(),
            vouch: entry.vouch,
            ..answer
        },
        Err(waits) => proto::JoinResponse { waits, ..answer },
    }
}

fn member(wire: Option<proto::Member>) -> Result<Member, Refusal> {
    let wire = wire.ok_or_else(|| malformed("it does not say whom it speaks for"))?;
    Ok(Member {
        run: name(wire.run)?,
        attempt: Attempt(wire.attempt),
        rank: Rank(wire.rank),
        incarnation: wire.incarnation,
    })
}

pub(super) fn report(wire: proto::ReportFileRequest) -> Result<(Member, Step, FileClaim), Refusal> {
    let file = wire.file.ok_or_else(|| malformed("it names no file"))?;
    Ok((member(wire.member)?, Step(wire.step), claim(file)?))
}

pub(super) fn reports(
    wire: proto::ReportFilesRequest,
) -> Result<(Member, Step, Vec<FileClaim>), Refusal> {
    if wire.files.len() > MAX_FILES_PER_REPORT {
        let count = wire.files.len();
        return Err(malformed(format!(
            "{count} files in one report, at most {MAX_FILES_PER_REPORT} are accepted"
        )));
    }
    let claims = wire.files.into_iter().map(claim).collect::<Result<_, _>>()?;
    Ok((member(wire.member)?, Step(wire.step), claims))
}

fn claim(file: proto::FileReport) -> Result<FileClaim, Refusal> {
    let header: [u8; 32] = file.header_hash.as_ref().try_into().map_err(|_| {
        malformed(format!("a header hash has 32 bytes, not {}", file.header_hash.len()))
    })?;
    if file.length > MAX_FILE_BYTES {
        let length = file.length;
        return Err(malformed(format!(
            "{length} bytes in one file, at most {MAX_FILE_BYTES} are accepted"
        )));
    }
    Ok(FileClaim { name: name(file.name)?, length: file.length, header_hash: TrustHash(header) })
}

pub(super) fn close(wire: proto::CloseStepRequest) -> Result<(Member, Step, Closing), Refusal> {
    let member = member(wire.member)?;
    let head = match wire.head.as_ref() {
        [] => None,
        bytes => {
            bounded("a declaration of the head", bytes.len(), MAX_DECLARATION_BYTES)?;
            Some(serde_json::from_slice(bytes).map_err(malformed)?)
        }
    };
    let omissions = wire.omissions.into_iter().map(|omission| {
        if omission.tensor.len().max(omission.reason.len()) > MAX_TEXT_BYTES {
            return Err(malformed(format!("an omission holds more than {MAX_TEXT_BYTES} bytes")));
        }
        Ok(Omission {
            rank: member.rank,
            tensor: match omission.tensor.as_str() {
                EVERYTHING => omission.tensor,
                // Escaped, not refused: a tensor may be omitted just because its name is not
                // allowed.
                name => Name::escaped(name).to_string(),
            },
            microbatch: omission.microbatch.map(Microbatch),
            reason: one_line(&omission.reason),
        })
    });
    let selection = match wire.selection.as_ref() {
        [] => None,
        bytes => Some(serde_json::from_slice(bytes).map_err(malformed)?),
    };
    let omissions = omissions.collect::<Result<_, _>>()?;
    let closing = Closing { files: wire.files, head, omissions, selection };
    Ok((member, Step(wire.step), closing))
}

/// Replaces control characters, which could move a terminal's cursor or end a line of a report.
fn one_line(text: &str) -> String {
    let plain = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(plain).collect()
}

pub(super) fn scalars(wire: proto::RecordScalarsRequest) -> Result<SentRows, Refusal> {
    let text = std::str::from_utf8(&wire.lines).map_err(malformed)?;
    let row = |line: &str| match Line::parse(line).map_err(malformed)? {
        // backtape's own ranks keep to the limits: a row beyond them is refused.
        Line::Row(row) => match row.bounded() {
            (row, 0) => Ok(row),
            (row, n) => Err(malformed(format!("{n} scalars of step {} have no name", row.step))),
        },
        _ => Err(malformed("a line of scalars is no row")),
    };
    let rows = text.lines().map(row).collect::<Result<_, _>>()?;
    Ok(SentRows { member: member(wire.member)?, host: name(wire.host)?, first: wire.first, rows })
}

/// The run that a question concerns.
pub(super) fn run(text: String) -> Result<Name, Refusal> {
    name(text)
}

pub(super) fn overview(overview: Overview) -> proto::RunStatusResponse {
    let progress = |progress: Progress| proto::StepProgress {
        step: progress.step.0,
        committed: progress.committed,
        partial: progress.partial,
        closed_ranks: progress.closed,
        files: progress.files,
        shards: progress.shards,
        bytes: progress.bytes,
        missing: progress.missing,
    };
    proto::RunStatusResponse {
        attempt: overview.attempt.0,
        world_size: overview.world_size,
        joined: overview.joined,
        absent: overview.absent,
        directory: overview.directory.to_string_lossy().into_owned(),
        steps: overview.steps.into_iter().map(progress).collect(),
        committed: overview.committed,
        open: overview.open,
        bytes: overview.bytes,
        version: crate::VERSION.into(),
    }
}

pub(super) fn status(wire: proto::StepStatusRequest) -> Result<(Name, Attempt, StepAsk), Refusal> {
    let ask = StepAsk { step: Step(wire.step), brief: wire.brief };
    Ok((name(wire.run)?, Attempt(wire.attempt), ask))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a rank's declarations are limited in size before they are parsed. Method: each part
    /// alone is larger than allowed and otherwise valid.
    #[test]
    fn a_mesh_versions_and_a_head_that_are_too_large_are_refused_and_named() {
        let plain_request =
            || proto::JoinRequest { run: "run".into(), host: "h".into(), ..Default::default() };
        assert!(join(plain_request()).is_ok());
        let blank = |most: usize| " ".repeat(most);
        let mesh = proto::JoinRequest { mesh: blank(MAX_MESH_BYTES) + "[]", ..plain_request() };
        let text = "1".repeat(MAX_VERSIONS_BYTES);
        let versions =
            proto::JoinRequest { versions: [("jax".into(), text)].into(), ..plain_request() };
        for (request, what) in [(mesh, "a mesh"), (versions, "the versions")] {
            let said = join(request).unwrap_err().to_string();
            assert!(said.contains(what) && said.contains("at most"), "{said}");
        }
        let member = proto::Member { run: "run".into(), ..Default::default() };
        let head = (blank(MAX_DECLARATION_BYTES) + "{}").into_bytes().into();
        let request = proto::CloseStepRequest { member: Some(member), head, ..Default::default() };
        let said = close(request).unwrap_err().to_string();
        assert!(said.contains("a declaration of the head"), "{said}");
    }
}
