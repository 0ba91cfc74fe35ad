use super::config::ExpertGemvConfig;
use crate::ActivationDtype;
use crate::experts::route::choose::{exists, first_of_lane, values_of_lane};
use crate::ptx::{
    global_address, half_to_f32, lane, ld_global_l2_2, ld_global_l2_4, ld_global_l2_8,
};
use cubecl::prelude::*;

/// Loads the logits of a token for [`choose`](crate::experts::route::choose::choose), past the
/// first-level cache: it may hold those of an earlier layer if the kernel has not yet waited.
#[cube]
pub(super) fn load_logits<L: Float>(
    logits: &[L],
    token: u32,
    values: &mut Array<f32>,
    #[comptime] config: ExpertGemvConfig,
) {
    let router = comptime!(config.router);
    let count = comptime!(values_of_lane(&router));
    let size = comptime!(config.logits.elem().size());
    let bf16 = comptime!(config.logits == ActivationDtype::BF16);
    let first = first_of_lane(lane(), router);
    let start = token * comptime!(router.experts as u32) + first;
    let address = global_address::<L>(logits) + u64::cast_from(start) * comptime!(size as u64);
    let is_whole = comptime!(router.experts.is_multiple_of(32));
    if comptime!(is_whole && size == 2 && count.is_multiple_of(4)) {
        // Runs of four logits are at multiples of 8 bytes.
        #[unroll]
        for run in 0..comptime!(count / 4) {
            let four = ld_global_l2_8(address + comptime!(8 * run as u64));
            #[unroll]
            for i in 0..4usize {
                let word = four.extract(comptime!(i / 2));
                values[comptime!(4 * run + i)] = half_to_f32(word, comptime!(i % 2 == 1), bf16);
            }
        }
    } else {
        #[unroll]
        for i in 0..count {
            let at = address + comptime!((size * i) as u64);
            values[i] = f32::new(f32::MIN);
            if exists(first + comptime!(i as u32), router) {
                values[i] = if comptime!(size == 4) {
                    f32::reinterpret(ld_global_l2_4(at))
                } else {
                    half_to_f32(ld_global_l2_2(at), false, bf16)
                };
            }
        }
    }
}
