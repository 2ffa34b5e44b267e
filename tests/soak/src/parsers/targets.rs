//! What reads bytes from outside, and sound inputs of each.

use std::fs::File;
use std::io::Cursor;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use backtape::coordinator::doubt::{CALLS, Call, makes_sense};
use backtape::coordinator::examine_from;
use backtape::hash::{ContentHash, TrustHash};
use backtape::head::HeadDeclaration;
use backtape::identity::{Name, Step};
use backtape::manifest::{Manifest, RunRecord};
use backtape::scalars::Line;
use backtape::selection::{ByteLimit, IndexSelection, Selection, StepSelection, TensorSelection};
use backtape::store::ShardFile;
use backtape::store::header::{METADATA_KEY, encode};
use backtape::store::shard_file::describe;
use backtape_proto as proto;
use backtape_replayer::head::HeadOptions;
use backtape_replayer::head::policy_file::read_toml;
use clap::ValueEnum;
use prost::Message;

use crate::bitrot::{memory, record};

/// A parser that is thrown bytes at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub(crate) enum Target {
    Header,
    Manifest,
    Journal,
    Proto,
    Head,
    Selection,
    Scalars,
}

/// A parser with its sound inputs; what is mutated may be packed before it is parsed.
pub(crate) struct Parser {
    target: Target,
    /// Inputs to mutate.
    pub(crate) seeds: Vec<Vec<u8>>,
    scratch: File,
    path: std::path::PathBuf,
    _folder: tempfile::TempDir,
}

impl Parser {
    /// With inputs that backtape itself wrote.
    pub(crate) fn new(target: Target) -> Result<Parser> {
        let folder = memory()?;
        let path = folder.path().join("scratch");
        let scratch = File::options().read(true).write(true).create_new(true).open(&path)?;
        let run = folder.path().join("run-a");
        record(&run)?;
        let seeds = seeds(target, &run)?;
        Ok(Parser { target, seeds, scratch, path, _folder: folder })
    }

    /// Packs a mutated input so that what guards the outside does not stop it there: in one
    /// input of eight it is thrown as it is.
    pub(crate) fn pack(&self, input: Vec<u8>, how: u64) -> Vec<u8> {
        match (self.target, how % 8) {
            (_, 0) | (Target::Proto | Target::Head | Target::Selection | Target::Scalars, _) => {
                input
            }
            (Target::Header, 1..=3) => [prefixed(input), vec![7; 12]].concat(),
            (Target::Header, _) => {
                let text = String::from_utf8_lossy(&input).into_owned();
                let entry =
                    serde_json::json!({"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]});
                let outer = serde_json::json!({"__metadata__": {METADATA_KEY: text}, "q": entry});
                let mut file = prefixed(outer.to_string().into_bytes());
                file.extend([7; 12]);
                file
            }
            (Target::Manifest, _) => sealed(&input),
            (Target::Journal, _) => chained(&input),
        }
    }

    /// True when the input was accepted.
    pub(crate) fn parse(&self, input: &[u8]) -> bool {
        match self.target {
            Target::Header => {
                let written = self.scratch.set_len(input.len() as u64);
                if written.and_then(|()| self.scratch.write_all_at(input, 0)).is_err() {
                    return false;
                }
                let described = describe(&self.path, &self.scratch).is_ok();
                // Two readers of one format must agree.
                assert_eq!(described, ShardFile::open(&self.path).is_ok(), "the readers differ");
                described
            }
            Target::Manifest => {
                RunRecord::from_bytes(input).is_ok() || Manifest::from_bytes(input).is_ok()
            }
            Target::Journal => {
                let examined = examine_from(Path::new("journal"), Cursor::new(input), Step(0));
                examined.is_ok_and(|examined| examined.torn_bytes == 0)
            }
            Target::Proto => {
                let Some((&call, message)) = input.split_first() else { return false };
                makes_sense(CALLS[usize::from(call) % CALLS.len()], message)
            }
            Target::Head => {
                let toml = std::str::from_utf8(input).ok().and_then(|text| read_toml(text).ok());
                let declared = serde_json::from_slice::<HeadDeclaration>(input).ok();
                // Whether the options fit together is another question; it must be answered.
                let _ = declared.as_ref().map(HeadOptions::new);
                toml.is_some() || declared.is_some()
            }
            Target::Selection => select(input),
            Target::Scalars => {
                std::str::from_utf8(input).is_ok_and(|text| match Line::parse(text) {
                    Ok(Line::Row(row)) => row.bounded().1 == 0,
                    other => other.is_ok(),
                })
            }
        }
    }
}

fn select(input: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(input) else { return false };
    let steps = text
        .parse::<StepSelection>()
        .map(|steps| steps.within(0, 1000, 10).len() + usize::from(steps.contains(u64::MAX)));
    let tensors = text.parse::<TensorSelection>();
    let tensors = tensors.map(|tensors| tensors.contains("layers.0.attn.q_proj.weight"));
    let ranks = text.parse::<IndexSelection>().map(|ranks| ranks.contains(u32::MAX));
    let bytes = text.parse::<ByteLimit>();
    let whole = serde_json::from_str::<Selection>(text).map(|whole| whole.restrictions());
    steps.is_ok() || tensors.is_ok() || ranks.is_ok() || bytes.is_ok() || whole.is_ok()
}

/// Behind the length that a header of so many bytes has.
fn prefixed(json: Vec<u8>) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json);
    file
}

/// In the seal that these contents have, if they are JSON.
fn sealed(input: &[u8]) -> Vec<u8> {
    let Ok(mut value) = serde_json::from_slice::<serde_json::Value>(input) else {
        return [b"{\"blake3\":\"\",\"manifest\":", input, b"}\n"].concat();
    };
    if value.get("started").is_some() {
        // A run's record carries its seal among the others.
        if let Some(fields) = value.as_object_mut() {
            fields.remove("blake3");
        }
        value["blake3"] = TrustHash::of(value.to_string().as_bytes()).to_string().into();
        let mut bytes = serde_json::to_vec_pretty(&value).unwrap_or_default();
        bytes.push(b'\n');
        return bytes;
    }
    let blake3 = TrustHash::of(value.to_string().as_bytes());
    format!("{{\"blake3\":\"{blake3}\",\"manifest\":{value}}}\n").into_bytes()
}

/// As lines whose checksums are right.
fn chained(input: &[u8]) -> Vec<u8> {
    let mut chain = ContentHash::of(b"backtape journal 1");
    let mut out = Vec::new();
    for json in input.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        chain = ContentHash::of(&[chain.to_string().as_bytes(), json].concat());
        out.extend(chain.to_string().bytes());
        out.push(b' ');
        out.extend(json);
        out.push(b'\n');
    }
    out
}

fn seeds(target: Target, run: &Path) -> Result<Vec<Vec<u8>>> {
    let step = run.join("step-00000000");
    let file = ShardFile::open(&step.join("rank-00000-mb-0000.safetensors"))?;
    let head = HeadDeclaration { z_loss: 1e-4, valid_vocab: Some(50257), ..Default::default() };
    let head = serde_json::to_vec(&head)?;
    Ok(match target {
        Target::Header => {
            let mut about = file.about().clone();
            about.shards.truncate(1);
            let entry = about.shards.first_mut().map(|shard| shard.entry = "q".into());
            entry.context("the file holds a shard")?;
            let inner = serde_json::to_vec(&about)?;
            let outer = encode(&about, 0)?[8..].to_vec();
            vec![inner, outer]
        }
        Target::Manifest => {
            let manifest: serde_json::Value =
                serde_json::from_slice(&std::fs::read(step.join("manifest.json"))?)?;
            let record = std::fs::read(run.join("run.json"))?;
            vec![manifest["manifest"].to_string().into_bytes(), record]
        }
        Target::Journal => {
            let text = std::fs::read(run.join("journal.jsonl"))?;
            let lines = text.split(|&byte| byte == b'\n').filter(|line| line.len() > 33);
            vec![lines.map(|line| &line[33..]).collect::<Vec<_>>().join(&b'\n')]
        }
        Target::Proto => messages(&head),
        Target::Head => {
            let policy = "base = \"fused\"\n[round]\nlogits = \"bf16\"\n[sums]\ndk = { dtype = \"f32\", order = \"blocked\", block = 64 }\n[tiles]\ntokens = 256\n";
            let grpo = br#"{"loss":"grpo","denominator":12.5,"mask_value":"-inf","grpo":{"clip_low":0.2,"kl":"k3"},"dtypes":{"logits":"f32"},"tiles":{"tokens":256,"vocab":512}}"#;
            vec![head, policy.into(), grpo.to_vec()]
        }
        Target::Selection => [
            "0,100-110",
            "every:1000",
            "none",
            "all",
            "layers.*.attn.*,!*.bias,q",
            "0-3,7",
            "64MiB",
            "1.5GB",
            r#"{"steps":"0","tensors":"q,dk","ranks":"0-3","microbatches":"all","max_tensor_bytes":"1MiB"}"#,
        ]
        .map(|text| text.as_bytes().to_vec())
        .into(),
        Target::Scalars => [
            r#"{"schema":"backtape.scalars/1","run":"run-a","attempt":0,"rank":3,"world_size":4,"host":"h","incarnation":7}"#,
            r#"{"step":0,"time":1700000000.25,"values":{"loss":10.82,"grad_norm":"NaN"}}"#,
            r#"{"note":"scalars of layers are left out"}"#,
        ]
        .map(|text| text.as_bytes().to_vec())
        .into(),
    })
}

/// One sound message of each call: a list, and long because there are nine.
#[allow(clippy::too_many_lines)]
fn messages(head: &[u8]) -> Vec<Vec<u8>> {
    let member =
        Some(proto::Member { run: "run-a".into(), attempt: 0, rank: 3, incarnation: 12345 });
    let name = Name::new("rank-00003.safetensors").map_or(String::new(), String::from);
    let one = |call: Call| -> Vec<u8> {
        let member = member.clone();
        match call {
            Call::Join => proto::JoinRequest {
                run: "run-a".into(),
                rank: 3,
                world_size: 4,
                incarnation: 12345,
                host: "host-a".into(),
                attempt: Some(1),
                format_version: 1,
                mesh: r#"[["data",2],["tensor",2]]"#.into(),
                transport: 1,
                versions: [("jax".into(), "0.7.1".into())].into(),
                launch: "job-17/2".into(),
                heard: Some(5),
            }
            .encode_to_vec(),
            Call::ReportFile => proto::ReportFileRequest {
                member,
                step: 7,
                file: Some(proto::FileReport {
                    name: name.clone(),
                    length: 70_000,
                    header_hash: vec![9; 32].into(),
                }),
            }
            .encode_to_vec(),
            Call::CloseStep => proto::CloseStepRequest {
                member,
                step: 7,
                files: 2,
                head: head.to_vec().into(),
                omissions: vec![proto::Omission {
                    tensor: "dk".into(),
                    microbatch: Some(1),
                    reason: "the disk is full".into(),
                }],
                selection: br#"{"steps":"0","tensors":"q"}"#.to_vec().into(),
            }
            .encode_to_vec(),
            Call::StepStatus => proto::StepStatusRequest {
                run: "run-a".into(),
                attempt: 1,
                step: 7,
                ..Default::default()
            }
            .encode_to_vec(),
            Call::RunStatus => proto::RunStatusRequest { run: "run-a".into() }.encode_to_vec(),
            Call::RecordScalars => proto::RecordScalarsRequest {
                member,
                host: "host-a".into(),
                first: 3,
                lines: br#"{"step":0,"time":1.5,"values":{"loss":10.82}}"#.to_vec().into(),
            }
            .encode_to_vec(),
            Call::Heartbeat => proto::HeartbeatRequest {
                member,
                step: Some(9),
                steps_per_second: 2.5,
                period_ms: 1000,
                plan_version: 1,
                triggers_settled: 0,
                report: Some(proto::TriggerReport { step: 9, reason: "loss is NaN".into() }),
                ring: Some(proto::RingReport { trigger: 1, steps: vec![7, 8, 9] }),
                leaving: false,
            }
            .encode_to_vec(),
            Call::SetPlan => proto::SetPlanRequest {
                run: "run-a".into(),
                steps: Some("every:1000".into()),
                tensors: Some("q,dk".into()),
                ..Default::default()
            }
            .encode_to_vec(),
            Call::Trigger => proto::TriggerRequest {
                run: "run-a".into(),
                step: Some(12),
                reason: "a look".into(),
            }
            .encode_to_vec(),
        }
    };
    let numbered = (0u8..).zip(CALLS);
    numbered.map(|(number, call)| [vec![number], one(call)].concat()).collect()
}
