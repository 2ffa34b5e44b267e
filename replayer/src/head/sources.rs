//! The items of a declaration with where each is from, and how they are told in a line.

use std::fmt::Write;

use backtape::head::{DTYPES, HeadDeclaration, OPTIONS, Source, written};
use serde::Serialize;

/// One item of a declaration: an option, or a point of the dtypes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeadItem {
    /// The option of `tape.head`, or `dtypes.` with the point.
    pub item: String,
    /// Its value as it is written in Python.
    pub value: String,
    /// Where it is from.
    pub source: Source,
    /// Whether it is the option's default.
    #[serde(skip)]
    is_default: bool,
}

/// Options that the line of the head has in words already.
const IN_WORDS: [&str; 6] = ["loss", "path", "reduction", "denominator", "scope", "microbatches"];

/// The items of a declaration, in the order of the documentation; none where the dump does not say
/// where they are from.
pub fn items(head: &HeadDeclaration) -> Vec<HeadItem> {
    let usual = HeadDeclaration::default();
    let mut items = Vec::new();
    for option in OPTIONS {
        let Some(source) = head.source(option.name) else { return Vec::new() };
        if option.name == DTYPES && !head.dtypes.is_empty() {
            items.extend(head.dtypes.iter().map(|(point, dtype)| {
                let item = format!("{DTYPES}.{point}");
                let source = head.source(&item).unwrap_or(source);
                HeadItem { item, value: dtype.clone(), source, is_default: false }
            }));
            continue;
        }
        let value = written(head, option.name);
        let is_default = value == option.shown(&usual);
        items.push(HeadItem { item: option.name.into(), value, source, is_default });
    }
    items
}

/// The items by their sources, in one line of text; empty for none. Defaults of which nobody has
/// said anything are told together.
pub fn by_source(items: &[HeadItem]) -> String {
    let mut groups: Vec<String> = Vec::new();
    for (source, words) in SOURCES {
        let own = || items.iter().filter(|item| item.source == source);
        let is_all_in_words = IN_WORDS.iter().all(|name| own().any(|item| item.item == **name));
        let mut told = Vec::from_iter(is_all_in_words.then(|| THE_ABOVE.to_string()));
        let is_named = |item: &&HeadItem| !(is_all_in_words && IN_WORDS.contains(&&item.item[..]));
        let options = own().filter(|item| !item.item.starts_with(POINT)).filter(is_named);
        told.extend(options.filter_map(one));
        let points = own().filter(|item| item.item.starts_with(POINT));
        told.extend(dtypes(points, source == Source::Measured));
        if source == Source::Assumed && own().any(|item| item.is_default && one(item).is_none()) {
            told.push(ALL_ELSE.into());
        }
        if !told.is_empty() {
            groups.push(format!("{words}: {}", told.join(", ")));
        }
    }
    groups.join("; ")
}

/// What the sources are called in a line.
const SOURCES: [(Source, &str); 4] = [
    (Source::Seen, "seen in the job"),
    (Source::Measured, "measured"),
    (Source::Declared, "declared by hand"),
    (Source::Assumed, "assumed"),
];

/// What the options are called that the line of the head has, where all are from one source.
const THE_ABOVE: &str = "the above";

/// What the assumed defaults are called together.
const ALL_ELSE: &str = "all else, by default";

/// What the name of a dtype's item begins with.
const POINT: &str = "dtypes.";

/// How an option is told: with its value where the line of the head does not have it. Other
/// defaults that were seen or are assumed go without saying.
fn one(item: &HeadItem) -> Option<String> {
    let HeadItem { item: name, value, source, is_default } = item;
    match source {
        _ if IN_WORDS.contains(&&name[..]) => Some(name.clone()),
        Source::Seen | Source::Assumed if *is_default => None,
        // What was measured of an option that has its default is a tensor, as the cotangent is.
        Source::Measured if *is_default => Some(name.clone()),
        _ => Some(format!("{name}={value}")),
    }
}

/// How dtypes are told: the points together that have the same; where all were measured to have one,
/// that alone.
fn dtypes<'i>(items: impl Iterator<Item = &'i HeadItem>, is_measured: bool) -> Option<String> {
    let mut of: Vec<(&str, Vec<&str>)> = Vec::new();
    for item in items {
        let point = item.item.strip_prefix(POINT).unwrap_or(&item.item);
        match of.iter_mut().find(|(dtype, _)| *dtype == item.value) {
            Some((_, points)) => points.push(point),
            None => of.push((&item.value, vec![point])),
        }
    }
    if let ([(dtype, points)], true) = (&of[..], is_measured)
        && points.len() > 1
    {
        return Some(format!("dtypes {dtype}"));
    }
    let mut told = String::from("dtypes");
    for (dtype, points) in &of {
        let _ = write!(told, " {dtype} ({})", points.join(" "));
    }
    (!of.is_empty()).then_some(told)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> String {
        by_source(&items(&serde_json::from_str(text).unwrap()))
    }

    #[test]
    fn a_dump_that_does_not_say_where_its_items_are_from_has_no_line() {
        assert_eq!(line(r#"{"reduction": "sum", "z_loss": 0.5}"#), "");
    }

    #[test]
    fn items_are_told_by_where_they_are_from_and_defaults_together() {
        let text = r#"{"reduction": "sum", "ignore_label": -100, "temperature": 30.0, "scope": "rank",
            "dtypes": {"logits": "bf16", "lse": "f32", "output": "bf16"},
            "sources": {"reduction": "seen", "ignore_label": "seen", "label_smoothing": "seen",
                "temperature": "declared", "z_loss": "declared", "cotangent": "measured",
                "dtypes.logits": "measured", "dtypes.output": "measured"}}"#;
        assert_eq!(
            line(text),
            "seen in the job: reduction, ignore_label=-100; measured: cotangent, dtypes bf16; \
             declared by hand: z_loss=0.0, temperature=30.0; assumed: loss, path, \
             denominator, scope, microbatches, dtypes f32 (lse), all else, by default"
        );
    }

    #[test]
    fn where_everything_is_known_nothing_is_assumed() {
        let all: Vec<String> =
            OPTIONS.iter().map(|option| format!("\"{}\": \"seen\"", option.name)).collect();
        let text = format!("{{\"reduction\": \"sum\", \"sources\": {{{}}}}}", all.join(", "));
        assert_eq!(line(&text), "seen in the job: the above");
    }
}
