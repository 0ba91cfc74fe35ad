//! The time of a call, without the cost of its launch.

use crate::BenchError;
use cubecl::client::Client;

/// The number of timed replays, after one that is not timed.
const REPLAYS: usize = 9;

/// Returns the time of one call in microseconds: the time of the median replay of a graph of
/// `calls` consecutive calls, divided by `calls`.
///
/// `call` launches the kernel; its argument is the number of the call.
pub fn time(
    client: &Client,
    calls: usize,
    call: impl Fn(usize) -> Result<(), BenchError>,
) -> Result<f64, BenchError> {
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
        // SAFETY: every buffer of the calls outlives this function, and nothing else runs on the
        // client's stream.
        unsafe { graph.replay() }.map_err(device)?;
        let duration = client.profile_end(window).map_err(device)?;
        let ticks = cubecl::future::block_on(duration.resolve())
            .ok_or_else(|| BenchError::Device("it gave no time".into()))?;
        times.push(ticks.duration().as_secs_f64() * 1e6 / calls as f64);
    }
    let timed = &mut times[1..];
    timed.sort_by(f64::total_cmp);
    Ok(timed[timed.len() / 2])
}

fn device(error: impl std::fmt::Debug) -> BenchError {
    BenchError::Device(format!("{error:?}"))
}
