//! The size of the KV cache.

use super::{ModelOptions, ModelServerError};
use marlin_lm::{BatchEngine, Model, Pages};

/// The number of sequences of the model's window for which the host, or a device that does not
/// report its memory, has pages by default.
const HOST_SEQUENCES: usize = 8;
/// The most bytes of these pages.
const HOST_BYTES: usize = 4 << 30;

/// Returns the number of pages of the KV cache.
pub(super) fn page_count(model: &Model, options: &ModelOptions) -> Result<usize, ModelServerError> {
    let page_size = options.page_size;
    let size = Pages {
        count: 1,
        size: page_size,
    };
    if !size.has_valid_size() {
        let least = Pages::MIN_SIZE;
        return Err(ModelServerError::PageSize { page_size, least });
    }
    let page_bytes = BatchEngine::page_bytes(model, page_size, options.cache_format);
    let fitting = default_pages(
        BatchEngine::free_memory(model).map(|free| free as f64 * options.memory_fraction),
        BatchEngine::runs_on_host(model),
        model.max_len().div_ceil(page_size),
        page_bytes,
    );
    match options.pages.map_or(fitting, |pages| pages as usize) {
        0 => Err(ModelServerError::NoPages {
            page_size,
            page_bytes,
        }),
        pages => Ok(pages.min(u32::MAX as usize)),
    }
}

/// Returns the default number of pages of `page_bytes`. `most_bytes` is the memory that the KV
/// cache may take, if the device reports its memory, and `window` the number of pages of the
/// model's window.
fn default_pages(
    most_bytes: Option<f64>,
    is_host: bool,
    window: usize,
    page_bytes: usize,
) -> usize {
    let fitting = most_bytes.map(|bytes| bytes as usize / page_bytes);
    match fitting {
        Some(pages) if !is_host => pages,
        _ => (HOST_SEQUENCES * window)
            .min(HOST_BYTES / page_bytes)
            .min(fitting.unwrap_or(usize::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_fills_its_memory_and_the_host_does_not() {
        let (gib, page) = ((1u64 << 30) as f64, 1 << 20);
        assert_eq!(default_pages(Some(60.0 * gib), false, 64, page), 60 << 10);
        assert_eq!(default_pages(Some(60.0 * gib), true, 64, page), 8 * 64);
        assert_eq!(default_pages(Some(60.0 * gib), true, 2048, page), 4 << 10);
        assert_eq!(default_pages(Some(0.25 * gib), true, 2048, page), 256);
        assert_eq!(default_pages(None, false, 64, page), 8 * 64);
        assert_eq!(default_pages(Some(0.0), true, 64, page), 0);
    }
}
