use marlin_format::checkpoint::compressed_tensors::QuantizationConfig;
use marlin_format::checkpoint::{ConfigError, LayerFormat, PackQuantizedFormat, Quantization};
use marlin_format::{GroupSize, QuantSpec, ScaleDtype};
use serde_json::{Value, json};

use crate::common::all_specs;

#[test]
fn configs_come_back() {
    for spec in all_specs() {
        for act_order in [false, true] {
            let ignore = vec!["lm_head".to_string(), "re:vision.*".to_string()];
            let config = QuantizationConfig::new(spec, ignore)
                .unwrap()
                .with_act_order(act_order);
            let text = json!({ "quantization_config": config.to_json() }).to_string();
            let read = Quantization::from_config(text.as_bytes()).unwrap().unwrap();
            // No config has the scale dtype.
            // No version of the package opens act-order with one group a channel.
            let act_order = act_order && spec.scales.group != GroupSize::Channel;
            let expected = LayerFormat::PackQuantized(PackQuantizedFormat {
                spec: spec.with_scale_dtype(ScaleDtype::F16),
                act_order,
            });
            assert_eq!(read.layer("model.layers.0.mlp.up_proj").unwrap(), expected);
            for ignored in ["lm_head", "vision.layers.0.fc1"] {
                assert_eq!(
                    read.layer(ignored).unwrap(),
                    LayerFormat::Float,
                    "{ignored}"
                );
            }
        }
    }
}

#[test]
fn layers_of_other_formats_have_groups_of_their_own() {
    let int8 = QuantSpec::int8(GroupSize::G64).with_zero_points();
    let config = QuantizationConfig::new(QuantSpec::int4(GroupSize::G128), vec!["head".into()])
        .unwrap()
        .with_layers(int8, false, vec!["a.down".into(), "b.down".into()])
        .with_layers(QuantSpec::int4(GroupSize::G32), true, vec!["a.up".into()])
        .with_ignored(vec!["c.down".into()])
        .unwrap();
    let json = json!({ "quantization_config": config.to_json() });
    let read = Quantization::from_config(json.to_string().as_bytes())
        .unwrap()
        .unwrap();
    let expected = [
        ("a.gate", "int4 g128"),
        ("a.down", "int8 g64 zero-points"),
        ("b.down", "int8 g64 zero-points"),
        ("a.up", "int4 g32 act-order"),
    ];
    for (layer, format) in expected {
        assert_eq!(
            read.layer(layer).unwrap().to_string(),
            format!("pack-quantized {format}"),
            "{layer}"
        );
    }
    for ignored in ["head", "c.down"] {
        assert_eq!(
            read.layer(ignored).unwrap(),
            LayerFormat::Float,
            "{ignored}"
        );
    }
}

/// The targets of each group, in the order of their numbers.
fn targets(config: &QuantizationConfig) -> Vec<Value> {
    let json = config.to_json();
    let groups = json["config_groups"].as_object().unwrap();
    (0..groups.len())
        .map(|index| groups[&format!("group_{index}")]["targets"].clone())
        .collect()
}

/// transformers 5.24 with `dequantize=True` takes the first group for all layers. It finds too few
/// values in narrower ones, and reads wider ones as other values.
#[test]
fn the_widest_values_have_the_first_group() {
    let int8 = QuantSpec::int8(GroupSize::G128);
    let config = QuantizationConfig::new(QuantSpec::int4(GroupSize::G128), Vec::new())
        .unwrap()
        .with_layers(QuantSpec::mxfp4(), false, vec!["up".into()])
        .with_layers(int8, false, vec!["lm_head".into()]);
    let expected = [json!(["lm_head"]), json!(["Linear"]), json!(["up"])];
    assert_eq!(targets(&config), expected);
    let config = QuantizationConfig::new(int8, Vec::new())
        .unwrap()
        .with_layers(QuantSpec::int4(GroupSize::G128), false, vec!["up".into()]);
    assert_eq!(targets(&config), [json!(["Linear"]), json!(["up"])]);
}

/// transformers 5.24 takes the group whose pattern has the word `experts` for all experts, or else
/// the first.
#[test]
fn experts_have_a_group_of_their_own_beside_others() {
    let (int4, int8) = (
        QuantSpec::int4(GroupSize::G128),
        QuantSpec::int8(GroupSize::G128),
    );
    let pattern = json!([r"re:.*\.experts\..*"]);
    let config = |spec| QuantizationConfig::new(spec, Vec::new()).unwrap();
    assert_eq!(
        targets(&config(int4).with_experts(int4)),
        [json!(["Linear"])]
    );
    let head = config(int4)
        .with_layers(int8, false, vec!["lm_head".into()])
        .with_experts(int4);
    assert_eq!(
        targets(&head),
        [json!(["lm_head"]), json!(["Linear"]), pattern.clone()]
    );

    let experts: Vec<String> = (0..3)
        .map(|expert| format!("model.layers.1.mlp.experts.{expert}.up_proj"))
        .collect();
    let others = [&experts[..], &["lm_head".to_string()]].concat();
    let wide = config(int4)
        .with_layers(int8, false, others)
        .with_experts(int8);
    assert_eq!(
        targets(&wide),
        [json!(["lm_head"]), pattern, json!(["Linear"])]
    );
    let json = json!({ "quantization_config": wide.to_json() }).to_string();
    let read = Quantization::from_config(json.as_bytes()).unwrap().unwrap();
    for (layer, expected) in [
        (experts[2].as_str(), "int8 g128"),
        ("lm_head", "int8 g128"),
        ("model.layers.1.mlp.shared_expert.up_proj", "int4 g128"),
    ] {
        let found = read.layer(layer).unwrap().to_string();
        assert_eq!(found, format!("pack-quantized {expected}"), "{layer}");
    }
}

#[test]
fn a_written_config_has_what_readers_ask_for() {
    let config = QuantizationConfig::new(
        QuantSpec::int4(GroupSize::G64).with_zero_points(),
        vec!["lm_head".into()],
    )
    .unwrap()
    .to_json();
    let weights = &config["config_groups"]["group_0"]["weights"];
    assert_eq!(
        (&config["format"], &config["quant_method"]),
        (&json!("pack-quantized"), &json!("compressed-tensors"))
    );
    assert_eq!(
        (&config["ignore"], &config["quantization_status"]),
        (&json!(["lm_head"]), &json!("compressed"))
    );
    assert_eq!(
        config["config_groups"]["group_0"]["targets"],
        json!(["Linear"])
    );
    assert_eq!(
        (
            &weights["num_bits"],
            &weights["type"],
            &weights["symmetric"]
        ),
        (&json!(4), &json!("int"), &json!(false))
    );
    assert_eq!(
        (&weights["strategy"], &weights["group_size"]),
        (&json!("group"), &json!(64))
    );
    let channel = QuantizationConfig::new(QuantSpec::int4(GroupSize::Channel), Vec::new())
        .unwrap()
        .to_json();
    let weights = &channel["config_groups"]["group_0"]["weights"];
    assert_eq!(
        (&weights["strategy"], &weights["group_size"]),
        (&json!("channel"), &Value::Null)
    );
}

#[test]
fn patterns_match_from_the_start() {
    let ignore = ["re:layers", "re:a|b"].map(String::from).to_vec();
    let config = QuantizationConfig::new(QuantSpec::int4(GroupSize::Channel), ignore).unwrap();
    assert!(config.ignores("layers.0") && config.ignores("bc") && config.ignores("a"));
    assert!(!config.ignores("model.layers.0") && !config.ignores("cb"));
    for pattern in ["(", "(?<!x)y", "a{100000}{100000}"] {
        let error = QuantizationConfig::new(
            QuantSpec::int4(GroupSize::Channel),
            vec![format!("re:{pattern}")],
        )
        .unwrap_err();
        assert!(
            matches!(&error, ConfigError::Pattern { pattern: found, .. } if found == pattern),
            "{error}"
        );
    }
}
