//! What happens to a network, drawn from a seed, and how it is done and undone.

use std::time::Duration;

use anyhow::Result;

use super::hosts::{Hosts, address};
use super::proxy::{Mode, Proxy};
use crate::random::Random;

/// Ranks of the job.
pub(crate) const RANKS: u32 = 8;
/// How long ranks wait for a step: longer than any fault, or less than most.
pub(crate) const PATIENT_MS: u64 = 60_000;
const HASTY_MS: u64 = 1500;
/// Longest fault, and longest of the few that are long: TCP doubles its pauses meanwhile, and
/// would send again what was lost as much later as the fault took.
const LONGEST_MS: u64 = 6000;
const VERY_LONG_MS: u64 = 26_000;

/// One thing that happens.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The links of ranks are down; of none: the coordinator's.
    LinkDown(Vec<u32>),
    /// Packets go one way only: those to the ranks, or those from them, are dropped.
    OneWay { ranks: Vec<u32>, to_ranks: bool },
    /// A share of the packets to and from these ranks is lost.
    Loss { ranks: Vec<u32>, percent: u64 },
    /// These ranks are cut off from the coordinator, and from nobody else.
    Partition(Vec<u32>),
    /// Everybody sends slowly.
    Slow { kbit: u32 },
    /// What the proxy does.
    Proxy(Mode),
}

/// What happens during one job.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) faults: Vec<Fault>,
    pub(crate) lasts: Duration,
    /// After the first commit, this much later; `None`: before the ranks come.
    pub(crate) begins: Option<Duration>,
    /// Whether ranks reach the coordinator through the proxy.
    pub(crate) proxied: bool,
    /// Ranks send their files, instead of writing them into a store that all see.
    pub(crate) stream: bool,
    /// mTLS and a token, instead of `--insecure`.
    pub(crate) credentials: bool,
    /// How long ranks wait for a step: some of them not as long as the fault lasts.
    pub(crate) step_ms: u64,
    pub(crate) files: u32,
    pub(crate) bytes: u64,
    /// A queue that fills up while nothing can be delivered.
    pub(crate) queue_kib: Option<u64>,
}

impl Scenario {
    /// Draws one; without namespaces only what a proxy can do.
    pub(crate) fn draw(random: &mut Random, namespaces: bool) -> Scenario {
        let wanted = if random.below(3) == 0 { 2 } else { 1 };
        let mut faults: Vec<Fault> = Vec::new();
        while faults.len() < wanted {
            let fault = Fault::draw(random, namespaces);
            let same =
                |other: &Fault| std::mem::discriminant(other) == std::mem::discriminant(&fault);
            // Two of one kind would undo each other.
            if !faults.iter().any(same) {
                faults.push(fault);
            } else if !namespaces {
                break;
            }
        }
        let begins = (random.below(6) != 0).then(|| Duration::from_millis(random.below(400)));
        let longest = if random.below(16) == 0 { VERY_LONG_MS } else { LONGEST_MS };
        let small_queue = random.below(4) == 0;
        let proxied = faults.iter().any(|fault| matches!(fault, Fault::Proxy(_)));
        Scenario {
            faults,
            lasts: Duration::from_millis(500 + random.below(longest - 500)),
            begins,
            proxied,
            stream: random.below(2) == 0,
            credentials: random.below(2) == 0,
            step_ms: if random.below(4) == 0 { HASTY_MS } else { PATIENT_MS },
            files: 1 + random.below(2) as u32,
            bytes: 1 << (10 + random.below(7)),
            queue_kib: small_queue.then_some(256),
        }
    }

    pub(crate) fn apply(&self, hosts: Option<&Hosts>, proxy: Option<&Proxy>) -> Result<()> {
        let mut rules = Rules::default();
        for fault in &self.faults {
            match (fault, hosts) {
                (Fault::Proxy(mode), _) => proxy.iter().for_each(|proxy| proxy.set(*mode)),
                (Fault::LinkDown(ranks), Some(hosts)) if ranks.is_empty() => {
                    hosts.coordinator_link("down")?;
                }
                (Fault::LinkDown(ranks), Some(hosts)) => hosts.links(ranks, "down")?,
                (Fault::Slow { kbit }, Some(hosts)) => {
                    for host in hosts.ranks.iter().chain([&hosts.coordinator]) {
                        host.rate(Some(*kbit))?;
                    }
                }
                (fault, _) => rules.add(fault),
            }
        }
        match hosts {
            Some(hosts) if !rules.is_empty() => hosts.coordinator.filter(&rules.text()),
            _ => Ok(()),
        }
    }

    /// Makes the network whole again.
    pub(crate) fn heal(&self, hosts: Option<&Hosts>, proxy: Option<&Proxy>) -> Result<()> {
        proxy.iter().for_each(|proxy| proxy.set(Mode::Pass));
        let Some(hosts) = hosts else { return Ok(()) };
        for fault in &self.faults {
            match fault {
                Fault::LinkDown(ranks) if ranks.is_empty() => hosts.coordinator_link("up")?,
                Fault::LinkDown(ranks) => hosts.links(ranks, "up")?,
                Fault::Slow { .. } => {
                    for host in hosts.ranks.iter().chain([&hosts.coordinator]) {
                        host.rate(None)?;
                    }
                }
                Fault::Proxy(_) => {}
                _ => hosts.coordinator.filter("")?,
            }
        }
        Ok(())
    }
}

impl Fault {
    fn draw(random: &mut Random, namespaces: bool) -> Fault {
        let kind = if namespaces { random.below(11) } else { 6 + random.below(5) };
        match kind {
            0 => Fault::LinkDown(some(random)),
            1 => Fault::LinkDown(Vec::new()),
            2 => Fault::OneWay { ranks: some(random), to_ranks: random.below(2) == 0 },
            3 => Fault::Loss { ranks: (0..RANKS).collect(), percent: 1 + random.below(30) },
            4 => Fault::Partition(some(random)),
            5 => Fault::Slow { kbit: 250 << random.below(6) },
            6 => Fault::Proxy(Mode::Latency(5 + random.below(100))),
            7 => Fault::Proxy(Mode::Reset),
            8 => Fault::Proxy(Mode::Stall),
            9 => Fault::Proxy(Mode::HalfOpen),
            _ => Fault::Proxy(Mode::Truncate(random.below(100_000))),
        }
    }
}

/// Some of the ranks, at least one and at most all.
fn some(random: &mut Random) -> Vec<u32> {
    let chosen = 1 + random.below((1 << RANKS) - 1);
    (0..RANKS).filter(|rank| chosen & (1 << rank) != 0).collect()
}

/// What the coordinator's packet filter drops.
#[derive(Default)]
struct Rules {
    input: String,
    output: String,
}

impl Rules {
    fn is_empty(&self) -> bool {
        self.input.is_empty() && self.output.is_empty()
    }

    fn add(&mut self, fault: &Fault) {
        let (ranks, share, both, to_ranks) = match fault {
            Fault::OneWay { ranks, to_ranks } => (ranks, None, false, *to_ranks),
            Fault::Loss { ranks, percent } => (ranks, Some(*percent), true, true),
            Fault::Partition(ranks) => (ranks, None, true, true),
            _ => return,
        };
        let hosts: Vec<String> = ranks.iter().map(|&rank| address(rank as usize + 1)).collect();
        let hosts = hosts.join(", ");
        let share = share.map(|percent| format!("numgen random mod 100 < {percent} "));
        let share = share.unwrap_or_default();
        if both || !to_ranks {
            self.input += &format!("    ip saddr {{ {hosts} }} {share}drop\n");
        }
        if both || to_ranks {
            self.output += &format!("    ip daddr {{ {hosts} }} {share}drop\n");
        }
    }

    fn text(&self) -> String {
        let chain = |name: &str, rules: &str| {
            format!("  chain {name} {{\n    type filter hook {name} priority 0\n{rules}  }}\n")
        };
        format!(
            "table inet faults {{\n{}{}}}\n",
            chain("input", &self.input),
            chain("output", &self.output)
        )
    }
}
