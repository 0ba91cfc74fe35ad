//! Sums by bin in shared memory, and the search for the bin at which the cumulative sum reaches a
//! target.

use super::TOKEN_BITS;
use super::floats::SharedValues;
use cubecl::prelude::*;

/// The number of bits of a token's place that a turn of a search finds.
pub(super) const DIGIT_BITS: usize = 9;
/// The number of bins: one for each value of [`DIGIT_BITS`] bits.
pub(super) const BINS: usize = 1 << DIGIT_BITS;

/// The number of values that a search stores in shared memory.
pub(super) const FOUND: usize = 3;
/// The number of bits of a limb of a sum, for shader compilers. The sum of 2^[`TOKEN_BITS`] limbs
/// fits into 32 bits without a carry.
const LIMB_BITS: u64 = 32 - TOKEN_BITS as u64;
/// The mask of the bits of a limb.
const LIMB: u64 = (1 << LIMB_BITS) - 1;

/// 64-bit sums by bin, and the bin in which a search ends.
///
/// A sum is stored in 32-bit words, because 64-bit atomics in shared memory are slow: in two words
/// with a carry, or, for a shader compiler ([`Floats`](super::floats::Floats)), in three words
/// without a carry. With carries, Vulkan on an H200 kept fewer tokens for top-p than the host.
#[derive(CubeType)]
pub(super) struct Bins {
    low: Shared<[Atomic<u32>]>,
    middle: Shared<[Atomic<u32>]>,
    high: Shared<[Atomic<u32>]>,
    /// The bin, the sum of the bins before it, and the sum through it.
    found: SharedValues,
    #[cube(comptime)]
    is_shader: bool,
}

/// The bin in which a search ends, and its cumulative sums.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Found {
    pub bin: u64,
    pub before: u64,
    pub through: u64,
    /// The sum of all bins.
    pub total: u64,
}

#[cube]
impl Bins {
    /// Allocates bins with undefined sums. [`clear`](Self::clear) must be called before the first
    /// use.
    pub fn new(#[comptime] is_shader: bool) -> Self {
        Bins {
            low: Shared::<[Atomic<u32>]>::new_slice(BINS),
            middle: Shared::<[Atomic<u32>]>::new_slice(comptime!(if is_shader { BINS } else { 1 })),
            high: Shared::<[Atomic<u32>]>::new_slice(BINS),
            found: SharedValues::new(FOUND, is_shader),
            is_shader,
        }
    }

    /// Sets all sums to 0. All units of the cube must call this function.
    pub fn clear(&self, #[comptime] units: usize) {
        for turn in 0..comptime!(BINS / units) {
            let bin = turn * units + UNIT_POS_X as usize;
            self.low[bin].store(0u32);
            self.high[bin].store(0u32);
            if comptime!(self.is_shader) {
                self.middle[bin].store(0u32);
            }
        }
        sync_cube();
    }

    /// Adds a value to the sum of a bin.
    pub fn add(&self, bin: u64, value: u64) {
        let bin = bin as usize;
        if comptime!(self.is_shader) {
            self.low[bin].fetch_add(u32::cast_from(value & LIMB));
            if value > LIMB {
                self.middle[bin].fetch_add(u32::cast_from((value >> LIMB_BITS) & LIMB));
                self.high[bin].fetch_add(u32::cast_from(value >> comptime!(2 * LIMB_BITS)));
            }
        } else {
            let low = u32::cast_from(value);
            let sum = self.low[bin].fetch_add(low) + low;
            let mut high = u32::cast_from(value >> 32);
            // The low word has overflowed.
            if sum < low {
                high += 1;
            }
            if high > 0 {
                self.high[bin].fetch_add(high);
            }
        }
    }

    fn get(&self, bin: usize) -> u64 {
        let (low, high) = (
            u64::cast_from(self.low[bin].load()),
            u64::cast_from(self.high[bin].load()),
        );
        if comptime!(self.is_shader) {
            low + (u64::cast_from(self.middle[bin].load()) << LIMB_BITS)
                + (high << comptime!(2 * LIMB_BITS))
        } else {
            (high << 32) | low
        }
    }

    /// Returns the bin at which the cumulative sum reaches `target`, or reaches the total if the
    /// total is less than `target`. At least one sum must be above 0.
    pub fn find(
        &mut self,
        target: u64,
        sums: &mut SharedValues,
        #[comptime] units: usize,
    ) -> Found {
        sync_cube();
        let each = comptime!(BINS / units);
        let first = UNIT_POS_X as usize * each;
        let mut own = 0u64.runtime();
        for i in 0..each {
            own += self.get(first + i);
        }
        let (through, total) = prefix_sum(own, sums, units);
        let target = min(target, total);
        if through >= target && through - own < target {
            let mut bin = first;
            let mut before = through - own;
            let mut sum = before + self.get(bin);
            while sum < target {
                bin += 1;
                before = sum;
                sum += self.get(bin);
            }
            self.found.set(0usize, bin as u64);
            self.found.set(1usize, before);
            self.found.set(2usize, sum);
        }
        sync_cube();
        Found {
            bin: self.found.get(0usize),
            before: self.found.get(1usize),
            through: self.found.get(2usize),
            total,
        }
    }
}

/// Returns the sum of the values of all units up to this one, and the sum of the values of all
/// units. `sums` holds two values per unit.
#[cube]
pub(super) fn prefix_sum(
    value: u64,
    sums: &mut SharedValues,
    #[comptime] units: usize,
) -> (u64, u64) {
    let unit = UNIT_POS_X as usize;
    let mut sum = value;
    // Every turn reads one half of `sums` and writes the other half.
    let mut half = 0usize.runtime();
    sums.set(unit, sum);
    sync_cube();
    let mut distance = 1usize.runtime();
    while distance < units {
        if unit >= distance {
            sum += sums.get(half + unit - distance);
        }
        half = comptime!(units).runtime() - half;
        sums.set(half + unit, sum);
        sync_cube();
        distance *= 2;
    }
    let total = sums.get(half + comptime!(units - 1));
    (sum, total)
}
