//! The time of a call.

use cubecl::client::Client;
use ladder::LadderError;
use marlin_kernels::{Runtime, Target};
use std::time::Instant;

/// The number of timed replays or calls.
const REPLAYS: usize = 9;
/// The approximate duration of a graph, in microseconds.
const GRAPH_MICROSECONDS: f64 = 4000.0;

/// Returns the time of one call in microseconds. `call` launches the kernel for a call number, and
/// `copies` consecutive calls read every copy of the weight once.
///
/// On CUDA, the time is the median of nine replays of one graph, divided by its number of calls,
/// which a shorter graph determines. On other runtimes, the time is the median of nine calls by the
/// host's clock, including the launch.
pub fn time(
    client: &Client,
    copies: usize,
    call: impl Fn(usize) -> Result<(), LadderError>,
) -> Result<f64, LadderError> {
    if Target::of(client).runtime != Runtime::Cuda {
        return by_clock(client, call);
    }
    let estimate = replayed(client, copies, 1, &call)?;
    let calls = ((GRAPH_MICROSECONDS / estimate) as usize)
        .clamp(1, 1000)
        .next_multiple_of(copies);
    replayed(client, calls, REPLAYS, &call)
}

/// Returns the time of one call in microseconds, from a graph of `calls` calls: the median of
/// `replays`, after one that is not timed.
fn replayed(
    client: &Client,
    calls: usize,
    replays: usize,
    call: &impl Fn(usize) -> Result<(), LadderError>,
) -> Result<f64, LadderError> {
    client.graph_prepare().map_err(failed)?;
    call(0)?;
    client.start_capture().map_err(failed)?;
    for i in 0..calls {
        call(i)?;
    }
    let graph = client.stop_capture().map_err(failed)?;
    let mut times = Vec::with_capacity(replays);
    for _ in 0..=replays {
        let window = client.profile_start().map_err(failed)?;
        // SAFETY: every buffer of the calls outlives this function, and nothing else runs on the
        // client's stream.
        unsafe { graph.replay() }.map_err(failed)?;
        let duration = client.profile_end(window).map_err(failed)?;
        let ticks = cubecl::future::block_on(duration.resolve())
            .ok_or_else(|| LadderError::Failed("it gave no time".into()))?;
        times.push(ticks.duration().as_secs_f64() * 1e6 / calls as f64);
    }
    Ok(median(&mut times[1..]))
}

fn by_clock(
    client: &Client,
    call: impl Fn(usize) -> Result<(), LadderError>,
) -> Result<f64, LadderError> {
    let mut times = Vec::with_capacity(REPLAYS);
    for i in 0..REPLAYS {
        let start = Instant::now();
        call(i)?;
        cubecl::future::block_on(client.sync()).map_err(failed)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(&mut times))
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn failed(error: impl std::fmt::Debug) -> LadderError {
    LadderError::Failed(format!("{error:?}"))
}
