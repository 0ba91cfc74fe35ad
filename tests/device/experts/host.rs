//! The routing of tokens to experts on the host, in f64 and from the definition.

use marlin_kernels::experts::{Router, RouterScores};

/// The tables of a routing.
pub struct HostRouting {
    /// The experts of each token, the best first; of equal ones the first.
    pub experts: Vec<u32>,
    /// Their weights.
    pub weights: Vec<f64>,
    /// The row of each token's expert in the order of experts.
    pub places: Vec<u32>,
    /// The token of each row.
    pub tokens: Vec<u32>,
    /// The expert, first row and number of rows of each block.
    pub blocks: Vec<[u32; 3]>,
    /// The scores by which experts of each token are chosen, of all experts.
    scores: Vec<f64>,
    /// The values by which they are weighted.
    values: Vec<f64>,
    factor: f64,
    router: Router,
}

impl HostRouting {
    pub fn new(
        router: &Router,
        logits: &[f32],
        correction: Option<&[f32]>,
        factor: f32,
        block_rows: usize,
    ) -> Self {
        let Router { experts, top_k, .. } = *router;
        let mut of = Self {
            experts: Vec::new(),
            weights: Vec::new(),
            places: vec![0; logits.len() / experts * top_k],
            tokens: Vec::new(),
            blocks: Vec::new(),
            scores: Vec::new(),
            values: Vec::new(),
            factor: f64::from(factor),
            router: *router,
        };
        let mut choice = Vec::new();
        for logits in logits.chunks_exact(experts) {
            let values: Vec<f64> = match router.scores {
                RouterScores::Softmax => {
                    let most = logits.iter().copied().fold(f32::MIN, f32::max);
                    let powers = logits.iter().map(|logit| f64::from(logit - most).exp());
                    let powers: Vec<f64> = powers.collect();
                    let total: f64 = powers.iter().sum();
                    powers.iter().map(|power| power / total).collect()
                }
                RouterScores::Sigmoid => logits
                    .iter()
                    .map(|&logit| 1.0 / (1.0 + f64::from(-logit).exp()))
                    .collect(),
            };
            let score = |expert: usize| match router.scores {
                RouterScores::Softmax => f64::from(logits[expert]),
                RouterScores::Sigmoid => {
                    values[expert] + correction.map_or(0.0, |of| f64::from(of[expert]))
                }
            };
            let scores: Vec<f64> = (0..experts).map(score).collect();
            let mut order: Vec<usize> = (0..experts).collect();
            // The sort is stable, so that the first of equal experts comes first; -0 + 0 is 0.
            order.sort_by(|&a, &b| (scores[b] + 0.0).total_cmp(&(scores[a] + 0.0)));
            choice.extend(order[..top_k].iter().map(|&expert| expert as u32));
            of.scores.extend(scores);
            of.values.extend(values);
        }
        of.choose(choice, block_rows);
        of
    }

    /// Sets the experts of all tokens, weights them, sorts the rows by expert, and cuts them into
    /// blocks.
    pub fn choose(&mut self, experts: Vec<u32>, block_rows: usize) {
        let Router {
            top_k, normalises, ..
        } = self.router;
        let factor = self.factor;
        let tokens = experts
            .chunks_exact(top_k)
            .zip(self.values.chunks_exact(self.router.experts));
        self.weights = tokens
            .flat_map(|(chosen, values)| {
                let of = chosen.iter().map(|&expert| values[expert as usize]);
                let total: f64 = if normalises { of.clone().sum() } else { 1.0 };
                of.map(move |value| value / total * factor)
            })
            .collect();
        self.experts = experts;
        self.tokens.clear();
        self.blocks.clear();
        for expert in 0..self.router.experts as u32 {
            let first = self.tokens.len();
            for (row, _) in self
                .experts
                .iter()
                .enumerate()
                .filter(|(_, of_row)| **of_row == expert)
            {
                self.places[row] = self.tokens.len() as u32;
                self.tokens.push((row / self.router.top_k) as u32);
            }
            let end = self.tokens.len();
            let blocks = (first..end).step_by(block_rows).map(|at| {
                let rows = block_rows.min(end - at);
                [expert, at as u32, rows as u32]
            });
            self.blocks.extend(blocks);
        }
    }

    /// Checks that each chosen expert has the score of the host's choice of the same rank, to the
    /// rounding of scores in f32, and that no expert is chosen twice.
    pub fn assert_near(&self, found: &[u32], case: &str) {
        let Router { experts, top_k, .. } = self.router;
        let tokens = found
            .chunks_exact(top_k)
            .zip(self.experts.chunks_exact(top_k));
        for ((found, expected), scores) in tokens.zip(self.scores.chunks_exact(experts)) {
            for (found, expected) in found.iter().zip(expected) {
                let (found, expected) = (scores[*found as usize], scores[*expected as usize]);
                assert!(
                    (found - expected).abs() < 1e-6,
                    "{case}: an expert of score {found}, not {expected}"
                );
            }
            let mut distinct = found.to_vec();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), top_k, "{case}: {found:?}");
        }
    }
}
