//! Tests that a file has the right bytes, or gives an error, however pushes are cut, direct writes
//! are refused, disks are full or many files are open.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;

/// Bytes that differ by position, so that a piece at a wrong offset is noticed.
fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    (0..length.div_ceil(4)).flat_map(|_| next().to_le_bytes()).take(length).collect()
}

fn file(directory: &tempfile::TempDir, name: &str) -> File {
    let path = directory.path().join(name);
    File::options().read(true).write(true).create_new(true).open(path).unwrap()
}

/// Writes `all` in chunks that end at `cuts`, and gives back what the file holds from `offset` on.
fn written(pieces: &mut Pieces, offset: u64, all: &[u8], cuts: &[usize]) -> Vec<u8> {
    let mut from = 0;
    for &cut in cuts.iter().chain([&all.len()]) {
        pieces.push(&all[from..cut]).unwrap();
        from = cut;
    }
    pieces.finish().unwrap();
    let mut read = vec![0; all.len()];
    assert_eq!(pieces.file().metadata().unwrap().size(), offset + all.len() as u64);
    pieces.file().read_exact_at(&mut read, offset).unwrap();
    read
}

/// Goal: the file has the same contents however the pushes are cut, with and without direct writes.
#[test]
fn however_bytes_come_the_file_holds_them_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let lengths = prop_oneof![0..3 * PIECE_BYTES, Just(PIECE_BYTES), Just(2 * PIECE_BYTES)];
    let cuts = proptest::collection::vec(0.0..1.0f64, 0..12);
    let aligned = any::<bool>();
    let mut runner = TestRunner::new(Config { cases: 24, ..Config::default() });
    let outcome =
        runner.run(&(lengths, cuts, any::<u64>(), aligned), |(length, cuts, seed, aligned)| {
            let all = bytes(length, seed);
            let step = if aligned { ALIGNMENT } else { 1 };
            let place = |share: f64| (share * length as f64) as usize / step * step;
            let mut cuts: Vec<usize> = cuts.into_iter().map(place).collect();
            cuts.sort_unstable();
            for direct in [true, false] {
                let mut pieces = Pieces::new(file(&directory, "any"), 65_536, direct);
                prop_assert!(written(&mut pieces, 65_536, &all, &cuts) == all);
                std::fs::remove_file(directory.path().join("any")).unwrap();
            }
            Ok(())
        });
    outcome.unwrap();
}

/// Goal: if the file system refuses a direct write, the bytes are written through the page cache.
/// Method: every file system refuses one at an odd offset.
#[test]
fn a_direct_write_that_is_refused_goes_through_the_page_cache() {
    let directory = tempfile::tempdir().unwrap();
    let mut pieces = Pieces::new(file(&directory, "odd"), 13, true);
    let all = bytes(2 * PIECE_BYTES + 5, 1);
    assert!(written(&mut pieces, 13, &all, &[]) == all);
}

/// Goal: a full disk gives an error with the offset from which bytes are missing. Method:
/// /dev/full, which also refuses direct writes.
#[test]
fn a_full_disk_is_told_with_its_place() {
    let full = || File::options().read(true).write(true).open("/dev/full").unwrap();
    let mut small = Pieces::new(full(), 65_536, true);
    small.push(&bytes(100, 1)).unwrap();
    let torn = small.finish().unwrap_err();
    assert_eq!((torn.from, torn.error.kind()), (65_536, io::ErrorKind::StorageFull));
    let mut large = Pieces::new(full(), 65_536, true);
    let all = bytes(6 * PIECE_BYTES, 1);
    let torn = large.push(&all).and_then(|()| large.finish()).unwrap_err();
    assert_eq!((torn.from, torn.error.kind()), (65_536, io::ErrorKind::StorageFull));
    large.restart(65_536);
    assert!(large.is_plain());
    assert_eq!(large.push(&all).unwrap_err().error.kind(), io::ErrorKind::StorageFull);
}

/// Goal: 64 files that are open at the same time do not hold 64 large pieces.
#[test]
fn many_open_files_hold_bounded_memory_and_all_their_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let all = bytes(PIECE_BYTES / 2, 7);
    let open = |n: u32| Pieces::new(file(&directory, &n.to_string()), 4096, true);
    let mut files: Vec<Pieces> = (0..64).map(open).collect();
    for chunk in all.chunks(1_000_003) {
        for index in 0..files.len() {
            files[index].push(chunk).unwrap();
            // Only this file's memory: other tests fill pieces at the same time.
            let bytes: usize = files.iter().map(|file| file.piece.room()).sum();
            assert!(bytes < 2 * FILLING_BYTES, "{bytes} bytes are held");
        }
    }
    for file in &mut files {
        file.finish().unwrap();
        let mut read = vec![0; all.len()];
        file.file().read_exact_at(&mut read, 4096).unwrap();
        assert!(read == all);
    }
}
