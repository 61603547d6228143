//! Moments of a parameter with 8-bit moments ([`MomentBlocks`]), by the tensors of transformers.
//!
//! Matrices of this decoder are `[in, out]`, and some are fused. Blocks are those of the tensors of transformers, `[out, in]`, so that
//! checkpoints of all policies are the same. A step transposes weights and gradients in groups of columns.

use super::{CHUNK, Largest, Update, chunks, matrices};
use crate::decoder::{Decoder, Part, parts};
use grpo_models::{MOMENT_BLOCK, NamedTensor};
use grpo_policy::{MomentBlocks, OptimizerName, Result, Rule, Slot, TensorSink, TensorSource, moment_codes};
use rayon::prelude::*;

/// Fewest columns that are transposed at once: a cache line of f32.
const COLUMNS: usize = 16;

/// The state of a tensor of transformers, in its order.
#[derive(Clone, Debug)]
pub(super) struct TensorMoments {
    part: Part,
    rule: Rule,
    values: Values,
}

#[derive(Clone, Debug)]
enum Values {
    /// f32, of a small tensor, for each slot of the rule.
    Single(Vec<Vec<f32>>),
    EightBit {
        blocks: MomentBlocks,
        codes: Vec<Vec<u8>>,
        scales: Vec<Vec<f32>>,
    },
}

/// Moments of a group of rows, or of blocks if there is one row only.
enum Group<'a> {
    Single(Vec<&'a mut [f32]>),
    EightBit {
        slots: &'static [Slot],
        /// Number of values of a row.
        row: usize,
        codes: Vec<&'a mut [u8]>,
        scales: Vec<&'a mut [f32]>,
    },
}

impl TensorMoments {
    /// Returns moments of zero for the tensors of a parameter; `None` if all of them have f32 moments and a rule of elements.
    pub(super) fn zeros(model: &Decoder, name: &str, shape: &[usize], optimizer: OptimizerName) -> Option<Vec<Self>> {
        let parts = parts(model.config(), &model.adapted, name, shape).into_iter();
        let tensors: Vec<Self> = parts.map(|part| Self::zeros_of(part, optimizer)).collect();
        let is_apart = |tensor: &Self| matches!(tensor.values, Values::EightBit { .. }) || tensor.rule.is_of_matrices();
        tensors.iter().any(is_apart).then_some(tensors)
    }

    fn zeros_of(part: Part, optimizer: OptimizerName) -> Self {
        let count = part.shape.iter().product();
        let rule = Rule::of(optimizer, &part.name, &part.shape);
        let slots = rule.slots().iter();
        let values = match MomentBlocks::of(optimizer, &part.shape) {
            None => Values::Single(slots.map(|_| vec![0.0; count]).collect()),
            Some(blocks) => Values::EightBit {
                blocks,
                codes: slots.clone().map(|slot| vec![slot.book.zero(); count]).collect(),
                scales: slots.map(|_| vec![0.0; blocks.count()]).collect(),
            },
        };
        Self { part, rule, values }
    }

    /// Reads the moments from a checkpoint whose names and shapes fit.
    pub(super) fn read(&mut self, state: &dyn TensorSource) -> Result<()> {
        let name = |prefix: &str| format!("{prefix}{}", self.part.name);
        for (i, slot) in self.rule.slots().iter().enumerate() {
            match &mut self.values {
                Values::Single(values) => values[i] = state.values(&name(slot.single))?.into_owned(),
                Values::EightBit { codes, scales, .. } => {
                    let [of_codes, of_scales] = slot.eight_bit.map(name);
                    codes[i] = moment_codes(&of_codes, &state.values(&of_codes)?)?;
                    scales[i] = state.values(&of_scales)?.into_owned();
                }
            }
        }
        Ok(())
    }

    /// Passes the moments to `sink`.
    pub(super) fn export(&self, sink: &mut dyn TensorSink) -> Result<()> {
        let Part { name, shape, .. } = &self.part;
        for (i, slot) in self.rule.slots().iter().enumerate() {
            let mut send = |prefix: &str, shape: &[usize], data| {
                sink.tensor(NamedTensor { name: format!("{prefix}{name}"), shape: shape.to_vec(), data })
            };
            match &self.values {
                Values::Single(values) => send(slot.single, shape, values[i].clone())?,
                Values::EightBit { blocks, codes, scales } => {
                    let [of_codes, of_scales] = slot.eight_bit;
                    send(of_codes, shape, codes[i].iter().copied().map(f32::from).collect())?;
                    send(of_scales, &blocks.scales(shape), scales[i].clone())?;
                }
            }
        }
        Ok(())
    }

    /// Returns the largest magnitude of a moment, or of the root of one of squares. The scale of a block is its largest magnitude.
    pub(super) fn largest(&self) -> Largest {
        let (Values::Single(slots) | Values::EightBit { scales: slots, .. }) = &self.values;
        Largest::of_slots(self.rule, slots.iter().map(|slot| &slot[..]))
    }

    /// Updates the tensor's values in the parameter `values`, which has this many columns, and the moments.
    pub(super) fn apply(
        &mut self,
        update: &Update,
        decays: bool,
        values: &mut [f32],
        gradient: &[f32],
        columns: usize,
    ) {
        if let (true, Values::Single(slots)) = (self.rule.is_of_matrices(), &mut self.values) {
            return matrices::apply(&self.part, update, values, gradient, &mut slots[0], columns);
        }
        let Part { shape, columns: of_part, first_row, transposed, .. } = self.part.clone();
        if !transposed {
            let whole = if of_part.is_empty() { 0..values.len() } else { of_part };
            let unit = self.unit();
            let length = unit * (CHUNK / unit).max(1);
            let groups = self.groups(length).into_par_iter();
            let chunks = values[whole.clone()].par_chunks_mut(length).zip(gradient[whole].par_chunks(length));
            groups.zip(chunks).for_each(|(group, (values, gradient))| group.step(update, decays, values, gradient));
            return;
        }
        let (outputs, inputs) = (shape[0], shape[1]);
        let width = match &self.values {
            // One row has the values of several columns.
            Values::EightBit { blocks, .. } if blocks.row() != inputs => outputs,
            _ => (CHUNK / inputs).clamp(COLUMNS, outputs.max(COLUMNS)),
        };
        let rows = first_row * columns..(first_row + inputs) * columns;
        let (values, gradient) = (&mut values[rows.clone()], &gradient[rows]);
        let mut slices: Vec<Vec<&mut [f32]>> = Vec::new();
        slices.resize_with(outputs.div_ceil(width), || Vec::with_capacity(inputs));
        for row in values.chunks_exact_mut(columns) {
            let of_row = row[of_part.clone()].chunks_mut(width);
            slices.iter_mut().zip(of_row).for_each(|(slices, slice)| slices.push(slice));
        }
        let groups = self.groups(width * inputs).into_par_iter();
        groups.zip(slices).enumerate().for_each(|(index, (group, mut slices))| {
            let first = of_part.start + index * width;
            let width = slices[0].len();
            let [mut values, mut gradients] = [(); 2].map(|()| vec![0.0; width * inputs]);
            for (input, (slice, row)) in slices.iter().zip(gradient.chunks_exact(columns)).enumerate() {
                let to = values[input..].iter_mut().step_by(inputs);
                to.zip(&**slice).for_each(|(to, value)| *to = *value);
                let to = gradients[input..].iter_mut().step_by(inputs);
                to.zip(&row[first..first + width]).for_each(|(to, gradient)| *to = *gradient);
            }
            group.step(update, decays, &mut values, &gradients);
            for (input, slice) in slices.iter_mut().enumerate() {
                let from = values[input..].iter().step_by(inputs);
                slice.iter_mut().zip(from).for_each(|(to, value)| *to = *value);
            }
        });
    }

    /// Returns the number of values of the smallest group.
    fn unit(&self) -> usize {
        match &self.values {
            Values::Single(_) => 1,
            Values::EightBit { blocks, .. } if blocks.rows() == 1 => MOMENT_BLOCK,
            Values::EightBit { blocks, .. } => blocks.row(),
        }
    }

    /// Returns groups of `length` values, a multiple of [`TensorMoments::unit`]; the last one may be shorter.
    fn groups(&mut self, length: usize) -> Vec<Group<'_>> {
        match &mut self.values {
            Values::Single(slots) => {
                chunks(slots.iter_mut().map(|slot| &mut slot[..]), length).into_iter().map(Group::Single).collect()
            }
            Values::EightBit { blocks, codes, scales } => {
                let row = blocks.row();
                let of_group = length / row * blocks.per_row() + (length % row).div_ceil(MOMENT_BLOCK);
                let codes = chunks(codes.iter_mut().map(|slot| &mut slot[..]), length);
                let scales = chunks(scales.iter_mut().map(|slot| &mut slot[..]), of_group);
                let slots = self.rule.slots();
                let group = |(codes, scales)| Group::EightBit { slots, row, codes, scales };
                codes.into_iter().zip(scales).map(group).collect()
            }
        }
    }
}

impl Group<'_> {
    /// Updates values and moments; values and gradient are in the order of the tensor.
    fn step(self, update: &Update, decays: bool, values: &mut [f32], gradient: &[f32]) {
        let (slots, row, mut codes, mut scales) = match self {
            Self::Single(slots) => return update.update(decays, values, gradient, slots),
            Self::EightBit { slots, row, codes, scales } => (slots, row, codes, scales),
        };
        let mut buffers = vec![[0.0; MOMENT_BLOCK]; slots.len()];
        let mut moments: Vec<&mut [f32]> = buffers.iter_mut().map(|buffer| &mut buffer[..]).collect();
        let blocks = values.chunks_mut(row).flat_map(|row| row.chunks_mut(MOMENT_BLOCK));
        let blocks = blocks.zip(gradient.chunks(row).flat_map(|row| row.chunks(MOMENT_BLOCK)));
        let mut first = 0;
        for (index, (values, gradient)) in blocks.enumerate() {
            let block = first..first + values.len();
            for (i, slot) in slots.iter().enumerate() {
                slot.book.dequantize(&codes[i][block.clone()], scales[i][index], &mut moments[i][..values.len()]);
            }
            update.step.update(decays, update.clip, values, gradient, &mut moments);
            for (i, slot) in slots.iter().enumerate() {
                scales[i][index] = slot.book.quantize(&moments[i][..values.len()], &mut codes[i][block.clone()]);
            }
            first = block.end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_policy::OptimizerSettings;
    use safetensors::SafeTensors;

    /// The numbers of tests/golden/adamw_8bit/generate.py.
    fn numbers(count: usize, step: usize) -> Vec<f32> {
        let number = |i: usize| match i {
            17 => 64.0,
            256..300 => 0.0,
            _ if (i * 5 + step).is_multiple_of(11) => 0.0,
            _ => {
                let whole = (i * 40503 + step * 30011) % 65536;
                (whole as f32 - 32768.0) / 32768.0 * 2f32.powi(-(((i * 7 + step) % 21) as i32))
            }
        };
        (0..count).map(number).collect()
    }

    /// Places a tensor `[out, in]` into a wider parameter `[in, out]`.
    fn placed(part: &Part, values: &[f32], columns: usize) -> Vec<f32> {
        let (outputs, inputs) = (part.shape[0], part.shape[1]);
        let mut parameter = vec![7.0; (part.first_row + inputs) * columns];
        for (output, input) in (0..outputs).flat_map(|output| (0..inputs).map(move |input| (output, input))) {
            let at = (part.first_row + input) * columns + part.columns.start + output;
            parameter[at] = values[output * inputs + input];
        }
        parameter
    }

    #[test]
    fn steps_match_torch() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/adamw_8bit/steps.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let floats = |name: &str| -> Vec<f32> {
            let words = expected.tensor(name).unwrap().data().as_chunks().0;
            words.iter().map(|word| f32::from_le_bytes(*word)).collect()
        };
        let config = OptimizerSettings {
            name: OptimizerName::AdamW8bit,
            adam_beta2: 0.99,
            weight_decay: 0.1,
            max_grad_norm: 0.0,
            ..OptimizerSettings::default()
        };
        let cases = [
            ("rows", vec![20, 300], true),
            ("joined_rows", vec![66, 64], true),
            ("vector", vec![4100], false),
            ("small", vec![8, 8], true),
        ];
        for (name, shape, transposed) in cases {
            let count = shape.iter().product();
            let (columns, first_row) = if transposed { (3..3 + shape[0], 2) } else { (0..0, 0) };
            let part = Part { name: name.to_owned(), shape, columns, first_row, transposed };
            let width = part.columns.end + 4;
            let place = |values: &[f32]| if transposed { placed(&part, values, width) } else { values.to_vec() };
            let mut tensor = TensorMoments::zeros_of(part.clone(), config.name);
            let mut values = place(&numbers(count, 99));
            for step in 1..=4 {
                let update = Update::new(&config, step as u64, 1.0, 1e-2);
                tensor.apply(&update, true, &mut values, &place(&numbers(count, step)), width);
            }
            // Values around the tensor are unchanged.
            let weights = place(&floats(&format!("{name}.weight")));
            for (i, (found, expected)) in values.iter().zip(&weights).enumerate() {
                assert!((found - expected).abs() <= 1e-6 * expected.abs().max(1.0), "{name} {i}: {found} {expected}");
            }
            assert_eq!(values.len(), weights.len());
            let close = |found: &[f32], what: &str| {
                let expected = floats(&format!("{name}.{what}"));
                assert_eq!(found.len(), expected.len(), "{name}: {what}");
                let is_close = |(found, expected): (&f32, &f32)| (found - expected).abs() <= 1e-6 * expected.abs();
                assert!(found.iter().zip(&expected).all(is_close), "{name}: {what}");
            };
            for (moment, of) in ["exp_avg", "exp_avg_sq"].into_iter().enumerate() {
                match &tensor.values {
                    Values::Single(values) => close(&values[moment], of),
                    Values::EightBit { codes, scales, .. } => {
                        close(&scales[moment], &format!("{of}_scales"));
                        let expected = expected.tensor(&format!("{name}.{of}_codes")).unwrap();
                        assert_eq!(codes[moment], expected.data(), "{name}: codes of {of}");
                    }
                }
            }
        }
    }
}
