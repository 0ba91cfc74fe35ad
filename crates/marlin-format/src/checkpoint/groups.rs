//! Act-order: the group of each row in a file, and the row permutation that sorts rows by group.

use crate::GroupSize;
use crate::checkpoint::{CheckpointError, TensorView};

/// Returns the stable permutation that sorts the rows of a `g_idx` tensor by group. Returns `None`
/// if the rows are already sorted or a single group spans all of K. Also returns `None` if all
/// entries are -1, which stands for an absent `g_idx`.
pub(super) fn row_permutation(
    tensor: &TensorView<'_>,
    group: GroupSize,
) -> Result<Option<Vec<u32>>, CheckpointError> {
    let index = tensor.to_i32()?;
    let k = index.len();
    let (rows, groups) = (group.rows(k), group.count(k));
    if group == GroupSize::Channel || index.iter().all(|&group| group == -1) {
        return Ok(None);
    }
    let mut counts = vec![0usize; groups];
    for (row, &group) in index.iter().enumerate() {
        match usize::try_from(group)
            .ok()
            .and_then(|group| counts.get_mut(group))
        {
            Some(count) => *count += 1,
            None => {
                return Err(tensor.bad_values(format!(
                    "row {row} is in group {group}, but there are {groups} groups"
                )));
            }
        }
    }
    // Stored row `i` is in group `i / rows`, so only the last group can be incomplete.
    let expected = |group: usize| rows.min(k - group * rows);
    if let Some((group, count)) = counts
        .iter()
        .enumerate()
        .find(|&(group, &count)| count != expected(group))
    {
        let expected = expected(group);
        return Err(tensor.bad_values(format!(
            "group {group} has {count} rows; of K = {k} in groups of {rows} it must have {expected}"
        )));
    }
    if index.is_sorted() {
        return Ok(None);
    }
    let mut permutation: Vec<u32> = (0..k as u32).collect();
    permutation.sort_by_key(|&row| index[row as usize]);
    Ok(Some(permutation))
}

/// Returns the group of each natural row, `[K]`.
pub(super) fn group_index(permutation: &[u32], group: GroupSize) -> Vec<i32> {
    let rows = group.rows(permutation.len());
    let mut index = vec![0; permutation.len()];
    for (stored, &natural) in permutation.iter().enumerate() {
        index[natural as usize] = (stored / rows) as i32;
    }
    index
}
