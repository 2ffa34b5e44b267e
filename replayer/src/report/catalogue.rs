//! The catalogue of causes as text.

use super::text::wrap;
use crate::diagnose::catalogue::CATALOGUE;
use crate::diagnose::cause::Cause;
use crate::spelling;

/// The whole catalogue, or one of its causes; `None` for an unknown id.
pub fn text(id: Option<&str>) -> Option<String> {
    let asked = |cause: &&&dyn Cause| id.is_none_or(|id| id == cause.id());
    let mut out = String::new();
    for cause in CATALOGUE.iter().filter(asked) {
        out.push_str(cause.id());
        out.push('\n');
        wrap(&mut out, "  what  ", cause.about());
        if !cause.cases().is_empty() {
            wrap(&mut out, "  seen  ", &cause.cases().join("; "));
        }
        wrap(&mut out, "  to do ", cause.advice());
    }
    Some(out).filter(|out| !out.is_empty())
}

/// The end of a sentence that suggests which id was meant by an unknown one.
pub fn hint(typed: &str) -> String {
    spelling::hint(typed, CATALOGUE.iter().map(|cause| cause.id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_is_listed_once_and_an_unknown_id_is_none() {
        let all = text(None).unwrap();
        for cause in CATALOGUE {
            let id = cause.id();
            assert_eq!(all.lines().filter(|line| *line == id).count(), 1, "{id}");
            assert!(text(Some(id)).unwrap().starts_with(id));
        }
        assert_eq!(text(Some("no-such-cause")), None);
    }
}
