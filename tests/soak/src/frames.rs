//! Hostile HTTP/2, written by hand: no client would send it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::random::Random;

/// With it a connection begins, and an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
/// How long the other side may take to answer or to hang up; it need do neither.
const PATIENCE: Duration = Duration::from_millis(200);

/// The ways to misbehave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flood {
    Garbage,
    Silence,
    Resets,
    Pings,
    Settings,
    Continuations,
    LyingLength,
    WindowOverflow,
    Streams,
}

pub(crate) const FLOODS: [Flood; 9] = [
    Flood::Garbage,
    Flood::Silence,
    Flood::Resets,
    Flood::Pings,
    Flood::Settings,
    Flood::Continuations,
    Flood::LyingLength,
    Flood::WindowOverflow,
    Flood::Streams,
];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// The headers of a call, as indexed and literal fields (RFC 7541).
fn call() -> Vec<u8> {
    let mut block = vec![0x83, 0x86];
    for (name, value) in [
        (":path", "/backtape.v1.Coordinator/Join"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        block.push(0);
        block.push(name.len() as u8);
        block.extend(name.bytes());
        block.push(value.len() as u8);
        block.extend(value.bytes());
    }
    block
}

/// Sends one flood on a connection of its own. Whatever the other side does is right, but to
/// fall over.
pub(crate) fn send(address: &str, flood: Flood, count: u32, random: &mut Random) {
    let Ok(mut stream) = TcpStream::connect(address) else { return };
    let _ = stream.set_write_timeout(Some(PATIENCE));
    let _ = stream.set_read_timeout(Some(PATIENCE));
    // It may hang up in the middle: an error ends the flood.
    let mut put = |bytes: &[u8]| stream.write_all(bytes).is_ok();
    if flood == Flood::Garbage {
        let bytes: Vec<u8> = (0..4096).map(|_| random.next() as u8).collect();
        put(&bytes);
    } else if flood != Flood::Silence && put(PREFACE) {
        let streams = (0..count).map(|index| index * 2 + 1);
        for stream in streams {
            if !put(&piece(flood, stream)) {
                break;
            }
        }
    }
    let _ = stream.read(&mut [0; 4096]);
}

fn piece(flood: Flood, stream: u32) -> Vec<u8> {
    match flood {
        Flood::Resets => {
            [frame(1, 4, stream, &call()), frame(3, 0, stream, &[0, 0, 0, 8])].concat()
        }
        Flood::Pings => frame(6, 0, 0, &[7; 8]),
        Flood::Settings => frame(4, 0, 0, &[0, 1, 0, 0, 0, 0]),
        // A block of headers that never ends.
        Flood::Continuations if stream == 1 => frame(1, 0, 1, &call()),
        Flood::Continuations => frame(9, 0, 1, &[0, 3, b'x', b'-', b'y', 1, b'z']),
        // A message of 8 MiB is announced, and a little of it comes.
        Flood::LyingLength => {
            let message = [&[0, 0, 0x80, 0, 0][..], &[1; 1024]].concat();
            [frame(1, 4, stream, &call()), frame(0, 0, stream, &message)].concat()
        }
        Flood::WindowOverflow => frame(8, 0, 0, &[0x7f, 0xff, 0xff, 0xff]),
        _ => frame(1, 4, stream, &call()),
    }
}
