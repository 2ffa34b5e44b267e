//! Connections to the metrics server: their number and their duration are limited. The server
//! accepts plain HTTP from everybody, and idle connections must not take the file descriptors that
//! ranks need.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};

use super::limits::{SCRAPE, SCRAPES};

/// A listener that limits the number of open connections.
pub(super) struct Scrapes {
    listener: TcpListener,
    places: Arc<Semaphore>,
    /// Longest duration of a connection.
    lasts: Duration,
}

/// A connection, until its time is over.
pub(super) struct Scrape {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Scrapes {
    pub(super) fn new(listener: TcpListener) -> Scrapes {
        Scrapes { listener, places: Arc::new(Semaphore::new(SCRAPES)), lasts: SCRAPE }
    }
}

impl Listener for Scrapes {
    type Io = Scrape;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Scrape, SocketAddr) {
        let Ok(place) = self.places.clone().acquire_owned().await else {
            // The semaphore is never closed, so that this is not reached.
            return std::future::pending().await;
        };
        let (stream, from) = Listener::accept(&mut self.listener).await;
        (Scrape { stream, end: Box::pin(sleep(self.lasts)), _place: place }, from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl Scrape {
    /// The result of a poll, or an error if the connection's time is over.
    fn in_time<T>(
        &mut self,
        polled: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if polled.is_pending() && self.end.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        polled
    }
}

impl AsyncRead for Scrape {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.in_time(polled, context)
    }
}

impl AsyncWrite for Scrape {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.in_time(polled, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    /// Goal: idle connections are limited in number and in time. Method: as many idle connections
    /// as are accepted.
    #[tokio::test]
    async fn whoever_only_holds_connections_takes_few_and_not_for_long() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let lasts = Duration::from_millis(20);
        let mut scrapes = Scrapes { lasts, ..Scrapes::new(listener) };
        let mut idle_connections = Vec::new();
        for _ in 0..SCRAPES {
            let idle = TcpStream::connect(address).await.unwrap();
            idle_connections.push((idle, scrapes.accept().await.0));
        }
        assert_eq!(scrapes.places.available_permits(), 0, "no further one is accepted");
        let (_idle, mut first) = idle_connections.swap_remove(0);
        let ended = first.read_u8().await.unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::TimedOut);
        drop(first);
        let late = TcpStream::connect(address).await.unwrap();
        assert_eq!(scrapes.accept().await.1, late.local_addr().unwrap());
    }
}
