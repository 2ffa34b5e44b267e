//! Connections as they are accepted: a bounded number, and each says something soon.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};

use super::limits::HANDSHAKE;

/// Bytes with which HTTP/2 begins, its first frame included (RFC 9113, 3.4).
const PREFACE_BYTES: usize = 33;

/// A connection that has one of the places.
pub(super) struct Accepted {
    stream: TcpStream,
    /// Until its first bytes are there: afterwards keepalive finds who is gone.
    silence: Option<Pin<Box<Sleep>>>,
    read: usize,
    _place: OwnedSemaphorePermit,
}

/// Connections, of which `most` are open at a time; further ones are closed at once, and an
/// honest caller tries again.
pub(super) fn accepted(
    incoming: TcpIncoming,
    most: usize,
) -> impl Stream<Item = io::Result<Accepted>> {
    let places = Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
    incoming.filter_map(move |stream| match stream {
        Err(error) => Some(Err(error)),
        Ok(stream) => {
            let place = places.clone().try_acquire_owned().ok()?;
            let silence = Some(Box::pin(tokio::time::sleep(HANDSHAKE)));
            Some(Ok(Accepted { stream, silence, read: 0, _place: place }))
        }
    })
}

impl Connected for Accepted {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
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
