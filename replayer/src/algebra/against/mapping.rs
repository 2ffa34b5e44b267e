//! The file of `--map`: which parameter of this run is which of the other.
//!
//! One `THIS RUN = OTHER RUN` a line; `#` begins a comment. Each side is a name or an expression:
//!
//! ```text
//! model.* = *                                                    # renamed; * is any characters
//! head.weight = params.head.kernel.T                             # a transposed matrix
//! layers.*.qkv.weight = cat(h.*.q.w, h.*.k.w, h.*.v.w; dim 0)    # fused; `; blocks 8`: head by head
//! conv.weight = permute(conv.kernel; 3 2 0 1)
//! out.weight = reshape(out.kernel; 64 32).T
//! ```

use super::view::View;

/// The lines of a mapping.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mapping {
    pub(super) rules: Vec<Line>,
}

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    /// Its number in the file, from 1.
    pub(super) number: usize,
    /// Its text.
    pub(super) text: String,
    pub(super) ours: View,
    pub(super) theirs: View,
}

/// Why a mapping cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("line {number} of the mapping, {text:?}: {why}")]
pub struct MappingError {
    number: usize,
    text: String,
    why: String,
}

impl Line {
    pub(super) fn wrong(&self, why: String) -> MappingError {
        MappingError { number: self.number, text: self.text.clone(), why }
    }

    /// Whether it is of many parameters.
    pub(super) fn is_pattern(&self) -> bool {
        let mut names = self.ours.names().into_iter().chain(self.theirs.names());
        names.any(|name| name.contains('*'))
    }
}

impl Mapping {
    /// Reads the text of a mapping.
    pub fn read(text: &str) -> Result<Mapping, MappingError> {
        let mut rules = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let wrong = |why| MappingError { number: at + 1, text: line.into(), why };
            let Some((ours, theirs)) = line.split_once('=') else {
                return Err(wrong("it has no =: write THIS RUN'S NAME = OTHER RUN'S NAME".into()));
            };
            let (ours, theirs) = (view(ours).map_err(&wrong)?, view(theirs).map_err(&wrong)?);
            let line = Line { number: at + 1, text: line.into(), ours, theirs };
            if line.is_pattern() && line.ours.names().len() > 1 && line.theirs.names().len() > 1 {
                let why = "of two sides that join parameters none can be found by its pattern: \
                           write one line for each";
                return Err(line.wrong(why.into()));
            }
            rules.push(line);
        }
        Ok(Mapping { rules })
    }
}

/// Reads an expression.
fn view(text: &str) -> Result<View, String> {
    let text = text.trim();
    if let Some(inner) = text.strip_suffix(").T") {
        return Ok(view(&format!("{inner})"))?.transposed());
    }
    let of = |function: &str| {
        let inside = text.strip_prefix(function)?.trim_start().strip_prefix('(')?;
        inside.strip_suffix(')')
    };
    if let Some(inside) = of("cat") {
        return joined(text, inside);
    }
    if let Some(inside) = of("permute") {
        let (inner, order) = numbers::<usize>(text, inside)?;
        return Ok(View::Permuted { of: Box::new(view(inner)?), order });
    }
    if let Some(inside) = of("reshape") {
        let (inner, shape) = numbers::<u64>(text, inside)?;
        return Ok(View::Reshaped { of: Box::new(view(inner)?), shape });
    }
    if text.is_empty()
        || text.contains(['(', ')', ',', ';', '='])
        || text.contains(char::is_whitespace)
    {
        return Err(format!(
            "{text:?} is no name: known are NAME, NAME.T, cat(NAME, NAME; dim 0), \
             permute(NAME; 1 0) and reshape(NAME; 8 4)"
        ));
    }
    match text.strip_suffix(".T") {
        Some(name) => Ok(View::Whole(name.into()).transposed()),
        None => Ok(View::Whole(text.into())),
    }
}

/// What stands before the last `;` outside of brackets, and the numbers behind it.
fn numbers<'a, N: std::str::FromStr>(
    text: &str,
    inside: &'a str,
) -> Result<(&'a str, Vec<N>), String> {
    let (inner, after) =
        inside.rsplit_once(';').ok_or_else(|| format!("{text} has no numbers behind a ;"))?;
    let numbers = after
        .split_whitespace()
        .map(|word| word.parse().map_err(|_| format!("{word:?} in {text} is no number")));
    let numbers: Vec<N> = numbers.collect::<Result<_, String>>()?;
    match numbers.is_empty() {
        true => Err(format!("{text} has no numbers behind a ;")),
        false => Ok((inner, numbers)),
    }
}

fn joined(text: &str, inside: &str) -> Result<View, String> {
    let mut sections = outside(inside, ';').into_iter();
    let parts = outside(sections.next().unwrap_or_default(), ',');
    let parts = parts.into_iter().map(view).collect::<Result<Vec<_>, _>>()?;
    let (mut dim, mut blocks) = (0, 1);
    for section in sections {
        let mut words = section.split_whitespace();
        let number = (words.next(), words.next().and_then(|word| word.parse::<u64>().ok()));
        match number {
            (Some("dim"), Some(value)) => dim = value as usize,
            (Some("blocks"), Some(value)) if value > 0 => blocks = value,
            _ => {
                return Err(format!(
                    "{:?} in {text} is neither a dimension, as dim 0, nor a number of blocks, as \
                     blocks 8",
                    section.trim()
                ));
            }
        }
    }
    Ok(View::Joined { parts, dim, blocks })
}

/// Cuts a text at a character that stands in no brackets.
fn outside(text: &str, at: char) -> Vec<&str> {
    let (mut depth, mut start, mut cut) = (0i32, 0, Vec::new());
    for (place, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ if c == at && depth == 0 => {
                cut.push(&text[start..place]);
                start = place + c.len_utf8();
            }
            _ => {}
        }
    }
    cut.push(&text[start..]);
    cut
}

/// What the stars of a pattern stand for in a name, the shortest first; `None` where it does not
/// fit.
pub(super) fn captured<'a>(pattern: &str, name: &'a str) -> Option<Vec<&'a str>> {
    let Some((head, tail)) = pattern.split_once('*') else {
        return (pattern == name).then(Vec::new);
    };
    let rest = name.strip_prefix(head)?;
    let ends = rest.char_indices().map(|(at, _)| at).chain([rest.len()]);
    ends.into_iter().find_map(|end| {
        let mut all = vec![&rest[..end]];
        all.extend(captured(tail, &rest[end..])?);
        Some(all)
    })
}

/// A pattern with its stars filled in.
pub(super) fn filled(pattern: &str, stars: &[&str]) -> String {
    let mut parts = pattern.split('*');
    let mut name = parts.next().unwrap_or_default().to_string();
    for (at, part) in parts.enumerate() {
        name.push_str(stars.get(at).copied().unwrap_or("*"));
        name.push_str(part);
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_is_told() {
        for line in [
            "a = b",
            "model.* = *",
            "head.weight = head.kernel.T",
            "layers.*.qkv = cat(h.*.q, h.*.k.T, h.*.v; dim 1; blocks 8)",
            "conv = permute(conv.kernel; 3 2 0 1)",
            "out = reshape(out.kernel; 64 32).T",
        ] {
            let mapping = Mapping::read(&format!("# names\n\n{line}  # so\n")).unwrap();
            let rule = &mapping.rules[0];
            assert_eq!((format!("{} = {}", rule.ours, rule.theirs), rule.number), (line.into(), 3));
        }
    }

    #[test]
    fn a_line_that_cannot_be_read_is_told_with_its_number_and_what_is_wrong() {
        for (line, why) in [
            ("a", "has no ="),
            ("a = ", "is no name"),
            ("a = b c", "is no name"),
            ("a = cat(b, c; dim x)", "neither a dimension"),
            ("a = cat(b, c; blocks 0)", "neither a dimension"),
            ("a = permute(b)", "no numbers behind a ;"),
            ("a = reshape(b; 3 x)", "\"x\" in reshape(b; 3 x) is no number"),
            ("cat(a.*, b.*) = cat(c.*, d.*)", "write one line for each"),
        ] {
            let said = Mapping::read(line).unwrap_err().to_string();
            assert!(said.contains(why) && said.starts_with("line 1 "), "{line}: {said}");
        }
    }

    #[test]
    fn stars_stand_for_any_characters_and_are_filled_in_order() {
        assert_eq!(captured("model.*", "model.a.b"), Some(vec!["a.b"]));
        assert_eq!(captured("l.*.*.w", "l.0.q.w"), Some(vec!["0", "q"]));
        assert_eq!(captured("l.*.w", "l.0.b"), None);
        assert_eq!(filled("h.*.x.*", &["0", "q"]), "h.0.x.q");
    }
}
