//! How much memory a process has held, as the kernel counted it.

use anyhow::Context;

/// The most memory that a process held at a time (VmHWM), in MiB.
pub(crate) fn peak_mib(pid: u32) -> anyhow::Result<f64> {
    Ok(status_kib(pid, "VmHWM:")? / 1024.0)
}

/// What memory a process holds now that is not a file's (RssAnon), in KiB.
pub(crate) fn anonymous_kib(pid: u32) -> anyhow::Result<f64> {
    status_kib(pid, "RssAnon:")
}

fn status_kib(pid: u32, field: &str) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
    kib.with_context(|| format!("{path} has no {field}"))
}
