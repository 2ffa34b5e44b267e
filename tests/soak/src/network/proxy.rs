//! A TCP proxy on the path between ranks and their coordinator, which does what networks and
//! their middle boxes do to connections: hold them up, reset them, forget them, cut them short.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Bytes that are passed on at a time.
const PIECE: usize = 64 << 10;

/// What it does to every connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Pass,
    /// Each piece arrives so many milliseconds later.
    Latency(u64),
    /// Connections are reset, those that are open and those that come.
    Reset,
    /// Nothing is passed on, and nothing is lost.
    Stall,
    /// Everything is taken and thrown away, for as long as the connection is open: it stays so
    /// when the network is whole again.
    HalfOpen,
    /// So many bytes more, then the end, in the middle of whatever it was.
    Truncate(u64),
}

/// Stops when it is dropped.
pub(crate) struct Proxy {
    mode: watch::Sender<Mode>,
}

impl Proxy {
    /// Listens on `address` of the host whose thread calls, and passes on to `to`.
    pub(crate) fn start(address: &str, to: &str) -> Result<Proxy> {
        let (mode, told) = watch::channel(Mode::Pass);
        let (address, to) = (address.to_string(), to.to_string());
        let (ready, started) = std::sync::mpsc::channel();
        // On the host of the caller: a thread is where its parent is.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let serve = async {
                let listener = TcpListener::bind(&address).await?;
                let _ = ready.send(Ok(()));
                serve(listener, to, told).await;
                anyhow::Ok(())
            };
            if let Err(error) = runtime.context("no runtime").and_then(|r| r.block_on(serve)) {
                let _ = ready.send(Err(error));
            }
        });
        started.recv().context("the proxy does not start")??;
        Ok(Proxy { mode })
    }

    pub(crate) fn set(&self, mode: Mode) {
        let _ = self.mode.send(mode);
    }
}

async fn serve(listener: TcpListener, to: String, mut mode: watch::Receiver<Mode>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                connections.spawn(connection(stream, to.clone(), mode.clone()));
            }
            Some(_) = connections.join_next() => {}
            changed = mode.changed() => if changed.is_err() { return },
        }
    }
}

/// How one direction of a connection ended.
enum End {
    Closed,
    Reset,
    /// It was closed after nothing of it was passed on any more.
    Forgotten,
}

async fn connection(mut near: TcpStream, to: String, mut mode: watch::Receiver<Mode>) {
    let _ = near.set_nodelay(true);
    let now = *mode.borrow_and_update();
    if now == Mode::Reset {
        let _ = near.set_zero_linger();
        return;
    }
    let Ok(mut far) = TcpStream::connect(to).await else { return };
    let _ = far.set_nodelay(true);
    // What is left to be passed on, of both directions together.
    let left = AtomicU64::new(u64::MAX);
    let end = {
        let (near_read, near_write) = near.split();
        let (far_read, far_write) = far.split();
        let there = pump(near_read, far_write, mode.clone(), now, &left);
        let back = async {
            match pump(far_read, near_write, mode.clone(), now, &left).await {
                // Whoever called does not hear of it: the box between has forgotten both.
                End::Forgotten => std::future::pending().await,
                end => end,
            }
        };
        tokio::pin!(there, back);
        tokio::select! { end = &mut there => end, end = &mut back => end }
    };
    if let End::Reset = end {
        let _ = (near.set_zero_linger(), far.set_zero_linger());
    }
}

/// Passes one direction on, as the mode has it.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut told: watch::Receiver<Mode>,
    mut mode: Mode,
    left: &AtomicU64,
) -> End {
    let mut forgotten = false;
    let mut piece = vec![0; PIECE];
    loop {
        match mode {
            Mode::Reset => return End::Reset,
            Mode::HalfOpen => forgotten = true,
            Mode::Truncate(bytes) => {
                left.fetch_min(bytes, Ordering::SeqCst);
            }
            _ => {}
        }
        tokio::select! {
            changed = told.changed() => match changed {
                Ok(()) => mode = *told.borrow_and_update(),
                Err(_) => return End::Closed,
            },
            read = from.read(&mut piece), if mode != Mode::Stall => {
                let read = match read {
                    Ok(1..) if forgotten => continue,
                    Ok(read @ 1..) => read,
                    _ if forgotten => return End::Forgotten,
                    _ => return End::Closed,
                };
                if let Mode::Latency(milliseconds) = mode {
                    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
                }
                let mut some = read as u64;
                if left.load(Ordering::SeqCst) != u64::MAX {
                    let before = left.load(Ordering::SeqCst);
                    some = some.min(before);
                    left.store(before - some, Ordering::SeqCst);
                }
                if to.write_all(&piece[..some as usize]).await.is_err() || some < read as u64 {
                    return End::Closed;
                }
            }
        }
    }
}
