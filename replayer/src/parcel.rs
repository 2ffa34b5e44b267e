//! Plain data as bytes and back: what a task is sent as, and what it sends back.
//!
//! The bytes are postcard's. Floats keep their bits, NaN included, which no text format promises.
//! It is no file format: both ends are the same build, which the ends make sure of.

use std::ops::Range;

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize};

/// Bytes that are not what they should be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a parcel ends early, or holds something else: both ends must run the same build")]
pub struct ParcelError;

/// What can be sent: whatever owns its data and derives serde's traits.
pub trait Parcel: Serialize + DeserializeOwned {
    /// It as bytes.
    fn to_parcel(&self) -> Vec<u8> {
        // It fails for a list of unknown length alone, and for a buffer that is full.
        postcard::to_allocvec(self).expect("lists know their lengths, and memory grows")
    }

    /// Reads it from bytes that hold nothing else. No more memory is taken than the bytes can
    /// fill, whatever lengths they name.
    fn of_parcel(bytes: &[u8]) -> Result<Self, ParcelError> {
        match postcard::take_from_bytes(bytes) {
            Ok((value, [])) => Ok(value),
            _ => Err(ParcelError),
        }
    }
}

impl<T: Serialize + DeserializeOwned> Parcel for T {}

/// Reads a range and refuses one that ends before it starts: slicing by it would panic.
pub(crate) fn range<'de, D: Deserializer<'de>>(from: D) -> Result<Range<usize>, D::Error> {
    let range = Range::<usize>::deserialize(from)?;
    let backwards = || D::Error::custom("a range ends before it starts");
    (range.start <= range.end).then_some(range).ok_or_else(backwards)
}

/// Reads a list of such ranges.
pub(crate) fn ranges<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Range<usize>>, D::Error> {
    #[derive(Deserialize)]
    struct One(#[serde(deserialize_with = "range")] Range<usize>);
    Ok(Vec::<One>::deserialize(from)?.into_iter().map(|one| one.0).collect())
}

/// Large arrays of numbers as their bytes: one copy into an array of the right size, where element
/// by element takes three times as long and grows the array as it comes, beyond the memory that a
/// driver with spilled arrays has.
pub(crate) mod numbers {
    use std::fmt::{self, Formatter};
    use std::marker::PhantomData;

    use bytemuck::Pod;
    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};

    /// Writes the bytes of all elements.
    pub(crate) fn serialize<T: Pod, S: Serializer>(all: &[T], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytemuck::cast_slice(all))
    }

    struct Bytes<T>(PhantomData<T>);

    impl<T: Pod> Visitor<'_> for Bytes<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
            f.write_str("the bytes of whole numbers of one width")
        }

        fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<T>, E> {
            if !bytes.len().is_multiple_of(size_of::<T>()) {
                return Err(E::custom("the last number is cut"));
            }
            let mut all = vec![T::zeroed(); bytes.len() / size_of::<T>()];
            bytemuck::cast_slice_mut(&mut all).copy_from_slice(bytes);
            Ok(all)
        }
    }

    /// Reads them; refuses bytes that end within a number.
    pub(crate) fn deserialize<'de, T: Pod, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<T>, D::Error> {
        from.deserialize_bytes(Bytes(PhantomData))
    }
}

/// Arrays of more than 32 elements, which serde has not: as lists, whose length is checked.
pub(crate) mod array {
    use serde::de::{DeserializeOwned, Error};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Writes it as a list.
    pub(crate) fn serialize<T: Serialize, S: Serializer, const N: usize>(
        all: &[T; N],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        all[..].serialize(to)
    }

    /// Reads a list of its length.
    pub(crate) fn deserialize<'de, T: DeserializeOwned, D: Deserializer<'de>, const N: usize>(
        from: D,
    ) -> Result<[T; N], D::Error> {
        let all = Vec::<T>::deserialize(from)?;
        all.try_into().map_err(|_| D::Error::custom("an array of another length"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Sent {
        numbers: Vec<f64>,
        #[serde(with = "numbers")]
        bytes: Vec<f64>,
        name: Option<String>,
        #[serde(deserialize_with = "range")]
        rows: Range<usize>,
        #[serde(deserialize_with = "ranges")]
        runs: Vec<Range<usize>>,
        #[serde(with = "array")]
        counts: [u64; 66],
        whole: bool,
    }

    #[derive(Debug, Serialize, Deserialize)]
    struct Numbers(#[serde(with = "numbers")] Vec<f64>);

    fn sent() -> Sent {
        let nan = f64::from_bits(0x7ff0_0000_dead_beef);
        let numbers = vec![1.5, nan, -nan, -0.0, f64::NEG_INFINITY, f64::from_bits(1)];
        let counts = std::array::from_fn(|at| 1 << (at % 64));
        let runs = vec![0..2, 5..5];
        let (bytes, name) = (numbers.clone(), Some("k".into()));
        Sent { numbers, bytes, name, rows: 3..7, runs, counts, whole: true }
    }

    /// Goal: every bit comes back, those of NaN too.
    #[test]
    fn bits_come_back() {
        let sent = sent();
        let received = Sent::of_parcel(&sent.to_parcel()).unwrap();
        let bits = |all: &[f64]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&received.numbers), bits(&sent.numbers));
        assert_eq!(bits(&received.bytes), bits(&sent.bytes));
        let rest = |of: Sent| Sent { numbers: Vec::new(), bytes: Vec::new(), ..of };
        assert_eq!(rest(received), rest(sent));
    }

    /// Goal: no damaged parcel is read as another, panics or takes the memory that it names.
    /// Method: a cut at every byte, a byte too many, and lengths for which there is no memory:
    /// whoever allocates by them ends the process.
    #[test]
    fn a_parcel_that_was_cut_or_names_lengths_it_does_not_hold_is_refused() {
        let bytes = sent().to_parcel();
        for cut in 0..bytes.len() {
            assert!(Sent::of_parcel(&bytes[..cut]).is_err(), "{cut}");
        }
        assert!(Sent::of_parcel(&[&bytes[..], &[0]].concat()).is_err());
        for length in [1u64 << 40, u64::MAX] {
            let bytes = [&length.to_parcel()[..], &[1; 64]].concat();
            assert!(Vec::<f64>::of_parcel(&bytes).is_err());
            assert!(Vec::<u32>::of_parcel(&bytes).is_err());
            assert!(Vec::<[u64; 32]>::of_parcel(&bytes).is_err());
            assert!(Vec::<String>::of_parcel(&bytes).is_err());
            assert!(String::of_parcel(&bytes).is_err());
            assert!(Numbers::of_parcel(&bytes).is_err());
        }
        assert!(Numbers::of_parcel(&[8; 9]).is_ok());
        assert!(Numbers::of_parcel(&[9; 10]).is_err(), "a number and an eighth of one");
    }

    #[test]
    fn a_range_that_runs_backwards_or_an_array_of_another_length_is_refused() {
        let mut sent = sent();
        (sent.rows.start, sent.rows.end) = (7, 3);
        assert!(Sent::of_parcel(&sent.to_parcel()).is_err());
        sent.rows = 3..7;
        (sent.runs[0].start, sent.runs[0].end) = (2, 1);
        assert!(Sent::of_parcel(&sent.to_parcel()).is_err());
        #[derive(Debug, Serialize, Deserialize)]
        struct Counts<const N: usize>(#[serde(with = "array")] [u64; N]);
        assert!(Counts::<40>::of_parcel(&Counts([1; 40]).to_parcel()).is_ok());
        assert!(Counts::<40>::of_parcel(&Counts([1; 41]).to_parcel()).is_err());
        assert!(Counts::<40>::of_parcel(&Counts([1; 39]).to_parcel()).is_err());
    }
}
