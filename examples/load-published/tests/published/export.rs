use std::path::Path;

use burn::module::{Lora, Module};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::store::KeyRemapper;
use burn::tensor::{Device, Tensor};
use burn_marlin::convert::ExportError;
use burn_marlin::{GroupSize, QuantLinear, QuantSpec, WeightQuantizer};
use load_published::Bert;
use marlin_format::checkpoint::{Checkpoint, CheckpointError, Quantization};
use safetensors::Dtype;
use serde_json::Value;

use crate::support::{Expected, golden, model, read_tensors};

fn read_config(dir: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap()
}

#[test]
fn what_was_loaded_is_exported_bit_for_bit_and_loaded_again() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("bert");
    let expected = Expected::read();
    let values = |model: &Bert| {
        model
            .encode(expected.ids.clone(), expected.segments.clone())
            .try_into_vec_as::<f32>()
            .unwrap()
    };
    let (first, report) =
        WeightQuantizer::load(model(), golden(), &Bert::from_transformers().unwrap()).unwrap();
    let before = values(&first);
    // The model is exported twice to check that exporting does not change it.
    for dir in [parent.path().join("once"), dir.clone()] {
        WeightQuantizer::export(&first, dir, &Bert::to_transformers().unwrap()).unwrap();
    }
    assert_eq!(values(&first), before);

    let (written, source) = (
        read_tensors(&dir.join("model.safetensors")),
        read_tensors(&golden().join("model.safetensors")),
    );
    assert_eq!(
        written.keys().collect::<Vec<_>>(),
        source.keys().collect::<Vec<_>>()
    );
    for (name, (dtype, shape, bytes)) in &source {
        let (written_dtype, written_shape, written_bytes) = &written[name];
        assert_eq!(written_shape, shape, "{name}");
        if name.contains(".weight_") {
            assert_eq!((written_dtype, written_bytes), (dtype, bytes), "{name}");
        } else {
            // The model's parameters are f32, with the values of the f16 tensors.
            assert_eq!(*written_dtype, Dtype::F32, "{name}");
            let (written, source) = (
                Checkpoint::open(&dir).unwrap(),
                Checkpoint::open(golden()).unwrap(),
            );
            assert_eq!(
                written.tensor(name).unwrap().to_f32().unwrap(),
                source.tensor(name).unwrap().to_f32().unwrap(),
                "{name}"
            );
        }
    }
    let quantization = &read_config(&dir)["quantization_config"];
    assert_eq!(quantization["ignore"], serde_json::json!(["classifier"]));
    let weights = &quantization["config_groups"]["group_0"]["weights"];
    assert_eq!([&weights["num_bits"], &weights["group_size"]], [4, 32]);

    let (second, again) =
        WeightQuantizer::load(model(), &dir, &Bert::from_transformers().unwrap()).unwrap();
    assert_eq!(again, report);
    assert_eq!(values(&second), before);
}

#[test]
fn a_model_that_was_exported_still_takes_a_record() {
    let parent = tempfile::tempdir().unwrap();
    let convert = || {
        WeightQuantizer::new(QuantSpec::int4(GroupSize::G32))
            .quantize(LinearConfig::new(64, 8).init(&Device::flex()))
            .unwrap()
            .0
    };
    let (model, other) = (convert(), convert());
    // Exporting must not read placeholders, which would count as a use.
    WeightQuantizer::export(
        &model,
        parent.path().join("model"),
        &KeyRemapper::new().add_pattern("^", "layer.").unwrap(),
    )
    .unwrap();
    let expected = other.weight.val().try_into_vec_as::<f32>().unwrap();
    let model = model.load_record(other.into_record());
    assert_eq!(
        model.weight.val().try_into_vec_as::<f32>().unwrap(),
        expected
    );
}

/// Layers in four formats, a float layer, and a `QuantLinear`.
#[derive(Module, Debug)]
struct Mixed {
    down: Linear,
    gate: Linear,
    q: Linear,
    v: Linear,
    up: Linear,
    own: QuantLinear,
}

impl Mixed {
    fn new() -> Self {
        let device = Device::flex();
        let linear = |k, n| {
            LinearConfig::new(k, n)
                .with_bias(false)
                .with_layout(LinearLayout::Col)
                .init(&device)
        };
        let spec = QuantSpec::int4(GroupSize::G32).with_zero_points();
        let own = QuantLinear::from_linear(&LinearConfig::new(32, 9).init(&device), &spec).unwrap();
        Self {
            down: linear(256, 32),
            gate: linear(32, 256),
            q: linear(32, 32),
            v: linear(32, 32),
            up: linear(32, 256),
            own,
        }
    }

    fn weights(&self) -> Vec<Vec<f32>> {
        [&self.down, &self.gate, &self.q, &self.v, &self.up]
            .map(|layer| layer.weight.val().try_into_vec_as::<f32>().unwrap())
            .into()
    }
}

/// The layers of [`Mixed`] without `own`, as in one block of a checkpoint with several formats.
#[derive(Module, Debug)]
struct Layers {
    down: Linear,
    gate: Linear,
    q: Linear,
    v: Linear,
    up: Linear,
}

#[test]
fn formats_of_several_kinds_come_back() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("mixed");
    let Mixed {
        down,
        gate,
        q,
        v,
        up,
        own,
    } = Mixed::new();
    // The GPTQ checkpoint has int4 in groups of 128 with act-order, int8, int4 per channel with
    // zero points, int4 in groups of 32 without zero points, and a float layer.
    let keys = KeyRemapper::new()
        .add_pattern(r"^model\.layers\.0\.mlp\.(\w+)_proj", "$1")
        .unwrap()
        .add_pattern(r"^model\.layers\.0\.self_attn\.(\w)_proj", "$1")
        .unwrap();
    let (
        Layers {
            down,
            gate,
            q,
            v,
            up,
        },
        report,
    ) = WeightQuantizer::load(
        Layers {
            down,
            gate,
            q,
            v,
            up,
        },
        golden().join("../gptq-v1-dynamic"),
        &keys,
    )
    .unwrap();
    assert_eq!(report.quantized(), 4, "{report}");
    let mixed = Mixed {
        down,
        gate,
        q,
        v,
        up,
        own,
    };
    WeightQuantizer::export(
        &mixed,
        &dir,
        &KeyRemapper::new().add_pattern("^", "model.").unwrap(),
    )
    .unwrap();

    let quantization = Quantization::read(&dir).unwrap().unwrap();
    let formats = ["down", "gate", "q", "v", "own", "up"].map(|layer| {
        quantization
            .layer(&format!("model.{layer}"))
            .unwrap()
            .to_string()
    });
    let expected = [
        "int4 g128 act-order",
        "int8 g32",
        "int4 g32",
        "int4 channel zero-points",
        "int4 g32 zero-points",
    ];
    assert_eq!(
        formats[..5],
        expected.map(|format| format!("pack-quantized {format}"))
    );
    assert_eq!(formats[5], "float");

    let Mixed {
        down,
        gate,
        q,
        v,
        up,
        ..
    } = Mixed::new();
    let keys = KeyRemapper::new().add_pattern(r"^model\.", "").unwrap();
    let (
        Layers {
            down,
            gate,
            q,
            v,
            up,
        },
        report,
    ) = WeightQuantizer::load(
        Layers {
            down,
            gate,
            q,
            v,
            up,
        },
        &dir,
        &keys,
    )
    .unwrap();
    assert_eq!(report.unused, ["model.own.bias", "model.own"]);
    let again = Mixed {
        down,
        gate,
        q,
        v,
        up,
        own: mixed.own.clone(),
    };
    assert_eq!(again.weights(), mixed.weights());

    // The exported `QuantLinear` is loaded into a `Linear`.
    #[derive(Module, Debug)]
    struct Own {
        own: Linear,
    }
    let plain = Own {
        own: LinearConfig::new(32, 9).init(&Device::flex()),
    };
    let (plain, _) = WeightQuantizer::load(plain, &dir, &keys).unwrap();
    let x = Tensor::<2>::ones([2, 32], &Device::flex());
    let [found, expected] = [plain.own.forward(x.clone()), mixed.own.forward(x)]
        .map(|y| y.try_into_vec_as::<f32>().unwrap());
    assert!(
        found
            .iter()
            .zip(&expected)
            .all(|(found, expected)| (found - expected).abs() < 1e-5),
        "{found:?}, {expected:?}"
    );
}

#[test]
fn what_cannot_be_written_is_refused_and_leaves_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("target");
    let device = Device::flex();
    let linear = || LinearConfig::new(64, 8).init(&device);
    let (quantized, _) = WeightQuantizer::new(QuantSpec::int4(GroupSize::G32))
        .quantize(linear())
        .unwrap();

    let error = WeightQuantizer::export(
        &quantized,
        &dir,
        &KeyRemapper::new()
            .add_pattern("^weight$", "kernel")
            .unwrap(),
    )
    .unwrap_err();
    assert!(
        matches!(&error, ExportError::Name { path, name } if path == "weight" && name == "kernel"),
        "{error}"
    );

    let one_name = KeyRemapper::new()
        .add_pattern("^.*$", "layer.weight")
        .unwrap();
    let error = WeightQuantizer::export(&linear(), &dir, &one_name).unwrap_err();
    assert!(
        matches!(
            &error,
            ExportError::Checkpoint(CheckpointError::Declaration { .. })
        ),
        "{error}"
    );

    let adapted = linear().apply_lora(Lora::new(2, 4.0));
    let (both, _) = WeightQuantizer::new(QuantSpec::int4(GroupSize::G32))
        .quantize(linear())
        .unwrap();
    for adapted in [adapted, both.apply_lora(Lora::new(2, 4.0))] {
        let error = WeightQuantizer::export(&adapted, &dir, &KeyRemapper::new()).unwrap_err();
        assert!(
            matches!(&error, ExportError::Reparameterized { path } if path == "weight"),
            "{error}"
        );
    }

    assert_eq!(parent.path().read_dir().unwrap().count(), 0);
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("notes.txt"), "mine").unwrap();
    let error = WeightQuantizer::export(
        &quantized,
        &dir,
        &KeyRemapper::new().add_pattern("^", "layer.").unwrap(),
    )
    .unwrap_err();
    assert!(
        matches!(
            &error,
            ExportError::Checkpoint(CheckpointError::TargetNotEmpty { .. })
        ),
        "{error}"
    );
    assert_eq!(std::fs::read(dir.join("notes.txt")).unwrap(), b"mine");
}
