//! Writes of a prompt's keys and values to the cache.

use super::{DTYPES, output, random, read};
use crate::kernels::{buffer, client, words};
use crate::setup::computes;
use burn::tensor::Device;
use marlin_kernels::ActivationDtype;
use marlin_nn::kernels::{RowsShape, write_cache};
use marlin_nn::{CacheShape, Pages};
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Writes keys of prompts to caches with and without pages.
pub(super) fn caches(device: &Device, seed: u64) {
    let client = client(device);
    let mut rng = StdRng::seed_from_u64(seed);
    let contiguous = CacheShape::from([3, 2, 40, 40]);
    let paged = CacheShape {
        pages: Some(Pages {
            count: 11,
            size: 16,
        }),
        ..contiguous
    };
    let table: [u32; 9] = [4, 9, 0, 7, 2, 10, 5, 1, 3];
    let page_table = |pages: &[u32]| words(&client, pages.iter().copied());
    for (cache_shape, dtype) in [contiguous, paged]
        .into_iter()
        .flat_map(|shape| DTYPES.map(|dtype| (shape, dtype)))
        .filter(|&(_, dtype)| computes(device, dtype))
    {
        let (kv_heads, head_dim) = (cache_shape.kv_heads, cache_shape.head_dim);
        let pages = cache_shape.pages.map(|_| table.as_slice());
        for (slot, start, seq) in [(0, 0, 40), (2, 39, 1), (1, 3, 17)] {
            let shape = RowsShape {
                rows: kv_heads * seq,
                features: head_dim,
                dtype,
            };
            let (mut expected, cache_bytes) = random(cache_shape.elements(), dtype, &mut rng);
            let (new, new_bytes) = random(kv_heads * seq * head_dim, dtype, &mut rng);
            let (cache, cache_arg) = output(&client, &cache_bytes, cache_shape.elements());
            write_cache(
                &client,
                &shape,
                &cache_shape,
                [slot, start],
                buffer(&client, &new_bytes, new.len()),
                cache_arg,
                pages.map(page_table),
            )
            .unwrap_or_else(|error| panic!("{shape}: {error}"));
            for (head, new) in new.chunks(seq * head_dim).enumerate() {
                for (position, new) in (start..).zip(new.chunks(head_dim)) {
                    let [_, _, size, _] = cache_shape.dims();
                    let page =
                        pages.map_or(slot, |pages| pages[slot * 3 + position / size] as usize);
                    let first = ((page * kv_heads + head) * size + position % size) * head_dim;
                    expected[first..first + head_dim].copy_from_slice(new);
                }
            }
            assert!(
                read(&client, cache, dtype) == expected,
                "{shape}, {:?}, slot {slot}, from {start}, seed {seed}",
                cache_shape.pages
            );
        }
    }
    let shape = RowsShape {
        rows: 2,
        features: contiguous.head_dim,
        dtype: ActivationDtype::F32,
    };
    let zeros = |elements: usize| buffer(&client, &vec![0; 4 * elements], elements);
    let refuse = |cache: &CacheShape, slot, start, pages| {
        let (new, all) = (zeros(2 * cache.head_dim), zeros(cache.elements()));
        let refused = write_cache(&client, &shape, cache, [slot, start], new, all, pages);
        assert!(refused.is_err(), "slot {slot}, position {start}");
    };
    refuse(&contiguous, 3, 0, None);
    refuse(&contiguous, 0, 40, None);
    refuse(&paged, 0, 0, None);
    refuse(&paged, 0, 0, Some(zeros(8)));
    refuse(&contiguous, 0, 0, Some(zeros(9)));
}
