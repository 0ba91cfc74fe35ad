//! The header of a safetensors file: an 8-byte length, then JSON, then the tensors' bytes.
//!
//! The check in the `safetensors` crate is not sufficient for untrusted files. That check adds
//! offsets without a test for overflow, and keeps the last of two tensors with one name. Its errors
//! name neither the tensor nor the number of bytes. Therefore this module parses the header, with
//! the types of that crate.

use std::collections::{HashMap, HashSet};
use std::fmt;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::SerializeMap;

use super::{HeaderError, TensorSpec};
use crate::text::{excerpt, is_plain};

const LENGTH_BYTES: usize = 8;
/// The maximum header size of the safetensors format.
const MAX_HEADER_BYTES: usize = 100_000_000;
/// The header's entry that is not a tensor but a map from text to text.
const METADATA: &str = "__metadata__";

/// A tensor and its byte range in the file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// The first byte from the start of the file. `end` is one past the last byte.
    pub start: usize,
    pub end: usize,
}

/// Parses and checks the header of `file`, the contents of a whole file. The range of every entry
/// is inside the file and has the size of the entry's dtype and shape.
pub(super) fn parse(file: &[u8]) -> Result<Vec<Entry>, HeaderError> {
    let (length, rest) = file
        .split_first_chunk::<LENGTH_BYTES>()
        .ok_or(HeaderError::TooShort { found: file.len() })?;
    let header = u64::from_le_bytes(*length);
    let past_end = HeaderError::PastEnd {
        header,
        available: rest.len(),
    };
    let Some((json, data)) = usize::try_from(header)
        .ok()
        .and_then(|header| rest.split_at_checked(header))
    else {
        return Err(past_end);
    };
    if json.len() > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLarge {
            header,
            limit: MAX_HEADER_BYTES,
        });
    }
    let mut tensors = serde_json::from_slice::<Header>(json)?.0;
    tensors.sort_by_key(|(_, info)| info.data_offsets);

    let mut names = HashSet::with_capacity(tensors.len());
    if let Some((name, _)) = tensors.iter().find(|(name, _)| !is_plain(name)) {
        return Err(HeaderError::Name {
            tensor: excerpt(name),
        });
    }
    if let Some((name, _)) = tensors.iter().find(|(name, _)| !names.insert(name)) {
        return Err(HeaderError::DuplicateTensor {
            tensor: name.clone(),
        });
    }

    let base = LENGTH_BYTES + json.len();
    let mut entries = Vec::with_capacity(tensors.len());
    let mut covered = 0;
    for (
        tensor,
        TensorInfo {
            dtype,
            shape,
            data_offsets: (start, end),
        },
    ) in tensors
    {
        if start != covered {
            return Err(HeaderError::Gap {
                tensor,
                expected: covered,
                found: start,
            });
        }
        let expected = size(&tensor, dtype, &shape)?;
        if end.checked_sub(start) != Some(expected) {
            return Err(HeaderError::Offsets {
                tensor,
                dtype,
                shape,
                expected,
                start,
                end,
            });
        }
        if end > data.len() {
            return Err(HeaderError::Coverage {
                expected: end,
                found: data.len(),
            });
        }
        covered = end;
        entries.push(Entry {
            name: tensor,
            dtype,
            shape,
            start: base + start,
            end: base + end,
        });
    }
    if covered != data.len() {
        return Err(HeaderError::Coverage {
            expected: covered,
            found: data.len(),
        });
    }
    Ok(entries)
}

/// Returns the length and header of a file with these tensors, and the byte range of each tensor in
/// the order of `specs`.
pub(super) fn build(specs: &[TensorSpec]) -> Result<(Vec<u8>, Vec<Entry>), HeaderError> {
    let mut names = HashSet::with_capacity(specs.len());
    for TensorSpec { name, .. } in specs {
        if name == METADATA {
            return Err(HeaderError::ReservedName {
                tensor: name.clone(),
            });
        }
        if !names.insert(name) {
            return Err(HeaderError::DuplicateTensor {
                tensor: name.clone(),
            });
        }
    }
    // The widest elements come first, so that every tensor starts at a multiple of its element
    // size. Readers that map a file require this alignment.
    let mut order: Vec<usize> = (0..specs.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(specs[i].dtype.bitsize()), &specs[i].name));

    let mut entries: Vec<Option<Entry>> = vec![None; specs.len()];
    let mut infos = Vec::with_capacity(specs.len());
    let mut start = 0usize;
    for i in order {
        let TensorSpec { name, dtype, shape } = &specs[i];
        let overflow = || HeaderError::Size {
            tensor: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
        };
        let end = start
            .checked_add(size(name, *dtype, shape)?)
            .filter(|&end| i64::try_from(end).is_ok())
            .ok_or_else(overflow)?;
        infos.push((
            name.as_str(),
            TensorInfo {
                dtype: *dtype,
                shape: shape.clone(),
                data_offsets: (start, end),
            },
        ));
        entries[i] = Some(Entry {
            name: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
            start,
            end,
        });
        start = end;
    }

    let mut json = Vec::new();
    let mut serializer = serde_json::Serializer::new(&mut json);
    let mut map = serde::Serializer::serialize_map(&mut serializer, Some(infos.len() + 1))?;
    // Transformers refuses files without this entry.
    map.serialize_entry(METADATA, &HashMap::from([("format", "pt")]))?;
    for (name, info) in &infos {
        map.serialize_entry(name, info)?;
    }
    map.end()?;
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLarge {
            header: json.len() as u64,
            limit: MAX_HEADER_BYTES,
        });
    }

    let base = LENGTH_BYTES + json.len();
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    let entries = entries.into_iter().flatten().map(|entry| Entry {
        start: base + entry.start,
        end: base + entry.end,
        ..entry
    });
    Ok((bytes, entries.collect()))
}

/// Returns the size of a tensor in bytes.
fn size(name: &str, dtype: Dtype, shape: &[usize]) -> Result<usize, HeaderError> {
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |bits, &extent| bits.checked_mul(extent));
    match bits {
        Some(bits) if bits.is_multiple_of(8) => Ok(bits / 8),
        _ => Err(HeaderError::Size {
            tensor: name.to_string(),
            dtype,
            shape: shape.to_vec(),
        }),
    }
}

/// The tensors of a header in file order, with duplicate names kept so that they can be detected.
struct Header(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tensors;

        impl<'de> Visitor<'de> for Tensors {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        map.next_value::<Option<HashMap<String, String>>>()?;
                    } else {
                        tensors.push((name, map.next_value()?));
                    }
                }
                Ok(Header(tensors))
            }
        }

        deserializer.deserialize_map(Tensors)
    }
}
