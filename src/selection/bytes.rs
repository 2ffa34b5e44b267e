//! A limit in bytes: `1048576`, `512MiB`, `2GB`.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{SelectionError, spelled};

const KIND: (&str, &str) = ("number of bytes", "512MiB or 2GiB or 1000000");

/// The units, in the order in which printing tries them: [`ByteLimit`] is printed in the first unit
/// that divides it.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

/// The most bytes that something may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ByteLimit(pub u64);

impl FromStr for ByteLimit {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<ByteLimit, SelectionError> {
        let wrong = |problem: &str| SelectionError::new(KIND, text, text, problem);
        let trimmed = text.trim();
        let end = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let (digits, unit) = trimmed.split_at(end);
        let count: u64 = digits.parse().map_err(|_| wrong("it starts with a whole number"))?;
        let unit = unit.trim();
        let known = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
        let factor = match known {
            Some((_, factor)) => *factor,
            None if unit.is_empty() => 1,
            None => return Err(wrong("units are B, KiB, MiB, GiB, TiB, KB, MB, GB and TB")),
        };
        let bytes = count.checked_mul(factor);
        Ok(ByteLimit(bytes.ok_or_else(|| wrong("it is more than 2^64"))?))
    }
}

impl std::fmt::Display for ByteLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let exact = UNITS.iter().find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor));
        let (unit, factor) = exact.copied().unwrap_or(("B", 1));
        write!(f, "{}{unit}", self.0 / factor)
    }
}

spelled!(ByteLimit);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_and_printed_back() {
        for (text, bytes) in
            [("512MiB", 512 << 20), ("2GiB", 2 << 30), ("17", 17), ("3 kb", 3000), ("0", 0)]
        {
            let read: ByteLimit = text.parse().unwrap();
            assert_eq!(read.0, bytes, "{text}");
            assert_eq!(read.to_string().parse::<ByteLimit>().unwrap(), read);
        }
        for wrong in
            ["", "MiB", "1.5GiB", "-1", "5 parsecs", "99999999999TiB", "18446744073709551616"]
        {
            let error = wrong.parse::<ByteLimit>().unwrap_err().to_string();
            assert!(error.contains("512MiB"), "{wrong:?}: {error}");
        }
    }
}
