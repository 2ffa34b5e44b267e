//! Parses the ways to name a run: `RUN`, `RUN@ATTEMPT`, `RUN:STEP`, `RUN@ATTEMPT:STEP`.
//!
//! The name of a run may itself contain `@` and `:`. If the path exists as it is written, that run
//! is meant; if the path without its ending exists too, this is an error.

use std::path::{Path, PathBuf};

use backtape::store::backend::is_url;

use super::{OpenError, Selection};

/// A run, with the attempt and step that were written after its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reference {
    pub(super) path: PathBuf,
    pub(super) attempt: Option<u32>,
    pub(super) step: Option<u64>,
}

impl Reference {
    /// Parses a path. In the URL of a bucket, whose objects are not known yet, an ending always
    /// counts as one.
    pub(super) fn read(written: &Path) -> Result<Reference, OpenError> {
        let whole = Reference { path: written.into(), ..Reference::default() };
        let Some(split) = split(written) else { return Ok(whole) };
        if is_url(written) {
            return Ok(split);
        }
        match (written.exists(), split.path.exists()) {
            (true, true) => Err(OpenError::TwoMeanings { path: written.into(), run: split.path }),
            (false, true) => Ok(split),
            (_, false) => Ok(whole),
        }
    }

    /// The name of a run without its ending, and the ending; `None` where it has none.
    pub(super) fn of_name(name: &String) -> Option<(String, Reference)> {
        let reference = split(Path::new(name))?;
        Some((reference.path.to_str()?.to_owned(), Reference { path: name.into(), ..reference }))
    }

    /// The selection, narrowed by the ending; an error if the two differ.
    pub(super) fn narrow(&self, selection: &Selection) -> Result<Selection, OpenError> {
        let differ = |what, written: u64, asked: u64| OpenError::SaidTwice {
            path: self.path.clone(),
            what,
            written,
            asked,
        };
        let mut narrowed = selection.clone();
        match (self.attempt, selection.attempt) {
            (Some(in_path), Some(asked)) if in_path != asked => {
                return Err(differ("attempt", in_path.into(), asked.into()));
            }
            (in_path, asked) => narrowed.attempt = in_path.or(asked),
        }
        match (self.step, selection.step) {
            (Some(in_path), Some(asked)) if in_path != asked => {
                return Err(differ("step", in_path, asked));
            }
            (in_path, asked) => narrowed.step = in_path.or(asked),
        }
        Ok(narrowed)
    }
}

/// The path without `@ATTEMPT` and `:STEP`, if it ends in one of them.
fn split(written: &Path) -> Option<Reference> {
    let name = written.file_name()?.to_str()?;
    let (rest, step) = number_after(name, ':').unwrap_or((name, None));
    let (run, attempt) = number_after(rest, '@').unwrap_or((rest, None));
    if run.is_empty() || (step.is_none() && attempt.is_none()) {
        return None;
    }
    let attempt = attempt.map(u32::try_from).transpose().ok()?;
    Some(Reference { path: written.with_file_name(run), attempt, step })
}

fn number_after(text: &str, mark: char) -> Option<(&str, Option<u64>)> {
    let (before, digits) = text.rsplit_once(mark)?;
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten().map(|number| (before, Some(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> (PathBuf, Option<u32>, Option<u64>) {
        let reference = Reference::read(path).unwrap();
        (reference.path, reference.attempt, reference.step)
    }

    #[test]
    fn an_ending_chooses_an_attempt_and_a_step_of_the_run_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run-a");
        std::fs::create_dir(&run).unwrap();
        let written = |ending: &str| dir.path().join(format!("run-a{ending}"));
        assert_eq!(read(&written("")), (run.clone(), None, None));
        assert_eq!(read(&written("@3")), (run.clone(), Some(3), None));
        assert_eq!(read(&written(":12")), (run.clone(), None, Some(12)));
        assert_eq!(read(&written("@3:12")), (run.clone(), Some(3), Some(12)));
        for no_ending in ["@", ":", "@x", ":-1", "@99999999999", ":3@1"] {
            assert_eq!(read(&written(no_ending)).0, written(no_ending), "{no_ending}");
        }
        assert_eq!(read(Path::new("s3://dumps/run-a@2:5")).2, Some(5));
    }

    #[test]
    fn a_run_whose_own_name_has_an_ending_is_not_taken_for_another() {
        let dir = tempfile::tempdir().unwrap();
        let named = dir.path().join("run-a:3");
        std::fs::create_dir(&named).unwrap();
        assert_eq!(read(&named), (named.clone(), None, None));
        std::fs::create_dir(dir.path().join("run-a")).unwrap();
        let said = Reference::read(&named).unwrap_err().to_string();
        assert!(said.contains("--run run-a:3") && said.contains("--step"), "{said}");
    }

    #[test]
    fn an_ending_and_an_option_that_disagree_are_refused() {
        let reference = Reference { path: "run".into(), attempt: Some(1), step: Some(5) };
        let asked = |attempt, step| Selection { run: None, attempt, step };
        let named = Reference::of_name(&"fused@2:5".to_string()).unwrap();
        assert_eq!((named.0.as_str(), named.1.attempt, named.1.step), ("fused", Some(2), Some(5)));
        assert_eq!(Reference::of_name(&"fused".to_string()), None);
        let narrowed = reference.narrow(&asked(None, Some(5))).unwrap();
        assert_eq!((narrowed.attempt, narrowed.step), (Some(1), Some(5)));
        assert!(
            reference.narrow(&asked(None, Some(6))).unwrap_err().to_string().contains("step 6")
        );
        assert!(
            reference.narrow(&asked(Some(0), None)).unwrap_err().to_string().contains("attempt 0")
        );
    }
}
