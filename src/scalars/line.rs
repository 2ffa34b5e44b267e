//! One line of a rank's JSON lines: a header that names the writing process, a row, or a note.
//!
//! ```text
//! {"schema":"backtape.scalars/1","run":"run-a","attempt":0,"rank":3,"world_size":4,...}
//! {"step":0,"time":1700000000.25,"values":{"loss":10.82,"grad_norm":"NaN"}}
//! {"note":"scalars of layers are left out from here on: ..."}
//! ```
//!
//! JSON has no NaN and no infinities: they are written as the strings NaN, Infinity and -Infinity.

use std::fmt;

use serde::de::{Error, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Row, word};
use crate::identity::{Attempt, Name, Rank};

/// Name and version of the format of the lines.
pub const SCHEMA: &str = "backtape.scalars/1";

/// Whose rows follow. A rank that is restarted inside an attempt writes another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// [`SCHEMA`]; a reader refuses another major version with an error that names it.
    pub schema: String,
    /// The run.
    pub run: Name,
    /// The launch.
    pub attempt: Attempt,
    /// The rank that wrote the rows.
    pub rank: Rank,
    /// Ranks in the job.
    pub world_size: u32,
    /// The rank's machine.
    pub host: Name,
    /// A random number, drawn once per process: distinguishes a restarted rank from a process that
    /// sends rows again.
    pub incarnation: u64,
}

/// A line that was read.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// Whose rows follow.
    Header(Header),
    /// Scalars of a step.
    Row(Row),
    /// A remark on the rows, for example that some were left out.
    Note(String),
}

/// Why a line cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// It was written by a later backtape.
    #[error("its schema is {0:?} and this version reads {SCHEMA}: read it with a newer backtape")]
    Newer(String),
    /// It is incomplete, or not a line of this format.
    #[error("{0}")]
    Malformed(#[from] serde_json::Error),
}

#[derive(Serialize, Deserialize)]
struct RowLine {
    step: u64,
    time: f64,
    values: Values,
}

#[derive(Serialize, Deserialize)]
struct NoteLine {
    note: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum AnyLine {
    Header(Header),
    Row(RowLine),
    Note(NoteLine),
}

impl Line {
    /// Reads one line, without its newline.
    pub fn parse(text: &str) -> Result<Line, LineError> {
        Ok(match serde_json::from_str(text)? {
            AnyLine::Header(header) if header.schema != SCHEMA => {
                return Err(LineError::Newer(header.schema));
            }
            AnyLine::Header(header) => Line::Header(header),
            AnyLine::Row(RowLine { step, time, values }) => {
                Line::Row(Row { step, time, values: values.0 })
            }
            AnyLine::Note(NoteLine { note }) => Line::Note(note),
        })
    }

    /// Appends the line with its newline.
    pub fn write(&self, out: &mut Vec<u8>) {
        let written = match self {
            Line::Header(header) => serde_json::to_writer(&mut *out, header),
            Line::Row(row) => return write_row(row, out),
            Line::Note(note) => serde_json::to_writer(&mut *out, &NoteLine { note: note.clone() }),
        };
        written.expect("plain data into memory");
        out.push(b'\n');
    }
}

/// Appends a row with its newline. A time that is NaN or infinite is written as 0.
pub fn write_row(row: &Row, out: &mut Vec<u8>) {
    #[derive(Serialize)]
    struct Borrowed<'a> {
        step: u64,
        time: f64,
        #[serde(serialize_with = "as_map")]
        values: &'a [(String, f64)],
    }
    let time = if row.time.is_finite() { row.time } else { 0.0 };
    let line = Borrowed { step: row.step, time, values: &row.values };
    serde_json::to_writer(&mut *out, &line).expect("plain data into memory");
    out.push(b'\n');
}

fn as_map<S: Serializer>(values: &[(String, f64)], out: S) -> Result<S::Ok, S::Error> {
    let mut map = out.serialize_map(Some(values.len()))?;
    for (name, value) in values {
        match word(*value) {
            Some(word) => map.serialize_entry(name, word)?,
            None => map.serialize_entry(name, value)?,
        }
    }
    map.end()
}

struct Values(Vec<(String, f64)>);

impl Serialize for Values {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        as_map(&self.0, out)
    }
}

impl<'de> Deserialize<'de> for Values {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Values, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Values;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("scalars by name")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Values, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, Number(value))) = map.next_entry()? {
                    pairs.push((name, value));
                }
                Ok(Values(pairs))
            }
        }
        input.deserialize_map(Pairs)
    }
}

struct Number(f64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Number, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(f64),
            Word(String),
        }
        match Either::deserialize(input)? {
            Either::Number(value) => Ok(Number(value)),
            Either::Word(word) => match word.as_str() {
                "NaN" => Ok(Number(f64::NAN)),
                "Infinity" => Ok(Number(f64::INFINITY)),
                "-Infinity" => Ok(Number(f64::NEG_INFINITY)),
                _ => Err(D::Error::custom(format!("{word:?} is no number"))),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_row_comes_back_bit_for_bit_whatever_its_names_and_values(
            step: u64,
            values in proptest::collection::vec((".{1,20}", any::<f64>()), 0..8),
        ) {
            let row = Row { step, time: 1.5, values };
            let mut bytes = Vec::new();
            write_row(&row, &mut bytes);
            prop_assert_eq!(bytes.pop(), Some(b'\n'));
            prop_assert!(!bytes.contains(&b'\n'));
            let Line::Row(back) = Line::parse(std::str::from_utf8(&bytes).unwrap()).unwrap() else {
                panic!("no row");
            };
            prop_assert_eq!(back.step, row.step);
            let bits = |row: &Row| -> Vec<_> {
                let name_and_bits = |(name, x): &(String, f64)| match x.is_nan() {
                    true => (name.clone(), 0),
                    false => (name.clone(), x.to_bits()),
                };
                row.values.iter().map(name_and_bits).collect()
            };
            prop_assert_eq!(bits(&back), bits(&row));
        }

        #[test]
        fn no_text_panics(text in ".{0,80}") {
            let _ = Line::parse(&text);
        }
    }

    #[test]
    fn a_newer_schema_is_refused_by_name() {
        let header = r#"{"schema":"backtape.scalars/2","run":"a","attempt":0,"rank":0,
            "world_size":1,"host":"h","incarnation":7}"#;
        let error = Line::parse(header).unwrap_err().to_string();
        assert!(error.contains("backtape.scalars/2"), "{error}");
    }
}
