//! Sums over the planes of a device.

use cubecl::client::Client;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

/// The planes that a kernel counts on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Planes {
    /// Units that are in one plane whichever of its sizes the device chooses: the smallest of them;
    /// 1 where units exchange nothing.
    pub size: usize,
    /// True if all planes of the device have that size.
    pub is_only_size: bool,
}

impl Planes {
    /// Those of an NVIDIA card.
    #[cfg(feature = "cuda")]
    pub const NVIDIA: Self = Self {
        size: 32,
        is_only_size: true,
    };

    /// Those of a client's device.
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let [least, most] = [
            properties.hardware.plane_size_min,
            properties.hardware.plane_size_max,
        ];
        let has_planes = properties.features.plane.contains(Plane::Ops);
        Self {
            size: if has_planes { least.max(1) as usize } else { 1 },
            is_only_size: least == most,
        }
    }
}

/// The sum over the `size` units of a plane that a unit is among, a power of two, in each of them.
#[cube]
pub fn plane_total(value: f32, #[comptime] size: usize) -> f32 {
    let mut total = value;
    // A plane may have several such sums in it; and on CUDA `plane_sum` is a loop that is not
    // unrolled.
    #[unroll]
    for i in 0..comptime!(size.ilog2()) {
        total += plane_shuffle_xor(total, comptime!(1u32 << i));
    }
    total
}
