//! Names of parameters, told as few words.

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
        && all.iter().filter(|name| matches(&glob, name)).count() == count
    {
        return format!("{glob} ({count} parameters)");
    }
    let left: Vec<&str> = all.iter().filter(|name| !names.contains(name)).copied().collect();
    if left.len() <= 2 {
        return format!("all {count} parameters but {}", left.join(" and "));
    }
    const SHOWN: usize = 3;
    match count {
        0..=SHOWN => names.join(", "),
        _ => format!("{} and {} more parameters", names[..SHOWN].join(", "), count - SHOWN),
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

/// Whether a name fits a pattern, in which `*` stands for any characters.
fn matches(glob: &str, name: &str) -> bool {
    glob::Pattern::new(&glob::Pattern::escape(glob).replace("[*]", "*"))
        .is_ok_and(|pattern| pattern.matches(name))
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
}
