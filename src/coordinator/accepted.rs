//! Accepted connections: their number is limited, each must send its first bytes within a deadline,
//! and bytes of strangers (connections without an authorised call yet) are read in turns.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::io::Errno;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep};
use tokio_stream::Stream;
use tonic::transport::server::{Connected, TcpIncoming};

use super::limits::{ACCEPT_PAUSE, HANDSHAKE, STRANGERS_FREE_BYTES};
use super::strangers::{Hosts, Standing};

/// Bytes of the HTTP/2 preface with the header of its first frame (RFC 9113, 3.4).
const PREFACE_BYTES: usize = 33;
/// Bytes of a stranger that are read at a time, before other connections get their turn: handling
/// more bytes of small frames would take about a millisecond.
const TURN_BYTES: usize = 1024;

/// A connection that counts towards the limit.
pub(super) struct Accepted {
    stream: TcpStream,
    /// The deadline for its first bytes; `None` once they are read, since from then on keepalive
    /// detects a dead peer.
    silence: Option<Pin<Box<Sleep>>>,
    read: usize,
    standing: Standing,
    /// How many bytes are read before the next turn, and a timer for that turn.
    allowed: usize,
    turn: Option<Pin<Box<Sleep>>>,
    /// The last poll read bytes: the next one yields to other tasks first.
    ran: bool,
    _place: OwnedSemaphorePermit,
}

/// Accepts connections, of which `most` may be open at a time; further ones are closed at once, and
/// a rank tries again.
pub(super) struct Door {
    incoming: TcpIncoming,
    places: Arc<Semaphore>,
    hosts: Arc<Hosts>,
    /// Connections that wait for their turn.
    waiting: JoinSet<Option<Accepted>>,
    /// A pause after an error.
    pause: Option<Pin<Box<Sleep>>>,
}

impl Door {
    pub(super) fn new(incoming: TcpIncoming, most: usize) -> Door {
        let places = Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
        Door { incoming, places, hosts: Arc::default(), waiting: JoinSet::new(), pause: None }
    }

    /// Counts a connection towards the limit and says how long it waits for its turn; `None` if it
    /// is refused.
    fn take_in(&self, stream: TcpStream) -> Option<(Accepted, Duration)> {
        let place = self.places.clone().try_acquire_owned().ok()?;
        let (standing, wait) = self.hosts.arrive(stream.peer_addr().ok()?.ip(), Instant::now())?;
        let silence = Some(Box::pin(sleep(HANDSHAKE)));
        let (allowed, turn, ran) = (STRANGERS_FREE_BYTES, None, false);
        let accepted =
            Accepted { stream, silence, read: 0, standing, allowed, turn, ran, _place: place };
        Some((accepted, wait))
    }
}

/// True for an error of the whole process (no file descriptors, no memory), after which the next
/// call would fail too; other errors concern one connection.
fn is_want(error: &io::Error) -> bool {
    let wants = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    wants.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

impl Stream for Door {
    type Item = io::Result<Accepted>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            while let Poll::Ready(Some(turn)) = self.waiting.poll_join_next(context) {
                if let Ok(Some(accepted)) = turn {
                    return Poll::Ready(Some(Ok(accepted)));
                }
            }
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            let stream = match ready!(Pin::new(&mut self.incoming).poll_next(context)) {
                Some(Ok(stream)) => stream,
                Some(Err(error)) if !is_want(&error) => return Poll::Ready(Some(Err(error))),
                Some(Err(error)) => {
                    tracing::warn!(
                        "no connection can be accepted for {} s: {error}; where files run out, \
                         raise the limit (ulimit -n)",
                        ACCEPT_PAUSE.as_secs()
                    );
                    self.pause = Some(Box::pin(sleep(ACCEPT_PAUSE)));
                    continue;
                }
                None => return Poll::Ready(None),
            };
            match self.take_in(stream) {
                Some((accepted, wait)) if wait.is_zero() => return Poll::Ready(Some(Ok(accepted))),
                Some((accepted, wait)) => {
                    self.waiting.spawn(async move {
                        sleep(wait).await;
                        accepted.is_open().await.then_some(accepted)
                    });
                }
                None => {}
            }
        }
    }
}

impl Accepted {
    /// False once the peer has closed the connection.
    async fn is_open(&self) -> bool {
        let peeked = std::future::poll_fn(|context| {
            let mut byte = [0; 1];
            Poll::Ready(self.stream.poll_peek(context, &mut ReadBuf::new(&mut byte)))
        });
        !matches!(peeked.await, Poll::Ready(Ok(0) | Err(_)))
    }

    /// Reads from a stranger: the bytes of a first call at once, further ones in turns.
    fn poll_stranger(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if std::mem::take(&mut self.ran) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.allowed == 0 && self.turn.is_none() {
            let Some(wait) = self.standing.turn(TURN_BYTES) else {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            };
            self.turn = Some(Box::pin(sleep(wait)));
        }
        if let Some(turn) = &mut self.turn {
            if turn.as_mut().poll(context).is_pending() && !self.standing.poll_known(context) {
                return Poll::Pending;
            }
            (self.turn, self.allowed) = (None, TURN_BYTES);
        }
        let mut bytes = [0; TURN_BYTES];
        let most = TURN_BYTES.min(self.allowed).min(buffer.remaining());
        let mut part = ReadBuf::new(&mut bytes[..most]);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut part))?;
        (self.allowed, self.ran) = (self.allowed - part.filled().len(), true);
        buffer.put_slice(part.filled());
        Poll::Ready(Ok(()))
    }
}

impl Connected for Accepted {
    type ConnectInfo = Standing;

    fn connect_info(&self) -> Standing {
        self.standing.clone()
    }
}

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = match self.standing.is_known() {
            true => Pin::new(&mut self.stream).poll_read(context, buffer),
            false => self.poll_stranger(context, buffer),
        };
        self.read = self.read.saturating_add(buffer.filled().len() - before);
        if self.read >= PREFACE_BYTES {
            self.silence = None;
        }
        match (&polled, &mut self.silence) {
            (Poll::Pending, Some(silence)) => match silence.as_mut().poll(context) {
                Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
                Poll::Pending => Poll::Pending,
            },
            _ => polled,
        }
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }
}
