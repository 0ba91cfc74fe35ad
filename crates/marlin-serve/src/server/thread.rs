//! The thread of a server.

use super::event::{EndReason, FailReason};
use super::executor::{Executor, ExecutorError, RowOutput, TokenMask};
use super::handle::{Command, Health, Shared, Submission};
use super::live::{Last, Live};
use super::record::Recorder;
use crate::scheduler::{
    Event, EventKind, FinishReason, Metrics, Outcome, RequestId, Scheduler, Step,
};
use marlin_format::with_causes;
use marlin_text::Tokenizer;
use rayon::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

/// How often the time from a failed step to a [trial](super::ServerOptions::retry) doubles.
const MAX_DOUBLINGS: u32 = 5;

/// The state of a server's thread.
pub(super) struct ServerThread<'t, E: Executor> {
    executor: E,
    tokenizer: &'t Tokenizer,
    scheduler: Scheduler,
    commands: Receiver<Command>,
    shared: &'t Shared,
    /// The requests that have not ended.
    live: HashMap<RequestId, Live<'t>>,
    /// The requests that have not ended, by ticket.
    tickets: HashMap<u64, RequestId>,
    /// The steps that were scheduled and are not finished.
    in_flight: VecDeque<StepInFlight<E::InFlight>>,
    /// The most steps in flight.
    max_steps: usize,
    /// The time at which the server ends, once it is shutting down.
    shutdown: Option<Duration>,
    /// The steps that failed since the last one that succeeded.
    failures: u32,
    recorder: Recorder<'t>,
}

/// A step that is not finished.
struct StepInFlight<I> {
    step: Step,
    /// What the executor has in flight, `None` if no row is left, or the reason why the step was
    /// not started.
    started: Result<Option<I>, ExecutorError>,
    /// True if the executor waits for masks.
    masked: bool,
}

impl<'t, E: Executor> ServerThread<'t, E> {
    pub fn new(
        executor: E,
        max_steps: usize,
        tokenizer: &'t Tokenizer,
        scheduler: Scheduler,
        commands: Receiver<Command>,
        shared: &'t Shared,
    ) -> Self {
        Self {
            executor,
            tokenizer,
            scheduler,
            commands,
            live: HashMap::new(),
            tickets: HashMap::new(),
            in_flight: VecDeque::new(),
            max_steps,
            shutdown: None,
            failures: 0,
            recorder: Recorder::new(shared),
            shared,
        }
    }

    /// Serves until the server is shut down, or nobody can submit a request any more.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn run(&mut self) -> Result<(), ExecutorError> {
        while self.take_commands() {
            while self.may_start() && self.start_step()? {}
            if let Some(step) = self.in_flight.pop_front() {
                self.finish_step(step)?;
            }
            self.recorder.publish(self.scheduler.metrics());
        }
        Ok(())
    }

    /// Returns true if another step may be started: after one that failed to start, its rows could
    /// lack the tokens of that one.
    fn may_start(&self) -> bool {
        self.in_flight.len() < self.max_steps
            && self.in_flight.iter().all(|step| step.started.is_ok())
    }

    /// Fails all requests, also those in the channel. Neither the executor nor the scheduler is
    /// used: one of them may have panicked.
    pub fn fail_all(&mut self, reason: &FailReason) {
        let now = self.shared.clock.now();
        let mut all: Vec<_> = self.live.drain().map(|(_, live)| live).collect();
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Submit(submission) = command {
                all.push(Live::new(*submission, &self.shared.options));
            }
        }
        for live in all {
            let last = Last::Failed(reason.clone());
            self.recorder.ended(&live, &last, now);
            live.end(last);
        }
        self.recorder.publish(Metrics::default());
    }

    /// Takes the commands that are there, and waits for one if there is nothing else to do. Returns
    /// false if the server ends.
    fn take_commands(&mut self) -> bool {
        loop {
            let idle = self.live.is_empty() && self.in_flight.is_empty();
            if idle && self.shutdown.is_some() {
                return false;
            }
            let command = if idle {
                self.recorder.publish(self.scheduler.metrics());
                match self.wait() {
                    Ok(command) => command,
                    Err(RecvTimeoutError::Timeout) => {
                        self.submit(self.shared.trial());
                        break;
                    }
                    Err(RecvTimeoutError::Disconnected) => return false,
                }
            } else {
                let Ok(command) = self.commands.try_recv() else {
                    break;
                };
                command
            };
            match command {
                Command::Submit(submission) => self.submit(*submission),
                Command::Cancel(ticket) => {
                    if let Some(&request) = self.tickets.get(&ticket) {
                        self.cancel(request, Last::Cancelled);
                    }
                }
                Command::Shutdown(end) => {
                    let end = self.shutdown.map_or(end, |before| before.min(end));
                    self.shutdown = Some(end);
                }
            }
        }
        let now = self.shared.clock.now();
        if self.shutdown.is_some_and(|end| end <= now) {
            for request in self.live.keys().copied().collect::<Vec<_>>() {
                self.cancel(request, Last::Failed(FailReason::ShutDown));
            }
        }
        true
    }

    /// Waits for a command: after a failed step, until it is time for a trial. Meanwhile the
    /// executor prepares later steps, if none failed.
    fn wait(&mut self) -> Result<Command, RecvTimeoutError> {
        if self.failures == 0 {
            loop {
                match self.commands.try_recv() {
                    Ok(command) => return Ok(command),
                    Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
                    Err(TryRecvError::Empty) if self.executor.prepare() => {}
                    Err(TryRecvError::Empty) => break,
                }
            }
            let command = self.commands.recv();
            return command.map_err(|_| RecvTimeoutError::Disconnected);
        }
        let doublings = (self.failures - 1).min(MAX_DOUBLINGS);
        let pause = self.shared.options.retry.saturating_mul(1 << doublings);
        self.commands.recv_timeout(pause)
    }

    fn submit(&mut self, submission: Submission) {
        let live = Live::new(submission, &self.shared.options);
        let arrival = live.times.arrival;
        match self.scheduler.submit(live.to_scheduler(), arrival) {
            Ok(request) => {
                self.tickets.insert(live.ticket, request);
                self.live.insert(request, live);
            }
            Err(error) => {
                // The handle refuses all that the scheduler refuses.
                self.shared.left_queue();
                live.end(Last::Failed(FailReason::Server(error.to_string())));
            }
        }
    }

    /// Ends a request, with `last` as its last event.
    fn cancel(&mut self, request: RequestId, last: Last) {
        if let Some(live) = self.live.get_mut(&request) {
            live.last = Some(last);
            self.scheduler.cancel(request);
            self.take_events();
        }
    }

    /// Schedules a step and starts it. Returns false if there is nothing to compute at present.
    fn start_step(&mut self) -> Result<bool, ExecutorError> {
        let step = self.scheduler.schedule(self.shared.clock.now());
        self.take_events();
        let Some(mut step) = step else {
            return Ok(false);
        };
        self.add_sequences(&mut step)?;
        let with_grammar = |request| self.live.get(&request).is_some_and(Live::has_grammar);
        let masked = rows(&step).any(|(request, samples)| samples && with_grammar(request));
        let started = if step.tokens() == 0 {
            Ok(None)
        } else {
            self.executor.start(&step, masked).map(Some)
        };
        self.in_flight.push_back(StepInFlight {
            step,
            started,
            masked,
        });
        self.give_masks()?;
        Ok(true)
    }

    /// Hands the sequences to the executor that are in a step for the first time since they were
    /// admitted. Those that it does not take fail, and are taken out of the step.
    fn add_sequences(&mut self, step: &mut Step) -> Result<(), ExecutorError> {
        let now = self.shared.clock.now();
        let mut refused = Vec::new();
        for chunk in &step.prefill {
            let request = chunk.request;
            let Some(live) = self.live.get_mut(&request).filter(|live| !live.in_executor) else {
                continue;
            };
            if live.times.admitted.is_none() {
                self.shared.left_queue();
                self.recorder.admitted(live, chunk.start);
                if let Err(error) = live.admit(self.tokenizer, chunk.start, now) {
                    refused.push((request, FailReason::Text(with_causes(&error))));
                    continue;
                }
            }
            match self.executor.add(live.to_executor(request)) {
                Ok(()) => live.in_executor = true,
                Err(ExecutorError::Call(reason)) => {
                    refused.push((request, FailReason::Executor(reason)));
                }
                Err(lost) => return Err(lost),
            }
        }
        for (request, reason) in refused {
            step.prefill.retain(|chunk| chunk.request != request);
            self.cancel(request, Last::Failed(reason));
        }
        Ok(())
    }

    /// Waits for a step, and hands out its tokens.
    fn finish_step(&mut self, step: StepInFlight<E::InFlight>) -> Result<(), ExecutorError> {
        let StepInFlight { step, started, .. } = step;
        let rows: Vec<_> = rows(&step).collect();
        // A step without rows says nothing about the executor.
        let is_computed = matches!(started, Ok(Some(_)));
        let outputs = match started {
            Ok(Some(in_flight)) => self.executor.finish(in_flight),
            Ok(None) => Ok(Vec::new()),
            Err(error) => Err(error),
        };
        let now = self.shared.clock.now();
        let outputs = outputs.and_then(|outputs| fitting(outputs, rows.len()));
        if let Ok(outputs) = &outputs {
            self.accept(&rows, outputs);
        }
        self.give_masks()?; // First: the next step waits for them.
        let outcomes = match outputs {
            Ok(outputs) => {
                if is_computed {
                    self.failures = 0;
                    self.shared.set_health(Health::Ok);
                }
                let rows = rows.into_iter().zip(outputs);
                rows.map(|((request, samples), output)| {
                    self.take_output(request, samples, output, now)
                })
                .collect()
            }
            Err(ExecutorError::Call(reason)) => {
                tracing::warn!("step {} failed: {reason}", step.id);
                self.failures = self.failures.saturating_add(1);
                self.shared.set_health(Health::StepFailed(reason.clone()));
                vec![Outcome::Failed(reason); rows.len()]
            }
            Err(lost) => return Err(lost),
        };
        self.recorder.end_step();
        let events = self.scheduler.complete(step, outcomes, now);
        self.take(events);
        Ok(())
    }

    /// Advances the grammars by the tokens of a step.
    fn accept(&mut self, rows: &[(RequestId, bool)], outputs: &[RowOutput]) {
        for ((request, _), output) in rows.iter().zip(outputs) {
            if let &RowOutput::Token { token, .. } = output
                && let Some(live) = self.live.get_mut(request)
            {
                live.accept(token);
            }
        }
    }

    /// Gives the executor the masks of the first step in flight, if it waits for them. The tokens
    /// before are known.
    fn give_masks(&mut self) -> Result<(), ExecutorError> {
        let Some(first) = self.in_flight.front_mut().filter(|first| first.masked) else {
            return Ok(());
        };
        first.masked = false;
        let Ok(Some(in_flight)) = &mut first.started else {
            return Ok(());
        };
        let sampled: HashMap<_, _> = rows(&first.step)
            .enumerate()
            .filter(|&(_, (_, samples))| samples)
            .map(|(row, (request, _))| (request, row))
            .collect();
        let states: Vec<_> = self
            .live
            .iter_mut()
            .filter_map(|(request, live)| Some((*request, *sampled.get(request)?, live.grammar()?)))
            .collect();
        let computed: Vec<_> = states
            .into_par_iter()
            .map(|(request, row, state)| (request, row, state.mask()))
            .collect();
        let mut masks = Vec::with_capacity(computed.len());
        let mut failed = Vec::new();
        for (request, row, mask) in computed {
            match mask {
                Ok(allowed) => masks.push(TokenMask { row, allowed }),
                Err(error) => failed.push((request, Last::failed_grammar(&error))),
            }
        }
        match self.executor.mask(in_flight, &first.step, masks) {
            Ok(()) => {}
            Err(lost @ ExecutorError::Lost(_)) => return Err(lost),
            Err(error) => first.started = Err(error),
        }
        for (request, last) in failed {
            self.cancel(request, last);
        }
        Ok(())
    }

    /// Takes the output of a row. Returns what it means for the scheduler.
    fn take_output(
        &mut self,
        request: RequestId,
        samples: bool,
        output: RowOutput,
        now: Duration,
    ) -> Outcome {
        let Some(live) = self.live.get_mut(&request) else {
            return Outcome::Failed(String::new()); // It ended while the step was in flight.
        };
        match (output, samples) {
            (RowOutput::Computed, false) => Outcome::Computed,
            (RowOutput::Token { token, logprobs }, true) => {
                self.recorder.token(live, now);
                live.push(token, logprobs)
            }
            (RowOutput::Failed(reason), _) => Outcome::Failed(reason),
            (RowOutput::Computed, true) => Outcome::Failed("no token was sampled".into()),
            (RowOutput::Token { token, .. }, false) => Outcome::Failed(format!(
                "token {token} was sampled before the end of the prompt"
            )),
        }
    }

    /// Takes the events of the scheduler since the last call.
    fn take_events(&mut self) {
        let events = self.scheduler.take_events();
        self.take(events);
    }

    fn take(&mut self, events: Vec<Event>) {
        for Event { request, kind } in events {
            let ended = match kind {
                EventKind::FirstToken(_) | EventKind::Token(_) => continue,
                EventKind::Preempted => {
                    self.recorder.preempted();
                    if let Some(live) = self.live.get_mut(&request) {
                        live.in_executor = false;
                        self.executor.remove(request);
                    }
                    continue;
                }
                EventKind::Finished(FinishReason::Length) => Last::End(EndReason::Length),
                EventKind::Finished(FinishReason::Stop | FinishReason::Cancelled) => {
                    Last::Cancelled
                }
                EventKind::Failed(reason) => Last::Failed(reason.into()),
            };
            let Some(mut live) = self.live.remove(&request) else {
                continue;
            };
            self.tickets.remove(&live.ticket);
            if live.in_executor {
                self.executor.remove(request);
            }
            if live.times.admitted.is_none() {
                self.shared.left_queue();
            }
            let last = live.last.take().unwrap_or(ended);
            self.recorder.ended(&live, &last, self.shared.clock.now());
            live.end(last);
        }
    }
}

/// Returns the request of each row of a step, and whether a token is sampled for it.
fn rows(step: &Step) -> impl Iterator<Item = (RequestId, bool)> {
    let chunks = step.prefill.iter();
    let chunks = chunks.map(|chunk| (chunk.request, chunk.ends_prompt));
    chunks.chain(step.decode.iter().map(|row| (row.request, true)))
}

/// Checks that there is an output for each row.
fn fitting(outputs: Vec<RowOutput>, rows: usize) -> Result<Vec<RowOutput>, ExecutorError> {
    if outputs.len() == rows {
        return Ok(outputs);
    }
    let found = outputs.len();
    Err(ExecutorError::Call(format!(
        "the executor returned {found} outputs for a step of {rows} rows"
    )))
}
