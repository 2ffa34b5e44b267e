//! Ranks by hosts: what each recorded, whether it covers what it should, and whether its
//! replicas agree; and the tensors, each covered exactly once or not.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::Page;
use super::escape::esc;
use crate::number::{bytes, count, plural};
use crate::report::drawings::{Drawings, FAULTS, Held, RankDrawn};

/// Ranks of one host that are drawn one by one.
const OF_HOST: usize = 64;

impl Page<'_> {
    pub(super) fn ranks(&self, out: &mut String) {
        self.section(out, "ranks", "Ranks by hosts");
        match &self.report.drawings {
            Some(drawn) => self.dump(out, drawn, ""),
            None => {
                out.push_str("<p>Not gathered: <code>replay --report</code> gathers them.</p>\n")
            }
        }
        let other = self.report.against.as_ref().and_then(|against| against.drawings.as_ref());
        if let Some(drawn) = other {
            out.push_str("<h3>The other run</h3>\n");
            self.dump(out, drawn, "other ");
        }
        out.push_str("</section>\n");
    }

    fn dump(&self, out: &mut String, drawn: &Drawings, whose: &str) {
        let mut hosts: BTreeMap<(&str, bool), Vec<&RankDrawn>> = BTreeMap::new();
        for rank in &drawn.ranks {
            let unnamed = rank.host.is_empty();
            let name = if unnamed { "no host is named" } else { &rank.host };
            hosts.entry((name, unnamed)).or_default().push(rank);
        }
        let of: Vec<_> = hosts.into_iter().map(|((name, _), ranks)| (name, ranks)).collect();
        let mut order: Vec<usize> = (0..of.len()).collect();
        // Hosts with something to say first: the others are many in a large job.
        order.sort_by_key(|&at| of[at].1.iter().all(|rank| rank.is_clean()));
        let _ = writeln!(
            out,
            "<p>{} on {}. {}</p>\n<p class=\"bt-note\">✓ recorded, and nothing speaks against it; ✕ a fault; \
             – closed its part with nothing in it; ? nothing of it is there.</p>",
            plural(drawn.ranks.len() as u64, "rank"),
            plural(of.len() as u64, "host"),
            esc(&replicas(&drawn.ranks))
        );
        let _ = writeln!(
            out,
            "<div class=\"bt-scroll\"><table class=\"bt-hosts\"><caption>{whose}ranks by hosts</caption><thead><tr><th scope=\"col\">host</th>\
             <th scope=\"col\">ranks</th><th scope=\"col\">shards</th><th scope=\"col\">bytes</th>\
             <th scope=\"col\">coverage</th><th scope=\"col\">replicas</th><th scope=\"col\">faults</th></tr></thead><tbody>"
        );
        for &at in order.iter().take(self.detail.items) {
            let (name, ranks) = &of[at];
            host(out, name, ranks);
        }
        out.push_str("</tbody></table></div>\n");
        self.more(out, of.len(), "hosts");
        self.tensors(out, drawn, whose);
    }

    fn tensors(&self, out: &mut String, drawn: &Drawings, whose: &str) {
        let mut tensors: Vec<_> = drawn.tensors.iter().collect();
        tensors.sort_by_key(|tensor| tensor.unusable.is_none());
        let _ = writeln!(
            out,
            "<div class=\"bt-scroll\"><table class=\"bt-tensors\"><caption>{whose}tensors</caption><thead><tr><th scope=\"col\">tensor</th>\
             <th scope=\"col\">dtype</th><th scope=\"col\">shape</th><th scope=\"col\">shards</th>\
             <th scope=\"col\">coverage and agreement</th></tr></thead><tbody>"
        );
        for tensor in tensors.iter().take(self.detail.items) {
            let state = match (&tensor.unusable, tensor.partial) {
                (Some(why), _) => format!("✕ {why}"),
                (None, Some(_)) => "✓ every addend is there".into(),
                (None, None) => "✓ every element is there, and its holders agree".into(),
            };
            let _ = writeln!(
                out,
                "<tr><th scope=\"row\">{}</th><td>{}</td><td class=\"bt-num\">{}</td>\
                 <td class=\"bt-num\">{}</td><td>{}</td></tr>",
                esc(&tensor.key.to_string()),
                tensor.dtype,
                esc(&format!("{:?}", tensor.shape)),
                count(tensor.shards),
                esc(&state)
            );
        }
        out.push_str("</tbody></table></div>\n");
        self.more(out, tensors.len(), "tensors");
    }
}

impl RankDrawn {
    fn is_clean(&self) -> bool {
        self.held != Held::Missing && self.apart == 0 && self.faults.iter().all(|&n| n == 0)
    }

    fn glyph(&self) -> (&'static str, &'static str) {
        match (self.held, self.is_clean()) {
            (Held::Missing, _) => ("bt-missing", "?"),
            (_, false) => ("bt-fail", "✕"),
            (Held::Nothing, true) => ("bt-skip", "–"),
            (Held::Recorded, true) => ("bt-pass", "✓"),
        }
    }

    fn about(&self) -> String {
        let mut text = format!("rank {}: ", self.rank);
        match self.held {
            Held::Missing => text.push_str("nothing of it is there"),
            Held::Nothing => text.push_str("closed with nothing in its part"),
            Held::Recorded => {
                let _ = write!(text, "{}, {}", plural(self.shards, "shard"), bytes(self.bytes));
            }
        }
        for (n, name) in self.faults.iter().zip(FAULTS).filter(|(n, _)| **n > 0) {
            let _ = write!(text, "; {} of its {name}", plural(*n, "fault"));
        }
        if self.replicated > 0 {
            let agree = self.replicated - self.apart;
            let _ = write!(text, "; {agree} of {} replicated boxes agree", self.replicated);
        }
        text
    }
}

fn host(out: &mut String, name: &str, ranks: &[&RankDrawn]) {
    let sum = |of: fn(&RankDrawn) -> u64| ranks.iter().map(|rank| of(rank)).sum::<u64>();
    let _ = write!(out, "<tr><th scope=\"row\">{}</th><td class=\"bt-ranks\">", esc(name));
    let mut order: Vec<&&RankDrawn> = ranks.iter().collect();
    order.sort_by_key(|rank| rank.is_clean());
    for rank in order.iter().take(OF_HOST) {
        let (class, glyph) = rank.glyph();
        let _ = write!(
            out,
            "<span class=\"bt-rank {class}\" title=\"{}\">{}<b>{glyph}</b></span>",
            esc(&rank.about()),
            rank.rank
        );
    }
    if ranks.len() > OF_HOST {
        let _ = write!(out, " and {} more", count((ranks.len() - OF_HOST) as u64));
    }
    let coverage = sum(|rank| rank.faults[2]) + sum(|rank| u64::from(rank.held == Held::Missing));
    let coverage = match coverage {
        0 => "✓ nothing is missing".to_string(),
        n => format!("✕ {} missing or doubled", plural(n, "part")),
    };
    let (boxes, apart) = (sum(|rank| rank.replicated), sum(|rank| rank.apart));
    let agreement = match (boxes, apart) {
        (0, _) => "none held twice".to_string(),
        (n, 0) => format!("✓ all {} agree", count(n)),
        (n, apart) => format!("✕ {apart} of {n} boxes differ"),
    };
    let faults: Vec<String> = (0..4)
        .map(|kind| (kind, ranks.iter().map(|rank| rank.faults[kind]).sum::<u64>()))
        .filter(|(_, n)| *n > 0)
        .map(|(kind, n)| format!("{} {n}", FAULTS[kind]))
        .collect();
    let faults = if faults.is_empty() { "none".into() } else { faults.join(", ") };
    let _ = writeln!(
        out,
        "</td><td class=\"bt-num\">{}</td><td class=\"bt-num\">{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
        count(sum(|rank| rank.shards)),
        bytes(sum(|rank| rank.bytes)),
        esc(&coverage),
        esc(&agreement),
        esc(&faults)
    );
}

fn replicas(ranks: &[RankDrawn]) -> String {
    let boxes: u64 = ranks.iter().map(|rank| rank.replicated).sum();
    let apart: Vec<u32> =
        ranks.iter().filter(|rank| rank.apart > 0).map(|rank| rank.rank).collect();
    match (boxes, apart.len()) {
        (0, _) => "No box is held by two ranks, so there are no replicas to compare.".into(),
        (_, 0) => "Boxes that several ranks hold are the same bits on all of them.".into(),
        (_, n) => {
            let shown: Vec<String> = apart.iter().take(12).map(u32::to_string).collect();
            let more = if n > 12 { format!(" and {} more", n - 12) } else { String::new() };
            format!(
                "Replicas DISAGREE: ranks {}{more} hold boxes of which another holder has other bits.",
                shown.join(", ")
            )
        }
    }
}
