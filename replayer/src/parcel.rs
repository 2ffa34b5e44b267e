//! Plain data as bytes and back: what a task is sent as, and what it sends back.
//!
//! Little-endian numbers one after the other, lists after their length. Floats keep their bits,
//! NaN included, which no text format promises. It is no file format: both ends are the same
//! build, which the ends make sure of.

use std::ops::Range;

/// Bytes that are not what they should be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a parcel ends early, or holds something else: both ends must run the same build")]
pub struct ParcelError;

/// What is left to read of a parcel.
pub struct Rest<'a>(&'a [u8]);

/// What can be sent.
pub trait Parcel: Sized {
    /// Appends it.
    fn put(&self, to: &mut Vec<u8>);
    /// Reads it off the front.
    fn take(from: &mut Rest<'_>) -> Result<Self, ParcelError>;

    /// Appends a list of it.
    fn put_list(all: &[Self], to: &mut Vec<u8>) {
        all.len().put(to);
        all.iter().for_each(|one| one.put(to));
    }

    /// Reads a list of it; each takes a byte at least.
    fn take_list(from: &mut Rest<'_>) -> Result<Vec<Self>, ParcelError> {
        let length = from.length(1)?;
        (0..length).map(|_| Self::take(from)).collect()
    }

    /// It alone.
    fn to_parcel(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.put(&mut bytes);
        bytes
    }

    /// It alone, with nothing behind it.
    fn of_parcel(bytes: &[u8]) -> Result<Self, ParcelError> {
        let mut rest = Rest(bytes);
        let found = Self::take(&mut rest)?;
        if rest.0.is_empty() { Ok(found) } else { Err(ParcelError) }
    }
}

impl<'a> Rest<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], ParcelError> {
        let (found, rest) = self.0.split_at_checked(count).ok_or(ParcelError)?;
        self.0 = rest;
        Ok(found)
    }

    /// A length that what is left can hold: no parcel makes us allocate more than it is.
    fn length(&mut self, width: usize) -> Result<usize, ParcelError> {
        let length = usize::take(self)?;
        let bytes = length.checked_mul(width).ok_or(ParcelError)?;
        if bytes <= self.0.len() { Ok(length) } else { Err(ParcelError) }
    }
}

macro_rules! numbers {
    ($($type:ty)*) => { $(
        impl Parcel for $type {
            fn put(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }
            fn take(from: &mut Rest<'_>) -> Result<Self, ParcelError> {
                let (bytes, _) = from.bytes(size_of::<$type>())?.as_chunks();
                Ok(<$type>::from_le_bytes(bytes[0]))
            }
            fn put_list(all: &[Self], to: &mut Vec<u8>) {
                all.len().put(to);
                to.reserve(size_of_val(all));
                all.iter().for_each(|x| to.extend_from_slice(&x.to_le_bytes()));
            }
            fn take_list(from: &mut Rest<'_>) -> Result<Vec<Self>, ParcelError> {
                let length = from.length(size_of::<$type>())?;
                let (chunks, _) = from.bytes(length * size_of::<$type>())?.as_chunks();
                Ok(chunks.iter().map(|&bytes| <$type>::from_le_bytes(bytes)).collect())
            }
        }
    )* };
}

numbers!(u8 u32 u64 f64);

impl Parcel for usize {
    fn put(&self, to: &mut Vec<u8>) {
        (*self as u64).put(to);
    }

    fn take(from: &mut Rest<'_>) -> Result<Self, ParcelError> {
        usize::try_from(u64::take(from)?).map_err(|_| ParcelError)
    }
}

impl Parcel for bool {
    fn put(&self, to: &mut Vec<u8>) {
        u8::from(*self).put(to);
    }

    fn take(from: &mut Rest<'_>) -> Result<Self, ParcelError> {
        match u8::take(from)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(ParcelError),
        }
    }
}

impl Parcel for String {
    fn put(&self, to: &mut Vec<u8>) {
        self.len().put(to);
        to.extend_from_slice(self.as_bytes());
    }

    fn take(from: &mut Rest<'_>) -> Result<Self, ParcelError> {
        String::from_utf8(u8::take_list(from)?).map_err(|_| ParcelError)
    }
}

impl<T: Parcel> Parcel for Vec<T> {
    fn put(&self, to: &mut Vec<u8>) {
        T::put_list(self, to);
    }

    fn take(from: &mut Rest<'_>) -> Result<Self, ParcelError> {
        T::take_list(from)
    }
}

impl<T: Parcel> Parcel for Option<T> {
    fn put(&self, to: &mut Vec<u8>) {
        self.is_some().put(to);
        if let Some(value) = self {
            value.put(to);
        }
    }

    fn take(from: &mut Rest<'_>) -> Result<Self, ParcelError> {
        if bool::take(from)? { T::take(from).map(Some) } else { Ok(None) }
    }
}

impl Parcel for Range<usize> {
    fn put(&self, to: &mut Vec<u8>) {
        self.start.put(to);
        self.end.put(to);
    }

    fn take(from: &mut Rest<'_>) -> Result<Self, ParcelError> {
        let (start, end) = (usize::take(from)?, usize::take(from)?);
        if start <= end { Ok(start..end) } else { Err(ParcelError) }
    }
}

impl<A: Parcel, B: Parcel> Parcel for (A, B) {
    fn put(&self, to: &mut Vec<u8>) {
        self.0.put(to);
        self.1.put(to);
    }

    fn take(from: &mut Rest<'_>) -> Result<Self, ParcelError> {
        Ok((A::take(from)?, B::take(from)?))
    }
}

impl<T: Parcel + Copy + Default, const N: usize> Parcel for [T; N] {
    fn put(&self, to: &mut Vec<u8>) {
        self.iter().for_each(|x| x.put(to));
    }

    fn take(from: &mut Rest<'_>) -> Result<Self, ParcelError> {
        let mut found = [T::default(); N];
        for x in &mut found {
            *x = T::take(from)?;
        }
        Ok(found)
    }
}

/// Makes a struct one that can be sent, field by field: one that is left out does not compile.
macro_rules! parcel {
    ($type:ty { $($field:ident),* $(,)? }) => {
        impl $crate::parcel::Parcel for $type {
            fn put(&self, to: &mut Vec<u8>) {
                let Self { $($field),* } = self;
                $( $crate::parcel::Parcel::put($field, to); )*
            }
            fn take(
                from: &mut $crate::parcel::Rest<'_>,
            ) -> Result<Self, $crate::parcel::ParcelError> {
                Ok(Self { $($field: $crate::parcel::Parcel::take(from)?),* })
            }
        }
    };
}
pub(crate) use parcel;

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every bit comes back, those of NaN too, and no damaged parcel is read as another,
    /// panics or allocates what it does not hold.
    #[test]
    fn bits_come_back_and_a_parcel_that_was_cut_is_refused() {
        let nan = f64::from_bits(0x7ff0_0000_dead_beef);
        let sent = ((vec![1.5, nan, -0.0], Some("k".to_string())), (3..7usize, true));
        let bytes = sent.to_parcel();
        type Sent = ((Vec<f64>, Option<String>), (Range<usize>, bool));
        let ((numbers, name), rest) = Sent::of_parcel(&bytes).unwrap();
        let bits = |all: &[f64]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&numbers), bits(&sent.0.0));
        assert_eq!((name, rest), (sent.0.1.clone(), sent.1.clone()));
        for cut in 0..bytes.len() {
            assert!(Sent::of_parcel(&bytes[..cut]).is_err(), "{cut}");
        }
        assert!(Sent::of_parcel(&[&bytes[..], &[0]].concat()).is_err());
        assert!(Vec::<f64>::of_parcel(&u64::MAX.to_le_bytes()).is_err());
        assert!(Vec::<String>::of_parcel(&(1u64 << 40).to_le_bytes()).is_err());
    }
}
