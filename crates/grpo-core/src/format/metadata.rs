//! Sorted metadata of a safetensors file.

use crate::error::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;

/// Adds `metadata` to the bytes of a safetensors file that has none; equal contents give equal bytes.
///
/// The crate `safetensors` writes metadata from a hash map, in an order that changes from run to run.
///
/// # Errors
/// [`Error::Format`] if `file` has no such header.
pub fn with_metadata(file: &[u8], metadata: &BTreeMap<&str, String>) -> Result<Vec<u8>> {
    let json = |e: serde_json::Error| Error::Format(format!("header: {e}"));
    let cut = || Error::Format(format!("expected a safetensors file, got {} bytes with no whole header", file.len()));
    let (length, rest) = file.split_first_chunk::<8>().ok_or_else(cut)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    let (header, data) = rest.split_at_checked(length).ok_or_else(cut)?;
    let mut entries: BTreeMap<String, Value> = serde_json::from_slice(header).map_err(json)?;
    entries.insert("__metadata__".into(), serde_json::to_value(metadata).map_err(json)?);
    let mut header = serde_json::to_vec(&entries).map_err(json)?;
    // Tensors start at a multiple of 8 bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header, data].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::{Dtype, SafeTensors, TensorView};

    #[test]
    fn metadata_is_sorted_and_tensors_stay_where_they_are() {
        let (a, b) = ([1u8; 3], [2u8; 8]);
        let view = |dtype, shape, data| TensorView::new(dtype, shape, data).unwrap();
        let views = [("z", view(Dtype::U8, vec![3], &a)), ("A", view(Dtype::F32, vec![2], &b))];
        let plain = safetensors::serialize(views, None).unwrap();
        let metadata = BTreeMap::from([("y", "2".to_owned()), ("x", "\"1\"".to_owned()), ("w", String::new())]);
        let bytes = with_metadata(&plain, &metadata).unwrap();
        assert_eq!((bytes.len() - a.len() - b.len()) % 8, 0);
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.find("\"w\"") < text.find("\"x\"") && text.find("\"x\"") < text.find("\"y\""), "{text}");
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!((file.tensor("z").unwrap().data(), file.tensor("A").unwrap().data()), (&a[..], &b[..]));
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["x"], "\"1\"");
        for cut in [0, 7, 12] {
            assert!(with_metadata(&plain[..cut], &metadata).is_err());
        }
    }
}
