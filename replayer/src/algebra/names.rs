//! Names of parameters, told as few words.

use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Names or patterns that are listed; of more, how many they are.
const SHOWN: usize = 3;

/// Parameters by the shortest pattern that names them and no other: `layers.*.weight`.
pub(crate) fn pattern(names: &[&str], all: &[&str]) -> String {
    let count = names.len();
    match names {
        [] => return "no parameter".into(),
        [one] => return (*one).to_string(),
        _ if count == all.len() => return format!("all {count} parameters"),
        _ => {}
    }
    if let Some(glob) = common(names)
        && let Some(pattern) = compiled(&glob)
        && all.iter().filter(|name| pattern.matches(name)).count() == count
    {
        return format!("{glob} ({count} parameters)");
    }
    let left: Vec<&str> = all.iter().filter(|name| !names.contains(name)).copied().collect();
    if left.len() <= 2 {
        return format!("all {count} parameters but {}", left.join(" and "));
    }
    if count <= SHOWN {
        return names.join(", ");
    }
    match cover(names, all) {
        Some(globs) => format!("{} ({count} parameters)", listed(&globs)),
        None => format!("{} and {} more parameters", names[..SHOWN].join(", "), count - SHOWN),
    }
}

/// The name with `*` in place of each number that counts modules: `layers.3.w` and `layers_3.w` are
/// of the kinds `layers.*.w` and `layers_*.w`.
pub(crate) fn kind(name: &str) -> String {
    let part = |part: &str| match part.rsplit_once('_') {
        _ if is_number(part) => "*".to_string(),
        Some((word, number)) if is_number(number) => format!("{word}_*"),
        _ => part.to_string(),
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// At most [`SHOWN`] patterns that together name all of `names` and no other.
fn cover(names: &[&str], all: &[&str]) -> Option<Vec<String>> {
    let mut left: BTreeSet<&str> = names.iter().copied().collect();
    let own = left.clone();
    let globs: BTreeSet<String> = names.iter().flat_map(|name| globs(name)).collect();
    let named = |glob: String| {
        let pattern = compiled(&glob)?;
        let named = all.iter().copied().filter(|name| pattern.matches(name));
        let named: Option<BTreeSet<&str>> =
            named.map(|name| own.contains(name).then_some(name)).collect();
        Some((glob, named?))
    };
    let found: Vec<(String, BTreeSet<&str>)> = globs.into_iter().filter_map(named).collect();
    let mut cover = Vec::new();
    while !left.is_empty() && cover.len() < SHOWN {
        // The widest first, of as wide ones a name before a pattern, then the shortest.
        let gain = |(glob, named): &&(String, BTreeSet<&str>)| {
            let is_name = !glob.contains('*');
            (named.intersection(&left).count(), is_name, Reverse(glob.len()))
        };
        let (glob, named) = found.iter().max_by_key(gain)?;
        left.retain(|name| !named.contains(name));
        cover.push(glob.clone());
    }
    // In the order of the first name that each has.
    let first = |glob: &String| {
        let named = found.iter().find(|(of, _)| of == glob);
        named.and_then(|(_, named)| named.first().copied())
    };
    cover.sort_by_key(first);
    left.is_empty().then_some(cover)
}

/// Patterns that a name fits: its kind, and beginnings, ends and parts of it and of its kind.
fn globs(name: &str) -> Vec<String> {
    let mut globs = Vec::new();
    for name in [name.to_string(), kind(name)] {
        let parts: Vec<&str> = name.split('.').collect();
        for at in 1..parts.len() {
            globs.push(format!("{}.*", parts[..at].join(".")));
            globs.push(format!("*.{}", parts[at..].join(".")));
        }
        let inner = parts.iter().skip(1).take(parts.len().saturating_sub(2));
        let words = inner.filter(|part| !is_number(part) && **part != "*");
        globs.extend(words.map(|part| format!("*.{part}.*")));
        globs.push(name);
    }
    globs
}

/// Things one after the other, as in a sentence.
fn listed(things: &[String]) -> String {
    match things {
        [before @ .., last] if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => things.join(", "),
    }
}

/// A pattern in which each part that differs is `*`; `None` where the names have other numbers of
/// parts and no common beginning or end.
fn common(names: &[&str]) -> Option<String> {
    let split: Vec<Vec<&str>> = names.iter().map(|name| name.split('.').collect()).collect();
    let first = split.first()?;
    if split.iter().all(|parts| parts.len() == first.len()) {
        let part = |at: usize| match split.iter().all(|parts| parts[at] == first[at]) {
            true => first[at],
            false => "*",
        };
        return Some((0..first.len()).map(part).collect::<Vec<_>>().join("."));
    }
    let same = |at: &usize| split.iter().all(|parts| parts.get(*at) == first.get(*at));
    let from_end = |at: &usize| {
        let last = |parts: &Vec<&str>| parts.iter().rev().nth(*at).map(|part| part.to_string());
        split.iter().all(|parts| last(parts).is_some() && last(parts) == last(first))
    };
    let head = (0..first.len()).take_while(same).count();
    let tail = (0..first.len()).take_while(from_end).count();
    let ends = [&first[..head], &["*"][..], &first[first.len() - tail..]];
    (head + tail > 0 && head + tail < first.len() + 1).then(|| ends.concat().join("."))
}

/// A pattern in which `*` stands for any characters.
fn compiled(glob: &str) -> Option<glob::Pattern> {
    glob::Pattern::new(&glob::Pattern::escape(glob).replace("[*]", "*")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [&str; 7] = [
        "embed.weight",
        "layers.0.w",
        "layers.0.norm",
        "layers.1.w",
        "layers.1.norm",
        "norm",
        "head.bias",
    ];

    #[test]
    fn parameters_are_told_by_the_shortest_pattern_that_names_no_other() {
        assert_eq!(pattern(&["norm"], &ALL), "norm");
        assert_eq!(pattern(&ALL, &ALL), "all 7 parameters");
        assert_eq!(pattern(&["layers.0.w", "layers.1.w"], &ALL), "layers.*.w (2 parameters)");
        assert_eq!(
            pattern(&["layers.0.norm", "layers.1.norm", "norm"], &ALL),
            "layers.0.norm, layers.1.norm, norm"
        );
        assert_eq!(pattern(&ALL[..5], &ALL), "all 5 parameters but norm and head.bias");
        let layers = ["layers.0.w", "layers.0.norm", "layers.1.w", "layers.1.norm"];
        assert_eq!(pattern(&layers, &ALL), "layers.*.* (4 parameters)");
    }

    /// Goal: a fault of two kinds of parameters is told by both, however many layers there are.
    /// Method: 24 layers of which two kinds and one more parameter are taken, then one layer, then a
    /// set that no few patterns name.
    #[test]
    fn several_kinds_are_told_by_a_pattern_each() {
        let kinds = ["norm1.weight", "norm2.weight", "up.weight", "down.weight", "up.bias"];
        let layers = (0..24).flat_map(|layer| kinds.map(|kind| format!("layers.{layer}.{kind}")));
        let all: Vec<String> = layers.chain(["norm.weight".into(), "head.weight".into()]).collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let told = |is: &dyn Fn(&str) -> bool| {
            pattern(&all.iter().copied().filter(|name| is(name)).collect::<Vec<_>>(), &all)
        };
        let norms = told(&|name| name.contains("norm"));
        assert_eq!(norms, "*.norm1.*, *.norm2.* and norm.weight (49 parameters)");
        assert_eq!(told(&|name| name.starts_with("layers.3.")), "layers.3.*.* (5 parameters)");
        let two = |name: &str| name.starts_with("layers.3.") || name.ends_with("up.bias");
        assert_eq!(told(&two), "*.bias and layers.3.* (28 parameters)");
        let scattered = told(&|name| name.len() == 18 && !name.contains(".2"));
        assert!(scattered.ends_with(" more parameters"), "{scattered}");
    }

    #[test]
    fn a_kind_has_a_star_where_modules_are_counted() {
        assert_eq!(kind("layers.3.experts.12.w1.weight"), "layers.*.experts.*.w1.weight");
        assert_eq!(kind("params.layers_10.kernel"), "params.layers_*.kernel");
        assert_eq!(kind("norm.weight"), "norm.weight");
    }
}
