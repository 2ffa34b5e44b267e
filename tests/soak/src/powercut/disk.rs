//! A disk whose power can be cut: a file system in an image behind a loop device.
//!
//! Two ways to cut, because they lose different things:
//! - `FS_IOC_SHUTDOWN` on the file system itself: what it had not yet sent to the disk is gone.
//! - The same on an ext4 *below* the image: besides that, what the disk had in its write cache
//!   and was not told to flush is gone too. It works under any file system.
//!
//! Mounts live in a mount namespace of this thread and loop devices are of the kind that go with
//! their last user, so that even `kill -9` of the campaign leaves nothing behind.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount,
};

/// `_IOR('X', 125, __u32)`, the same number on ext4, xfs and whoever else has it.
const FS_IOC_SHUTDOWN: u32 = 0x8004_587d;
/// Nothing is written on the way down, not even the file system's own journal.
const NO_LOG_FLUSH: u32 = 2;
const LOOP_SET_STATUS64: u32 = 0x4c04;
const LOOP_AUTOCLEAR: u32 = 4;
/// How long a file system may stay in use after its last user ended.
const UNMOUNT_PATIENCE: Duration = Duration::from_secs(20);

/// A file system that backtape's stores lie on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub(crate) enum FileSystem {
    Ext4,
    Xfs,
    Btrfs,
}

/// What loses its power.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Cut {
    /// The file system: what it had not sent to the disk is lost.
    Fs,
    /// The disk: what it was not told to flush is lost as well.
    Disk,
}

impl FileSystem {
    pub(crate) fn name(self) -> &'static str {
        match self {
            FileSystem::Ext4 => "ext4",
            FileSystem::Xfs => "xfs",
            FileSystem::Btrfs => "btrfs",
        }
    }

    /// The package that brings `mkfs` for it.
    pub(crate) fn package(self) -> &'static str {
        match self {
            FileSystem::Ext4 => "e2fsprogs",
            FileSystem::Xfs => "xfsprogs",
            FileSystem::Btrfs => "btrfs-progs",
        }
    }

    /// Large enough for a campaign's steps on one image; xfs makes none below 300 MiB.
    fn bytes(self) -> u64 {
        match self {
            FileSystem::Ext4 => 256 << 20,
            FileSystem::Xfs | FileSystem::Btrfs => 384 << 20,
        }
    }

    fn make(self, device: &Path) -> Result<()> {
        let mut command = Command::new(format!("mkfs.{}", self.name()));
        match self {
            FileSystem::Ext4 => command.args(["-q", "-F"]),
            FileSystem::Xfs | FileSystem::Btrfs => command.args(["-q", "-f"]),
        };
        let output = command.arg(device).output();
        let output = output.with_context(|| {
            format!("mkfs.{} is not there: install {}", self.name(), self.package())
        })?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "mkfs.{} failed: {said}", self.name());
        Ok(())
    }
}

/// Gives this thread, and every thread that it starts, mounts of its own.
pub(crate) fn enter_namespace() -> Result<()> {
    use rustix::thread::{UnshareFlags, unshare_unsafe};
    // SAFETY: only the mount table is unshared; no file descriptor is, so none can be closed
    // under a safe owner.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.context("mounts need root (CAP_SYS_ADMIN)")?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).context("mounts of this process cannot be kept private")
}

/// A loop device; it goes when this and the last mount of it are gone.
struct Loop {
    path: PathBuf,
    _held: File,
}

impl Loop {
    fn over(image: &Path) -> Result<Loop> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(image).output();
        let output = output.context("losetup is not there: install mount (util-linux)")?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "no loop device: {said}");
        let path = PathBuf::from(String::from_utf8(output.stdout)?.trim());
        let held = File::open(&path)?;
        // struct loop_info64: 52 bytes of numbers, lo_flags, then names that are not set.
        let mut info = [0u32; 58];
        info[13] = LOOP_AUTOCLEAR;
        type Info = [u32; 58];
        // SAFETY: the kernel reads the 232 bytes of a loop_info64 and keeps no pointer.
        unsafe {
            let setter = rustix::ioctl::Setter::<LOOP_SET_STATUS64, Info>::new(info);
            rustix::ioctl::ioctl(held.as_fd(), setter)?;
        }
        Ok(Loop { path, _held: held })
    }
}

/// A mounted file system.
struct Mounted {
    at: PathBuf,
}

impl Mounted {
    fn new(device: &Loop, at: &Path, system: FileSystem) -> Result<Mounted> {
        let name = system.name();
        mount(&device.path, at, name, MountFlags::empty(), None)
            .with_context(|| format!("{} cannot be mounted as {name}", device.path.display()))?;
        Ok(Mounted { at: at.into() })
    }

    fn cut(&self) -> Result<()> {
        let root = File::open(&self.at)?;
        // SAFETY: the kernel reads one u32 and keeps no pointer.
        let done = unsafe {
            let setter = rustix::ioctl::Setter::<FS_IOC_SHUTDOWN, u32>::new(NO_LOG_FLUSH);
            rustix::ioctl::ioctl(root.as_fd(), setter)
        };
        done.context("FS_IOC_SHUTDOWN is refused")
    }

    /// Waits for the last user: the coordinator's thread ends after its last handle.
    fn release(&self) -> Result<()> {
        let end = Instant::now() + UNMOUNT_PATIENCE;
        loop {
            match unmount(&self.at, UnmountFlags::empty()) {
                Ok(()) => return Ok(()),
                Err(Errno::BUSY) if Instant::now() < end => std::thread::yield_now(),
                Err(error) => bail!("{} cannot be unmounted: {error}", self.at.display()),
            }
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Already done by `release` when all went well; lazy when a failure leaves users.
        let _ = unmount(&self.at, UnmountFlags::DETACH);
    }
}

/// A file system that survives as much as it would on a machine that lost its power.
pub(crate) struct Disk {
    // In the order in which they are to be dropped.
    mounted: Option<Mounted>,
    device: Option<Loop>,
    below: Option<(Option<Mounted>, Loop)>,
    system: FileSystem,
    directory: PathBuf,
}

impl Disk {
    /// Makes a file system in an image below `directory`, which is memory where possible.
    pub(crate) fn make(directory: &Path, system: FileSystem, cut: Cut) -> Result<Disk> {
        for name in ["mount", "below"] {
            std::fs::create_dir_all(directory.join(name))?;
        }
        let mut disk =
            Disk { mounted: None, device: None, below: None, system, directory: directory.into() };
        let image = directory.join("image");
        let _ = std::fs::remove_file(&image);
        if cut == Cut::Fs {
            File::create_new(&image)?.set_len(system.bytes())?;
        } else {
            File::create_new(&image)?.set_len(system.bytes() + (64 << 20))?;
            let device = Loop::over(&image)?;
            FileSystem::Ext4.make(&device.path)?;
            disk.below = Some((None, device));
            disk.mount_below()?;
            File::create_new(disk.image())?.set_len(system.bytes())?;
        }
        let device = Loop::over(&disk.image())?;
        system.make(&device.path)?;
        disk.device = Some(device);
        Ok(disk)
    }

    fn image(&self) -> PathBuf {
        match self.below {
            Some(_) => self.directory.join("below/image"),
            None => self.directory.join("image"),
        }
    }

    fn mount_below(&mut self) -> Result<()> {
        if let Some((mounted, device)) = &mut self.below {
            *mounted = Some(Mounted::new(device, &self.directory.join("below"), FileSystem::Ext4)?);
        }
        Ok(())
    }

    /// Mounts it, which recovers it as after a reboot.
    pub(crate) fn mount(&mut self) -> Result<PathBuf> {
        if self.below.as_ref().is_some_and(|(mounted, _)| mounted.is_none()) {
            self.mount_below()?;
        }
        let image = self.image();
        let device = match self.device.take() {
            Some(device) => device,
            None => Loop::over(&image)?,
        };
        let at = self.directory.join("mount");
        let mounted = Mounted::new(&device, &at, self.system)?;
        (self.mounted, self.device) = (Some(mounted), Some(device));
        Ok(at)
    }

    /// Cuts the power. What is in flight fails.
    pub(crate) fn cut(&self) -> Result<()> {
        let below = self.below.as_ref().and_then(|(mounted, _)| mounted.as_ref());
        match below.or(self.mounted.as_ref()) {
            Some(mounted) => mounted.cut(),
            None => bail!("nothing is mounted"),
        }
    }

    /// Lets go of it, once nobody uses it any more.
    pub(crate) fn unmount(&mut self) -> Result<()> {
        if let Some(mounted) = self.mounted.take() {
            mounted.release()?;
        }
        if self.below.is_some() {
            // A device remembers failed writes of before the cut: the next boot has a new one.
            self.device = None;
        }
        if let Some((mounted, _)) = &mut self.below
            && let Some(mounted) = mounted.take()
        {
            mounted.release()?;
        }
        Ok(())
    }
}
