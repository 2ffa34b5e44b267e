//! A file as the messages of an upload: its claim, then its bytes in chunks.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use backtape_proto as proto;
use bytes::Bytes;
use proto::upload_file_request::Part;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::coordinator::limits::CHUNK_BYTES;
use crate::faults;
use crate::store::Moved;

/// Chunks that are read before the network takes them.
const CHUNKS_AHEAD: usize = 2;

/// The stream of messages that the call takes.
pub type Parts = ReceiverStream<proto::UploadFileRequest>;

/// The messages of an upload, and the task that reads the file, which ends when all are sent or the
/// call has ended. It reads on a separate thread, because the calling one encrypts and sends. Adds
/// the bytes that the call has taken to the counter.
pub fn parts(
    claim: proto::ReportFileRequest,
    path: &Path,
    moved: &Moved,
) -> (Parts, impl Future<Output = io::Result<()>> + use<>) {
    let (sender, receiver) = mpsc::channel(CHUNKS_AHEAD);
    let (path, moved) = (path.to_path_buf(), moved.clone());
    let reading = async move {
        let reading = tokio::task::spawn_blocking(move || read(claim, path, &sender, &moved));
        reading.await.map_err(io::Error::other)?
    };
    (ReceiverStream::new(receiver), reading)
}

fn read(
    claim: proto::ReportFileRequest,
    path: PathBuf,
    sender: &mpsc::Sender<proto::UploadFileRequest>,
    moved: &Moved,
) -> io::Result<()> {
    let send = |part| sender.blocking_send(proto::UploadFileRequest { part: Some(part) }).is_ok();
    faults::point("client.open-spooled")?;
    let mut file = File::open(path)?;
    // If the channel is closed the call has ended, and its answer says why.
    let mut open = send(Part::Header(claim));
    while open {
        faults::point("client.read-spooled")?;
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        file.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut chunk)?;
        let length = chunk.len() as u64;
        open = length > 0 && send(Part::Chunk(Bytes::from(chunk)));
        if open {
            moved.fetch_add(length, Ordering::Relaxed);
        }
    }
    Ok(())
}
