use marlin_format::checkpoint::ConfigError;
use marlin_format::checkpoint::compressed_tensors::QuantizationConfig;
use marlin_format::{FormatError, GroupSize, QuantSpec, ScaleDtype};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::common::{all_specs, cases, message};

/// A config as llm-compressor writes it.
fn published() -> Value {
    json!({
        "config_groups": {
            "group_0": {
                "input_activations": null,
                "output_activations": null,
                "targets": ["Linear"],
                "weights": {
                    "actorder": null, "block_structure": null, "dynamic": false, "group_size": 128, "num_bits": 4, "observer": "minmax",
                    "observer_kwargs": {}, "strategy": "group", "symmetric": true, "type": "int"
                }
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": 1.89,
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed"
    })
}

#[test]
fn a_published_config() {
    let config = QuantizationConfig::parse(&published()).unwrap();
    assert_eq!(config.spec(), QuantSpec::int4(GroupSize::G128));
    assert_eq!(config.ignore(), ["lm_head", "re:.*mlp\\.gate$"]);
    assert!(!config.act_order());
    assert!(config.ignores("lm_head") && config.ignores("model.layers.3.mlp.gate"));
    for name in ["model.lm_head", "lm_head2", "model.layers.3.mlp.gate_proj", "", "re:.*mlp\\.gate"] {
        assert!(!config.ignores(name), "{name}");
    }
}

#[test]
fn configs_come_back() {
    for spec in all_specs() {
        for act_order in [false, true] {
            let ignore = vec!["lm_head".to_string(), "re:vision.*".to_string()];
            let config = QuantizationConfig::new(spec, ignore.clone()).unwrap().with_act_order(act_order);
            let back = QuantizationConfig::parse(&config.to_json()).unwrap();
            // No config says the scale dtype.
            assert_eq!(back.spec(), spec.with_scale_dtype(ScaleDtype::F16));
            assert_eq!((back.ignore(), back.act_order()), (&ignore[..], act_order));
            assert_eq!(back.to_json(), config.to_json());
        }
    }
}

#[test]
fn a_written_config_has_what_readers_ask_for() {
    let config = QuantizationConfig::new(QuantSpec::int4(GroupSize::G64).with_zero_points(), vec!["lm_head".into()]).unwrap().to_json();
    let weights = &config["config_groups"]["group_0"]["weights"];
    assert_eq!((&config["format"], &config["quant_method"]), (&json!("pack-quantized"), &json!("compressed-tensors")));
    assert_eq!((&config["ignore"], &config["quantization_status"]), (&json!(["lm_head"]), &json!("compressed")));
    assert_eq!(config["config_groups"]["group_0"]["targets"], json!(["Linear"]));
    assert_eq!((&weights["num_bits"], &weights["type"], &weights["symmetric"]), (&json!(4), &json!("int"), &json!(false)));
    assert_eq!((&weights["strategy"], &weights["group_size"]), (&json!("group"), &json!(64)));
    let channel = QuantizationConfig::new(QuantSpec::int4(GroupSize::Channel), Vec::new()).unwrap().to_json();
    let weights = &channel["config_groups"]["group_0"]["weights"];
    assert_eq!((&weights["strategy"], &weights["group_size"]), (&json!("channel"), &Value::Null));
}

#[test]
fn patterns_match_from_the_start() {
    let ignore = ["re:layers", "re:a|b"].map(String::from).to_vec();
    let config = QuantizationConfig::new(QuantSpec::int4(GroupSize::Channel), ignore).unwrap();
    assert!(config.ignores("layers.0") && config.ignores("bc") && config.ignores("a"));
    assert!(!config.ignores("model.layers.0") && !config.ignores("cb"));
    for pattern in ["(", "(?<!x)y", "a{100000}{100000}"] {
        let error = QuantizationConfig::new(QuantSpec::int4(GroupSize::Channel), vec![format!("re:{pattern}")]).unwrap_err();
        assert!(matches!(&error, ConfigError::Pattern { pattern: found, .. } if found == pattern), "{error}");
    }
}

/// The published config with the value at a JSON pointer changed, or removed.
fn changed(pointer: &str, value: Option<Value>) -> Value {
    let mut config = published();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    let parent = config.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match value {
        Some(value) => drop(parent.insert(field.into(), value)),
        None => drop(parent.remove(field)),
    }
    config
}

#[test]
fn variants_are_read() {
    let read = |pointer: &str, value| QuantizationConfig::parse(&changed(pointer, value)).unwrap();
    let weights = |field: &str| format!("/config_groups/group_0/weights/{field}");
    for (size, group) in [(32, GroupSize::G32), (64, GroupSize::G64), (128, GroupSize::G128)] {
        assert_eq!(read(&weights("group_size"), Some(size.into())).spec().group, group);
    }
    assert_eq!(read(&weights("strategy"), None).spec().group, GroupSize::G128);
    let channel = json!({ "num_bits": 4, "strategy": "channel", "group_size": -1, "symmetric": false });
    let config = read("/config_groups/group_0/weights", Some(channel));
    assert_eq!(config.spec(), QuantSpec::int4(GroupSize::Channel).with_zero_points());
    for (order, act_order) in [("group", true), ("weight", false), ("static", false), ("dynamic", true)] {
        assert_eq!(read(&weights("actorder"), Some(order.into())).act_order(), act_order);
    }
    for (num_bits, spec) in [(4, QuantSpec::int4(GroupSize::G128)), (8, QuantSpec::int8(GroupSize::G128))] {
        assert_eq!(read(&weights("num_bits"), Some(num_bits.into())).spec(), spec);
    }
    assert!(read(&weights("symmetric"), None).spec() == QuantSpec::int4(GroupSize::G128));
    assert!(read("/ignore", None).ignore().is_empty());
    let same = published()["config_groups"]["group_0"].clone();
    assert_eq!(read("/config_groups/group_1", Some(same)).spec().group, GroupSize::G128);
    read("/sparsity_config", Some(json!({ "format": "dense" })));
    read("/sparsity_config", Some(json!({})));
    read("/config_groups/group_0/format", Some("pack-quantized".into()));
}

/// What is not read: the field, and what the error says was found there.
#[test]
fn other_formats_are_refused_by_name() {
    let group = "/config_groups/group_0";
    let unsupported: [(&str, Value); 24] = [
        ("/quant_method", json!("gptq")),
        ("/format", json!("marlin-24")),
        ("/format", json!("nvfp4-pack-quantized")),
        ("/format", json!(3)),
        ("/sparsity_config", json!({ "format": "sparse-24-bitmask" })),
        ("/sparsity_config", json!([])),
        ("/config_groups", json!({})),
        ("/config_groups", json!([])),
        ("/config_groups/group_0", json!("Linear")),
        ("/config_groups/group_0/targets", json!(["re:.*q_proj"])),
        ("/config_groups/group_0/format", json!("int-quantized")),
        ("/config_groups/group_0/input_activations", json!({ "num_bits": 8 })),
        ("/config_groups/group_0/output_activations", json!({ "num_bits": 8 })),
        ("/config_groups/group_0/weights", json!(4)),
        ("/config_groups/group_0/weights/num_bits", json!(3)),
        ("/config_groups/group_0/weights/num_bits", json!(4.0)),
        ("/config_groups/group_0/weights/num_bits", json!("8")),
        ("/config_groups/group_0/weights/type", json!("float")),
        ("/config_groups/group_0/weights/dynamic", json!(true)),
        ("/config_groups/group_0/weights/symmetric", json!("yes")),
        ("/config_groups/group_0/weights/strategy", json!("tensor_group")),
        ("/config_groups/group_0/weights/actorder", json!("row")),
        ("/config_groups/group_0/weights/group_size", json!("128")),
        ("/ignore", json!("lm_head")),
    ];
    for (pointer, value) in unsupported {
        let error = QuantizationConfig::parse(&changed(pointer, Some(value.clone()))).unwrap_err();
        let ConfigError::Unsupported { field, found, .. } = &error else { panic!("{pointer}: {error:?}") };
        assert!(field.starts_with(&pointer[1..].replace('/', ".")) && value.to_string().contains(found.as_str()), "{pointer}: {error}");
        assert!(message(&error).contains("this version reads"), "{error}");
    }

    for pointer in ["/quant_method", "/format", "/config_groups"] {
        let error = QuantizationConfig::parse(&changed(pointer, None)).unwrap_err();
        assert!(matches!(&error, ConfigError::Missing { field, .. } if field == &pointer[1..]), "{error}");
    }
    for field in ["targets", "weights", "weights/num_bits", "weights/group_size"] {
        let error = QuantizationConfig::parse(&changed(&format!("{group}/{field}"), None)).unwrap_err();
        let expected = format!("config_groups.group_0.{}", field.replace('/', "."));
        assert!(matches!(&error, ConfigError::Missing { field, .. } if field == &expected), "{error}");
    }

    let error = QuantizationConfig::parse(&changed("/config_groups/group_0/weights/group_size", Some(256.into()))).unwrap_err();
    assert!(matches!(&error, ConfigError::GroupSize { source: FormatError::GroupSize { found: 256 }, .. }), "{error}");
    let mut channel = changed("/config_groups/group_0/weights/strategy", Some("channel".into()));
    assert!(QuantizationConfig::parse(&channel).is_err());
    channel["config_groups"]["group_0"]["weights"]["group_size"] = Value::Null;
    assert_eq!(QuantizationConfig::parse(&channel).unwrap().spec().group, GroupSize::Channel);
    channel["config_groups"]["group_0"]["weights"]["strategy"] = Value::Null;
    assert!(matches!(QuantizationConfig::parse(&channel).unwrap_err(), ConfigError::Missing { field, .. } if field.ends_with("strategy")));

    let mut other = published()["config_groups"]["group_0"].clone();
    other["weights"]["group_size"] = 32.into();
    let error = QuantizationConfig::parse(&changed("/config_groups/group_1", Some(other))).unwrap_err();
    assert!(matches!(&error, ConfigError::DifferentGroups { group } if group == "group_1"), "{error}");
    assert!(matches!(QuantizationConfig::parse(&json!(null)).unwrap_err(), ConfigError::Unsupported { .. }));
}

#[test]
fn long_values_are_cut_in_messages() {
    let error = QuantizationConfig::parse(&changed("/format", Some("é".repeat(10_000).into()))).unwrap_err();
    assert!(error.to_string().len() < 600, "{error}");
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn mutated_configs_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), "[ -~é]{0,3}", 0..3usize), 1..4)) {
        let mut text: Vec<char> = published().to_string().chars().collect();
        for (place, replacement, removed) in changes {
            let place = place.index(text.len());
            let end = (place + removed).min(text.len());
            text.splice(place..end, replacement.chars());
        }
        if let Ok(value) = serde_json::from_str::<Value>(&text.into_iter().collect::<String>())
            && let Ok(config) = QuantizationConfig::parse(&value)
        {
            let _ = config.ignores("model.layers.0.mlp.gate");
            prop_assert_eq!(QuantizationConfig::parse(&config.to_json()).unwrap().spec(), config.spec());
        }
    }
}
