//! An S3 server over a directory, on loopback: s3s-fs, which checks signatures, ranges and
//! conditions as S3 does. It looks whether an object is there and then writes it, which S3 does
//! at once, so puts with a condition are taken one at a time.

use std::net::SocketAddr;
use std::sync::Arc;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::TcpListener;
use tokio::sync::Mutex;

/// Name and secret of the one user.
pub(crate) const USER: &str = "backtape-test";

/// What the name of an object holds that may not be put now.
type Forbidden = Arc<std::sync::Mutex<Option<&'static str>>>;

/// A server with the bucket `dumps`, until its test's process ends.
pub(crate) struct S3 {
    address: SocketAddr,
    forbids: Forbidden,
    _root: tempfile::TempDir,
}

impl S3 {
    pub(crate) fn start() -> S3 {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("dumps")).unwrap();
        let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root.path()).unwrap());
        service.set_auth(SimpleAuth::from_single(USER, USER));
        let service = service.build();
        let (sender, started) = std::sync::mpsc::channel();
        let forbids = Forbidden::default();
        let switch = forbids.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
                sender.send(listener.local_addr().unwrap()).unwrap();
                serve(listener, service, switch).await;
            });
        });
        S3 { address: started.recv().unwrap(), forbids, _root: root }
    }

    /// From now on no object whose name holds this may be put, as when credentials ran out.
    #[allow(dead_code)]
    pub(crate) fn forbid(&self, puts: Option<&'static str>) {
        *self.forbids.lock().unwrap() = puts;
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What a process must have in its environment to reach the bucket.
    #[allow(dead_code)]
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ENDPOINT", self.endpoint()),
            ("AWS_ALLOW_HTTP", "true".into()),
            ("AWS_REGION", "us-east-1".into()),
            ("AWS_ACCESS_KEY_ID", USER.into()),
            ("AWS_SECRET_ACCESS_KEY", USER.into()),
        ]
    }
}

async fn serve(listener: TcpListener, service: S3Service, forbids: Forbidden) {
    let creating = Arc::new(Mutex::new(()));
    loop {
        let (socket, _) = listener.accept().await.unwrap();
        let (service, creating, forbids) = (service.clone(), creating.clone(), forbids.clone());
        let answer = tower::service_fn(move |request: http::Request<hyper::body::Incoming>| {
            let (service, creating) = (service.clone(), creating.clone());
            let forbids = *forbids.lock().unwrap();
            let forbidden = request.method() == http::Method::PUT
                && forbids.is_some_and(|name| request.uri().path().contains(name));
            async move {
                if forbidden {
                    let refused = http::Response::builder().status(http::StatusCode::FORBIDDEN);
                    return Ok(refused.body(s3s::Body::empty()).unwrap());
                }
                let alone = match request.headers().contains_key("if-none-match") {
                    true => Some(creating.lock().await),
                    false => None,
                };
                let answer = service.call(request.map(s3s::Body::from)).await;
                drop(alone);
                answer
            }
        });
        tokio::spawn(async move {
            let builder = auto::Builder::new(TokioExecutor::new());
            let connection = TowerToHyperService::new(answer);
            // A client that goes away is no fault of the server.
            let _ = builder.serve_connection(TokioIo::new(socket), connection).await;
        });
    }
}
