//! Records and files whose packed words have another integer dtype.

use super::record_of;
use crate::layer::values;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::store::{ModuleSnapshot, SafetensorsStore};
use burn::tensor::{Device, Distribution, Int, IntDType, Tensor};
use burn_marlin::{ActivationDtype, GroupSize, QuantLinear, QuantLinearConfig, QuantSpec};

/// The tensors of a record of a `QuantLinear` without a bias, its packed values in another dtype.
#[derive(Module, Debug)]
struct Recorded {
    weight: RecordedWeight,
}

#[derive(Module, Debug)]
struct RecordedWeight {
    format: Param<Tensor<1>>,
    qweight: Param<Tensor<2, Int>>,
    scales: Param<Tensor<2, Int>>,
}

impl Recorded {
    fn of(layer: &QuantLinear, qweight: IntDType, scales: IntDType) -> Self {
        #[derive(Default)]
        struct Tensors(Vec<Tensor<1>>, Vec<Tensor<2, Int>>);
        impl ModuleVisitor for Tensors {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.push(param.val().flatten(0, D - 1));
            }
            fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
                self.1.push(
                    param.val().reshape(
                        <[usize; 2]>::try_from(param.dims().as_slice())
                            .unwrap_or_else(|_| panic!("no matrix")),
                    ),
                );
            }
        }
        let mut tensors = Tensors::default();
        layer.visit(&mut tensors);
        let parameter = |index: usize, dtype| {
            Param::initialized(ParamId::new(), tensors.1[index].clone().cast(dtype))
        };
        let format = Param::initialized(ParamId::new(), tensors.0[0].clone());
        Self {
            weight: RecordedWeight {
                format,
                qweight: parameter(0, qweight),
                scales: parameter(1, scales),
            },
        }
    }
}

pub(super) fn other_integers(device: &Device) {
    let spec = QuantSpec::int4(GroupSize::G32);
    let linear = burn::nn::LinearConfig::new(64, 40)
        .with_bias(false)
        .init(device);
    let layer = QuantLinear::from_linear(&linear, &spec).unwrap_or_else(|error| panic!("{error}"));
    let x = Tensor::<2>::random([3, 64], Distribution::Normal(0.0, 1.0), device);
    let expected = values(layer.forward(x.clone()));
    let target = || {
        QuantLinearConfig::new(64, 40, spec)
            .with_bias(false)
            .with_activations(Some(ActivationDtype::F32))
            .init(device)
            .unwrap_or_else(|error| panic!("{error}"))
    };
    for (words, scales) in [
        (IntDType::I32, IntDType::I32),
        (IntDType::I64, IntDType::I32),
        (IntDType::I32, IntDType::I64),
    ] {
        let recorded = Recorded::of(&layer, words, scales);
        let loaded = target().try_load_record(record_of(&recorded));
        let mut store = SafetensorsStore::from_bytes(None);
        recorded
            .save_into(&mut store)
            .unwrap_or_else(|error| panic!("{error}"));
        let bytes = store.get_bytes().unwrap_or_else(|error| panic!("{error}"));
        let mut from_file = target();
        let read = from_file.load_from(&mut SafetensorsStore::from_bytes(Some(bytes)));
        if (words, scales) == (IntDType::I32, IntDType::I32) {
            let loaded = loaded.unwrap_or_else(|error| panic!("{error}"));
            assert!(
                read.is_ok()
                    && values(loaded.forward(x.clone())) == expected
                    && values(from_file.forward(x.clone())) == expected
            );
            continue;
        }
        let name = if words == IntDType::I64 {
            "weight.qweight"
        } else {
            "weight.scales"
        };
        let error = loaded
            .err()
            .unwrap_or_else(|| panic!("a record of {words:?} and {scales:?} was loaded"));
        assert!(error.to_string().contains(name), "{error}");
        let error = read
            .err()
            .unwrap_or_else(|| panic!("a file of {words:?} and {scales:?} was loaded"));
        assert!(
            error.to_string().contains(name) && error.to_string().contains("I64"),
            "{error}"
        );
        // Part of a record may be missing: the layer keeps its own values.
        let kept = layer
            .clone()
            .try_load_record(record_of(&recorded).allow_partial(true))
            .unwrap_or_else(|error| panic!("{error}"));
        assert!(values(kept.forward(x.clone())) == expected);
    }
    // A mapper that casts all integer tensors and cannot return an error.
    struct Widen;
    impl ModuleMapper for Widen {
        fn map_int<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Int>>,
        ) -> Param<Tensor<D, Int>> {
            param.map(|tensor| tensor.cast(IntDType::I64))
        }
    }
    assert!(
        values(layer.map(&mut Widen).forward(x)) == expected,
        "cast to i64"
    );
}
