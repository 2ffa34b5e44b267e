//! What somebody may have meant by a name that is not there.
//!
//! A hint and never a choice: a debugger that goes on with another tensor than the one that was
//! typed would lie.

use strsim::osa_distance;

/// Names longer than this are not compared: the work grows with their product.
const LONGEST: usize = 255;

/// The known name that is nearest to what was typed, if a slip of the fingers explains it: a
/// letter wrong, missing, doubled or swapped with its neighbour, for every three letters one.
pub fn nearest<'a>(typed: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = typed.chars().count().div_ceil(3);
    let far = |name: &str| osa_distance(&typed.to_lowercase(), &name.to_lowercase());
    let known: Vec<&str> = known.into_iter().filter(|name| name.len() <= LONGEST).collect();
    if typed.len() > LONGEST || known.contains(&typed) {
        return None;
    }
    // Of equals the one that begins alike: the first letter is seldom the slip.
    let alike = |name: &str| name.chars().next() != typed.chars().next();
    let mut all: Vec<_> = known.iter().map(|&name| (far(name), alike(name), name)).collect();
    all.sort_unstable();
    // A tensor is there once for each microbatch.
    all.dedup();
    let (best, next) = (all.first()?, all.get(1));
    // Of two that are as near none is meant more than the other.
    let alone = next.is_none_or(|next| (next.0, next.1) > (best.0, best.1));
    (best.0 <= most && alone).then_some(best.2)
}

/// The same to stand behind the name; empty where nothing is near.
pub fn hint<'a>(typed: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(typed, known).map(|name| format!(" (did you mean {name}?)")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_fingers_is_understood_and_another_word_is_not() {
        let known = ["dk", "dk_label", "dk_lse", "label_logits", "q", "grad_norm"];
        let correction = |typed| nearest(typed, known);
        assert_eq!(correction("dk_labl"), Some("dk_label"));
        assert_eq!(correction("dk_lable"), Some("dk_label"));
        assert_eq!(correction("labels_logits"), Some("label_logits"));
        assert_eq!(correction("DK"), Some("dk"));
        assert_eq!(correction("gradnorm"), Some("grad_norm"));
        assert_eq!(correction("kd"), Some("dk"));
        assert_eq!(nearest("qq", ["dq", "q"]), Some("q"));
        assert_eq!(correction("optimizer"), None);
        assert_eq!(correction(""), None);
        assert_eq!(correction("dk"), None, "what is there is no slip");
        assert_eq!(nearest("x", []), None);
        assert_eq!(nearest("dqq", ["dq", "dq"]), Some("dq"), "of two microbatches");
        assert_eq!(nearest("run-c", ["run-a", "run-b"]), None, "either may be meant");
    }

    #[test]
    fn a_letter_swapped_with_its_neighbour_is_one_slip() {
        assert_eq!(nearest("kd", ["dk"]), Some("dk"), "two letters wrong would be too many");
        assert_eq!(nearest("ql", ["dk"]), None);
    }
}
