//! A server on this machine that speaks the part of the Hugging Face hub's interface that downloads
//! need.
//!
//! As on the hub, files in LFS are redirected to another server. [`HubFaults`] are the failures
//! that a test can ask for.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use serde_json::{Value, json};
use sha1::{Digest, Sha1};
use sha2::Sha256;

/// A file of a model on a [`HubServer`].
#[derive(Debug, Clone)]
pub struct HubFile {
    /// The path in the repository.
    pub path: String,
    /// The contents.
    pub contents: Vec<u8>,
    /// True for a file in LFS.
    pub is_lfs: bool,
}

impl HubFile {
    /// Creates a file that is in Git itself.
    pub fn small(path: &str, contents: impl Into<Vec<u8>>) -> Self {
        Self {
            path: path.into(),
            contents: contents.into(),
            is_lfs: false,
        }
    }

    /// Creates a file that is in LFS.
    pub fn large(path: &str, contents: impl Into<Vec<u8>>) -> Self {
        Self {
            is_lfs: true,
            ..Self::small(path, contents)
        }
    }

    /// Reads the files of a folder. Weights are in LFS.
    pub fn of_folder(dir: &Path) -> Vec<Self> {
        let entries = dir.read_dir().unwrap().map(|entry| entry.unwrap().path());
        let file = |path: std::path::PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap();
            Self {
                is_lfs: name.ends_with(".safetensors"),
                ..Self::small(name, std::fs::read(&path).unwrap())
            }
        };
        entries.map(file).collect()
    }

    /// Returns the SHA-256 of the contents.
    pub fn sha256(&self) -> String {
        hex(&Sha256::digest(&self.contents))
    }

    /// Returns the Git object ID of the contents.
    pub fn object_id(&self) -> String {
        let header = format!("blob {}\0", self.contents.len());
        let hash = Sha1::new_with_prefix(header).chain_update(&self.contents);
        hex(&hash.finalize())
    }

    /// Returns the checksum in the hub's list, which names the contents in the cache: the SHA-256
    /// for a file in LFS, otherwise the Git object ID.
    pub fn checksum(&self) -> String {
        if self.is_lfs {
            self.sha256()
        } else {
            self.object_id()
        }
    }

    /// Returns the file's entry in the hub's list.
    fn entry(&self) -> Value {
        let size = self.contents.len();
        // The object ID of a file in LFS is that of its pointer; nothing may depend on it.
        let object_id = if self.is_lfs {
            "0".repeat(40)
        } else {
            self.object_id()
        };
        let mut entry = json!({"rfilename": self.path, "size": size, "blobId": object_id});
        if self.is_lfs {
            entry["lfs"] = json!({"sha256": self.sha256(), "size": size, "pointerSize": 130});
        }
        entry
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The failures of a [`HubServer`]. The default has none.
#[derive(Debug, Clone, Default)]
pub struct HubFaults {
    /// Closes the connection at this offset of a file in LFS that is longer, in so many answers.
    pub breaks: Option<(usize, usize)>,
    /// Sends this file with another last byte.
    pub wrong: Option<&'static str>,
    /// Sends whole files where a range is requested.
    pub no_ranges: bool,
    /// Answers requests for the list of files with this status, and this text as code and message.
    pub api: Option<(u16, &'static str)>,
    /// Answers requests for files with this status, and this text as code and message.
    pub files: Option<(u16, &'static str)>,
}

/// A request to a [`HubServer`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubRequest {
    /// The method and the path.
    pub line: String,
    /// The header `Range`.
    pub range: Option<String>,
    /// The header `Authorization`.
    pub authorization: Option<String>,
    /// True for a request to the server of files in LFS.
    pub is_storage: bool,
}

/// A server that has one model.
#[derive(Debug)]
pub struct HubServer {
    endpoint: String,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    name: String,
    /// The address of the hub, and that of the files in LFS.
    addresses: [String; 2],
    /// The files of each commit.
    commits: BTreeMap<String, Vec<HubFile>>,
    /// The commits of branches.
    branches: BTreeMap<String, String>,
    requests: Mutex<Vec<HubRequest>>,
    faults: Mutex<HubFaults>,
}

impl HubServer {
    /// Starts a server with a model, `owner/name`, and the files of its branches. It runs until the
    /// end of the process.
    pub fn start(name: &str, branches: &[(&str, Vec<HubFile>)]) -> Self {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let port = |server: usize| listeners[server].local_addr().unwrap().port();
        // Another host, to which no token may be sent.
        let addresses = [
            format!("http://127.0.0.1:{}", port(0)),
            format!("http://localhost:{}", port(1)),
        ];
        let commit = |branch: &str| hex(&Sha1::digest(branch));
        let state = Arc::new(State {
            name: name.into(),
            commits: branches
                .iter()
                .map(|(branch, files)| (commit(branch), files.clone()))
                .collect(),
            branches: branches
                .iter()
                .map(|(branch, _)| ((*branch).into(), commit(branch)))
                .collect(),
            requests: Mutex::default(),
            faults: Mutex::default(),
            addresses,
        });
        for (listener, is_storage) in listeners.into_iter().zip([false, true]) {
            let state = state.clone();
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let state = state.clone();
                    // A client may close the connection at any time.
                    thread::spawn(move || {
                        stream.is_ok_and(|stream| state.serve(stream, is_storage).is_ok())
                    });
                }
            });
        }
        Self {
            endpoint: state.addresses[0].clone(),
            state,
        }
    }

    /// Returns the address of the hub.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Returns the commit of a branch.
    pub fn commit(&self, branch: &str) -> &str {
        &self.state.branches[branch]
    }

    /// Sets the failures from now on.
    pub fn fail(&self, faults: HubFaults) {
        *lock(&self.state.faults) = faults;
    }

    /// Returns the requests since the last call.
    pub fn requests(&self) -> Vec<HubRequest> {
        std::mem::take(&mut lock(&self.state.requests))
    }

    /// Returns the requests for the contents of files since the last call, without those that are
    /// redirected.
    pub fn downloads(&self) -> Vec<HubRequest> {
        let is_lfs = |request: &HubRequest| {
            let files = self.state.commits.values().flatten();
            files
                .filter(|file| file.is_lfs)
                .any(|file| request.line.ends_with(&*file.path))
        };
        let mut requests = self.requests();
        requests.retain(|request| {
            !request.line.contains("/api/") && (request.is_storage || !is_lfs(request))
        });
        requests
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An answer: status, headers, and a body of which a part may be missing.
struct Answer {
    status: u16,
    headers: String,
    body: Vec<u8>,
    /// The number of bytes of the body that are sent.
    sent: usize,
}

impl Answer {
    fn new(status: u16, headers: String, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        Self {
            status,
            headers,
            sent: body.len(),
            body,
        }
    }
}

impl State {
    fn serve(&self, mut stream: TcpStream, is_storage: bool) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let line = lines.next().transpose()?.unwrap_or_default();
        let line = line.trim_end_matches(" HTTP/1.1").to_owned();
        let mut headers = BTreeMap::new();
        for line in lines {
            match line?.split_once(": ") {
                Some((name, value)) => headers.insert(name.to_lowercase(), value.to_owned()),
                None => break,
            };
        }
        let request = HubRequest {
            range: headers.remove("range"),
            authorization: headers.remove("authorization"),
            line,
            is_storage,
        };
        lock(&self.requests).push(request.clone());
        let path = request.line.trim_start_matches("GET ");
        let answer = if is_storage {
            self.stored(path, &request)
        } else {
            self.answer(path, &request)
        };
        let head = format!(
            "HTTP/1.1 {} Status\r\nConnection: close\r\nContent-Length: {}\r\n{}\r\n",
            answer.status,
            answer.body.len(),
            answer.headers
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(&answer.body[..answer.sent])?;
        stream.flush()
    }

    fn answer(&self, path: &str, request: &HubRequest) -> Answer {
        let faults = lock(&self.faults).clone();
        let failed = |(status, code): (u16, &str)| {
            let headers = format!("X-Error-Code: {code}\r\nX-Error-Message: {code}\r\n");
            Answer::new(status, headers, "{}")
        };
        let path = path.trim_start_matches('/');
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let parts = match path.strip_prefix("api/models/") {
            Some(rest) => rest
                .strip_prefix(&*self.name)
                .map(|rest| (rest, faults.api)),
            None => path
                .strip_prefix(&*self.name)
                .map(|rest| (rest, faults.files)),
        };
        let Some((rest, fault)) = parts else {
            return failed((404, "RepoNotFound"));
        };
        if let Some(fault) = fault {
            return failed(fault);
        }
        let parts: Vec<&str> = rest.trim_start_matches('/').split('/').collect();
        let files = |revision: &str| {
            let revision = revision.replace("%2F", "/").replace("%20%23", " #");
            let commit = self.branches.get(&revision).unwrap_or(&revision);
            self.commits.get_key_value(commit)
        };
        match *parts {
            ["revision", revision] if query == "blobs=true" => match files(revision) {
                Some((commit, files)) => {
                    let mut entries: Vec<Value> = files.iter().map(HubFile::entry).collect();
                    entries.push(HubFile::large("original/consolidated.pth", "other").entry());
                    let info = json!({"id": self.name, "sha": commit, "siblings": entries});
                    Answer::new(200, String::new(), info.to_string())
                }
                None => failed((404, "RevisionNotFound")),
            },
            ["resolve", revision, ref path @ ..] => {
                let path = path.join("/");
                let found = files(revision).and_then(|(commit, files)| {
                    Some((commit, files.iter().find(|file| file.path == path)?))
                });
                match found {
                    Some((commit, file)) => self.file(commit, file, request, &faults),
                    None => failed((404, "EntryNotFound")),
                }
            }
            _ => failed((404, "Unknown")),
        }
    }

    fn file(
        &self,
        commit: &str,
        file: &HubFile,
        request: &HubRequest,
        faults: &HubFaults,
    ) -> Answer {
        let headers = format!("X-Repo-Commit: {commit}\r\n");
        if file.is_lfs {
            let (sha256, size, storage) = (file.sha256(), file.contents.len(), &self.addresses[1]);
            let headers = format!(
                "{headers}X-Linked-Etag: \"{sha256}\"\r\nX-Linked-Size: {size}\r\nLocation: {storage}/{sha256}/{}\r\n",
                file.path
            );
            return Answer::new(302, headers, "");
        }
        let headers = format!("{headers}ETag: \"{}\"\r\n", file.object_id());
        contents(file, headers, request, faults)
    }

    /// Answers with a file in LFS.
    fn stored(&self, path: &str, request: &HubRequest) -> Answer {
        let mut files = self.commits.values().flatten().filter(|file| file.is_lfs);
        let stored = |file: &&HubFile| path == format!("/{}/{}", file.sha256(), file.path);
        let Some(file) = files.find(stored) else {
            return Answer::new(404, String::new(), "");
        };
        let mut faults = lock(&self.faults);
        let mut answer = contents(file, String::new(), request, &faults);
        if let Some((at, times @ 1..)) = faults.breaks
            && file.contents.len() > at
        {
            let start = file.contents.len() - answer.body.len();
            answer.sent = at.saturating_sub(start).min(answer.sent);
            faults.breaks = Some((at, times - 1));
        }
        answer
    }
}

/// Answers with the contents of a file, or the requested range of them.
fn contents(file: &HubFile, headers: String, request: &HubRequest, faults: &HubFaults) -> Answer {
    let mut body = file.contents.clone();
    if faults.wrong == Some(&*file.path)
        && let Some(last) = body.last_mut()
    {
        *last ^= 1;
    }
    match request.range.as_deref().and_then(first_byte) {
        Some(start) if !faults.no_ranges => {
            let rest = body.get(start..).unwrap_or_default();
            Answer::new(206, headers, rest)
        }
        _ => Answer::new(200, headers, body),
    }
}

/// Parses `bytes=first-`.
fn first_byte(header: &str) -> Option<usize> {
    let first = header.strip_prefix("bytes=")?.strip_suffix('-')?;
    first.parse().ok()
}
