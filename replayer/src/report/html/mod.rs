//! The report as one page: no network, nothing beside it, readable without a script and on
//! paper. Plain data in, HTML out.
//!
//! The templates have the tables and texts, and escape all that they are given; the script adds
//! the theme, and values under the pointer and the arrow keys. The page's policy lets nothing else
//! run or load.

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
mod step;
mod step_map;
mod step_norm;
mod step_pair;
mod step_table;
mod top;

use askama::Template;
use askama::filters::Safe;

use super::schema::Report;
use escape::{id, json};

/// Bytes that no page exceeds, whatever was dumped.
pub const MAX_BYTES: usize = 3_000_000;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// SHA-256 of the script in base 64: the one script that the page's policy lets run.
const SCRIPT_HASH: &str = "sha256-77aB3qwNf12qKv5MdJy34JTpfpD7M7Vky6JQwP7IBqI=";

/// HTML that stands in a page as it is: made by a template, or by us of numbers and escaped text.
type Markup = Safe<String>;

/// What a template makes of its data.
fn markup(template: &impl Template) -> Markup {
    Safe(template.render().expect("memory can be written to"))
}

/// How much of what there is a page shows.
#[derive(Clone, Copy)]
struct Detail {
    /// How often the blocks of the maps are halved.
    halvings: u32,
    /// Items of a list.
    items: usize,
    /// Bytes of JSON up to which the report stands in the page as data too.
    json: usize,
    /// Parameters in the table of the step.
    parameters: usize,
    /// Whether each cell of that table has its numbers beside the ratio.
    titles: bool,
}

/// Tried in turn until the page is small enough. The last has a few thousand items of bounded
/// length at most.
const DETAILS: [Detail; 5] = [
    Detail { halvings: 0, items: 200, json: 512 << 10, parameters: 10_000, titles: true },
    Detail { halvings: 0, items: 100, json: 0, parameters: 10_000, titles: false },
    Detail { halvings: 1, items: 50, json: 0, parameters: 4000, titles: false },
    Detail { halvings: 2, items: 20, json: 0, parameters: 1000, titles: false },
    Detail { halvings: 4, items: 8, json: 0, parameters: 100, titles: false },
];

/// What every part of a page is made from.
struct Page<'a> {
    report: &'a Report,
    /// What the ids of all elements begin with.
    id: String,
    detail: Detail,
}

/// What stands around the article.
#[derive(Template)]
#[template(path = "page.html")]
struct Whole<'a> {
    title: String,
    script_hash: &'static str,
    body: Safe<&'a str>,
}

#[derive(Template)]
#[template(path = "article.html")]
struct Article<'a> {
    id: &'a str,
    verdict: &'static str,
    style: Safe<&'static str>,
    script: Safe<&'static str>,
    top: Markup,
    /// Whether anything but the step was replayed.
    has_head: bool,
    /// What becomes of every parameter: in both runs against each other, in this run and in the
    /// other; and whether that comes before the head.
    steps: Vec<Markup>,
    step_leads: bool,
    graph: Markup,
    causes: Markup,
    stages: Markup,
    against: Markup,
    maps: Markup,
    norm: Markup,
    ranks: Markup,
    rest: Markup,
    /// What the script is told of the maps.
    drawn: Markup,
    /// The report itself, for programs that are given the page alone.
    report: Option<Markup>,
}

/// The whole report as one HTML file of at most [`MAX_BYTES`].
pub fn page(report: &Report) -> String {
    let title = format!("backtape: {} step {}", report.dump.run, report.step);
    let mut whole = Whole { title, script_hash: SCRIPT_HASH, body: Safe("") };
    // A template ends without the newline of its file.
    let around = markup(&whole).0.len() + 1;
    let body = fragment_within(report, "bt", MAX_BYTES - around);
    whole.body = Safe(&body);
    markup(&whole).0 + "\n"
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
        text = Page { report, id, detail }.article().0;
        if text.len() <= most {
            break;
        }
    }
    text
}

impl Page<'_> {
    fn article(&self) -> Markup {
        let (maps, drawn) = self.maps();
        let report = serde_json::to_string(self.report).unwrap_or_default();
        markup(&Article {
            id: &self.id,
            verdict: top::verdict_word(self.report.verdict),
            style: Safe(STYLE),
            script: Safe(SCRIPT),
            top: self.top(),
            has_head: !self.has_no_head(),
            steps: [self.step_pair(), self.step(), self.other_step()]
                .into_iter()
                .flatten()
                .collect(),
            step_leads: self.step_leads(),
            graph: self.graph(),
            causes: self.causes(),
            stages: self.stages(),
            against: self.against(),
            maps,
            norm: self.norm(),
            ranks: self.ranks(),
            rest: self.rest(),
            drawn: Safe(json(&drawn)),
            report: (report.len() <= self.detail.json).then(|| Safe(json(&report))),
        })
    }

    /// As many of a list as the page shows.
    fn shown<'l, T>(&self, all: &'l [T]) -> &'l [T] {
        &all[..all.len().min(self.detail.items)]
    }
}

#[cfg(test)]
mod tests {
    use base64::prelude::{BASE64_STANDARD, Engine};
    use sha2::{Digest, Sha256};

    use super::*;

    /// Goal: the policy names the script that stands in the page, or no browser runs it. Method:
    /// the hash of all that stands between the script's tags, as browsers compute it.
    #[test]
    fn the_policy_lets_the_script_of_the_page_run() {
        let nothing = || Safe(String::new());
        let article = markup(&Article {
            id: "bt",
            verdict: "agreed",
            style: Safe(STYLE),
            script: Safe(SCRIPT),
            top: nothing(),
            has_head: true,
            steps: Vec::new(),
            step_leads: false,
            graph: nothing(),
            causes: nothing(),
            stages: nothing(),
            against: nothing(),
            maps: nothing(),
            norm: nothing(),
            ranks: nothing(),
            rest: nothing(),
            drawn: nothing(),
            report: None,
        });
        let title = "</title><script>".to_string();
        let body = Safe(&article.0[..]);
        let page = markup(&Whole { title, script_hash: SCRIPT_HASH, body }).0;
        let script = page.split("<script>").nth(1).and_then(|rest| rest.split_once("</script>"));
        let (script, _) = script.expect("one script runs");
        let hash = format!("sha256-{}", BASE64_STANDARD.encode(Sha256::digest(script)));
        assert!(page.contains(&format!("script-src '{hash}';")), "{hash}");
        assert_eq!(page.matches("<script>").count(), 1, "a title opens none");
    }
}
