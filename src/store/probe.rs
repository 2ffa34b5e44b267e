//! Tests, before a job depends on it, what a store can do, with files of its own that it removes
//! again.

use std::io;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use super::pieces::ALIGNMENT;
use super::{Backend, durable};

/// The result of one test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probed {
    /// What was tested.
    pub what: &'static str,
    /// Whether the store does what a durable dump needs. True also if direct writes are refused:
    /// without them recording is only slower.
    pub works: bool,
    /// The outcome in words.
    pub outcome: String,
}

/// Time limit for all tests: calls to a file server that is down block without end.
const PATIENCE: Duration = Duration::from_secs(30);

/// Tests what recording needs of a store: a directory or the URL of a bucket. It does not create a
/// missing directory but tests the nearest parent that exists.
pub fn probe(place: &Path) -> Vec<Probed> {
    let (done, answer) = sync_channel(1);
    let there = place.to_path_buf();
    // If the store never answers, the thread stays blocked: a thread in a system call cannot be
    // ended.
    std::thread::spawn(move || done.send(tried(&there)));
    answer.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        let late = format!("no answer in {} s", PATIENCE.as_secs());
        vec![outcome_of("answer", Err(io::Error::other(late)))]
    })
}

fn tried(place: &Path) -> Vec<Probed> {
    match Backend::of(place) {
        Err(error) => vec![outcome_of("connect", Err(io::Error::other(error.to_string())))],
        Ok(bucket @ Backend::Bucket(_)) => {
            let begin = Instant::now();
            let tried = bucket.prove_writable(place);
            let took = format!("put, refused second put and delete in {}", since(begin));
            vec![outcome_of("conditional put", tried.map(|()| took))]
        }
        Ok(Backend::Directory) => directory(place),
    }
}

fn directory(place: &Path) -> Vec<Probed> {
    let absolute = std::path::absolute(place).unwrap_or_else(|_| place.to_path_buf());
    let Some(there) = absolute.ancestors().find(|above| above.is_dir()) else {
        return vec![outcome_of("directory", Err(io::ErrorKind::NotFound.into()))];
    };
    let note = match there == absolute {
        true => format!("{}", there.display()),
        false => format!("{} is not there yet; {} is", absolute.display(), there.display()),
    };
    let mut probes = vec![outcome_of("directory", Ok(note))];
    let target = durable::scratch_beside(&there.join("probe"));
    probes.push(outcome_of("write, fsync and name", written(&target)));
    probes.push(outcome_of("never replaces", replaced(&target)));
    let _ = std::fs::remove_file(&target);
    let direct = direct(&durable::scratch_beside(&there.join("direct")));
    probes.push(match direct {
        Ok(words) => outcome_of("direct writes", Ok(words)),
        Err(error) => Probed {
            what: "direct writes",
            works: true,
            outcome: format!("refused ({error}): writes go through the page cache, slower"),
        },
    });
    probes.push(outcome_of("space", space(there)));
    probes
}

/// Creates a file as recording does: write, fsync, link to its name, fsync of the directory.
fn written(target: &Path) -> io::Result<String> {
    let begin = Instant::now();
    match durable::create(target, b"backtape")? {
        true if std::fs::read(target)? == b"backtape" => Ok(format!("durable in {}", since(begin))),
        true => Err(io::Error::other("what was written is not what is read back")),
        false => Err(io::Error::other("a new name is said to be taken")),
    }
}

/// Tests that a second file of the same name is refused, as manifests need.
fn replaced(target: &Path) -> io::Result<String> {
    let again = durable::create(target, b"again")?;
    match again || std::fs::read(target)? != b"backtape" {
        false => Ok("a second file of one name is refused".into()),
        true => Err(io::Error::other("a file was replaced: commits would not be safe here")),
    }
}

fn direct(path: &Path) -> io::Result<String> {
    let done = try_direct(path);
    let _ = std::fs::remove_file(path);
    done
}

fn try_direct(path: &Path) -> io::Result<String> {
    use std::os::unix::fs::FileExt;
    let file = durable::create_private(path)?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags | OFlags::DIRECT)?;
    let piece = memmap2::MmapMut::map_anon(ALIGNMENT)?;
    file.write_all_at(&piece, 0)?;
    Ok("past the page cache".into())
}

fn space(directory: &Path) -> io::Result<String> {
    let statistics = rustix::fs::statvfs(directory)?;
    let gib = |blocks: u64| blocks as f64 * statistics.f_frsize as f64 / f64::from(1 << 30);
    Ok(format!("{:.1} of {:.1} GiB free", gib(statistics.f_bavail), gib(statistics.f_blocks)))
}

fn since(begin: Instant) -> String {
    format!("{:.1} ms", begin.elapsed().as_secs_f64() * 1e3)
}

fn outcome_of(what: &'static str, result: io::Result<String>) -> Probed {
    match result {
        Ok(said) => Probed { what, works: true, outcome: said },
        Err(error) => Probed { what, works: false, outcome: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_holds_what_is_promised_is_told_so_and_is_left_as_it_was() {
        let store = tempfile::tempdir().unwrap();
        let probed = probe(&store.path().join("not/there/yet"));
        assert!(probed.iter().all(|one| one.works), "{probed:?}");
        assert!(probed[0].outcome.contains("is not there yet"), "{probed:?}");
        let names: Vec<&str> = probed.iter().map(|probed| probed.what).collect();
        assert_eq!(
            names,
            ["directory", "write, fsync and name", "never replaces", "direct writes", "space"]
        );
        assert_eq!(std::fs::read_dir(store.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_cannot_be_written_or_reached_is_told_and_panics_nowhere() {
        let probed = probe(Path::new("/proc"));
        assert!(probed.iter().any(|one| !one.works), "{probed:?}");
        let probed = probe(Path::new("s3://"));
        assert!(!probed[0].works, "{probed:?}");
    }

    #[test]
    fn a_bucket_is_asked_for_its_conditional_put() {
        let probed = probe(Path::new("memory://doctor/prefix"));
        assert_eq!((probed.len(), probed[0].what, probed[0].works), (1, "conditional put", true));
    }
}
