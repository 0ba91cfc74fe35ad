//! Plane sizes of a device, and sums over planes.

use cubecl::client::Client;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

/// The plane sizes on which a kernel can rely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Planes {
    /// The smallest plane size of the device: this many units are in one plane whichever plane size
    /// the device chooses. 1 if the units of a plane cannot exchange values.
    pub size: usize,
    /// True if all planes of the device have this size.
    pub is_only_size: bool,
}

impl Planes {
    /// The planes of an NVIDIA card.
    #[cfg(feature = "cuda")]
    pub const NVIDIA: Self = Self {
        size: 32,
        is_only_size: true,
    };

    /// Returns the planes of a client's device.
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

/// Returns, in every unit, the sum of `value` over the unit's aligned run of `size` units of a
/// plane. `size` is a power of two.
#[cube]
pub fn plane_total(value: f32, #[comptime] size: usize) -> f32 {
    let mut total = value;
    // This is not `plane_sum`, because a plane may have several such runs, and because on CUDA
    // `plane_sum` is a loop that is not unrolled.
    #[unroll]
    for i in 0..comptime!(size.ilog2()) {
        total += plane_shuffle_xor(total, comptime!(1u32 << i));
    }
    total
}
