//! The program's handle of a worker process.

use std::io::{self, Read};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::child;
use super::protocol::{Head, Limits, read_reply, write_request};
use crate::Failure;
use crate::worker::request::Request;

/// The argument that starts the program as a worker.
pub(super) const ARGUMENT: &str = "marlin-text-worker";

/// A process that waits for requests. It ends when the handle is dropped, or with the program.
#[derive(Debug)]
pub(in crate::worker) struct Process {
    child: Child,
    requests: ChildStdin,
    replies: ChildStdout,
}

impl Process {
    pub fn start() -> Result<Self, Failure> {
        let failed = |what: &str, error: io::Error| Failure::Worker {
            what: format!("{what}: {error}"),
        };
        // The link stays valid if the executable was replaced in the meantime.
        let executable = match cfg!(target_os = "linux") {
            true => "/proc/self/exe".into(),
            false => std::env::current_exe().map_err(|error| failed("has no executable", error))?,
        };
        let mut command = Command::new(executable);
        let streams = command
            .arg(ARGUMENT)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = streams
            .spawn()
            .map_err(|error| failed("cannot be started", error))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(requests), Some(replies)) => Ok(Self {
                child,
                requests,
                replies,
            }),
            _ => Err(Failure::Worker {
                what: "has no pipes".into(),
            }),
        }
    }

    /// Sends a request and waits for the reply. After a failure the process has ended.
    pub fn call(&mut self, request: Request, body: &[u8]) -> Result<Vec<u8>, Failure> {
        let limits = Limits::of(&request, body.len());
        // If the process ended before it read the whole request, the error is the reason for its
        // end, not the failed write.
        let asked = write_request(&mut self.requests, &Head { request, limits }, body);
        asked
            .and_then(|()| read_reply(&mut self.replies))
            .map_err(|error| self.failure(&error, limits))
    }

    /// Returns the reason why there is no reply.
    fn failure(&mut self, error: &io::Error, limits: Limits) -> Failure {
        // The process has ended, or has sent an invalid message.
        let _ = self.child.kill();
        let mut said = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            // Output that is not UTF-8 has none of the messages below.
            let _ = stderr.take(1 << 16).read_to_string(&mut said);
        }
        if said.contains(child::TIMED_OUT) {
            Failure::Time { after: limits.time }
        } else if said.contains("memory allocation of") {
            Failure::Memory {
                limit: limits.bytes,
            }
        } else if said.contains("has overflowed its stack") {
            Failure::Nesting
        } else {
            match self.child.wait() {
                Ok(status) => Failure::Worker {
                    what: format!("ended with {status}"),
                },
                Err(_) => Failure::Worker {
                    what: format!("does not answer: {error}"),
                },
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already. Without `wait` it would stay in the system's process
        // table.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
