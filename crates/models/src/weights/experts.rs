//! Tensors of experts that files store in another form than parameters have.
//!
//! transformers 5 computes with the experts of a layer as one tensor, and may save it as such: `experts.gate_up_proj` `[E, 2I, H]` and
//! `experts.down_proj` `[E, H, I]`. The matrices of each expert are then views of it. gpt-oss is published in MXFP4 (OCP Microscaling
//! Formats 1.0): `experts.gate_up_proj_blocks` `[E, O, G, 16]` has two 4-bit floats per byte, and `experts.gate_up_proj_scales` `[E, O, G]`
//! an exponent for each 32 of them.
//!
//! Legend: E experts, I width of an expert's MLP, H hidden size, O outputs, G groups of 32 inputs.

use super::shard::Shard;
use super::{Place, Source};
use crate::error::{Error, Result};
use crate::names::EXPERTS;
use bytes::Bytes;
use half::bf16;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

/// The 4-bit floats of MXFP4 (E2M1) without their sign, which is the highest bit.
const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// The number of bytes of a group of 32 values.
const GROUP: usize = 16;
/// The exponent of a scale of 0.
const BIAS: i32 = 127;

/// A tensor `[E, in, out]` in MXFP4, dequantised to bf16 at first use. Values within the range of bf16 are exact; larger ones are infinite, and a scale
/// of 255 is NaN.
#[derive(Debug)]
pub(super) struct Mxfp4 {
    blocks: Bytes,
    scales: Bytes,
    pub(super) shape: [usize; 3],
    values: OnceLock<Bytes>,
}

impl Mxfp4 {
    /// Returns the values, bf16 in little-endian order.
    pub(super) fn values(&self) -> &Bytes {
        self.values.get_or_init(|| {
            let [experts, inputs, outputs] = self.shape;
            let mut values = vec![0u8; 2 * experts * inputs * outputs];
            for (row, (blocks, scales)) in
                self.blocks.chunks_exact(inputs / 2).zip(self.scales.chunks_exact(inputs / 32)).enumerate()
            {
                // Files have [E, out, in].
                let (expert, output) = (row / outputs, row % outputs);
                for (group, (block, scale)) in blocks.chunks_exact(GROUP).zip(scales).enumerate() {
                    let factor = if *scale == u8::MAX { f64::NAN } else { 2f64.powi(i32::from(*scale) - BIAS) };
                    let numbers = block.iter().flat_map(|byte| [byte & 0xf, byte >> 4]);
                    for (i, number) in numbers.enumerate() {
                        let magnitude = MAGNITUDES[usize::from(number & 7)] * factor;
                        let value = bf16::from_f64(if number & 8 == 0 { magnitude } else { -magnitude });
                        let at = 2 * ((expert * inputs + group * 32 + i) * outputs + output);
                        values[at..at + 2].copy_from_slice(&value.to_le_bytes());
                    }
                }
            }
            values.into()
        })
    }
}

/// Replaces tensors of experts by those that parameters have.
pub(super) fn expand(path: &Path, shards: &[Shard], tensors: &mut BTreeMap<String, Place>) -> Result<()> {
    let shape = |tensors: &BTreeMap<String, Place>, name: &str| {
        let place = tensors.get(name)?;
        Some(shards[place.shard].header.info(name)?.shape.clone())
    };
    let names: Vec<String> = tensors.keys().filter(|name| name.contains(EXPERTS)).cloned().collect();
    for name in names {
        if let Some(of) = name.strip_suffix("_blocks") {
            let scales = format!("{of}_scales");
            let (blocks, factors) = (shape(tensors, &name).unwrap_or_default(), shape(tensors, &scales));
            let fits = match (&blocks[..], factors.as_deref()) {
                (&[experts, outputs, groups, GROUP], Some(found)) if ![experts, outputs, groups].contains(&0) => {
                    (found == [experts, outputs, groups]).then_some([experts, groups * 32, outputs])
                }
                _ => None,
            };
            let Some(shape) = fits else {
                let reason = format!(
                    "`{name}` has shape {blocks:?} and `{scales}` {factors:?}; MXFP4 has [E, out, in / 32, 16] and [E, out, in / 32], each at least 1"
                );
                return Err(Error::weights(path, reason));
            };
            let bytes = |name: &str| {
                let place = tensors.get(name)?;
                let info = shards[place.shard].header.info(name)?;
                (info.dtype == safetensors::Dtype::U8).then(|| shards[place.shard].shared(info.data_offsets))
            };
            let (Some(blocks), Some(scales_bytes)) = (bytes(&name), bytes(&scales)) else {
                return Err(Error::weights(path, format!("`{name}` and `{scales}` must have dtype U8, as in MXFP4")));
            };
            let values = Mxfp4 { blocks, scales: scales_bytes, shape, values: OnceLock::new() };
            let shard = tensors[&name].shard;
            tensors.remove(&name);
            tensors.remove(&scales);
            put(path, tensors, of, Place { shard, source: Source::Mxfp4(values) })?;
        }
        // gpt-oss has biases, and parameters of this form.
        let (Some((_, part)), false) =
            (name.split_once(&format!(".{EXPERTS}.")), tensors.contains_key(&format!("{name}_bias")))
        else {
            continue;
        };
        let matrices: &[&str] = match part {
            "gate_up_proj" => &["gate_proj", "up_proj"],
            "down_proj" => &["down_proj"],
            _ => continue,
        };
        let Some(&[experts, outputs, inputs]) = shape(tensors, &name).as_deref() else { continue };
        if [experts, outputs, inputs].contains(&0) {
            // Without values, a header of a few bytes could name any number of experts.
            let reason = format!("`{name}` has shape {:?}, expected sizes of at least 1", [experts, outputs, inputs]);
            return Err(Error::weights(path, reason));
        }
        if !outputs.is_multiple_of(matrices.len()) {
            continue;
        }
        let shard = tensors[&name].shard;
        tensors.remove(&name);
        let prefix = name.trim_end_matches(part);
        let shape = [outputs / matrices.len(), inputs];
        for (number, matrix) in
            (0..experts).flat_map(|expert| matrices.iter().map(move |matrix| (expert, matrix))).enumerate()
        {
            let (expert, matrix) = matrix;
            let source = Source::Rows { of: name.clone(), start: number * shape[0] * shape[1], shape };
            put(path, tensors, &format!("{prefix}{expert}.{matrix}.weight"), Place { shard, source })?;
        }
    }
    Ok(())
}

fn put(path: &Path, tensors: &mut BTreeMap<String, Place>, name: &str, place: Place) -> Result<()> {
    match tensors.insert(name.to_owned(), place) {
        None => Ok(()),
        Some(_) => Err(Error::weights(
            path,
            format!("the tensor `{name}` is there twice, alone and with those of all experts"),
        )),
    }
}
