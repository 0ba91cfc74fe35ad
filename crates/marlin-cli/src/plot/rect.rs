//! Rectangles in pixels, and the search for free places for labels.

use super::RADIUS;

/// A rectangle in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rect {
    pub left: i32,
    pub top: i32,
    pub right: i32,
    pub bottom: i32,
}

impl Rect {
    pub fn corners(&self) -> [(i32, i32); 5] {
        let &Self {
            left,
            top,
            right,
            bottom,
        } = self;
        [
            (left, top),
            (right, top),
            (right, bottom),
            (left, bottom),
            (left, top),
        ]
    }

    pub fn overlaps(&self, other: &Self) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }

    #[cfg(test)]
    pub fn contains(&self, other: &Self) -> bool {
        self.left < other.left
            && other.right < self.right
            && self.top < other.top
            && other.bottom < self.bottom
    }

    fn nearest(&self, (x, y): (i32, i32)) -> (i32, i32) {
        (
            x.clamp(self.left, self.right),
            y.clamp(self.top, self.bottom),
        )
    }

    /// Returns true if a line has a point in the rectangle.
    fn is_crossed(&self, [from, to]: [(i32, i32); 2]) -> bool {
        const POINTS: i32 = 32;
        let between = |from: i32, to: i32, index: i32| from + (to - from) * index / POINTS;
        let mut points =
            (0..=POINTS).map(|index| (between(from.0, to.0, index), between(from.1, to.1, index)));
        points.any(|point| self.nearest(point) == point)
    }

    /// Returns the line from a point to the rectangle, or `None` if the point is close to the
    /// rectangle.
    pub fn line_from(&self, (x, y): (i32, i32)) -> Option<[(i32, i32); 2]> {
        let near = self.nearest((x, y));
        let distance = (near.0 - x).abs().max((near.1 - y).abs());
        (distance > 3 * RADIUS).then_some([(x, y), near])
    }
}

/// Finds a place for a label of the given size: in the frame, near the point with the bar `own`,
/// and clear of `own`, `line` and `others`. If possible, the line from the label to the point
/// crosses none of `others`.
pub(super) fn free_rect(
    (x, y): (i32, i32),
    (width, height): (i32, i32),
    frame: &Rect,
    own: &Rect,
    others: &[Rect],
    line: &Rect,
) -> Rect {
    /// The distance in pixels between the places that are tried.
    const STEP: usize = 4;
    let at = |left: i32, top: i32| Rect {
        left,
        top,
        right: left + width,
        bottom: top + height,
    };
    let beside = at(x + 2 * RADIUS, y - height / 2);
    // The candidates: directly beside the point, and every few pixels from there.
    let first = |from: i32, low: i32| low + 1 + (from - low - 1).rem_euclid(STEP as i32);
    let lefts = (first(beside.left, frame.left)..frame.right - width).step_by(STEP);
    let places = lefts.flat_map(|left| {
        (first(beside.top, frame.top)..frame.bottom - height)
            .step_by(STEP)
            .map(move |top| at(left, top))
    });
    let is_free = |rect: &Rect| {
        ![own, line]
            .into_iter()
            .chain(others)
            .any(|other| other.overlaps(rect))
    };
    // The cost is low for places near the point, level with the point or centred above or below it,
    // and to its right rather than its left.
    let cost = |rect: &Rect| {
        let (near_x, near_y) = rect.nearest((x, y));
        let distance = f64::from((near_x - x).pow(2) + (near_y - y).pow(2)).sqrt();
        let crooked = ((rect.left + rect.right) / 2 - x)
            .abs()
            .min(((rect.top + rect.bottom) / 2 - y).abs());
        let crosses = rect
            .line_from((x, y))
            .is_some_and(|line| others.iter().any(|other| other.is_crossed(line)));
        let far = if crosses { 100_000 } else { 0 };
        far + 10 * distance as i32 + crooked + if rect.left > x { 0 } else { 8 }
    };
    let in_frame = at(beside.left.min(frame.right - width - 1), beside.top);
    places.filter(is_free).min_by_key(cost).unwrap_or(in_frame)
}
