//! Times each part of a decode step. A part is recorded for all layers as one graph.

use crate::BenchError;
use burn::tensor::{DType, Distribution, Tensor, capture};
use marlin_lm::Model;
use marlin_lm::model::{Block, FeedForward};
use marlin_nn::{self as decode, AttentionParts, LayerCache, SequenceState, SequenceStatus};
use std::time::Instant;

/// The number of timed replays.
const REPLAYS: usize = 20;

/// Prints the time of each part of a step with `rows` sequences at `position`, in microseconds, for
/// all layers and for one layer.
pub fn report(model: &Model, rows: usize, position: usize) -> Result<(), BenchError> {
    let (device, config) = (model.device(), model.config().clone());
    let layers = config.num_hidden_layers;
    let of = |features: usize| {
        Tensor::<2>::random(
            [rows, features],
            Distribution::Normal(0.0, 1.0),
            (&device, DType::F16),
        )
    };
    let (x, mixed, gated) = (
        of(config.hidden_size),
        of(config.query_size()),
        of(config.intermediate_size),
    );
    let qkv = of(config.query_size() + 2 * config.key_value_size());
    let mut state = decode::words([rows, SequenceState::WORDS], &device);
    let row = |slot: usize| SequenceState {
        status: SequenceStatus::At(position as u32),
        slot: slot as u32,
        ..SequenceState::IDLE
    };
    decode::write_rows(&mut state, 0, &(0..rows).map(row).collect::<Vec<_>>());
    let arrival_counters = decode::words([rows, config.num_attention_heads], &device);
    let half = config.rotary_dim() / 2;
    let table = || Tensor::<2>::ones([model.max_len(), half], (&device, DType::F32));
    let parts = AttentionParts {
        heads: config.num_attention_heads,
        rope: [table(), table()],
        norms: None,
        window: None,
        sinks: None,
    };
    let shape = [
        rows,
        config.num_key_value_heads,
        model.max_len(),
        config.head_dim,
    ];
    let mut caches: Vec<[Tensor<4>; 2]> = (0..layers)
        .map(|_| [(); 2].map(|()| decode::cache(shape, model.dtype(), &device)))
        .collect();
    let mut token_table = decode::words(
        [
            decode::TokenTable::row(rows, 0),
            decode::TokenTable::words(config.vocab_size),
        ],
        &device,
    );
    let logits = of(config.vocab_size);

    println!("    {:24} {:>10} {:>10}", "part", "us a step", "us a layer");
    let mut total = 0.0;
    let mut part = |name: &str,
                    count: usize,
                    body: &mut dyn FnMut() -> Vec<Tensor<2>>|
     -> Result<(), BenchError> {
        let mut graph = capture(&device, body);
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            for _ in 0..REPLAYS {
                // SAFETY: every buffer that the graph reads or writes lives to the end of this
                // function, and nothing else runs on the device.
                unsafe { graph.replay() };
            }
            device
                .sync()
                .map_err(|error| BenchError::Device(error.to_string()))?;
            best = best.min(start.elapsed().as_secs_f64() * 1e6 / REPLAYS as f64);
        }
        total += best;
        println!(
            "    {name:24} {best:>10.1} {:>10.2}{}",
            best / count as f64,
            if graph.is_hardware() {
                ""
            } else {
                " (no graph)"
            }
        );
        Ok(())
    };
    let layer =
        |body: &dyn Fn(&Block) -> Tensor<2>| model.layers.iter().map(body).collect::<Vec<_>>();
    part("norm and qkv", layers, &mut || {
        layer(&|layer| {
            layer
                .attention()
                .qkv_proj
                .forward_add_norm(x.clone(), x.clone(), &layer.mixer_norm)
                .0
        })
    })?;
    part("attention", layers, &mut || {
        caches
            .iter_mut()
            .map(|[keys, values]| {
                decode::attention(
                    qkv.clone(),
                    &state,
                    LayerCache {
                        keys,
                        values,
                        pages: None,
                        workspace: None,
                    },
                    &arrival_counters,
                    &parts,
                )
            })
            .collect()
    })?;
    part("o", layers, &mut || {
        layer(&|layer| layer.attention().o_proj.forward_joined(mixed.clone()))
    })?;
    part("norm, gate_up and SwiGLU, or router", layers, &mut || {
        layer(&|layer| match &layer.feed_forward {
            FeedForward::SwiGlu(mlp) => {
                let norm = &layer.feed_forward_norm;
                let gate_up = &mlp.gate_up_proj;
                gate_up.forward_add_norm(x.clone(), x.clone(), norm).0
            }
            FeedForward::Experts(mixture) => {
                let norm = &layer.feed_forward_norm;
                let router = &mixture.router;
                router.forward_with_norm(x.clone(), x.clone(), norm).0
            }
        })
    })?;
    // Those of the first mixture; without one they are not used.
    let mixture = model.layers.iter().find_map(Block::mixture);
    let router_logits = mixture.map_or(x.clone(), |mixture| mixture.router.forward(x.clone()));
    part("down, or experts", layers, &mut || {
        layer(&|layer| match &layer.feed_forward {
            FeedForward::SwiGlu(mlp) => mlp.down_proj.forward_joined(gated.clone()),
            FeedForward::Experts(mixture) => mixture.forward(x.clone(), router_logits.clone()),
        })
    })?;
    part("head", 1, &mut || vec![model.head(x.clone())])?;
    part("embedding", 1, &mut || {
        vec![decode::embed(model.embed_tokens.weight.val(), &state)]
    })?;
    part("sampling", 1, &mut || {
        // Every replay advances the rows by one position; with this `max_len`, no row reaches the
        // end of its window.
        decode::sample(
            logits.clone(),
            &mut state,
            &mut token_table,
            usize::MAX >> 33,
        );
        Vec::new()
    })?;
    println!("    {:24} {total:>10.1}", "together");
    Ok(())
}
