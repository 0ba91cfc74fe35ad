//! Weights that are moved to another device, and saved and loaded as records.

use super::values;
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Device, FloatDType};
use burn_marlin::{GroupSize, QuantSpec, QuantizedWeight};
use marlin_format::{ScaleDtype, Sparsity};
use marlin_kernels::ActivationDtype;
use marlin_tests::{Case, Operands, cases};

pub(super) fn round_trips(device: &Device, seed: u64) {
    let flex = Device::flex();
    for (i, case) in cases()
        .iter()
        .filter(|case| case.activations == ActivationDtype::F32)
        .enumerate()
    {
        let operands = Operands::random(case, seed.wrapping_add(i as u64));
        let weight = QuantizedWeight::from_plain(&operands.weight, device);
        // Devices without sparse tensor cores store a 2:4 weight as dense.
        let back = |weight: &QuantizedWeight| {
            weight
                .to_plain()
                .unwrap_or_else(|error| panic!("{case}: {error}"))
                .into_dense()
        };
        assert_eq!(back(&weight), *operands.weight.to_dense(), "{case}");
        let moved = weight.clone().to_device(&flex).to_device(device);
        assert_eq!(back(&moved), *operands.weight.to_dense(), "{case} moved");

        let bytes = weight
            .into_record()
            .into_bytes()
            .unwrap_or_else(|error| panic!("{case}: {error}"));
        let other = Operands::random(case, seed.wrapping_add(1 + i as u64));
        let record =
            ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{case}: {error}"));
        let loaded = QuantizedWeight::from_plain(&other.weight, &flex)
            .try_load_record(record)
            .unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(
            back(&loaded),
            *operands.weight.to_dense(),
            "{case} reloaded on another device"
        );
    }
}

pub(super) fn other_format(device: &Device, seed: u64) {
    let case = |spec, k, permuted| Case {
        m: 1,
        k,
        n: 24,
        spec,
        activations: ActivationDtype::F32,
        permuted,
        sparsity: Sparsity::Dense,
    };
    let weight =
        |case: &Case| QuantizedWeight::from_plain(&Operands::random(case, seed).weight, device);
    let record = |weight: &QuantizedWeight| {
        let bytes = weight
            .clone()
            .into_record()
            .into_bytes()
            .unwrap_or_else(|error| panic!("{error}"));
        ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{error}"))
    };
    let formats = [
        case(QuantSpec::int4(GroupSize::G32), 72, false),
        case(
            QuantSpec::int8(GroupSize::G64).with_zero_points(),
            72,
            false,
        ),
        case(
            QuantSpec::int4(GroupSize::Channel).with_scale_dtype(ScaleDtype::BF16),
            72,
            true,
        ),
    ];
    for (from, to) in formats
        .iter()
        .flat_map(|from| formats.iter().map(move |to| (from, to)))
    {
        let (saved, target) = (weight(from), weight(to));
        let loaded = target
            .try_load_record(record(&saved))
            .unwrap_or_else(|error| panic!("{from} into {to}: {error}"));
        assert_eq!(
            (loaded.spec(), loaded.is_permuted()),
            (from.spec, from.permuted),
            "the record's format is taken"
        );
        assert_eq!(
            loaded.to_plain().ok(),
            saved.to_plain().ok(),
            "{from} into {to}"
        );
        let unloaded = QuantizedWeight::unloaded(to.k, to.n, to.spec, ActivationDtype::F32, device)
            .unwrap_or_else(|error| panic!("{error}"));
        assert!(
            values(unloaded.dequantize(FloatDType::F32))
                .iter()
                .all(|value| value.is_nan()),
            "no values, none that look right"
        );
        let loaded = unloaded
            .try_load_record(record(&saved))
            .unwrap_or_else(|error| panic!("{from} into {to}: {error}"));
        assert_eq!(
            loaded.to_plain().ok(),
            saved.to_plain().ok(),
            "{from} into an unloaded {to}"
        );
    }
    // A record with another K is refused even if its tensors fit.
    let channel = QuantSpec::int4(GroupSize::Channel);
    for (from, to, permuted) in [(7, 8, false), (8, 7, true), (64, 32, false), (64, 32, true)] {
        let loaded = weight(&case(channel, to, permuted))
            .try_load_record(record(&weight(&case(channel, from, permuted))));
        assert!(loaded.is_err(), "K = {from} was loaded as K = {to}");
    }
}
