//! Colours of a report on a terminal. They repeat what the words say, for whoever scans; nothing
//! else depends on them, and whatever is no terminal gets the plain text (`anstream` strips them,
//! and honours NO_COLOR).

use anstyle::{AnsiColor, Style};

const BAD: Style = AnsiColor::Red.on_default().bold();
const DOUBT: Style = AnsiColor::Yellow.on_default().bold();
const GOOD: Style = AnsiColor::Green.on_default();
const QUIET: Style = Style::new().dimmed();

/// First words of a line that are its verdict: the line is painted.
const LINES: [(&str, Style); 11] = [
    ("DIVERGED", BAD),
    ("FAILED", BAD),
    ("NOT PROVED", BAD),
    ("found ", BAD),
    ("INCOMPLETE", DOUBT),
    ("PARTIAL", DOUBT),
    ("omitted ", DOUBT),
    ("AGREED", GOOD),
    ("PASSED", GOOD),
    ("PROVED", GOOD),
    ("unchecked ", QUIET),
];

/// Second words of a table's row that are its status: the word is painted.
const STATUSES: [(&str, Style); 4] =
    [("FAIL", BAD), ("warn", DOUBT), ("pass", GOOD), ("skip", QUIET)];

/// The text with colours in it; without them it is the same, letter by letter.
pub(super) fn paint(text: &str) -> String {
    text.split_inclusive('\n').map(line).collect()
}

fn line(whole: &str) -> String {
    let (text, end) = match whole.strip_suffix('\n') {
        Some(text) => (text, "\n"),
        None => (whole, ""),
    };
    if let Some((_, style)) = LINES.iter().find(|(word, _)| text.starts_with(word)) {
        return format!("{style}{text}{style:#}{end}");
    }
    // A row begins with a name in its first column; what is indented is prose.
    let named = text.starts_with(|letter: char| letter.is_alphanumeric());
    let second = text.split_whitespace().nth(1).filter(|_| named);
    let status_word = second.and_then(|word| STATUSES.iter().find(|(status, _)| *status == word));
    let Some((word, style)) = status_word else { return whole.into() };
    let first = text.find(' ').unwrap_or(0);
    match text[first..].find(word) {
        Some(at) => {
            let (before, rest) = text.split_at(first + at);
            format!("{before}{style}{word}{style:#}{}{end}", &rest[word.len()..])
        }
        None => whole.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_repeat_the_words_and_change_no_letter() {
        let text =
            "dk_label  FAIL  1.5e-1\nlse    pass  1\n  a pass in prose\nDIVERGED at dk\nAGREED";
        let painted = paint(text);
        assert_eq!(anstream::adapter::strip_str(&painted).to_string(), text);
        let colours: Vec<bool> = painted.lines().map(|line| line.contains('\u{1b}')).collect();
        assert_eq!(colours, [true, true, false, true, true]);
        assert!(painted.contains(&format!("{BAD}FAIL{BAD:#}  1.5e-1")), "{painted:?}");
    }
}
