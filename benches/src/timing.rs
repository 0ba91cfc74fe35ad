//! Time of a call, without the cost of launching it.

use crate::BenchError;
use cubecl::client::Client;

/// Replays that are timed, after one that is not.
const REPLAYS: usize = 9;

/// Microseconds of one call: a graph of `calls` calls, one after the other, replayed; the median replay divided by the calls.
///
/// `call` launches the kernel on the number of the call.
pub fn time(client: &Client, calls: usize, call: impl Fn(usize) -> Result<(), BenchError>) -> Result<f64, BenchError> {
    client.graph_prepare().map_err(device)?;
    call(0)?;
    client.start_capture().map_err(device)?;
    for i in 0..calls {
        call(i)?;
    }
    let graph = client.stop_capture().map_err(device)?;
    let mut times = Vec::with_capacity(REPLAYS);
    for _ in 0..=REPLAYS {
        let window = client.profile_start().map_err(device)?;
        // SAFETY: every buffer of the calls outlives this function, and nothing else runs on the client's stream.
        unsafe { graph.replay() }.map_err(device)?;
        let duration = client.profile_end(window).map_err(device)?;
        let ticks = cubecl::future::block_on(duration.resolve()).ok_or_else(|| BenchError::Device("it gave no time".into()))?;
        times.push(ticks.duration().as_secs_f64() * 1e6 / calls as f64);
    }
    let timed = &mut times[1..];
    timed.sort_by(f64::total_cmp);
    Ok(timed[timed.len() / 2])
}

fn device(error: impl std::fmt::Debug) -> BenchError {
    BenchError::Device(format!("{error:?}"))
}
