//! Text, numbers and bytes as they may stand in a page, whatever they hold.
//!
//! Names, paths and sentences come from outside. Nothing enters the page but through here.

use std::fmt::Write;

/// Characters of one text that are shown; a page has room for many.
const MOST: usize = 2000;

/// Text between tags or in a quoted attribute. Controls, and marks that turn the direction of
/// writing, are shown as what they are not: they could make a line read as another.
pub(super) fn esc(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (at, c) in text.chars().enumerate() {
        if at == MOST {
            out.push_str(" ... (shortened)");
            break;
        }
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || turns(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
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

/// Base 64 with padding.
pub(super) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let at = bits >> (18 - 6 * digit) & 63;
            out.push(if digit <= chunk.len() { DIGITS[at as usize] as char } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_comes_from_outside_opens_a_tag_or_leaves_an_attribute() {
        let hostile = "<img src=x onerror=\"alert('1')\"> & </script>\u{202e}\u{0}";
        let shown = esc(hostile);
        assert!(!shown.contains(['<', '>', '"', '\'', '\u{202e}', '\u{0}']), "{shown}");
        let text = serde_json::to_string(hostile).unwrap();
        let data = json(&text);
        assert!(!data.contains(['<', '>', '&', '\u{202e}']), "{data}");
        assert_eq!(serde_json::from_str::<String>(&data).unwrap(), hostile);
        assert_eq!(id("a\"><b c_1"), "abc_1");
        assert!(esc(&"x".repeat(9000)).len() < 2100);
    }

    #[test]
    fn base64_is_that_of_rfc_4648() {
        for (plain, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
        assert_eq!(base64(&[0xfb, 0xff]), "+/8=");
    }
}
