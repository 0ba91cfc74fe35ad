//! Tests of inputs that `quantize` refuses without writing anything.

use serde_json::json;

use crate::support::{
    Folder, args, calibrated, heldout, read_safetensors, refuse, run_with_input, succeed,
    write_safetensors,
};

#[test]
fn methods_that_look_at_text_need_it() {
    let folder = Folder::tiny();
    for method in ["gptq", "sparsegpt", "awq"] {
        refuse(
            &args![
                "quantize",
                &folder.source,
                &folder.target,
                "--method",
                method
            ],
            &["--calibration FILE"],
        );
    }
    refuse(
        &args![
            "quantize",
            &folder.source,
            &folder.target,
            "--calibration",
            heldout()
        ],
        &["--calibration is for --method"],
    );
    refuse(
        &args!["quantize", &folder.source, &folder.target, "--awq"],
        &["--awq is for", "--method awq"],
    );
    assert!(folder.leftovers().is_empty(), "{:?}", folder.leftovers());
}

#[test]
fn a_layer_that_gptq_files_do_not_hold_is_refused_before_anything_is_written() {
    let folder = Folder::with_config(json!({ "intermediate_size": 84 }));
    refuse(
        &args![
            "quantize",
            &folder.source,
            &folder.target,
            "--format",
            "gptq"
        ],
        &[
            "model.layers.0.mlp.",
            "K = 84",
            "multiples of 8",
            "write compressed-tensors",
        ],
    );
    assert!(folder.leftovers().is_empty(), "{:?}", folder.leftovers());
    succeed(&args!["quantize", &folder.source, &folder.target]);
}

#[test]
fn a_layer_that_two_of_four_do_not_fit_is_refused_before_anything_is_written() {
    let folder = Folder::with_config(json!({ "intermediate_size": 90 }));
    let args = |more: &[&str]| {
        let mut args = args!["quantize", &folder.source, &folder.target, "--sparse24"];
        args.extend(more.iter().map(Into::into));
        args
    };
    let layer = "model.layers.0.mlp.";
    refuse(&args(&["--format", "marlin-24"]), &[layer, "90"]);
    refuse(
        &args(&[]),
        &[layer, "K = 90", "multiple of 4", "keep this weight dense"],
    );
    refuse(
        &args(&[
            "--format",
            "marlin-24",
            "--group",
            "g32",
            "--exclude",
            "re:.*mlp",
        ]),
        &["model.layers.0.", "marlin-24", "groups of 128", "int4 g32"],
    );
    let dense = args![
        "quantize",
        &folder.source,
        &folder.target,
        "--format",
        "marlin-24",
        "--exclude",
        "re:.*mlp"
    ];
    // The refusal follows the warning that few readers support the format.
    let run = run_with_input(&dense, b"");
    assert!(
        run.code == Some(1) && run.stdout.is_empty(),
        "{}{}",
        run.stdout,
        run.stderr
    );
    for word in [
        "WARN",
        "model.layers.0.self_attn",
        "values that are not zero",
        "prune it",
    ] {
        assert!(run.stderr.contains(word), "{word}: {}", run.stderr);
    }
    assert!(folder.leftovers().is_empty(), "{:?}", folder.leftovers());
    succeed(&args(&["--exclude", "re:.*mlp"]));
}

/// compressed-tensors from 0.19 on refuses `actorder: group`.
#[test]
fn act_order_over_groups_is_refused_before_anything_is_calibrated() {
    let folder = Folder::tiny();
    let mut args = calibrated(&folder.source, &folder.target, &heldout(), 1, 32);
    args.extend(args!["--method", "gptq", "--act-order"]);
    refuse(
        &args,
        &[
            "model.layers.0.mlp.down_proj",
            "4 groups",
            "act-order",
            "form GPTQ",
            "one group a channel",
        ],
    );
    assert!(folder.leftovers().is_empty(), "{:?}", folder.leftovers());
    args.extend(["--group".into(), "channel".into()]);
    succeed(&args);
}

#[test]
fn a_target_with_something_in_it_is_left_alone() {
    let folder = Folder::tiny();
    std::fs::create_dir(&folder.target).unwrap();
    let file = folder.target.join("precious.txt");
    std::fs::write(&file, "keep").unwrap();
    refuse(
        &args!["quantize", &folder.source, &folder.target],
        &["target", "not empty"],
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "keep");
    assert_eq!(folder.target.read_dir().unwrap().count(), 1);
    assert_eq!(folder.leftovers(), ["target"]);
    refuse(&args!["quantize", &folder.source, &file], &["precious.txt"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "keep");
}

#[test]
fn a_quantised_model_is_not_quantised_again() {
    let folder = Folder::tiny_quantized();
    let twice = folder.beside("twice");
    refuse(
        &args!["quantize", &folder.target, &twice],
        &["config.json", "quantised already"],
    );
    assert!(!twice.exists());
}

#[test]
fn excluding_by_a_broken_pattern_is_refused() {
    let folder = Folder::tiny();
    let misspelt = "model.layers.0.mlp.downproj";
    refuse(
        &args![
            "quantize",
            &folder.source,
            &folder.target,
            "--exclude",
            misspelt
        ],
        &[misspelt, "exclude", "no layer"],
    );
    refuse(
        &args![
            "quantize",
            &folder.source,
            &folder.target,
            "--exclude",
            "re:(mlp"
        ],
        &["`(mlp`", "regular expression"],
    );
    assert!(folder.leftovers().is_empty(), "{:?}", folder.leftovers());
}

#[test]
fn weights_that_are_not_finite_are_refused() {
    let folder = Folder::tiny();
    let (path, layer) = (
        folder.source.join("model.safetensors"),
        "model.layers.1.mlp.up_proj",
    );
    let (header, mut data) = read_safetensors(&path);
    let start = header[format!("{layer}.weight")]["data_offsets"][0]
        .as_u64()
        .unwrap() as usize;
    // Row 3, column 2 of [K, N]: the file stores [N, K].
    let at = start + 2 * (2 * 256 + 3);
    data[at..at + 2].copy_from_slice(&0x7c00u16.to_le_bytes());
    write_safetensors(&path, &header, &data);
    refuse(
        &args!["quantize", &folder.source, &folder.target, "--quiet"],
        &[layer, "row 3, column 2", "inf"],
    );
    assert!(folder.leftovers().is_empty(), "{:?}", folder.leftovers());
}
