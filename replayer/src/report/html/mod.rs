//! The report as one page: no network, nothing beside it, readable without a script and on
//! paper. Plain data in, HTML out.
//!
//! Tables, texts and drawings are made here; the script adds the theme, and values under
//! the pointer and the arrow keys. The page's policy lets nothing else run or load.

mod against;
mod bars;
mod causes;
mod escape;
mod graph;
mod maps;
mod norm;
mod picture;
mod ranks;
mod rest;
mod stages;
mod top;

use std::fmt::Write;

use super::schema::Report;
use escape::{esc, id, json};

/// Bytes that no page exceeds, whatever was dumped.
pub const MAX_BYTES: usize = 3_000_000;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// SHA-256 of the script in base 64: the one script that the page's policy lets run.
const SCRIPT_HASH: &str = "sha256-alHzb0BV2+J0aKuQDzkb+LmZofIRDLzKTsvGWcr1X10=";

/// How much of what there is a page shows.
#[derive(Clone, Copy)]
struct Detail {
    /// How often the blocks of the maps are halved.
    halvings: u32,
    /// Items of a list.
    items: usize,
    /// Bytes of JSON up to which the report stands in the page as data too.
    json: usize,
}

/// Tried in turn until the page is small enough. The last has a few thousand items of bounded
/// length at most.
const DETAILS: [Detail; 5] = [
    Detail { halvings: 0, items: 200, json: 512 << 10 },
    Detail { halvings: 0, items: 100, json: 0 },
    Detail { halvings: 1, items: 50, json: 0 },
    Detail { halvings: 2, items: 20, json: 0 },
    Detail { halvings: 4, items: 8, json: 0 },
];

/// What every part of a page is made from.
struct Page<'a> {
    report: &'a Report,
    /// What the ids of all elements begin with.
    id: String,
    detail: Detail,
}

/// The whole report as one HTML file of at most [`MAX_BYTES`].
pub fn page(report: &Report) -> String {
    let title = format!("backtape: {} step {}", report.dump.run, report.step);
    let head = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
         style-src 'unsafe-inline'; script-src '{SCRIPT_HASH}'; base-uri 'none'; \
         form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"referrer\" content=\"no-referrer\">\n\
         <title>{}</title>\n</head>\n<body class=\"backtape-page\">\n",
        esc(&title)
    );
    let end = "</body>\n</html>\n";
    let body = fragment_within(report, "bt", MAX_BYTES - head.len() - end.len());
    head + &body + end
}

/// The same drawing to be put into another page, such as a notebook's: no `<html>`, all styles
/// below one class. `prefix` begins every id, so that several stand on one page.
pub fn fragment(report: &Report, prefix: &str) -> String {
    fragment_within(report, prefix, MAX_BYTES)
}

fn fragment_within(report: &Report, prefix: &str, most: usize) -> String {
    let mut text = String::new();
    for detail in DETAILS {
        let prefix = id(prefix);
        let id = if prefix.is_empty() { "bt".into() } else { prefix };
        text = Page { report, id, detail }.article();
        if text.len() <= most {
            break;
        }
    }
    text
}

impl Page<'_> {
    fn article(&self) -> String {
        let mut out = format!("<style>\n{STYLE}</style>\n");
        let _ = writeln!(
            out,
            "<article class=\"backtape\" id=\"{}\" data-verdict=\"{}\">",
            self.id,
            top::verdict_word(self.report.verdict)
        );
        self.top(&mut out);
        out.push_str("<div class=\"bt-front\">\n");
        self.graph(&mut out);
        self.causes(&mut out);
        out.push_str("</div>\n");
        self.stages(&mut out);
        self.against(&mut out);
        let drawn = self.maps(&mut out);
        self.norm(&mut out);
        self.ranks(&mut out);
        self.rest(&mut out);
        let _ = writeln!(
            out,
            "<script type=\"application/json\" class=\"bt-data\">{}</script>",
            json(&drawn)
        );
        self.data(&mut out);
        out.push_str("</article>\n");
        let _ = writeln!(out, "<script>{SCRIPT}</script>");
        out
    }

    /// The report itself, for programs that are given the page alone.
    fn data(&self, out: &mut String) {
        let text = serde_json::to_string(self.report).unwrap_or_default();
        if text.len() <= self.detail.json {
            let _ = writeln!(
                out,
                "<script type=\"application/json\" class=\"bt-report\">{}</script>",
                json(&text)
            );
        }
    }

    /// Opens a section with its heading.
    fn section(&self, out: &mut String, name: &str, heading: &str) {
        let _ = writeln!(
            out,
            "<section id=\"{}-{name}\" aria-labelledby=\"{}-{name}-h\">\n<h2 id=\"{}-{name}-h\">{}</h2>",
            self.id,
            self.id,
            self.id,
            esc(heading)
        );
    }

    /// Says how many items of a list are not on the page.
    fn more(&self, out: &mut String, all: usize, what: &str) {
        if all > self.detail.items {
            let _ = writeln!(
                out,
                "<p class=\"bt-note\">{} more {what} are not shown; <code>--json</code> names all.</p>",
                all - self.detail.items
            );
        }
    }
}
