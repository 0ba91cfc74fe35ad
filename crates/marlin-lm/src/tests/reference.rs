//! A reference forward pass in f64: plain loops over the tensors of a file. It follows the papers
//! and Hugging Face's `modeling_llama.py` and the files of other architectures. It shares no code
//! with the model: the tensors of a file decide what is computed.

use std::f64::consts::PI;
use std::ops::Range;

use super::support::Weights;
use crate::{ModelConfig, RopeScaling};

type Vector = Vec<f64>;

/// Returns the tensors of a file with the experts one by one, where one tensor has all of them: the
/// float weights [experts, K, N] of gpt-oss, whose gates and ups alternate.
pub(crate) fn one_by_one(weights: &Weights) -> Weights {
    let mut single = Weights::new();
    for (name, (shape, values)) in weights {
        let Some((experts, part)) = name.rsplit_once(".experts.") else {
            single.insert(name.clone(), (shape.clone(), values.clone()));
            continue;
        };
        let (stack, is_bias) = match part.strip_suffix("_bias") {
            Some(stack) => (stack, true),
            None => (part, false),
        };
        let layers: &[&str] = match stack {
            "gate_up_proj" => &["gate_proj", "up_proj"],
            "down_proj" => &["down_proj"],
            _ => {
                single.insert(name.clone(), (shape.clone(), values.clone()));
                continue;
            }
        };
        let n = shape[shape.len() - 1];
        let k = if is_bias { 1 } else { shape[1] };
        for expert in 0..shape[0] {
            let matrix = &values[expert * k * n..][..k * n];
            for (first, layer) in layers.iter().enumerate() {
                let columns = (first..n).step_by(layers.len());
                let of_layer: Vec<f32> = columns
                    .flat_map(|column| matrix[column..].iter().step_by(n).copied())
                    .collect();
                let name = format!("{experts}.experts.{expert}.{layer}");
                let rows = n / layers.len();
                match is_bias {
                    true => single.insert(format!("{name}.bias"), (vec![rows], of_layer)),
                    false => single.insert(format!("{name}.weight"), (vec![rows, k], of_layer)),
                };
            }
        }
    }
    single
}

/// Returns the logits of every position.
pub(crate) fn forward(config: &ModelConfig, weights: &Weights, tokens: &[u32]) -> Vec<Vector> {
    let weights = &one_by_one(weights);
    let row = |name: &str, row: usize, width: usize| -> Vector {
        weights[name].1[row * width..(row + 1) * width]
            .iter()
            .map(|&value| f64::from(value))
            .collect()
    };
    let linear = |name: &str, x: &Vector| -> Vector {
        let (shape, values) = &weights[&format!("{name}.weight")];
        assert_eq!(shape[1], x.len(), "{name}");
        let bias = weights.get(&format!("{name}.bias"));
        let output = |n: usize| {
            (0..x.len())
                .map(|k| f64::from(values[n * x.len() + k]) * x[k])
                .sum::<f64>()
        };
        (0..shape[0])
            .map(|n| output(n) + bias.map_or(0.0, |(_, bias)| f64::from(bias[n])))
            .collect()
    };
    let norm = |name: &str, x: &Vector| -> Vector {
        let mean_square = x.iter().map(|value| value * value).sum::<f64>() / x.len() as f64;
        let weight = row(name, 0, x.len());
        x.iter()
            .zip(weight)
            .map(|(value, weight)| value / (mean_square + config.rms_norm_eps).sqrt() * weight)
            .collect()
    };
    // The outputs of the layer `part`, or the columns of the joined layer `group` if the file has
    // it.
    let part_of =
        |layer: &str, group: &str, columns: Range<usize>, part: &str, x: &Vector| -> Vector {
            if weights.contains_key(&format!("{layer}.{group}.weight")) {
                linear(&format!("{layer}.{group}"), x)[columns].to_vec()
            } else {
                linear(&format!("{layer}.{part}"), x)
            }
        };
    let add = |x: &mut Vector, y: Vector| x.iter_mut().zip(y).for_each(|(x, y)| *x += y);

    let (head_dim, group) = (
        config.head_dim,
        config.num_attention_heads / config.num_key_value_heads,
    );
    let (query_size, key_size) = (
        config.num_attention_heads * head_dim,
        config.num_key_value_heads * head_dim,
    );
    let rotary_dim = (head_dim as f64 * config.partial_rotary_factor) as usize;
    let frequencies: Vector = (0..rotary_dim / 2)
        .map(|i| frequency(config, rotary_dim, i))
        .collect();
    let mut stream: Vec<Vector> = tokens
        .iter()
        .map(|&token| {
            row(
                "model.embed_tokens.weight",
                token as usize,
                config.hidden_size,
            )
        })
        .collect();
    for layer in 0..config.num_hidden_layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let normed: Vec<Vector> = stream
            .iter()
            .map(|x| norm(&name("input_layernorm.weight"), x))
            .collect();
        let project = |part: &str, columns: Range<usize>| -> Vec<Vector> {
            normed
                .iter()
                .map(|x| part_of(&name("self_attn"), "qkv_proj", columns.clone(), part, x))
                .collect()
        };
        let mut queries = project("q_proj", 0..query_size);
        let mut keys = project("k_proj", query_size..query_size + key_size);
        let values = project("v_proj", query_size + key_size..query_size + 2 * key_size);
        for (vectors, head_norm) in [
            (&mut queries, "self_attn.q_norm.weight"),
            (&mut keys, "self_attn.k_norm.weight"),
        ] {
            for (position, x) in vectors.iter_mut().enumerate() {
                if weights.contains_key(&name(head_norm)) {
                    *x = x
                        .chunks(head_dim)
                        .flat_map(|head| norm(&name(head_norm), &head.to_vec()))
                        .collect();
                }
                rotate(
                    x,
                    position,
                    head_dim,
                    &frequencies,
                    attention_factor(config),
                );
            }
        }
        let window = config
            .sliding_window
            .filter(|window| window.layers.contains(layer))
            .map_or(usize::MAX, |window| window.size);
        for position in 0..tokens.len() {
            let mut mixed = vec![0.0; config.num_attention_heads * head_dim];
            for head in 0..config.num_attention_heads {
                let (query, key) = (head * head_dim, head / group * head_dim);
                let score = |other: usize| -> f64 {
                    (0..head_dim)
                        .map(|i| queries[position][query + i] * keys[other][key + i])
                        .sum::<f64>()
                        / (head_dim as f64).sqrt()
                };
                let seen = (0..=position).filter(|other| position - other < window);
                let exponents: Vec<(usize, f64)> =
                    seen.map(|other| (other, score(other).exp())).collect();
                let sink = weights
                    .get(&name("self_attn.sinks"))
                    .map_or(0.0, |(_, sinks)| f64::from(sinks[head]).exp());
                let sum = exponents.iter().map(|(_, exponent)| exponent).sum::<f64>() + sink;
                for &(other, exponent) in &exponents {
                    for i in 0..head_dim {
                        mixed[query + i] += exponent / sum * values[other][key + i];
                    }
                }
            }
            add(
                &mut stream[position],
                linear(&name("self_attn.o_proj"), &mixed),
            );
        }
        for x in &mut stream {
            let normed = norm(&name("post_attention_layernorm.weight"), x);
            let swiglu = |[gate, up, down]: [&str; 3], x: &Vector| {
                let (gate, up) = (linear(&name(gate), x), linear(&name(up), x));
                let is_clamped = weights.contains_key(&name("mlp.router.weight"));
                let gated = gate.iter().zip(up).map(|(&g, up)| match is_clamped {
                    true => {
                        let (g, up) = (g.min(7.0), up.clamp(-7.0, 7.0));
                        g / (1.0 + (-1.702 * g).exp()) * (up + 1.0)
                    }
                    false => g / (1.0 + (-g).exp()) * up,
                });
                linear(&name(down), &gated.collect())
            };
            let sparse = [
                ("mlp", "gate"),
                ("mlp", "router"),
                ("block_sparse_moe", "gate"),
            ]
            .into_iter()
            .find(|(block, router)| {
                weights.contains_key(&name(&format!("{block}.{router}.weight")))
            });
            if let Some((block, router)) = sparse {
                let experts = config.experts.as_ref().unwrap();
                let scores = linear(&name(&format!("{block}.{router}")), &normed);
                let sum: f64 = scores.iter().map(|score| score.exp()).sum();
                let mut chosen: Vec<(usize, f64)> = scores
                    .iter()
                    .map(|score| score.exp() / sum)
                    .enumerate()
                    .collect();
                chosen.sort_by(|a, b| b.1.total_cmp(&a.1));
                chosen.truncate(experts.top_k);
                let total = match experts.normalises {
                    true => chosen.iter().map(|(_, weight)| weight).sum(),
                    false => 1.0,
                };
                for (expert, weight) in chosen {
                    let names = match block {
                        "mlp" => ["gate_proj", "up_proj", "down_proj"],
                        _ => ["w1", "w3", "w2"],
                    }
                    .map(|layer| format!("{block}.experts.{expert}.{layer}"));
                    let out = swiglu([&names[0], &names[1], &names[2]], &normed);
                    add(x, out.iter().map(|value| value * weight / total).collect());
                }
                if weights.contains_key(&name("mlp.shared_expert_gate.weight")) {
                    let gate = linear(&name("mlp.shared_expert_gate"), &normed)[0];
                    let names = [
                        "mlp.shared_expert.gate_proj",
                        "mlp.shared_expert.up_proj",
                        "mlp.shared_expert.down_proj",
                    ];
                    let out = swiglu(names, &normed);
                    add(
                        x,
                        out.iter()
                            .map(|value| value / (1.0 + (-gate).exp()))
                            .collect(),
                    );
                }
                continue;
            }
            let size = config.intermediate_size;
            let gate = part_of(&name("mlp"), "gate_up_proj", 0..size, "gate_proj", &normed);
            let up = part_of(
                &name("mlp"),
                "gate_up_proj",
                size..2 * size,
                "up_proj",
                &normed,
            );
            let inner = gate
                .iter()
                .zip(up)
                .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
                .collect();
            add(x, linear(&name("mlp.down_proj"), &inner));
        }
    }
    let head = if config.tie_word_embeddings {
        "model.embed_tokens"
    } else {
        "lm_head"
    };
    stream
        .iter()
        .map(|x| linear(head, &norm("model.norm.weight", x)))
        .collect()
}

/// Rotates and scales each head's x[i] + x[i + rotary_dim / 2] i as a complex number.
fn rotate(x: &mut Vector, position: usize, head_dim: usize, frequencies: &[f64], scale: f64) {
    for head in x.chunks_mut(head_dim) {
        for (i, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (real, imaginary) = (head[i], head[i + frequencies.len()]);
            head[i] = scale * (real * cos - imaginary * sin);
            head[i + frequencies.len()] = scale * (real * sin + imaginary * cos);
        }
    }
}

/// Returns rotary frequency `i`, for a model that is opened with all its positions. It is computed
/// as in `_compute_llama3_parameters`, `_compute_yarn_parameters` and
/// `_compute_longrope_parameters` of Hugging Face's `modeling_rope_utils.py`.
fn frequency(config: &ModelConfig, rotary_dim: usize, i: usize) -> f64 {
    let frequency = 1.0 / config.rope_theta.powf((2 * i) as f64 / rotary_dim as f64);
    match &config.rope_scaling {
        None => frequency,
        Some(RopeScaling::LongRope(scaling)) => {
            let long = config.max_position_embeddings > scaling.original_max_position_embeddings;
            frequency
                / if long {
                    scaling.long_factor[i]
                } else {
                    scaling.short_factor[i]
                }
        }
        Some(RopeScaling::Yarn(scaling)) => {
            let (dim, original) = (
                rotary_dim as f64,
                scaling.original_max_position_embeddings as f64,
            );
            let correction = |rotations: f64| {
                dim * (original / (rotations * 2.0 * PI)).ln() / (2.0 * config.rope_theta.ln())
            };
            let (mut low, mut high) =
                (correction(scaling.beta_fast), correction(scaling.beta_slow));
            if scaling.truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(dim - 1.0));
            if low == high {
                high += 0.001;
            }
            let extrapolated = 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            frequency / scaling.factor * (1.0 - extrapolated) + frequency * extrapolated
        }
        Some(RopeScaling::Llama3(scaling)) => {
            let old_context = scaling.original_max_position_embeddings as f64;
            let wavelength = 2.0 * PI / frequency;
            if wavelength < old_context / scaling.high_freq_factor {
                frequency
            } else if wavelength > old_context / scaling.low_freq_factor {
                frequency / scaling.factor
            } else {
                let smooth = (old_context / wavelength - scaling.low_freq_factor)
                    / (scaling.high_freq_factor - scaling.low_freq_factor);
                (1.0 - smooth) * frequency / scaling.factor + smooth * frequency
            }
        }
    }
}

fn attention_factor(config: &ModelConfig) -> f64 {
    match &config.rope_scaling {
        Some(RopeScaling::Yarn(scaling)) => {
            let mscale = |scale: f64| {
                if scaling.factor <= 1.0 {
                    1.0
                } else {
                    0.1 * scale * scaling.factor.ln() + 1.0
                }
            };
            let computed = match (scaling.mscale, scaling.mscale_all_dim) {
                (Some(scale), Some(all_dim)) if scale != 0.0 && all_dim != 0.0 => {
                    mscale(scale) / mscale(all_dim)
                }
                _ => mscale(1.0),
            };
            scaling.attention_factor.unwrap_or(computed)
        }
        Some(RopeScaling::LongRope(scaling)) => {
            let original = scaling.original_max_position_embeddings as f64;
            let factor = scaling
                .factor
                .unwrap_or(config.max_position_embeddings as f64 / original);
            let computed = if factor <= 1.0 {
                1.0
            } else {
                (1.0 + factor.ln() / original.ln()).sqrt()
            };
            scaling.attention_factor.unwrap_or(computed)
        }
        Some(RopeScaling::Llama3(_)) | None => 1.0,
    }
}
