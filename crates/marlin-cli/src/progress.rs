//! The progress of long work, on standard error: a bar on a terminal, lines elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::output::size;

/// The time between two lines of work whose steps are short.
const INTERVAL: Duration = Duration::from_secs(30);
/// The number of past lines from which the time left is estimated.
const RECENT: usize = 8;

/// True if no progress is reported.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Sets whether the process reports no progress.
pub fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

/// The progress of long work.
pub struct Progress {
    bar: ProgressBar,
    /// The lines that take the place of the bar if standard error is no terminal.
    lines: Option<Lines>,
}

impl Progress {
    /// Creates the progress of a quantisation, with a line for each block.
    pub fn of_blocks() -> Self {
        Self::new(Unit::Block, Duration::ZERO)
    }

    /// Creates the progress of an evaluation in windows of a text.
    pub fn of_windows() -> Self {
        Self::new(Unit::Window, INTERVAL)
    }

    /// Creates the progress of a load test in requests.
    #[cfg(feature = "serve")]
    pub fn of_requests() -> Self {
        Self::new(Unit::Request, INTERVAL)
    }

    /// Creates the progress of a load test in seconds.
    #[cfg(feature = "serve")]
    pub fn of_seconds() -> Self {
        Self::new(Unit::Second, INTERVAL)
    }

    /// Creates the progress of bytes that are, for example, `read`.
    pub fn of_bytes(done: &'static str) -> Self {
        Self::new(Unit::Byte { done }, INTERVAL)
    }

    fn new(unit: Unit, interval: Duration) -> Self {
        let quiet = QUIET.load(Ordering::Relaxed);
        let (bar, lines) = match (quiet, io::stderr().is_terminal()) {
            (true, _) => (ProgressBar::hidden(), None),
            (false, true) => (ProgressBar::new(0), None),
            (false, false) => (
                ProgressBar::hidden(),
                Some(Lines::new(unit, interval, Instant::now())),
            ),
        };
        let template = match unit {
            Unit::Byte { .. } => {
                "{wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {msg}"
            }
            _ => "{wide_bar} {pos}/{len} {elapsed}, {eta} left {msg}",
        };
        // The templates are constants, and a bar without one is still a bar.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self { bar, lines }
    }

    /// Sets what is done, of `total`, in the bar and in the lines.
    pub fn set(&mut self, done: usize, total: usize, message: &str) {
        self.set_bar(done, total, message);
        self.set_line(done, total);
    }

    /// Sets what is done, of `total`, in the bar alone.
    pub fn set_bar(&self, done: usize, total: usize, message: &str) {
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
        self.set_message(message);
    }

    /// Sets the text beside the bar.
    pub fn set_message(&self, message: &str) {
        self.bar.set_message(message.to_owned());
    }

    /// Writes a line with what is done, of `total`, if a line is due.
    pub fn set_line(&mut self, done: usize, total: usize) {
        let lines = self.lines.as_mut();
        if let Some(line) = lines.and_then(|lines| lines.next(done, total, Instant::now())) {
            // Work goes on where nobody reads its progress.
            let _ = writeln!(io::stderr(), "{line}");
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// The unit in which progress is counted.
#[derive(Debug, Clone, Copy)]
enum Unit {
    Block,
    Window,
    #[cfg(feature = "serve")]
    Request,
    #[cfg(feature = "serve")]
    Second,
    /// A byte, with what is done to it.
    Byte {
        done: &'static str,
    },
}

/// Lines of progress with the time passed and the time left.
struct Lines {
    unit: Unit,
    /// The least time between two lines.
    interval: Duration,
    start: Instant,
    /// What was done at the start and at each of the last lines, and when.
    recent: VecDeque<(usize, Instant)>,
}

impl Lines {
    fn new(unit: Unit, interval: Duration, start: Instant) -> Self {
        Self {
            unit,
            interval,
            start,
            recent: VecDeque::from([(0, start)]),
        }
    }

    /// Returns the line for what is done at the time `now`, if there is progress since the last
    /// line and the interval is over.
    fn next(&mut self, done: usize, total: usize, now: Instant) -> Option<String> {
        let &(last, at) = self.recent.back()?;
        if done <= last || now - at < self.interval {
            return None;
        }
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        let &(before, since) = self.recent.front()?;
        self.recent.push_back((done, now));
        let rate = (now - since).as_secs_f64() / (done - before) as f64;
        let left = Duration::try_from_secs_f64(rate * total.saturating_sub(done) as f64);
        let done = match self.unit {
            Unit::Block => format!("block {done} of {total}"),
            Unit::Window => format!("window {done} of {total}"),
            #[cfg(feature = "serve")]
            Unit::Request => format!("request {done} of {total}"),
            #[cfg(feature = "serve")]
            Unit::Second => format!("second {done} of {total}"),
            Unit::Byte { done: word } => format!("{} of {} {word}", size(done), size(total)),
        };
        let (passed, left) = (
            duration(now - self.start),
            duration(left.unwrap_or_default()),
        );
        Some(format!("{done}, {passed}, {left} left"))
    }
}

/// Formats a duration for a person, to the second or to the minute.
fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64().round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_a_line_with_the_time_left() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut lines = Lines::new(Unit::Block, Duration::ZERO, start);
        assert_eq!(lines.next(0, 30, at(2)), None);
        let expected = [
            (1, 4, "block 1 of 30, 4 s, 1 min 56 s left"),
            (3, 12, "block 3 of 30, 12 s, 1 min 48 s left"),
            (30, 120, "block 30 of 30, 2 min 0 s, 0 s left"),
        ];
        for (done, seconds, line) in expected {
            assert_eq!(lines.next(done, 30, at(seconds)).as_deref(), Some(line));
            assert_eq!(lines.next(done, 30, at(seconds + 1)), None);
        }
    }

    #[test]
    fn the_time_left_follows_from_the_last_lines() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut lines = Lines::new(Unit::Block, Duration::ZERO, start);
        // Blocks of an earlier run take no time, those of this run ten seconds.
        for done in 1..=10 {
            lines.next(done, 30, at(0));
        }
        let last = (11..=20).filter_map(|done| lines.next(done, 30, at(10 * (done as u64 - 10))));
        assert_eq!(
            last.last().as_deref(),
            Some("block 20 of 30, 1 min 40 s, 1 min 40 s left")
        );
    }

    #[test]
    fn short_steps_are_a_line_an_interval() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut lines = Lines::new(Unit::Window, INTERVAL, start);
        let found: Vec<_> = (1..=90)
            .filter_map(|second| lines.next(second, 100, at(second as u64)))
            .collect();
        assert_eq!(
            found,
            [
                "window 30 of 100, 30 s, 1 min 10 s left",
                "window 60 of 100, 1 min 0 s, 40 s left",
                "window 90 of 100, 1 min 30 s, 10 s left"
            ]
        );
        let mut lines = Lines::new(Unit::Byte { done: "read" }, INTERVAL, start);
        assert_eq!(
            lines
                .next(4_000_000_000, 16_000_000_000, at(1200))
                .as_deref(),
            Some("4000.0 MB of 16.0 GB read, 20 min 0 s, 1 h 0 min left")
        );
    }
}
