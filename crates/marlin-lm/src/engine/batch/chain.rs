//! The rows of the last decode step, which the next one continues on the device.

/// The rows of a decode step on the device: a power of two.
#[derive(Debug)]
pub(super) struct Chain {
    rows: Vec<Row>,
    /// True if the step computes log probabilities.
    pub logprobs: bool,
}

/// A row on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    /// The row is idle.
    Idle,
    /// The row has the next token of the sequence of a slot.
    Slot(usize),
    /// The row has the next token of a sequence that no longer continues.
    Stale,
}

/// The rows of the next decode step.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Next {
    /// The number of rows on the device.
    pub size: usize,
    /// The row of each wanted slot.
    pub rows: Vec<usize>,
    /// The rows that are written anew, each with the index of its wanted slot; `None` for a row
    /// that becomes idle.
    pub replaced: Vec<(usize, Option<usize>)>,
}

impl Chain {
    /// Returns the rows of a step of these slots, in their order.
    pub(super) fn new(slots: &[usize], logprobs: bool) -> Self {
        let mut rows: Vec<Row> = slots.iter().map(|&slot| Row::Slot(slot)).collect();
        rows.resize(slots.len().next_power_of_two(), Row::Idle);
        Self { rows, logprobs }
    }

    /// Forgets the sequence of a slot.
    pub(super) fn remove(&mut self, slot: usize) {
        for row in &mut self.rows {
            if *row == Row::Slot(slot) {
                *row = Row::Stale;
            }
        }
    }

    /// Returns the rows of the next step, of slots with a flag that is true if the host knows the
    /// slot's token; `None`, and changes nothing, if a token that the host does not know is not on
    /// the device, or if the step needs another number of rows on the device.
    pub(super) fn next(&mut self, wanted: &[(usize, bool)]) -> Option<Next> {
        let size = self.rows.len();
        if wanted.len().next_power_of_two() != size {
            return None;
        }
        let place = |slot: usize| self.rows.iter().position(|&row| row == Row::Slot(slot));
        let places: Vec<Option<usize>> = wanted.iter().map(|&(slot, _)| place(slot)).collect();
        let is_lost = |(place, &(_, is_known)): (&Option<usize>, &(usize, bool))| {
            place.is_none() && !is_known
        };
        if places.iter().zip(wanted).any(is_lost) {
            return None;
        }
        for (index, row) in self.rows.iter_mut().enumerate() {
            if matches!(row, Row::Slot(_)) && !places.contains(&Some(index)) {
                *row = Row::Stale;
            }
        }
        let mut replaced = Vec::new();
        // Rows that have to be written anyway come first.
        let mut free: Vec<usize> = (0..size).filter(|&i| self.rows[i] == Row::Idle).collect();
        free.extend((0..size).filter(|&index| self.rows[index] == Row::Stale));
        let mut rows = Vec::with_capacity(wanted.len());
        for (index, (&(slot, _), place)) in wanted.iter().zip(places).enumerate() {
            let place = place.or_else(|| {
                let place = free.pop()?;
                replaced.push((place, Some(index)));
                Some(place)
            })?;
            self.rows[place] = Row::Slot(slot);
            rows.push(place);
        }
        for (index, row) in self.rows.iter_mut().enumerate() {
            if *row == Row::Stale {
                *row = Row::Idle;
                replaced.push((index, None));
            }
        }
        Some(Next {
            size,
            rows,
            replaced,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_stays_where_it_is_and_new_ones_take_free_rows() {
        let mut chain = Chain::new(&[5, 3, 8], false);
        // All continue.
        let all = [(3, false), (5, true), (8, false)];
        let next = chain.next(&all).unwrap();
        assert_eq!((next.size, next.rows), (4, vec![1, 0, 2]));
        assert_eq!(next.replaced, []);
        // Slot 3 ends, slot 1 begins in its row.
        chain.remove(3);
        let next = chain.next(&[(5, false), (1, true), (8, false)]).unwrap();
        assert_eq!(next.rows, [0, 1, 2]);
        assert_eq!(next.replaced, [(1, Some(1))]);
        // Slot 5 does not continue, and its row becomes idle; slot 9 takes another.
        let next = chain.next(&[(8, false), (1, false), (9, true)]).unwrap();
        assert_eq!(
            (next.rows, next.replaced),
            (vec![2, 1, 0], vec![(0, Some(2))])
        );
        let next = chain.next(&[(8, false), (1, false), (9, false), (2, true)]);
        assert_eq!(next.unwrap().replaced, [(3, Some(3))]);
        let next = chain.next(&[(8, false), (1, false), (2, false)]).unwrap();
        assert_eq!(next.replaced, [(0, None)]);
    }

    #[test]
    fn unknown_tokens_and_other_sizes_are_not_continued() {
        let mut chain = Chain::new(&[0, 1, 2], false);
        assert_eq!(chain.next(&[(0, false), (1, false), (4, false)]), None);
        assert_eq!(chain.next(&[(0, false), (1, false)]), None);
        chain.remove(2);
        assert_eq!(chain.next(&[(0, false), (1, false), (2, false)]), None);
        assert!(chain.next(&[(0, false), (1, false), (2, true)]).is_some());
    }
}
