//! Conversion of models that have user-defined layer types beside Burn's.

use super::{GROUP, outcome, random};
use crate::layer::values;
use crate::models::Tried;
use burn::module::{Module, Param, ParamId};
use burn::nn::transformer::TransformerEncoder;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_marlin::convert::{ConvertError, Outcome, SkipReason};
use burn_marlin::{Error, QuantSpec, WeightQuantizer};

mod pytorch {
    use super::{Module, Param, Tensor};

    /// A user-defined layer, whose weight is [N, K].
    #[derive(Module, Debug)]
    pub struct Linear {
        pub weight: Param<Tensor<2>>,
        pub bias: Option<Param<Tensor<1>>>,
    }
}

mod shown_otherwise {
    use super::{Module, Param, Tensor};
    use burn::module::{Content, ModuleDisplay};

    /// A user-defined layer that displays its sizes instead of its parameters, as Burn's `Linear`
    /// does.
    #[derive(Module, Debug)]
    #[module(custom_display)]
    pub struct Linear {
        pub weight: Param<Tensor<2>>,
    }

    impl ModuleDisplay for Linear {
        fn custom_content(&self, content: Content) -> Option<Content> {
            content
                .add("d_output", &self.weight.lazy_shape()[0])
                .optional()
        }
    }
}

#[derive(Module, Debug)]
struct Own {
    weight: Param<Tensor<2>>,
}

#[derive(Module, Debug)]
struct Mixed {
    burn: Linear,
    pytorch: pytorch::Linear,
    shown: shown_otherwise::Linear,
    own: Own,
}

fn mixed(device: &Device) -> Mixed {
    let square = || Param::initialized(ParamId::new(), random([64, 64], device));
    Mixed {
        burn: LinearConfig::new(64, 64).init(device),
        pytorch: pytorch::Linear {
            weight: square(),
            bias: None,
        },
        shown: shown_otherwise::Linear { weight: square() },
        own: Own { weight: square() },
    }
}

pub(super) fn other_linear(device: &Device) {
    let quantizer = WeightQuantizer::new(QuantSpec::int4(GROUP));
    for converted in [
        quantizer.quantize(mixed(device)),
        quantizer.unloaded(mixed(device)),
    ] {
        let (_, report) = converted.unwrap_or_else(|error| panic!("{error}"));
        assert!(
            matches!(outcome(&report, "burn.weight"), Outcome::Quantized { .. }),
            "{report:#}"
        );
        assert_eq!(
            *outcome(&report, "pytorch.weight"),
            Outcome::Skipped(SkipReason::OtherLinear)
        );
        assert_eq!(
            *outcome(&report, "shown.weight"),
            Outcome::Skipped(SkipReason::OtherLinear)
        );
        assert_eq!(
            *outcome(&report, "own.weight"),
            Outcome::Skipped(SkipReason::NotLinear)
        );
        assert!(
            report.to_string().contains("also"),
            "the report says what to do: {report}"
        );
    }
    let asked = quantizer.also::<Own>().also::<pytorch::Linear>();
    let (_, report) = asked
        .quantize(mixed(device))
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.quantized(), 4, "{report:#}");
}

/// A model whose head is tied to a table of a user-defined type, and which keeps averages of an
/// encoder's weights under the ids of those weights.
#[derive(Module, Debug)]
struct Averaged {
    table: Own,
    head: Linear,
    encoder: TransformerEncoder,
    averages: Vec<Own>,
}

pub(super) fn id_elsewhere(device: &Device) {
    let table = Own {
        weight: Param::initialized(ParamId::new(), random([32, 64], device)),
    };
    let head = Linear {
        weight: table.weight.clone().map(|weight| weight.transpose()),
        bias: None,
    };
    let encoder = <TransformerEncoder as Tried>::new(device);
    let weights = encoder
        .layers
        .iter()
        .flat_map(|layer| [&layer.mha.query, &layer.pwff.linear_inner]);
    let averages = weights
        .map(|layer| Own {
            weight: Param::initialized(layer.weight.id, layer.weight.val() * 0.5),
        })
        .collect();
    let model = Averaged {
        table,
        head,
        encoder,
        averages,
    };
    let kept: Vec<Vec<f64>> = [&model.table]
        .into_iter()
        .chain(&model.averages)
        .map(|own| values(own.weight.val()))
        .collect();
    let (model, report) = WeightQuantizer::new(QuantSpec::int4(GROUP))
        .strict()
        .quantize(model)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        (report.quantized(), report.skipped()),
        (13, 0),
        "{report:#}"
    );
    let after: Vec<Vec<f64>> = [&model.table]
        .into_iter()
        .chain(&model.averages)
        .map(|own| values(own.weight.val()))
        .collect();
    assert!(after == kept, "what is not linear stays float");
}

pub(super) fn strict(device: &Device) {
    let quantizer = WeightQuantizer::new(QuantSpec::int4(GROUP))
        .exclude("shown")
        .exclude("pytorch");
    assert!(
        quantizer.clone().strict().quantize(mixed(device)).is_ok(),
        "what was excluded may be left"
    );
    let refused = |quantizer: WeightQuantizer, expected: &str| {
        let before = mixed(device);
        let weight = values(before.burn.weight.val());
        let ConvertError { model, error } = quantizer
            .strict()
            .quantize(before)
            .err()
            .unwrap_or_else(|| panic!("not refused: {expected}"));
        assert!(
            matches!(error, Error::Strict { .. }) && error.to_string().contains(expected),
            "{error}"
        );
        assert!(
            values(model.burn.weight.val()) == weight,
            "the model comes back as it was"
        );
    };
    refused(
        WeightQuantizer::new(QuantSpec::int4(GROUP)),
        "pytorch.weight",
    );
    refused(quantizer.clone().exclude("lm_head"), "`lm_head`");
    // The pattern matches a parameter, but not that of a linear layer.
    refused(
        quantizer.clone().with_spec("^own", QuantSpec::int8(GROUP)),
        "`^own`",
    );
    refused(quantizer.clone().include("burn").include("^own"), "`^own`");
    let (_, report) = quantizer
        .exclude("lm_head")
        .quantize(mixed(device))
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.unmatched, ["lm_head"]);
    assert!(
        report.to_string().contains("`lm_head` matches nothing"),
        "{report}"
    );
}
