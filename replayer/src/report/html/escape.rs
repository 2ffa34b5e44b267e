//! Text and data as they may stand in a page, whatever they hold.
//!
//! Names, paths and sentences come from outside. Every template escapes by [`Text`], as
//! askama.toml says; what stands in the page as it is, is marked with `Safe`.

use std::fmt::{Result, Write};

use askama::filters::Escaper;

/// Characters of one text that are shown; a page has room for many.
const MOST: usize = 2000;

/// How templates write text between tags or in a quoted attribute. Controls, and marks that turn
/// the direction of writing, are shown as what they are not: they could make a line read as
/// another.
#[derive(Clone, Copy)]
pub(super) struct Text;

impl Escaper for Text {
    fn write_escaped_str<W: Write>(&self, mut out: W, text: &str) -> Result {
        for (index, c) in text.chars().enumerate() {
            if index == MOST {
                return out.write_str(" ... (shortened)");
            }
            match c {
                '&' => out.write_str("&amp;"),
                '<' => out.write_str("&lt;"),
                '>' => out.write_str("&gt;"),
                '"' => out.write_str("&quot;"),
                '\'' => out.write_str("&#39;"),
                '\n' | '\t' => out.write_char(c),
                c if c.is_control() || turns(c) => out.write_char('\u{fffd}'),
                c => out.write_char(c),
            }?;
        }
        Ok(())
    }
}

/// The same text, for the pictures that no template makes.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::new();
    // Writing into memory cannot fail.
    let _ = Text.write_escaped_str(&mut out, text);
    out
}

/// Whether a character turns the direction of writing.
fn turns(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{061c}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// JSON that may stand in a script element: nothing in it ends the element or begins a
/// comment, and it is the same JSON.
pub(super) fn json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if matches!(c, '<' | '>' | '&' | '\u{2028}' | '\u{2029}') || turns(c) => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out
}

/// What may be a part of an element's id.
pub(super) fn id(text: &str) -> String {
    let kept = text.chars().filter(|c| c.is_ascii_alphanumeric() || "-_".contains(*c));
    kept.take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_comes_from_outside_opens_a_tag_or_leaves_an_attribute() {
        let hostile = "<img src=x onerror=\"alert('1')\"> & </script>\u{202e}\u{0}";
        let shown = escaped(hostile);
        assert!(!shown.contains(['<', '>', '"', '\'', '\u{202e}', '\u{0}']), "{shown}");
        let text = serde_json::to_string(hostile).unwrap();
        let data = json(&text);
        assert!(!data.contains(['<', '>', '&', '\u{202e}']), "{data}");
        assert_eq!(serde_json::from_str::<String>(&data).unwrap(), hostile);
        assert_eq!(id("a\"><b c_1"), "abc_1");
        assert!(escaped(&"x".repeat(9000)).len() < 2100);
    }

    /// Goal: a template that forgets to escape escapes. Method: one that says nothing of it.
    #[test]
    fn a_template_escapes_by_itself() {
        #[derive(askama::Template)]
        #[template(source = "<p title=\"{{ text }}\">{{ text }}</p>", ext = "html")]
        struct Plain {
            text: &'static str,
        }
        let made = askama::Template::render(&Plain { text: "<\"'\u{202e}" }).unwrap();
        let text = "&lt;&quot;&#39;\u{fffd}";
        assert_eq!(made, format!("<p title=\"{text}\">{text}</p>"));
    }
}
