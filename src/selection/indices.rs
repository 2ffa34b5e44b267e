//! Which ranks or microbatches: `0-3,7`, or `all`.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{SelectionError, range, spelled, terms};

const KIND: (&str, &str) = ("ranks or microbatches", "0-3,7 or all");

/// A set of indices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IndexSelection {
    /// Ranges with both ends included; `None`: every index.
    ranges: Option<Vec<(u32, u32)>>,
}

impl IndexSelection {
    /// True when no index is left out.
    pub fn is_all(&self) -> bool {
        self.ranges.is_none()
    }

    /// True when this index is selected.
    pub fn contains(&self, index: u32) -> bool {
        let Some(ranges) = &self.ranges else { return true };
        ranges.iter().any(|&(first, last)| (first..=last).contains(&index))
    }

    /// The selection of exactly these indices, which must be ascending.
    pub fn of(ascending: impl IntoIterator<Item = u32>) -> IndexSelection {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for index in ascending {
            match ranges.last_mut() {
                Some((_, last)) if last.checked_add(1) == Some(index) => *last = index,
                _ => ranges.push((index, index)),
            }
        }
        IndexSelection { ranges: Some(ranges) }
    }
}

impl FromStr for IndexSelection {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<IndexSelection, SelectionError> {
        if text.trim() == "all" {
            return Ok(IndexSelection::default());
        }
        let rule = "it is a whole number below 2^32";
        let parse = |term: &str| {
            let (first, last) = range(term, rule)?;
            let last = u32::try_from(last).map_err(|_| rule)?;
            Ok((u32::try_from(first).map_err(|_| rule)?, last))
        };
        let ranges = terms(KIND, text)?.map(|term| {
            parse(term).map_err(|problem: &str| SelectionError::new(KIND, text, term, problem))
        });
        Ok(IndexSelection { ranges: Some(ranges.collect::<Result<_, _>>()?) })
    }
}

impl std::fmt::Display for IndexSelection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(ranges) = &self.ranges else { return f.write_str("all") };
        let range_text = |&(first, last): &(u32, u32)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        f.write_str(&ranges.iter().map(range_text).collect::<Vec<_>>().join(","))
    }
}

spelled!(IndexSelection);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_printed_and_gathered() {
        let read: IndexSelection = "0-3, 7".parse().unwrap();
        let chosen: Vec<u32> = (0..10).filter(|&i| read.contains(i)).collect();
        assert_eq!(chosen, [0, 1, 2, 3, 7]);
        assert_eq!(IndexSelection::of(chosen), read);
        assert_eq!(read.to_string(), "0-3,7");
        assert!("all".parse::<IndexSelection>().unwrap().contains(u32::MAX));
    }

    #[test]
    fn what_cannot_be_read_is_named_with_an_example_of_what_can() {
        for wrong in ["", "x", "3-1", "1,,2", "-1", "4294967296", "0-99999999999"] {
            let error = wrong.parse::<IndexSelection>().unwrap_err().to_string();
            assert!(error.contains("0-3,7"), "{wrong:?}: {error}");
        }
    }
}
