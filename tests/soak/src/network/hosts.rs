//! Hosts on one network, each a network namespace of its own, joined by a bridge in another.
//!
//! No namespace has a name: each lives as long as the descriptor that this process holds of it,
//! so that even `kill -9` of the campaign leaves nothing behind.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// Where the coordinator of every network is; its ranks follow it.
pub(crate) const COORDINATOR: &str = "10.77.0.1";

/// A host: a network of its own with one link, or the bridge that joins the links.
pub(crate) struct Host {
    namespace: File,
}

impl Host {
    fn new() -> Result<Host> {
        let made = || {
            // SAFETY: only the network is unshared; no file descriptor is, so none can be closed
            // under a safe owner. The thread that leaves its network ends here.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
                .context("namespaces need root (CAP_SYS_ADMIN)")?;
            Ok(Host { namespace: File::open("/proc/thread-self/ns/net")? })
        };
        std::thread::scope(|scope| scope.spawn(made).join())
            .unwrap_or_else(|_| anyhow::bail!("a thread panicked"))
    }

    /// Runs `work` on a thread that is on this host, as are the processes and threads that it
    /// starts and the sockets that it opens.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let entered = || {
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(self.namespace.as_fd(), network)?;
            work()
        };
        std::thread::scope(|scope| scope.spawn(entered).join())
            .unwrap_or_else(|_| anyhow::bail!("a thread panicked"))
    }

    /// As a path that other processes can open.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_raw_fd())
    }

    /// Runs a program of this machine on this host, with lines to read.
    pub(crate) fn tool(&self, program: &str, arguments: &[&str], lines: &str) -> Result<()> {
        self.inside(|| {
            let mut command = Command::new(program);
            command.args(arguments).stdin(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.stdout(Stdio::null()).spawn().context(program.to_string())?;
            let mut stdin = child.stdin.take().context("no input")?;
            stdin.write_all(lines.as_bytes())?;
            drop(stdin);
            let output = child.wait_with_output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{program} {arguments:?} of {lines:?}: {said}");
            Ok(())
        })
    }

    /// Replaces what the packet filter of this host drops.
    pub(crate) fn filter(&self, rules: &str) -> Result<()> {
        self.tool("nft", &["-f", "-"], &format!("flush ruleset\n{rules}"))
    }

    /// Bounds how fast this host sends; `None`: as fast as it can.
    pub(crate) fn rate(&self, kbit: Option<u32>) -> Result<()> {
        let _ = self.tool("tc", &["qdisc", "del", "dev", "eth0", "root"], "");
        let Some(kbit) = kbit else { return Ok(()) };
        let rate = format!("{kbit}kbit");
        let limits = ["rate", &rate, "burst", "32k", "latency", "200ms"];
        self.tool(
            "tc",
            &[&["qdisc", "add", "dev", "eth0", "root", "tbf"], &limits[..]].concat(),
            "",
        )
    }
}

/// The hosts of a job: one for the coordinator, one for each rank.
pub(crate) struct Hosts {
    bridge: Host,
    pub(crate) coordinator: Host,
    pub(crate) ranks: Vec<Host>,
}

impl Hosts {
    /// Makes and joins them.
    pub(crate) fn new(ranks: u32) -> Result<Hosts> {
        let host = |_| Host::new();
        let hosts = Hosts {
            bridge: Host::new()?,
            coordinator: Host::new()?,
            ranks: (0..ranks).map(host).collect::<Result<_>>()?,
        };
        let mut lines = String::from("link add br0 type bridge\nlink set br0 up\n");
        for (index, host) in hosts.all().enumerate() {
            let path = host.path();
            lines += &format!("link add p{index} type veth peer name eth0 netns {path}\n");
            lines += &format!("link set p{index} master br0 up\n");
        }
        hosts.bridge.tool("ip", &["-batch", "-"], &lines)?;
        for (index, host) in hosts.all().enumerate() {
            let address = address(index);
            let lines =
                format!("addr add {address}/24 dev eth0\nlink set eth0 up\nlink set lo up\n");
            host.tool("ip", &["-batch", "-"], &lines)?;
        }
        Ok(hosts)
    }

    /// The coordinator's, then those of the ranks.
    fn all(&self) -> impl Iterator<Item = &Host> {
        std::iter::once(&self.coordinator).chain(&self.ranks)
    }

    /// Takes links of ranks down or up again, as if somebody had pulled the cable.
    pub(crate) fn links(&self, ranks: &[u32], state: &str) -> Result<()> {
        let line = |rank: &u32| format!("link set p{} {state}\n", rank + 1);
        self.bridge.tool("ip", &["-batch", "-"], &ranks.iter().map(line).collect::<String>())
    }

    /// The same for the coordinator's link.
    pub(crate) fn coordinator_link(&self, state: &str) -> Result<()> {
        self.bridge.tool("ip", &["link", "set", "p0", state], "")
    }
}

/// The address of the coordinator (0), and of each rank one further.
pub(crate) fn address(index: usize) -> String {
    format!("10.77.0.{}", index + 1)
}

/// Whether networks can be made and made to fail here, or why not.
pub(crate) fn available() -> Result<()> {
    let hosts = Hosts::new(1)?;
    hosts.coordinator.filter("").context("packets are dropped by nft (nftables)")?;
    hosts.ranks[0].rate(Some(1000)).context("links are slowed by tc (iproute2)")
}
