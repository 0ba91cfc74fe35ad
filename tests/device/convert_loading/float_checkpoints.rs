//! Float checkpoints that are loaded into converted models.

use super::{batch, fresh, record_of};
use crate::convert::{close, convert, reset};
use crate::layer::values;
use crate::models::Mlp;
use burn::module::Module;
use burn::store::{ModuleSnapshot, SafetensorsStore};
use burn::tensor::{Device, Tensor};
use burn_marlin::GroupSize;
use burn_marlin::convert::reset_placeholders;

/// Checks that a float checkpoint loads from a record and from a store, before and after the first
/// use of the model.
pub(super) fn float_checkpoint(device: &Device) {
    let (float, x) = (fresh(device), batch(device));
    let expected = values(convert(float.clone(), GroupSize::G32).0.forward(x.clone()));
    for used in [false, true] {
        let model = || {
            let (model, _) = convert(fresh(device), GroupSize::G32);
            if used {
                let _ = values(model.forward(x.clone()));
            }
            model
        };
        if let Ok(loaded) = model().try_load_record(record_of(&float).allow_partial(true)) {
            assert!(
                used,
                "a fresh converted model has no place for float weights"
            );
            close(
                &values(loaded.forward(x.clone())),
                &expected,
                1e-6,
                "a float record, rounded",
            );
            // Resetting the placeholders removes the float values; the packed weights stay.
            let reset = reset(loaded);
            assert!(
                reset.up.weight.lazy_shape().num_elements() == 1,
                "the float values are gone"
            );
            close(
                &values(reset.forward(x.clone())),
                &expected,
                1e-6,
                "rounded, and reset",
            );
        }
        let mut store = SafetensorsStore::from_bytes(None);
        float
            .save_into(&mut store)
            .unwrap_or_else(|error| panic!("{error}"));
        let bytes = store.get_bytes().unwrap_or_else(|error| panic!("{error}"));
        let mut loaded = model();
        match loaded.load_from(&mut SafetensorsStore::from_bytes(Some(bytes)).allow_partial(true)) {
            Ok(_) => close(
                &values(loaded.forward(x.clone())),
                &expected,
                1e-6,
                "a float file, rounded",
            ),
            Err(error) => assert!(!used, "{error}"),
        }
    }
}

/// Checks that a used converted model loads float checkpoints whose weights cannot be quantised.
pub(super) fn unroundable(device: &Device) {
    let x = batch(device);
    type Edit = fn(Tensor<2>) -> Tensor<2>;
    let edits: [(&str, Edit); 3] = [
        ("a first row that is not a number", |weight| {
            let [_, n] = weight.dims();
            let row = Tensor::full([1, n], f32::NAN, &weight.device());
            weight.slice_assign([0..1, 0..n], row)
        }),
        ("no number at all", |weight| weight.mul_scalar(f32::NAN)),
        ("scales that overflow f16", |weight| weight.mul_scalar(1e8)),
    ];
    for (what, edit) in edits {
        let mut float = fresh(device);
        float.up.weight = float.up.weight.map(edit);
        let (model, _) = convert(fresh(device), GroupSize::G32);
        let _ = values(model.forward(x.clone()));
        let loaded = model
            .try_load_record(record_of(&float).allow_partial(true))
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        let (expected, kept) = (values(float.up.weight.val()), |model: &Mlp| {
            values(model.up.weight.val())
        });
        // A value that is NaN may come back as any non-finite value.
        let same = |found: Vec<f64>| {
            found.iter().zip(&expected).all(|(found, &value)| {
                if value.is_nan() {
                    !found.is_finite()
                } else {
                    *found == value
                }
            })
        };
        assert!(same(kept(&loaded)), "{what}: the layer is float");
        let refused = reset_placeholders(loaded)
            .err()
            .unwrap_or_else(|| panic!("{what}: accepted"));
        assert!(
            refused.error.to_string().starts_with("up.weight: "),
            "{what}: {}",
            refused.error
        );
        assert!(
            same(kept(&refused.model)),
            "{what}: the layer is still float"
        );
        let down = values(refused.model.down.weight.val());
        assert!(
            down.iter().all(|value| value.is_finite()),
            "{what}: the other layer is rounded"
        );
    }
}
