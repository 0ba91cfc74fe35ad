//! The division of a batch of prompts into tiles.

use crate::kernels::{SequenceState, SequenceStatus};

/// The maximum number of tokens of a tile.
pub const TILE_ROWS: usize = 128;
/// The number of words of a tile: the index of its first row, and its number of rows.
pub const TILE_WORDS: usize = 2;

/// Returns the tiles of rows of prompts, as `count` times [`TILE_WORDS`] words. A tile is a run of
/// up to [`TILE_ROWS`] rows of one slot at consecutive positions. The tiles that attend to the most
/// positions come first. Idle rows are in no tile, and tiles that are not needed have no rows.
///
/// # Panics
/// Panics if there are more tiles than `count`. [`most_tiles`] tiles are always enough.
pub fn tiles(rows: &[SequenceState], count: usize) -> Vec<i32> {
    let mut tiles: Vec<(u32, [i32; TILE_WORDS])> = Vec::new();
    let mut next = None;
    for (index, row) in rows.iter().enumerate() {
        let SequenceStatus::At(position) = row.status else {
            next = None;
            continue;
        };
        match tiles.last_mut() {
            Some((end, [_, length]))
                if next == Some((row.slot, position)) && (*length as usize) < TILE_ROWS =>
            {
                (*end, *length) = (position, *length + 1);
            }
            _ => tiles.push((position, [index as i32, 1])),
        }
        next = Some((row.slot, position + 1));
    }
    assert!(
        tiles.len() <= count,
        "{} tiles where there is room for {count}",
        tiles.len()
    );
    tiles.sort_by_key(|&(end, _)| std::cmp::Reverse(end));
    tiles.resize(count, (0, [0; TILE_WORDS]));
    tiles.into_iter().flat_map(|(_, tile)| tile).collect()
}

/// Returns the maximum number of tiles of `rows` rows of up to `sequences` sequences.
pub fn most_tiles(rows: usize, sequences: usize) -> usize {
    let sequences = sequences.min(rows);
    (rows - sequences) / TILE_ROWS + sequences
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(slot: u32, start: u32, tokens: u32) -> impl Iterator<Item = SequenceState> {
        (start..start + tokens).map(move |position| SequenceState {
            status: SequenceStatus::At(position),
            slot,
            ..SequenceState::IDLE
        })
    }

    #[test]
    fn every_row_is_in_one_tile() {
        let idle = [SequenceState::IDLE; 3];
        let rows: Vec<SequenceState> = run(0, 5, 128)
            .chain(run(1, 0, 129))
            .chain(run(2, 0, 1))
            .chain(idle)
            .chain(run(2, 1, 1))
            .chain(run(2, 7, 257))
            .collect();
        // The batch has full tiles, smaller tiles, a sequence that continues after idle rows, and
        // one that continues after a gap in its positions.
        let most = most_tiles(rows.len(), 5);
        let found = tiles(&rows, most);
        assert_eq!(found.len(), most * TILE_WORDS);
        let mut covered = vec![0; rows.len()];
        for tile in found.chunks_exact(TILE_WORDS) {
            let (first, length) = (tile[0] as usize, tile[1] as usize);
            assert!(length <= TILE_ROWS);
            for (offset, row) in rows[first..first + length].iter().enumerate() {
                covered[first + offset] += 1;
                let SequenceStatus::At(start) = rows[first].status else {
                    panic!("an idle row in a tile")
                };
                assert_eq!(
                    (row.status, row.slot),
                    (SequenceStatus::At(start + offset as u32), rows[first].slot)
                );
            }
        }
        let expected: Vec<i32> = rows
            .iter()
            .map(|row| i32::from(row.status != SequenceStatus::Idle))
            .collect();
        assert_eq!(covered, expected);
        let ends: Vec<u32> = found
            .chunks_exact(TILE_WORDS)
            .filter(|tile| tile[1] > 0)
            .map(|tile| last(&rows, tile))
            .collect();
        assert!(ends.is_sorted_by(|a, b| a >= b), "{ends:?}");
    }

    fn last(rows: &[SequenceState], tile: &[i32]) -> u32 {
        match rows[(tile[0] + tile[1] - 1) as usize].status {
            SequenceStatus::At(position) => position,
            state => panic!("{state:?} in a tile"),
        }
    }

    #[test]
    fn there_is_room_for_every_batch() {
        assert_eq!(
            [
                most_tiles(128, 1),
                most_tiles(128, 2),
                most_tiles(512, 1),
                most_tiles(4, 16),
                most_tiles(1, 1)
            ],
            [1, 2, 4, 4, 1]
        );
        for sequences in 1..9usize {
            for rows in sequences..300 {
                // The worst division: all sequences but the last have one row.
                let lengths = (0..sequences).map(|i| {
                    if i + 1 < sequences {
                        1
                    } else {
                        rows + 1 - sequences
                    }
                });
                let batch: Vec<SequenceState> = lengths
                    .enumerate()
                    .flat_map(|(slot, tokens)| run(slot as u32, 0, tokens as u32))
                    .collect();
                assert_eq!(
                    tiles(&batch, most_tiles(rows, sequences)).len(),
                    most_tiles(rows, sequences) * TILE_WORDS
                );
            }
        }
    }
}
