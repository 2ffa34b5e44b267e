//! Scalars as CSV with one value per line. A table with one column per name would need a new header
//! whenever a name first appears at a later step.

use std::io::Write;

use super::{Row, word};
use crate::identity::Rank;

/// The first line of the file.
pub const HEADER: &str = "step,time,rank,name,value\n";

/// Appends one line for each value of a row.
pub fn write_row(rank: Rank, row: &Row, out: &mut Vec<u8>) {
    for (name, value) in &row.values {
        let _ = write!(out, "{},{:.6},{},", row.step, row.time, rank.0);
        write_field(name, out);
        let _ = match word(*value) {
            Some(word) => writeln!(out, ",{word}"),
            None => writeln!(out, ",{value}"),
        };
    }
}

/// Writes a field, quoted as RFC 4180 defines if it contains a comma, a quote or a newline.
fn write_field(text: &str, out: &mut Vec<u8>) {
    if !text.contains([',', '"', '\n', '\r']) {
        return out.extend_from_slice(text.as_bytes());
    }
    out.push(b'"');
    out.extend_from_slice(text.replace('"', "\"\"").as_bytes());
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_no_numbers_and_names_with_commas_survive() {
        let values = vec![("a,\"b".into(), f64::NAN), ("loss".into(), 0.1)];
        let mut out = Vec::new();
        write_row(Rank(3), &Row { step: 7, time: 1.5, values }, &mut out);
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text, "7,1.500000,3,\"a,\"\"b\",NaN\n7,1.500000,3,loss,0.1\n");
    }
}
