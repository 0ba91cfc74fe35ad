use serde_json::Value;

/// Returns an object with the fields of another set in it.
///
/// # Panics
/// Panics if one of both is no object.
#[track_caller]
pub fn with_fields(mut object: Value, fields: &Value) -> Value {
    let added = fields.as_object().unwrap().clone();
    object.as_object_mut().unwrap().extend(added);
    object
}
