//! Tests the contents of shard files after failed writes, and with headers longer than their room.

use std::fs::File;

use super::*;
use crate::FORMAT_VERSION;
use crate::dtype::Dtype;
use crate::fingerprint::Fingerprint;
use crate::hash::ContentHash;
use crate::identity::{Attempt, Rank, Step};
use crate::index_box::IndexBox;
use crate::placement::MeshCoordinates;
use crate::shard::{FingerprintSource, Shard, TensorKey};
use crate::store::ShardFile;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn about() -> FileSelf {
    let about = FileSelf::new(name("run"), Attempt(0), Step(0), Rank(0), 1);
    assert_eq!(about.format_version, FORMAT_VERSION);
    about
}

fn record(tensor: &str, bytes: &[u8]) -> ShardRecord {
    let length = bytes.len() as u64;
    let place = IndexBox::whole(&[length]);
    ShardRecord {
        key: TensorKey { tensor: name(tensor), microbatch: None, when: None },
        fingerprint: Fingerprint::of(Dtype::U8, &place, bytes),
        shard: Shard::new(Dtype::U8, vec![length], place),
        rank: Rank(0),
        host: name("host"),
        attempt: Attempt(0),
        mesh: MeshCoordinates::default(),
        hash: ContentHash::of(bytes),
        length,
        fingerprint_source: FingerprintSource::Recorder,
        entry: String::new(),
    }
}

fn bytes(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed).collect()
}

/// Names and contents of the shards of a published file, each with its hash checked.
fn names_and_lengths(path: &Path) -> Vec<(String, usize)> {
    let file = ShardFile::open(path).unwrap();
    let name_and_length = |(index, shard): (usize, &ShardRecord)| {
        let data = file.bytes(index);
        assert_eq!(ContentHash::of(data), shard.hash, "{}", shard.entry);
        (shard.entry.clone(), data.len())
    };
    file.shards().iter().enumerate().map(name_and_length).collect()
}

fn writer(directory: &tempfile::TempDir) -> ShardWriter {
    ShardWriter::create(directory.path(), name("rank-00000.safetensors"), about()).unwrap()
}

/// Goal: shards that a failed write left incomplete are listed as lost and are not in the file; all
/// others, earlier and later, are.
#[test]
fn a_write_that_fails_later_takes_out_its_shards_alone() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = writer(&directory);
    let large = 9 << 20;
    for (index, tensor) in ["a", "b", "c"].into_iter().enumerate() {
        let bytes = bytes(large, index as u8);
        writer.append(record(tensor, &bytes), &bytes).unwrap();
    }
    // The disk was full for the third piece, which holds the end of b and the beginning of c.
    let from = (HEADER_ROOM + (16 << 20)) as u64;
    writer.tear(&Torn { from, error: io::ErrorKind::StorageFull.into() });
    let late = bytes(large, 9);
    writer.append(record("d", &late), &late).unwrap();
    writer.append(record("d", &late[..100]), &late[..100]).unwrap();
    let finished = writer.finish().unwrap();
    let lost: Vec<String> = finished.lost.iter().map(|(key, _)| key.to_string()).collect();
    assert_eq!(lost, ["b", "c"]);
    assert!(finished.lost[0].1.contains("could not be written"), "{:?}", finished.lost[0]);
    let (record, created) = finished.publish().unwrap();
    assert!(created);
    let path = directory.path().join(record.name.as_str());
    assert_eq!(
        names_and_lengths(&path),
        [("a".into(), large), ("d".into(), large), ("d#1".into(), 100)]
    );
}

/// Goal: a full disk gives an error, never a file with missing bytes.
#[test]
fn a_disk_that_is_full_finishes_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = writer(&directory);
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    writer.pieces = Pieces::new(full, HEADER_ROOM as u64, true);
    let large = bytes(9 << 20, 0);
    let appended: Vec<bool> =
        (0..6).map(|n| writer.append(record(&format!("t{n}"), &large), &large).is_ok()).collect();
    assert!(appended.contains(&false), "{appended:?}");
    assert!(writer.about.shards.len() < 6);
    assert!(writer.finish().is_err());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left behind");
}

/// Goal: the file system's insertion of blocks and the copy give the same file when the header is
/// longer than its room.
#[test]
fn a_header_larger_than_its_room_gives_the_same_file_inserted_or_copied() {
    let mut files = Vec::new();
    for copied in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = writer(&directory);
        let mut large = bytes(9 << 20, 3);
        large.truncate((9 << 20) - 7);
        writer.append(record("large", &large), &large).unwrap();
        for n in 0..400 {
            let small = bytes(100 + n, n as u8);
            writer.append(record("small", &small), &small).unwrap();
        }
        if copied {
            // What `finish` does if the file system cannot insert blocks.
            writer.pieces.finish().unwrap();
            let header = header::encode(&writer.about, HEADER_ROOM).unwrap();
            assert!(header.len() > HEADER_ROOM && header.len().is_multiple_of(4096));
            writer.move_data(header.len()).unwrap();
            writer.pieces.file().write_all_at(&header, 0).unwrap();
            files.push(std::fs::read(&writer.scratch).unwrap());
        } else {
            let (record, _) = writer.finish().unwrap().publish().unwrap();
            let path = directory.path().join(record.name.as_str());
            let shards = names_and_lengths(&path);
            assert_eq!((shards.len(), &*shards[400].0), (401, "small#399"));
            files.push(std::fs::read(path).unwrap());
        }
    }
    assert!(files[0] == files[1]);
}
