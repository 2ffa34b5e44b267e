//! Rate limits for strangers: connections on which no call was authorised yet.
//!
//! A stranger can open connections and send frames very fast, and each costs the coordinator more
//! work than the stranger. So the strangers of one host share two budgets: of new connections, and
//! of bytes beyond those of a first call. Once a call on a connection is authorised, the connection
//! is no longer limited and its turn is given back, so that a host with many ranks does not exhaust
//! its budget.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::time::Instant;

use super::limits::{MAX_HOSTS, STRANGERS, STRANGERS_BYTES, Turns};

/// A budget of turns that refills with time. Below zero it owes turns to connections that were told
/// to wait.
#[derive(Clone, Copy, Debug)]
struct Budget {
    turns: Turns,
    left: f64,
    refilled: Instant,
}

impl Budget {
    fn full(turns: Turns, now: Instant) -> Budget {
        Budget { turns, left: turns.at_once, refilled: now }
    }

    fn fill(&mut self, now: Instant) {
        let grown =
            now.saturating_duration_since(self.refilled).as_secs_f64() * self.turns.per_second;
        (self.left, self.refilled) = ((self.left + grown).min(self.turns.at_once), now);
    }

    /// Takes so many turns and returns how long to wait for them; `None`, and takes nothing, if
    /// that is too long.
    fn take(&mut self, count: f64, now: Instant) -> Option<Duration> {
        self.fill(now);
        let wait = Duration::from_secs_f64((count - self.left).max(0.0) / self.turns.per_second);
        (wait <= self.turns.most_wait).then(|| {
            self.left -= count;
            wait
        })
    }

    fn give_back(&mut self, count: f64) {
        self.left = (self.left + count).min(self.turns.at_once);
    }

    fn is_full(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.left >= self.turns.at_once
    }
}

/// The budgets of one host's strangers.
struct Host {
    connections: Budget,
    bytes: Budget,
}

/// The budgets of all hosts that connected recently.
#[derive(Default)]
pub(super) struct Hosts(Mutex<HashMap<IpAddr, Host>>);

impl Hosts {
    /// Admits a new connection and returns how long it waits for its turn; `None` if too many wait
    /// already.
    pub(super) fn arrive(
        self: &Arc<Hosts>,
        from: IpAddr,
        now: Instant,
    ) -> Option<(Standing, Duration)> {
        let host = host(from);
        let wait = self.of(host, now, |host| host.connections.take(1.0, now))?;
        let standing = Inner {
            hosts: self.clone(),
            host,
            known: AtomicBool::new(false),
            reader: Mutex::default(),
        };
        Some((Standing(Arc::new(standing)), wait))
    }

    fn of<T>(&self, host: IpAddr, now: Instant, act: impl FnOnce(&mut Host) -> T) -> T {
        let mut hosts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if hosts.len() >= MAX_HOSTS && !hosts.contains_key(&host) {
            // Dropping a host with full budgets changes nothing: it would get full ones again.
            hosts.retain(|_, host| !(host.connections.is_full(now) && host.bytes.is_full(now)));
        }
        let fresh = || Host {
            connections: Budget::full(STRANGERS, now),
            bytes: Budget::full(STRANGERS_BYTES, now),
        };
        act(hosts.entry(host).or_insert_with(fresh))
    }
}

/// The address that identifies a host: for IPv6 the /64 network, since one host has 2^64 addresses.
fn host(from: IpAddr) -> IpAddr {
    match from.to_canonical() {
        IpAddr::V6(six) => IpAddr::V6(Ipv6Addr::from_bits(six.to_bits() & (!0 << 64))),
        four => four,
    }
}

/// Whether a call on a connection was authorised; clones share it.
#[derive(Clone)]
pub(super) struct Standing(Arc<Inner>);

struct Inner {
    hosts: Arc<Hosts>,
    host: IpAddr,
    known: AtomicBool,
    /// The task that waits for the next turn.
    reader: Mutex<Option<Waker>>,
}

impl Standing {
    pub(super) fn is_known(&self) -> bool {
        self.0.known.load(Ordering::Acquire)
    }

    /// Marks the connection: a call was authorised.
    pub(super) fn set_known(&self) {
        if !self.0.known.swap(true, Ordering::AcqRel) {
            let give_back = |host: &mut Host| host.connections.give_back(1.0);
            self.0.hosts.of(self.0.host, Instant::now(), give_back);
            // The reader need not wait for its turn any longer.
            self.reader().take().iter().for_each(Waker::wake_by_ref);
        }
    }

    fn reader(&self) -> MutexGuard<'_, Option<Waker>> {
        self.0.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if a call was authorised; otherwise wakes the reading task when one is.
    pub(super) fn poll_known(&self, context: &mut Context<'_>) -> bool {
        *self.reader() = Some(context.waker().clone());
        self.is_known()
    }

    /// How long to wait before more bytes of a stranger are read; `None` if that is too long.
    pub(super) fn turn(&self, bytes: usize) -> Option<Duration> {
        let now = Instant::now();
        self.0.hosts.of(self.0.host, now, |host| host.bytes.take(bytes as f64, now))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TURNS: Turns =
        Turns { at_once: 5.0, per_second: 10.0, most_wait: Duration::from_millis(1000) };

    proptest! {
        /// Method: for random arrivals, the turns in any interval of time, from its first to its
        /// last turn, are at most those allowed at once plus those refilled in the interval.
        #[test]
        fn no_stretch_of_time_has_more_turns_than_it_brings(
            gaps in proptest::collection::vec(0u64..200, 1..80)
        ) {
            let began = Instant::now();
            let (mut budget, mut now) = (Budget::full(TURNS, began), began);
            let mut turns: Vec<f64> = Vec::new();
            for gap in gaps {
                now += Duration::from_millis(gap);
                if let Some(wait) = budget.take(1.0, now) {
                    prop_assert!(wait <= TURNS.most_wait);
                    turns.push((now + wait - began).as_secs_f64());
                }
            }
            for (i, from) in turns.iter().enumerate() {
                prop_assert!(i == 0 || *from >= turns[i - 1], "who came first waits longest");
                for (j, to) in turns.iter().enumerate().skip(i) {
                    let most = TURNS.at_once + (to - from) * TURNS.per_second + 1e-6;
                    prop_assert!((j - i + 1) as f64 <= most + 1.0, "{} in {}", j - i + 1, to - from);
                }
            }
        }
    }

    #[test]
    fn who_would_wait_too_long_is_turned_away_and_takes_no_turn() {
        let now = Instant::now();
        let mut budget = Budget::full(TURNS, now);
        let waits: Vec<_> = (0..20).map(|_| budget.take(1.0, now)).collect();
        assert!(waits[..5].iter().all(|wait| *wait == Some(Duration::ZERO)), "{waits:?}");
        assert_eq!(waits[14], Some(TURNS.most_wait));
        assert!(waits[15..].iter().all(Option::is_none), "{waits:?}");
        assert!(budget.take(1.0, now + Duration::from_millis(100)).is_some());
    }

    #[test]
    fn a_host_whose_connections_become_known_never_runs_out() {
        let (hosts, now) = (Arc::new(Hosts::default()), Instant::now());
        let from = IpAddr::from([127, 0, 0, 1]);
        for _ in 0..10 * STRANGERS.at_once as usize {
            let (standing, wait) = hosts.arrive(from, now).unwrap();
            assert!(wait.is_zero() && !standing.is_known());
            standing.set_known();
            standing.clone().set_known(); // gives nothing back twice
            assert!(standing.is_known());
        }
        let unknown = (0..).map_while(|_| hosts.arrive(from, now)).count() as f64;
        assert_eq!(
            unknown,
            STRANGERS.at_once + STRANGERS.per_second * STRANGERS.most_wait.as_secs_f64()
        );
        assert!(
            hosts.arrive(IpAddr::from([127, 0, 0, 2]), now).unwrap().1.is_zero(),
            "another host"
        );
    }

    #[test]
    fn a_host_has_one_budget_for_its_addresses() {
        let host_of = |text: &str| host(text.parse().unwrap());
        assert_eq!(host_of("2001:db8::1"), host_of("2001:db8::ffff:2"));
        assert_ne!(host_of("2001:db8::1"), host_of("2001:db8:0:1::1"));
        assert_eq!(host_of("::ffff:10.0.0.1"), host_of("10.0.0.1"));
        assert_ne!(host_of("10.0.0.1"), host_of("10.0.0.2"));
    }

    #[test]
    fn hosts_that_left_are_forgotten() {
        let (hosts, mut now) = (Arc::new(Hosts::default()), Instant::now());
        for host in 0..3 * MAX_HOSTS as u32 {
            hosts.arrive(IpAddr::from(host.to_be_bytes()), now).unwrap();
            now += Duration::from_millis(1);
        }
        assert!(hosts.0.lock().unwrap().len() <= MAX_HOSTS + 1);
    }
}
