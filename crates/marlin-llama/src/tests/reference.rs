//! Llama's forward pass in f64, by plain loops over the tensors of a file, after the papers and Hugging Face's `modeling_llama.py`. It shares no
//! code with the model.

use std::f64::consts::PI;

use super::support::Weights;
use crate::LlamaConfig;

type Vector = Vec<f64>;

/// Logits of every position.
pub(crate) fn forward(config: &LlamaConfig, weights: &Weights, tokens: &[u32]) -> Vec<Vector> {
    let row = |name: &str, row: usize, width: usize| -> Vector {
        weights[name].1[row * width..(row + 1) * width].iter().map(|&value| f64::from(value)).collect()
    };
    let linear = |name: &str, x: &Vector| -> Vector {
        let (shape, values) = &weights[&format!("{name}.weight")];
        assert_eq!(shape[1], x.len(), "{name}");
        let bias = weights.get(&format!("{name}.bias"));
        let output = |n: usize| (0..x.len()).map(|k| f64::from(values[n * x.len() + k]) * x[k]).sum::<f64>();
        (0..shape[0]).map(|n| output(n) + bias.map_or(0.0, |(_, bias)| f64::from(bias[n]))).collect()
    };
    let norm = |name: &str, x: &Vector| -> Vector {
        let mean_square = x.iter().map(|value| value * value).sum::<f64>() / x.len() as f64;
        let weight = row(name, 0, x.len());
        x.iter().zip(weight).map(|(value, weight)| value / (mean_square + config.rms_norm_eps).sqrt() * weight).collect()
    };
    let add = |x: &mut Vector, y: Vector| x.iter_mut().zip(y).for_each(|(x, y)| *x += y);

    let (head_dim, group) = (config.head_dim, config.num_attention_heads / config.num_key_value_heads);
    let frequencies: Vector = (0..head_dim / 2).map(|i| frequency(config, i)).collect();
    let mut stream: Vec<Vector> =
        tokens.iter().map(|&token| row("model.embed_tokens.weight", token as usize, config.hidden_size)).collect();
    for layer in 0..config.num_hidden_layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let normed: Vec<Vector> = stream.iter().map(|x| norm(&name("input_layernorm.weight"), x)).collect();
        let project = |part: &str| -> Vec<Vector> { normed.iter().map(|x| linear(&name(part), x)).collect() };
        let (mut queries, mut keys, values) = (project("self_attn.q_proj"), project("self_attn.k_proj"), project("self_attn.v_proj"));
        for vectors in [&mut queries, &mut keys] {
            vectors.iter_mut().enumerate().for_each(|(position, x)| rotate(x, position, head_dim, &frequencies));
        }
        for position in 0..tokens.len() {
            let mut mixed = vec![0.0; config.num_attention_heads * head_dim];
            for head in 0..config.num_attention_heads {
                let (query, key) = (head * head_dim, head / group * head_dim);
                let score = |other: usize| -> f64 {
                    (0..head_dim).map(|i| queries[position][query + i] * keys[other][key + i]).sum::<f64>() / (head_dim as f64).sqrt()
                };
                let exponents: Vector = (0..=position).map(|other| score(other).exp()).collect();
                let sum: f64 = exponents.iter().sum();
                for (other, exponent) in exponents.iter().enumerate() {
                    for i in 0..head_dim {
                        mixed[query + i] += exponent / sum * values[other][key + i];
                    }
                }
            }
            add(&mut stream[position], linear(&name("self_attn.o_proj"), &mixed));
        }
        for x in &mut stream {
            let normed = norm(&name("post_attention_layernorm.weight"), x);
            let gate = linear(&name("mlp.gate_proj"), &normed);
            let up = linear(&name("mlp.up_proj"), &normed);
            let inner = gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            add(x, linear(&name("mlp.down_proj"), &inner));
        }
    }
    let head = if config.tie_word_embeddings { "model.embed_tokens" } else { "lm_head" };
    stream.iter().map(|x| linear(head, &norm("model.norm.weight", x))).collect()
}

/// Each head's x[i] + x[i + head_dim / 2] i, turned as a complex number.
fn rotate(x: &mut Vector, position: usize, head_dim: usize, frequencies: &[f64]) {
    for head in x.chunks_mut(head_dim) {
        for (i, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (real, imaginary) = (head[i], head[i + head_dim / 2]);
            head[i] = real * cos - imaginary * sin;
            head[i + head_dim / 2] = real * sin + imaginary * cos;
        }
    }
}

/// `_compute_llama3_parameters` of Hugging Face's `modeling_rope_utils.py`.
fn frequency(config: &LlamaConfig, i: usize) -> f64 {
    let frequency = 1.0 / config.rope_theta.powf((2 * i) as f64 / config.head_dim as f64);
    let Some(scaling) = &config.rope_scaling else { return frequency };
    let old_context = scaling.original_max_position_embeddings as f64;
    let wavelength = 2.0 * PI / frequency;
    if wavelength < old_context / scaling.high_freq_factor {
        frequency
    } else if wavelength > old_context / scaling.low_freq_factor {
        frequency / scaling.factor
    } else {
        let smooth = (old_context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
        (1.0 - smooth) * frequency / scaling.factor + smooth * frequency
    }
}
