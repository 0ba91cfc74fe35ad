//! Conversion of the model on Flex: the error and the memory of the result. Invalid options are
//! errors.

use burn::tensor::{Device, FloatDType};
use burn_marlin::{GroupSize, QuantSpec};
use convert_model::{CLASSES, CompareError, Comparison, Options, compare};

const OPTIONS: Options = Options {
    hidden: 128,
    layers: 2,
    rows: 5,
    dtype: FloatDType::F16,
    spec: QuantSpec::int4(GroupSize::G128),
    runs: 1,
};

fn converted(spec: QuantSpec) -> Comparison {
    let comparison = compare(&Options { spec, ..OPTIONS }, &Device::flex())
        .unwrap_or_else(|error| panic!("{error}"));
    // Six in each layer, four in attention and two in the feed-forward network; and the classifier.
    let (quantized, left) = (comparison.report.quantized(), comparison.report.skipped());
    assert_eq!((quantized, left), (13, 0), "{}", comparison.report);
    assert_eq!(comparison.after.output.len(), OPTIONS.rows * CLASSES);
    comparison
}

/// Checks the relative error of the output, and that converted weights take `bits` bits for each
/// value, relative to the float weights in f16.
fn expect(spec: QuantSpec, error: std::ops::Range<f64>, bits: f64) {
    let comparison = converted(spec);
    let found = comparison.relative_error();
    assert!(
        error.contains(&found),
        "{spec}: a relative error of {found} is none of its bits"
    );
    let [before, after] = comparison.report.converted_bytes();
    assert_eq!(
        after as f64,
        before as f64 * bits / 16.0,
        "{}",
        comparison.report
    );
    let [before, after] = comparison.report.total_bytes();
    assert!(
        (after as f64) < before as f64 * bits / 16.0 + 16384.0,
        "{}",
        comparison.report
    );
}

#[test]
fn int4_is_near_and_a_quarter() {
    // 4 bits for each value, and a scale of 16 bits for each group.
    expect(
        QuantSpec::int4(GroupSize::G128),
        0.06..0.09,
        4.0 + 16.0 / 128.0,
    );
    expect(
        QuantSpec::int4(GroupSize::G32),
        0.06..0.09,
        4.0 + 16.0 / 32.0,
    );
}

#[test]
fn int8_is_nearer_and_a_half() {
    expect(
        QuantSpec::int8(GroupSize::G128),
        0.003..0.006,
        8.0 + 16.0 / 128.0,
    );
}

#[test]
fn wrong_options_are_errors() {
    let refused = |options: Options| {
        compare(&options, &Device::flex())
            .map(|_| ())
            .expect_err("the options are wrong")
            .to_string()
    };
    for hidden in [0, 63, 100] {
        assert_eq!(
            refused(Options { hidden, ..OPTIONS }),
            format!(
                "--hidden {hidden}: the model needs a multiple of 64, one attention head or more"
            )
        );
    }
    assert_eq!(
        refused(Options {
            layers: 0,
            ..OPTIONS
        }),
        "--layers 0: the comparison needs 1 or more"
    );
    assert_eq!(
        refused(Options { rows: 0, ..OPTIONS }),
        "--rows 0: the comparison needs 1 or more"
    );
    assert_eq!(
        refused(Options { runs: 0, ..OPTIONS }),
        "--runs 0: the comparison needs 1 or more"
    );
    for options in [
        Options {
            hidden: 1 << 24,
            ..OPTIONS
        },
        Options {
            layers: usize::MAX,
            ..OPTIONS
        },
        Options {
            rows: usize::MAX,
            ..OPTIONS
        },
    ] {
        let error = compare(&options, &Device::flex())
            .map(|_| ())
            .expect_err("no machine has the memory");
        assert!(matches!(error, CompareError::TooLarge { .. }), "{error}");
    }
}
