//! Tests what the rest of backtape relies on with every backend that can run here: a directory, a
//! bucket in memory, and a bucket behind the S3 protocol over loopback. Set `BACKTAPE_CONTRACT_URL`
//! to test another bucket.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::bucket::Bucket;
use super::s3::{S3, USER};
use super::{Backend, Listing};
use object_store::aws::AmazonS3Builder;

/// Tests every rule, below a place that nothing else uses.
fn contract(backend: &Backend, root: &Path) {
    created_once(backend, &root.join("create"));
    published_once(backend, &root.join("publish"));
    large_files_arrive_whole(backend, &root.join("large"));
    lists_name_what_lies_directly_in_a_place(backend, &root.join("list"));
    absent_things_are_not_found(backend, &root.join("absent"));
    one_of_many_creators_wins(backend, &root.join("race"));
    backend.prove_writable(&root.join("probe")).unwrap();
}

fn created_once(backend: &Backend, root: &Path) {
    let target = root.join("step-00000000/manifest.json");
    assert!(backend.create(&target, b"first").unwrap());
    assert!(!backend.create(&target, b"second").unwrap());
    assert_eq!(backend.read(&target).unwrap(), b"first");
    assert!(backend.holds(&target).unwrap());
    let empty = root.join("step-00000000/empty");
    assert!(backend.create(&empty, b"").unwrap());
    assert_eq!(backend.read(&empty).unwrap(), b"");
}

/// Creates a finished file on this host as a rank does.
fn file(backend: &Backend, target: &Path, bytes: &[u8]) -> PathBuf {
    backend.create_directory(target.parent().unwrap()).unwrap();
    let scratch = backend.scratch(target);
    std::fs::write(&scratch, bytes).unwrap();
    scratch
}

fn published_once(backend: &Backend, root: &Path) {
    let target = root.join("rank-00003.safetensors");
    let (first, second) = (file(backend, &target, b"0123456789"), file(backend, &target, b"other"));
    assert_ne!(first, second, "two writers of one name must not meet in their scratch files");
    assert!(backend.publish(&first, &target).unwrap());
    assert!(!backend.publish(&second, &target).unwrap());
    assert!(!first.exists() && !second.exists(), "scratch files are removed");
    let opened = backend.open(&target).unwrap();
    assert_eq!(opened.length().unwrap(), 10);
    let mut middle = [0; 4];
    opened.read_exact_at(&mut middle, 3).unwrap();
    assert_eq!(&middle, b"3456");
    let beyond = opened.read_exact_at(&mut middle, 8).unwrap_err();
    assert_eq!(beyond.kind(), std::io::ErrorKind::UnexpectedEof);
}

fn large_files_arrive_whole(backend: &Backend, root: &Path) {
    let target = root.join("rank-00000-mb-0000.safetensors");
    // More than two parts, and not a multiple of a part.
    let bytes: Vec<u8> =
        (0..70_000_001_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let scratch = file(backend, &target, &bytes);
    assert!(backend.publish(&scratch, &target).unwrap());
    assert!(backend.read(&target).unwrap() == bytes);
    let again = file(backend, &target, b"shorter");
    assert!(!backend.publish(&again, &target).unwrap(), "a large file is not replaced either");
    let opened = backend.open(&target).unwrap();
    let mut tail = [0; 5];
    opened.read_exact_at(&mut tail, 69_999_996).unwrap();
    assert_eq!(tail, bytes[69_999_996..]);
    if let Backend::Bucket(bucket) = backend {
        let here = tempfile::tempdir().unwrap();
        let fetched = here.path().join("fetched");
        bucket.fetch(&target, bytes.len() as u64, &fetched).unwrap();
        assert!(std::fs::read(&fetched).unwrap() == bytes);
    }
}

fn lists_name_what_lies_directly_in_a_place(backend: &Backend, root: &Path) {
    for name in ["b/deep/file", "a/file", "z.json", "y.json"] {
        assert!(backend.create(&root.join(name), name.as_bytes()).unwrap());
    }
    let listed = backend.list(root).unwrap();
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect();
    assert_eq!(
        listed,
        Listing { directories: names(&["a", "b"]), files: names(&["y.json", "z.json"]) }
    );
    // The directory `ab` is not below `a`, although its name begins with it.
    assert!(backend.create(&root.join("ab/file"), b"").unwrap());
    assert_eq!(backend.list(&root.join("a")).unwrap().files, ["file"]);
    let both = [root.join("y.json"), root.join("b/deep/file")];
    assert_eq!(backend.read_all(&both).unwrap(), [b"y.json".to_vec(), b"b/deep/file".to_vec()]);
}

fn absent_things_are_not_found(backend: &Backend, root: &Path) {
    let target = root.join("nothing");
    let kind = |error: std::io::Error| error.kind();
    assert_eq!(backend.read(&target).map_err(kind), Err(std::io::ErrorKind::NotFound));
    assert_eq!(backend.open(&target).map(drop).map_err(kind), Err(std::io::ErrorKind::NotFound));
    assert!(!backend.holds(&target).unwrap());
    assert_eq!(backend.list(&target).unwrap(), Listing::default());
    assert!(backend.is_gone(&target).unwrap());
    assert!(backend.create(&root.join("step/deep/file"), b"").unwrap());
    assert!(!backend.is_gone(&root.join("step")).unwrap());
    assert!(backend.read_all(std::slice::from_ref(&target)).is_err());
}

fn one_of_many_creators_wins(backend: &Backend, root: &Path) {
    for round in 0..50 {
        let target = root.join(format!("manifest-{round}.json"));
        let winners = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for creator in 0..8_u64 {
                let (target, winners) = (&target, &winners);
                scope.spawn(move || {
                    if backend.create(target, &creator.to_le_bytes()).unwrap() {
                        // Exactly one creator may win, so that the sum is that creator's number
                        // plus 1.
                        winners.fetch_add(creator + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        let stands = u64::from_le_bytes(backend.read(&target).unwrap().try_into().unwrap());
        assert_eq!(winners.into_inner(), stands + 1, "round {round}");
    }
}

#[test]
fn a_directory_keeps_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    contract(&Backend::of(dir.path()).unwrap(), dir.path());
}

#[test]
fn a_bucket_in_memory_keeps_the_contract() {
    let root = Path::new("memory://contract/some/prefix");
    contract(&Backend::of(root).unwrap(), root);
}

/// Goal: the same over the S3 protocol, with signatures and conditional puts.
#[test]
fn a_bucket_behind_s3_keeps_the_contract() {
    let server = S3::start();
    let root = PathBuf::from("s3://dumps/team/contract");
    let builder = AmazonS3Builder::new()
        .with_endpoint(server.endpoint())
        .with_allow_http(true)
        .with_access_key_id(USER)
        .with_secret_access_key(USER)
        .with_region("us-east-1");
    contract(&Backend::Bucket(Bucket::s3(builder, &root).unwrap()), &root);
}

#[test]
fn a_bucket_of_yours_keeps_the_contract() {
    let Some(url) = std::env::var_os("BACKTAPE_CONTRACT_URL").map(PathBuf::from) else {
        println!("skipped: BACKTAPE_CONTRACT_URL names no bucket");
        return;
    };
    let root = url.join(format!("contract-{}", std::process::id()));
    contract(&Backend::of(&root).unwrap(), &root);
}

#[test]
fn urls_are_told_from_paths_and_bad_ones_say_what_to_give() {
    for path in ["/dumps/run", "dumps", "./s3", "s3:/dumps", "C:", "http://host/x"] {
        assert!(!super::is_url(Path::new(path)), "{path}");
    }
    let refused = |url: &str| Backend::of(Path::new(url)).unwrap_err().to_string();
    assert!(super::is_url(Path::new("gs://dumps/run")));
    assert!(refused("s3:///run").contains("s3://bucket/prefix"), "{}", refused("s3:///run"));
}
