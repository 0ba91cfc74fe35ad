//! Products of rows by the matrices of their experts.

use super::*;
use crate::experts::host::multiply;

/// Checks rows that go to experts in no order: an expert of none, of one and of many rows.
#[test]
fn rows_of_experts_are_multiplied_by_their_matrices() {
    let seed = seed();
    let rng = &mut StdRng::seed_from_u64(seed);
    let experts = [4, 1, 0, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 4];
    let (rows, n, k, count) = (experts.len(), 33, 200, 5);
    for (spec, permuted) in specs()
        .into_iter()
        .flat_map(|spec| [(spec, false), (spec, true)])
    {
        let mut case = || Case::random(rows, n, k, spec, permuted, rng);
        let cases: Vec<Case> = (0..count).map(|_| case()).collect();
        let all = |words: fn(&Case) -> Option<&[u32]>| -> Option<Vec<u32>> {
            let words: Option<Vec<&[u32]>> = cases.iter().map(words).collect();
            words.map(|words| words.concat())
        };
        let words = all(|case| Some(&case.words)).unwrap();
        let scales: Vec<f16> = cases
            .iter()
            .flat_map(|case| &case.scales)
            .copied()
            .collect();
        let zero_points = all(|case| case.zero_points.as_deref());
        let permutation = all(|case| case.permutation.as_deref());
        let bias: Vec<f32> = cases.iter().flat_map(|case| &case.bias).copied().collect();
        let weight = HostWeight {
            words: &words,
            scales: Floats::F16(&scales),
            zero_points: zero_points.as_deref(),
            row_permutation: permutation.as_deref(),
        };
        let problem = QuantProblem {
            weight: cases[0].problem.weight.with_experts(count),
            ..cases[0].problem
        };
        let x = &cases[0].x;
        let found = multiply(&problem, x, &experts, weight, Some(&bias));
        let found = found.unwrap();
        for (row, expert) in experts.into_iter().enumerate() {
            let of_expert = &cases[expert as usize];
            let of_row = Case {
                problem: QuantProblem {
                    m: 1,
                    ..of_expert.problem
                },
                words: Vec::new(),
                scales: Vec::new(),
                zero_points: None,
                permutation: None,
                x: x[row * k..][..k].to_vec(),
                bias: of_expert.bias.clone(),
                natural: of_expert.natural.clone(),
                terms: of_expert.terms.clone(),
            };
            let error = of_row.error(&found[row * n..][..n]);
            assert!(error < 1e-5, "{problem}, row {row}, seed {seed}: {error:e}");
        }
        let refused = multiply(&problem, x, &[5; 14], weight, None);
        assert!(matches!(refused, Err(KernelError::Outside { end: 6, .. })));
        let refused = multiply(&problem, x, &experts, weight, Some(&[0.0]));
        assert!(matches!(refused, Err(KernelError::BufferLength { .. })));
    }
}
