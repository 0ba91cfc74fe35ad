//! Questions to the CUDA driver.

use cubecl::client::Client;
use cudarc::driver::{CudaContext, DriverError};
use std::sync::Arc;

/// Asks the driver about the card of a CUDA client. If it does not answer, the result is `None`,
/// and the reason is logged after `what` was asked.
pub(super) fn ask<T: Send + 'static>(
    client: &Client,
    what: &str,
    question: impl FnOnce(Arc<CudaContext>) -> Result<T, DriverError> + Send + 'static,
) -> Option<T> {
    let ordinal = client.service_id().device.index_id as usize;
    // The query runs on a thread of its own, because the driver binds the card's context to the
    // thread that asks.
    let answer = std::thread::spawn(move || question(CudaContext::new(ordinal)?)).join();
    match answer.ok()? {
        Ok(answer) => Some(answer),
        Err(error) => {
            tracing::info!(%error, "the driver does not say {what}");
            None
        }
    }
}

/// Returns the bytes that no process has allocated on the card of a CUDA client (CUDA driver API,
/// `cuMemGetInfo`); `None` for other clients, or if the driver does not answer.
pub fn free_memory_of_card(client: &Client) -> Option<usize> {
    if client.name() != "cuda" {
        return None;
    }
    let question = |context: Arc<CudaContext>| context.mem_get_info();
    let (free, _) = ask(client, "how much memory is free", question)?;
    Some(free)
}
