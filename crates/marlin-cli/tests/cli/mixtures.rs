//! Tests of the commands on mixtures of experts.

use serde_json::{Value, json};

use crate::support::{Folder, args, calibrated, heldout, read_json, succeed, succeed_json};

/// The line about the mixture's experts.
const EXPERTS: &str = "6 experts a layer, 2 active";

/// Creates a random Qwen3-MoE of two layers.
fn mixture() -> Folder {
    Folder::with_config(json!({
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "norm_topk_prob": true,
    }))
}

#[test]
fn inspect_kernels_and_advise_say_how_many_experts_are_active() {
    let folder = mixture();
    let inspected = succeed(&args!["inspect", &folder.source, "--device", "flex"]);
    assert!(inspected.contains(EXPERTS), "{inspected}");

    succeed(&args!["quantize", &folder.source, &folder.target]);
    let kernels = args!["kernels", &folder.target, "--device", "flex", "--rows", "3"];
    let printed = succeed(&kernels);
    assert!(printed.contains(EXPERTS), "{printed}");
    let json = succeed_json(&[&kernels[..], &args!["--json"]].concat());
    let of_experts: Vec<[&Value; 4]> = json
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["layer"].as_str().unwrap().contains(".experts."))
        .map(|row| [&row["matrices"], &row["rows"], &row["k"], &row["n"]])
        .collect();
    // Two experts of each of three tokens, in each of two layers: gates and ups, and down.
    let expected = [[6, 6, 256, 2 * 128], [6, 6, 128, 256]].map(|row| row.map(Value::from));
    assert_eq!(of_experts.len(), 4, "{json}");
    for expected in &expected {
        let found = of_experts.iter().filter(|row| **row == expected.each_ref());
        assert_eq!(found.count(), 2, "{expected:?} in {json}");
    }

    let advise = args!["advise", &folder.source, "--card", "h200", "--prompt", "8"];
    let printed = succeed(&advise);
    assert!(printed.contains(EXPERTS), "{printed}");
    let json = succeed_json(&[&advise[..], &args!["--json"]].concat());
    let expected = json!({ "experts": 6, "active": 2, "shared": false });
    assert_eq!(json["experts"], expected);
}

/// Other readers quantise every linear layer that the config does not name.
#[test]
fn the_config_names_the_routers_as_float() {
    let folder = mixture();
    succeed(&args!["quantize", &folder.source, &folder.target]);
    let config = read_json(&folder.target.join("config.json"));
    assert_eq!(
        config["quantization_config"]["ignore"],
        json!([
            "lm_head",
            "model.layers.0.mlp.gate",
            "model.layers.1.mlp.gate"
        ])
    );
}

#[test]
fn experts_with_few_tokens_are_rounded_and_listed_unless_all_tokens_are_routed_to_them() {
    let folder = mixture();
    let quantize = |name: &str, more: &[&str]| {
        let target = folder.beside(name);
        let mut args = calibrated(&folder.source, &target, &heldout(), 4, 64);
        args.extend(args!["--method", "gptq"]);
        args.extend(more.iter().map(std::ffi::OsString::from));
        succeed(&args)
    };
    // 512 routes for six experts: 85 each, fewer than the 128 that calibration takes.
    let listed = |printed: &str| printed.matches("rounded: too few tokens").count();
    let routed = quantize("routed", &[]);
    assert!(listed(&routed) > 0, "{routed}");
    let all = quantize("all", &["--route-all"]);
    assert_eq!(listed(&all), 0, "{all}");
}
