//! The mixture on Flex: the error and the memory of the quantised one. Sizes that no kernel
//! supports are errors.

use burn::tensor::{Device, FloatDType};
use burn_marlin::{GroupSize, QuantSpec};
use quantize_experts::{Comparison, MixtureError, Sizes, compare};

const SIZES: Sizes = Sizes {
    hidden: 128,
    intermediate: 64,
    experts: 8,
    top_k: 2,
};

fn compared(sizes: &Sizes, spec: QuantSpec, tokens: usize) -> Result<Comparison, MixtureError> {
    compare(sizes, tokens, &spec, FloatDType::F32, 1, &Device::flex())
}

#[test]
fn int4_experts_are_near_and_an_eighth_of_f32() {
    for spec in [
        QuantSpec::int4(GroupSize::G64),
        QuantSpec::int4(GroupSize::G64).with_zero_points(),
    ] {
        let Comparison {
            bytes: [before, after],
            relative_error,
            ..
        } = compared(&SIZES, spec, 5).unwrap_or_else(|error| panic!("{error}"));
        assert!(
            (0.05..0.2).contains(&relative_error),
            "{spec}: {relative_error}"
        );
        let bits = 32.0 * after as f64 / before as f64;
        assert!((4.0..5.0).contains(&bits), "{spec}: {bits} bits a weight");
    }
}

#[test]
fn what_no_kernel_supports_is_an_error() {
    let spec = QuantSpec::int4(GroupSize::G64);
    let more = Sizes { top_k: 9, ..SIZES };
    let error = compared(&more, spec, 5)
        .err()
        .map(|error| error.to_string());
    assert!(
        error.is_some_and(|error| error.contains('9')),
        "9 of 8 experts"
    );
    assert!(matches!(compared(&SIZES, spec, 0), Err(MixtureError::Zero)));
}
