//! Ranks by hosts: what each recorded, whether it covers what it should, and whether its
//! replicas agree; and the tensors, each covered exactly once or not.

use std::collections::BTreeMap;
use std::fmt::Write;

use askama::Template;

use super::{Markup, Page, markup};
use crate::number::{bytes, count, plural};
use crate::report::drawings::{Drawings, FAULTS, RankDrawn, RankState};
use crate::verify::TensorVerdict;

/// Ranks of one host that are drawn one by one.
const OF_HOST: usize = 64;

#[derive(Template)]
#[template(path = "ranks.html")]
struct Ranks<'a> {
    id: &'a str,
    /// Whether what is drawn of this run was gathered.
    gathered: bool,
    /// Of this run and of the other.
    dumps: Vec<Dump<'a>>,
    /// Items of a list that are shown.
    items: usize,
}

struct Dump<'a> {
    whose: &'static str,
    counts: String,
    replicas: String,
    hosts: Vec<Host<'a>>,
    all_hosts: usize,
    tensors: Vec<Tensor<'a>>,
    all_tensors: usize,
}

struct Host<'a> {
    name: &'a str,
    ranks: Vec<Rank>,
    /// How many ranks are not drawn, where there are such.
    left: String,
    shards: String,
    bytes: String,
    coverage: String,
    agreement: String,
    faults: String,
}

struct Rank {
    class: &'static str,
    glyph: &'static str,
    number: u32,
    about: String,
}

struct Tensor<'a> {
    drawn: &'a TensorVerdict,
    shards: String,
    /// Coverage and agreement.
    state: String,
}

impl Page<'_> {
    pub(super) fn ranks(&self) -> Markup {
        let own_drawings = self.report.drawings.as_ref();
        let other = self.report.against.as_ref().and_then(|against| against.drawings.as_ref());
        let both = own_drawings.map(|drawn| (drawn, "")).into_iter();
        let both = both.chain(other.map(|drawn| (drawn, "other ")));
        markup(&Ranks {
            id: &self.id,
            gathered: own_drawings.is_some(),
            dumps: both.map(|(drawn, whose)| self.dump(drawn, whose)).collect(),
            items: self.detail.items,
        })
    }

    fn dump<'a>(&self, drawn: &'a Drawings, whose: &'static str) -> Dump<'a> {
        let mut hosts: BTreeMap<(&str, bool), Vec<&RankDrawn>> = BTreeMap::new();
        for rank in &drawn.ranks {
            let unnamed = rank.host.is_empty();
            let name = if unnamed { "no host is named" } else { &rank.host };
            hosts.entry((name, unnamed)).or_default().push(rank);
        }
        let mut hosts: Vec<_> = hosts.into_iter().map(|((name, _), ranks)| (name, ranks)).collect();
        // Hosts with something to say first: the others are many in a large job.
        hosts.sort_by_key(|(_, ranks)| ranks.iter().all(|rank| rank.is_clean()));
        let mut tensors: Vec<_> = drawn.tensors.iter().collect();
        tensors.sort_by_key(|tensor| tensor.unusable.is_none());
        let ranks = plural(drawn.ranks.len() as u64, "rank");
        Dump {
            whose,
            counts: format!("{ranks} on {}", plural(hosts.len() as u64, "host")),
            replicas: replicas(&drawn.ranks),
            hosts: self.shown(&hosts).iter().map(|(name, ranks)| host(name, ranks)).collect(),
            all_hosts: hosts.len(),
            tensors: self.shown(&tensors).iter().map(|drawn| tensor(drawn)).collect(),
            all_tensors: tensors.len(),
        }
    }
}

fn tensor(drawn: &TensorVerdict) -> Tensor<'_> {
    let state = match (&drawn.unusable, drawn.partial) {
        (Some(why), _) => format!("✕ {why}"),
        (None, Some(_)) => "✓ every addend is there".into(),
        (None, None) => "✓ every element is there, and its holders agree".into(),
    };
    Tensor { drawn, shards: count(drawn.shards), state }
}

impl RankDrawn {
    fn is_clean(&self) -> bool {
        self.state != RankState::Missing && self.apart == 0 && self.faults.iter().all(|&n| n == 0)
    }

    fn glyph(&self) -> (&'static str, &'static str) {
        match (self.state, self.is_clean()) {
            (RankState::Missing, _) => ("bt-missing", "?"),
            (_, false) => ("bt-fail", "✕"),
            (RankState::Nothing, true) => ("bt-skip", "–"),
            (RankState::Recorded, true) => ("bt-pass", "✓"),
        }
    }

    fn shown(&self) -> Rank {
        let (class, glyph) = self.glyph();
        Rank { class, glyph, number: self.rank, about: self.about() }
    }

    fn about(&self) -> String {
        let mut text = format!("rank {}: ", self.rank);
        match self.state {
            RankState::Missing => text.push_str("nothing of it is there"),
            RankState::Nothing => text.push_str("closed with nothing in its part"),
            RankState::Recorded => {
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

fn host<'a>(name: &'a str, ranks: &[&RankDrawn]) -> Host<'a> {
    let sum = |of: fn(&RankDrawn) -> u64| ranks.iter().map(|rank| of(rank)).sum::<u64>();
    let mut order: Vec<&RankDrawn> = ranks.to_vec();
    order.sort_by_key(|rank| rank.is_clean());
    let coverage =
        sum(|rank| rank.faults[2]) + sum(|rank| u64::from(rank.state == RankState::Missing));
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
    let left = ranks.len().saturating_sub(OF_HOST);
    Host {
        name,
        ranks: order.into_iter().take(OF_HOST).map(RankDrawn::shown).collect(),
        left: if left > 0 { count(left as u64) } else { String::new() },
        shards: count(sum(|rank| rank.shards)),
        bytes: bytes(sum(|rank| rank.bytes)),
        coverage,
        agreement,
        faults,
    }
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
