//! The tiles that a batch of prompts is divided into.

use crate::kernels::{Row, RowState};

/// Most tokens of a tile.
pub const TILE_ROWS: usize = 128;
/// Words of a tile: the first of its rows, and their number.
pub const TILE_WORDS: usize = 2;

/// The tiles of rows of prompts, `count` times [`TILE_WORDS`] words: runs of up to [`TILE_ROWS`]
/// rows of one slot at consecutive positions, those that attend to the most positions first. Idle
/// rows are in no tile; tiles that are not needed have no rows.
///
/// # Panics
/// Panics if there are more tiles than `count`. [`most_tiles`] are always enough.
pub fn tiles(rows: &[Row], count: usize) -> Vec<i32> {
    let mut tiles: Vec<(u32, [i32; TILE_WORDS])> = Vec::new();
    let mut next = None;
    for (index, row) in rows.iter().enumerate() {
        let RowState::At(position) = row.state else {
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

/// The most tiles that `rows` rows of up to `sequences` sequences have.
pub fn most_tiles(rows: usize, sequences: usize) -> usize {
    let sequences = sequences.min(rows);
    (rows - sequences) / TILE_ROWS + sequences
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(slot: u32, start: u32, tokens: u32) -> impl Iterator<Item = Row> {
        (start..start + tokens).map(move |position| Row {
            state: RowState::At(position),
            slot,
            ..Row::IDLE
        })
    }

    #[test]
    fn every_row_is_in_one_tile() {
        let idle = [Row::IDLE; 3];
        let rows: Vec<Row> = run(0, 5, 128)
            .chain(run(1, 0, 129))
            .chain(run(2, 0, 1))
            .chain(idle)
            .chain(run(2, 1, 1))
            .chain(run(2, 7, 257))
            .collect();
        // Full tiles and fewer rows, a sequence that goes on after idle rows, and after a jump.
        let most = most_tiles(rows.len(), 5);
        let found = tiles(&rows, most);
        assert_eq!(found.len(), most * TILE_WORDS);
        let mut covered = vec![0; rows.len()];
        for tile in found.chunks_exact(TILE_WORDS) {
            let (first, length) = (tile[0] as usize, tile[1] as usize);
            assert!(length <= TILE_ROWS);
            for (offset, row) in rows[first..first + length].iter().enumerate() {
                covered[first + offset] += 1;
                let RowState::At(start) = rows[first].state else {
                    panic!("an idle row in a tile")
                };
                assert_eq!(
                    (row.state, row.slot),
                    (RowState::At(start + offset as u32), rows[first].slot)
                );
            }
        }
        let expected: Vec<i32> = rows
            .iter()
            .map(|row| i32::from(row.state != RowState::Idle))
            .collect();
        assert_eq!(covered, expected);
        let ends: Vec<u32> = found
            .chunks_exact(TILE_WORDS)
            .filter(|tile| tile[1] > 0)
            .map(|tile| last(&rows, tile))
            .collect();
        assert!(ends.is_sorted_by(|a, b| a >= b), "{ends:?}");
    }

    fn last(rows: &[Row], tile: &[i32]) -> u32 {
        match rows[(tile[0] + tile[1] - 1) as usize].state {
            RowState::At(position) => position,
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
                // The worst division: all sequences but one have one row more than full tiles.
                let lengths = (0..sequences).map(|i| {
                    if i + 1 < sequences {
                        1
                    } else {
                        rows + 1 - sequences
                    }
                });
                let batch: Vec<Row> = lengths
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
