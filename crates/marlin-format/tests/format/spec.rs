use marlin_format::{FormatError, GroupSize, QuantSpec, ScaleDtype, WeightValue};

#[test]
fn group_sizes_convert_both_ways() {
    for group in GroupSize::ALL {
        assert_eq!(GroupSize::try_from(group.as_i64()), Ok(group));
        assert_eq!(group.to_string().parse(), Ok(group));
        assert_eq!(group.as_i64().to_string().parse(), Ok(group));
        let json = serde_json::to_string(&group).unwrap();
        assert_eq!(json, group.as_i64().to_string());
        assert_eq!(serde_json::from_str::<GroupSize>(&json).unwrap(), group);
    }
    assert_eq!(
        GroupSize::ALL.map(|group| group.to_string()),
        ["channel", "g128", "g64", "g32", "g16"]
    );
}

#[test]
fn other_group_sizes_are_refused() {
    for found in [0, 1, 8, -2, 256, i64::MIN, i64::MAX] {
        assert_eq!(
            GroupSize::try_from(found),
            Err(FormatError::GroupSize { found })
        );
        assert!(serde_json::from_str::<GroupSize>(&found.to_string()).is_err());
    }
    for text in ["", "g8", "G128", "channels", "12 8"] {
        assert_eq!(
            text.parse::<GroupSize>(),
            Err(FormatError::GroupSizeName { found: text.into() })
        );
    }
}

#[test]
fn widths_convert_both_ways() {
    for (bits, number, shown) in [
        (WeightValue::Int4, 4, "int4"),
        (WeightValue::Int8, 8, "int8"),
    ] {
        assert_eq!(
            (
                WeightValue::try_from(number),
                bits.bits() as i64,
                bits.to_string().as_str()
            ),
            (Ok(bits), number, shown)
        );
        let json = serde_json::to_string(&bits).unwrap();
        assert_eq!(json, number.to_string());
        assert_eq!(serde_json::from_str::<WeightValue>(&json).unwrap(), bits);
    }
    for found in [0, 2, 3, 5, 16, -4, i64::MAX] {
        assert_eq!(
            WeightValue::try_from(found),
            Err(FormatError::Bits { found })
        );
        assert!(serde_json::from_str::<WeightValue>(&found.to_string()).is_err());
    }
}

#[test]
fn floats_convert_both_ways_by_name() {
    for (value, shown) in [(WeightValue::E2m1, "e2m1"), (WeightValue::E4m3, "e4m3")] {
        assert_eq!(value.to_string(), shown);
        let json = serde_json::to_string(&value).unwrap();
        assert_eq!(json, format!("\"{shown}\""));
        assert_eq!(serde_json::from_str::<WeightValue>(&json).unwrap(), value);
    }
    for found in ["e5m2", "E4M3", "int4", "4", ""] {
        let json = format!("\"{found}\"");
        let error = serde_json::from_str::<WeightValue>(&json).unwrap_err();
        let found = found.to_string();
        assert_eq!(
            error.to_string(),
            FormatError::ValueName { found }.to_string()
        );
    }
}

/// Checks the groups of every kind of values: integers have no groups of 16, and of floats each
/// published format has its own.
#[test]
fn values_have_their_own_groups() {
    for (value, groups) in [
        (WeightValue::Int4, vec!["channel", "g128", "g64", "g32"]),
        (WeightValue::Int8, vec!["channel", "g128", "g64", "g32"]),
        (WeightValue::E2m1, vec!["g32", "g16"]),
        (WeightValue::E4m3, vec!["channel", "g128"]),
    ] {
        for group in GroupSize::ALL {
            let spec = QuantSpec::new(value, group);
            if groups.contains(&group.to_string().as_str()) {
                assert_eq!(spec.check(), Ok(()), "{spec}");
            } else {
                let error = FormatError::ValueGroup { value, group };
                assert_eq!(spec.check(), Err(error), "{spec}");
            }
        }
        let zero_points = QuantSpec::new(value, value.groups()[0]).with_zero_points();
        if value.is_float() {
            let error = FormatError::FloatZeroPoints { value };
            assert_eq!(zero_points.check(), Err(error));
        } else {
            assert_eq!(zero_points.check(), Ok(()));
        }
    }
}

/// Checks each width: 2^bits values, as many values per word as fit, and of integers a midpoint in
/// their middle.
#[test]
fn widths_follow_from_their_count() {
    for bits in WeightValue::ALL {
        assert_eq!(usize::from(bits.max()), (1 << bits.bits()) - 1);
        let midpoint = if bits.is_float() {
            0
        } else {
            1 << (bits.bits() - 1)
        };
        assert_eq!(usize::from(bits.midpoint()), midpoint);
        assert_eq!(bits.per_word() * bits.bits(), 32);
        let word = (0..bits.per_word()).fold(0, |word, slot| {
            word | u32::from(bits.midpoint()) << (bits.bits() * slot)
        });
        assert_eq!(bits.padding_word(), word);
    }
}

#[test]
fn groups_of_k() {
    assert_eq!(
        (GroupSize::Channel.rows(100), GroupSize::Channel.count(100)),
        (100, 1)
    );
    assert_eq!((GroupSize::G32.rows(96), GroupSize::G32.count(96)), (32, 3));
    assert_eq!(
        (GroupSize::G128.rows(128), GroupSize::G128.count(128)),
        (128, 1)
    );
    assert_eq!(GroupSize::G64.count(65), 2);
    // 10 whole groups and one group of 24 rows.
    assert_eq!(
        (GroupSize::G32.rows(344), GroupSize::G32.count(344)),
        (32, 11)
    );
    assert_eq!(
        (GroupSize::G128.rows(100), GroupSize::G128.count(100)),
        (128, 1)
    );
}

#[test]
fn specs_show_and_serialise() {
    let spec = QuantSpec::int4(GroupSize::G128);
    assert_eq!(spec.to_string(), "int4 g128 f16");
    let spec = QuantSpec::int4(GroupSize::Channel)
        .with_zero_points()
        .with_scale_dtype(ScaleDtype::BF16);
    assert_eq!(spec.to_string(), "int4 channel zero-points bf16");
    assert_eq!(
        QuantSpec::int8(GroupSize::G64)
            .with_zero_points()
            .to_string(),
        "int8 g64 zero-points f16"
    );
    let json = serde_json::to_string(&spec).unwrap();
    assert_eq!(
        json,
        r#"{"bits":4,"group":-1,"zero_points":true,"scale_dtype":"bf16"}"#
    );
    assert_eq!(serde_json::from_str::<QuantSpec>(&json).unwrap(), spec);
    let spec = QuantSpec::nvfp4();
    let json = serde_json::to_string(&spec).unwrap();
    assert_eq!(
        json,
        r#"{"bits":"e2m1","group":16,"zero_points":false,"scale_dtype":"f32"}"#
    );
    assert_eq!(serde_json::from_str::<QuantSpec>(&json).unwrap(), spec);
}

#[test]
fn shapes_are_checked() {
    for (k, n) in [
        (1, 1),
        (33, 8),
        (64, 1),
        (344, 7),
        (QuantSpec::MAX_FEATURES, 2),
        (2, QuantSpec::MAX_FEATURES),
        (65537, 65535),
    ] {
        assert_eq!(QuantSpec::check_shape(k, n), Ok(()));
    }
    for (k, n) in [(0, 4), (32, 0), (0, 0)] {
        assert_eq!(
            QuantSpec::check_shape(k, n),
            Err(FormatError::Empty { k, n })
        );
    }
    for (k, n) in [(1 << 31, 8), (32, usize::MAX)] {
        assert_eq!(
            QuantSpec::check_shape(k, n),
            Err(FormatError::TooLarge {
                k,
                n,
                limit: QuantSpec::MAX_FEATURES
            })
        );
    }
    for (k, n) in [
        (65536, 65536),
        (3, QuantSpec::MAX_FEATURES),
        (QuantSpec::MAX_FEATURES, QuantSpec::MAX_FEATURES),
    ] {
        let error = QuantSpec::check_shape(k, n).unwrap_err();
        assert_eq!(
            error,
            FormatError::TooManyElements {
                k,
                n,
                elements: k * n,
                limit: QuantSpec::MAX_ELEMENTS
            }
        );
        let message = error.to_string();
        for part in [
            format!("K = {k} by N = {n}"),
            (k * n).to_string(),
            "4294967295".into(),
            "split".into(),
        ] {
            assert!(message.contains(&part), "{message}");
        }
    }
}
