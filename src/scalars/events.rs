//! Scalars in TensorBoard's format: TFRecords of `tensorflow.Event` messages.
//!
//! A record consists of the message's length (u64, little endian), the masked CRC-32C of that
//! length, the message and the masked CRC-32C of the message. Four fields of the message are
//! written: `wall_time` = 1 (double), `step` = 2 (varint), `file_version` = 3 (string) in the first
//! record, and `summary` = 5, which contains for each scalar a `value` = 1 with `tag` = 1 (string)
//! and `simple_value` = 2 (float). This module encodes them by hand: generated types for four
//! fields would need a second set of .proto files in the build.

use super::Row;

/// The `file_version` of the first record; TensorBoard refuses files without it.
const FILE_VERSION: &str = "brain.Event:2";

/// Wire types of protobuf.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED32: u64 = 5;

/// Appends the first record of a file.
pub fn write_version(time: f64, out: &mut Vec<u8>) {
    let mut event = wall_time(time);
    text(3, FILE_VERSION, &mut event);
    write_record(&event, out);
}

/// Appends one record with all scalars of a row, rounded to f32, the type of `simple_value`.
pub fn write_row(row: &Row, out: &mut Vec<u8>) {
    let mut summary = Vec::new();
    for (name, value) in &row.values {
        let mut value_message = Vec::new();
        text(1, name, &mut value_message);
        tag(2, FIXED32, &mut value_message);
        value_message.extend_from_slice(&(*value as f32).to_le_bytes());
        bytes(1, &value_message, &mut summary);
    }
    let mut event = wall_time(row.time);
    tag(2, VARINT, &mut event);
    // `Event.step` is an int64: a larger u64 would be read as a negative number.
    varint(row.step.min(i64::MAX as u64), &mut event);
    bytes(5, &summary, &mut event);
    write_record(&event, out);
}

fn wall_time(time: f64) -> Vec<u8> {
    let mut event = Vec::new();
    tag(1, FIXED64, &mut event);
    event.extend_from_slice(&time.to_le_bytes());
    event
}

fn write_record(message: &[u8], out: &mut Vec<u8>) {
    let length = (message.len() as u64).to_le_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&masked_crc(&length).to_le_bytes());
    out.extend_from_slice(message);
    out.extend_from_slice(&masked_crc(message).to_le_bytes());
}

/// TFRecord masks CRCs, because the CRC of data that itself contains CRCs detects fewer errors.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn tag(field: u64, kind: u64, out: &mut Vec<u8>) {
    varint(field << 3 | kind, out);
}

fn text(field: u64, value: &str, out: &mut Vec<u8>) {
    bytes(field, value.as_bytes(), out);
}

fn bytes(field: u64, value: &[u8], out: &mut Vec<u8>) {
    tag(field, LENGTH, out);
    varint(value.len() as u64, out);
    out.extend_from_slice(value);
}

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the framing is TensorFlow's. Method: the first record of every file is written out as
    /// the format describes it, with CRCs from a separate bitwise implementation.
    #[test]
    fn the_first_record_has_the_bytes_that_the_format_names() {
        let mut out = Vec::new();
        write_version(0.0, &mut out);
        let message = b"\x09\0\0\0\0\0\0\0\0\x1a\x0dbrain.Event:2";
        assert_eq!(&out[..8], (message.len() as u64).to_le_bytes());
        assert_eq!(&out[12..12 + message.len()], message);
        let naive = |data: &[u8]| {
            let mut crc = !0u32;
            for byte in data {
                crc ^= u32::from(*byte);
                for _ in 0..8 {
                    crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
                }
            }
            let crc = !crc;
            crc.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
        };
        assert_eq!(&out[8..12], naive(&out[..8]));
        assert_eq!(&out[12 + message.len()..], naive(message));
    }
}
