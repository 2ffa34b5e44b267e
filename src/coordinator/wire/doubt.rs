//! Decodes and checks the bytes of a message as the service does, without acting on it: the entry
//! point for a fuzzer.

use backtape_proto as proto;
use prost::Message;

use super::{Refusal, malformed, steering};

/// A call with a message that a rank or a person sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Call {
    Join,
    ReportFile,
    CloseStep,
    StepStatus,
    RunStatus,
    RecordScalars,
    Heartbeat,
    SetPlan,
    Trigger,
}

/// Every call.
pub const CALLS: [Call; 9] = [
    Call::Join,
    Call::ReportFile,
    Call::CloseStep,
    Call::StepStatus,
    Call::RunStatus,
    Call::RecordScalars,
    Call::Heartbeat,
    Call::SetPlan,
    Call::Trigger,
];

/// True when the bytes are a message of the call that passes all checks.
pub fn makes_sense(call: Call, message: &[u8]) -> bool {
    let read = match call {
        Call::Join => decode::<proto::JoinRequest>(message).and_then(super::join).map(drop),
        Call::ReportFile => decode(message).and_then(super::report).map(drop),
        Call::CloseStep => decode(message).and_then(super::close).map(drop),
        Call::StepStatus => decode(message).and_then(super::status).map(drop),
        Call::RunStatus => decode::<proto::RunStatusRequest>(message)
            .and_then(|wire| super::run(wire.run))
            .map(drop),
        Call::RecordScalars => decode(message).and_then(super::scalars).map(drop),
        Call::Heartbeat => decode(message).and_then(steering::heartbeat).map(drop),
        Call::SetPlan => decode(message).and_then(steering::plan).map(drop),
        Call::Trigger => decode(message).and_then(steering::trigger).map(drop),
    };
    read.is_ok()
}

fn decode<M: Message + Default>(message: &[u8]) -> Result<M, Refusal> {
    M::decode(message).map_err(malformed)
}
