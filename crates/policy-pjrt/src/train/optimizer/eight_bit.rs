//! 8-bit moments ([`grpo_policy::MomentBlocks`]) as operations of a program.
//!
//! Entries of a code book have a closed form (`grpo_policy::CodeBook`), so codes are computed by comparisons with the limits of seven decades
//! and a linear function within a decade. A search in a table would gather eight times per value, which is slow on TPUs.
//!
//! A row may be sharded over devices whose shards do not end with a block. The largest magnitude of a block is therefore reduced in two
//! steps: over groups within a shard, whose size divides shard and block, and then over the few groups of a block.

use crate::decoder::{Axis, Parameter};
use crate::leaves::all;
use crate::sharding::{AxisRules, greatest_common_divisor};
use grpo_models::MOMENT_BLOCK;
use grpo_policy::{CodeBook, MomentBlocks, OptimizerName, Slot};
use grpo_stablehlo::{Dtype, Reducer, Unary, Value};

/// A tensor of the moments of a parameter.
#[derive(Clone, Debug)]
pub(crate) struct MomentTensor {
    /// The parameter with shape and axes of the tensor.
    pub(crate) parameter: Parameter,
    pub(crate) kind: MomentKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MomentKind {
    /// f32 moments.
    Single,
    /// Codes of 8-bit moments, u8.
    Codes,
    /// Scales of the blocks of 8-bit moments, f32.
    Scales,
}

impl MomentKind {
    /// Returns the prefix of the names of the moments of a slot.
    pub(crate) fn prefix(self, slot: &Slot) -> &'static str {
        match self {
            Self::Single => slot.single,
            Self::Codes => slot.eight_bit[0],
            Self::Scales => slot.eight_bit[1],
        }
    }

    pub(crate) fn dtype(self) -> Dtype {
        if self == Self::Codes { Dtype::U8 } else { Dtype::F32 }
    }
}

/// The format of the moments of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MomentFormat {
    /// f32.
    Single,
    /// Codes, u8, with the shape of the parameter, and scales, f32.
    EightBit {
        blocks: MomentBlocks,
        /// Shape of the scales.
        scales: Vec<usize>,
        /// Number of scales, or of rows of scales, behind those in files.
        padding: usize,
        /// Logical axes of the scales.
        axes: Vec<Axis>,
        /// Number of values of a group.
        group: usize,
    },
}

impl MomentFormat {
    /// Returns the format of the moments of `parameter`.
    pub(crate) fn of(parameter: &Parameter, optimizer: OptimizerName, axis_rules: &AxisRules) -> Self {
        let Some(in_file) = MomentBlocks::of(optimizer, &parameter.file_shape()) else { return Self::Single };
        // Padding follows the values of the last row: the blocks before it are those of the file.
        let padded = MomentBlocks::of(optimizer, parameter.tensor_shape()).filter(|_| parameter.padding > 0);
        let blocks = padded.unwrap_or(in_file);
        // The dimensions before the row, the stack's included.
        let leading = parameter.stacked() + parameter.dimensions_of(blocks.leading());
        let shard = axis_rules.shard(parameter);
        let of_row: usize = shard[leading..].iter().product();
        // Rows of several dimensions are contiguous in a shard if only the first one is sharded.
        let is_contiguous = shard[leading + 1..] == parameter.shape[leading + 1..];
        let is_even = is_contiguous && of_row.is_multiple_of(MOMENT_BLOCK);
        let is_padded = leading == 0 && parameter.padding > 0;
        let last = if is_even && !is_padded { parameter.axes[leading] } else { Axis::Blocks };
        let axes = parameter.axes[..leading].iter().copied().chain([last]).collect();
        let scales = parameter.shape[..leading].iter().copied().chain([blocks.per_row()]).collect();
        let padding = if is_padded { blocks.per_row() - in_file.per_row() } else { parameter.padding };
        let group = if is_contiguous { greatest_common_divisor(MOMENT_BLOCK, of_row) } else { 1 };
        Self::EightBit { blocks, scales, padding, axes, group }
    }

    /// Returns the tensors of a moment of `parameter`.
    pub(super) fn tensors(&self, parameter: &Parameter) -> Vec<MomentTensor> {
        let tensor = |parameter, kind| MomentTensor { parameter, kind };
        match self {
            Self::Single => vec![tensor(parameter.clone(), MomentKind::Single)],
            Self::EightBit { scales, padding, axes, .. } => {
                let mut of_scales = parameter.with_shape(scales.clone(), axes.clone());
                of_scales.padding = *padding;
                vec![tensor(parameter.clone(), MomentKind::Codes), tensor(of_scales, MomentKind::Scales)]
            }
        }
    }

    /// Returns the f32 moments of these tensors.
    pub(super) fn get(&self, book: CodeBook, parts: &[Value]) -> Value {
        match self {
            Self::Single => all::<1>(parts)[0].clone(),
            Self::EightBit { blocks, group, .. } => {
                let [codes, scales] = all(parts);
                decode(book, codes) * spread(blocks, *group, scales, codes.shape())
            }
        }
    }

    /// Returns the tensors of f32 moments.
    pub(super) fn put(&self, book: CodeBook, moments: &Value) -> Vec<Value> {
        match self {
            Self::Single => vec![moments.clone()],
            Self::EightBit { blocks, scales, group, .. } => {
                let scales = largest(blocks, *group, scales, &moments.abs());
                let wide = spread(blocks, *group, &scales, moments.shape());
                let unit = wide.gt(&wide.like(0.0)).select(&(moments / &wide), &wide.like(0.0));
                vec![encode(book, &unit), scales]
            }
        }
    }

    /// Returns the moments or, if they are stored as codes, the scales of their blocks: both have the same largest magnitude.
    pub(super) fn sizes(&self, parts: &[Value]) -> Value {
        match self {
            Self::Single => all::<1>(parts)[0].clone(),
            Self::EightBit { .. } => all::<2>(parts)[1].clone(),
        }
    }
}

/// Returns the largest of `magnitudes`, which have the shape of the parameter, in each block.
fn largest(blocks: &MomentBlocks, group: usize, scales: &[usize], magnitudes: &Value) -> Value {
    let (leading, groups) = (&scales[..scales.len() - 1], blocks.row() / group);
    let of_last = |value: &Value| value.reduce(Reducer::Max, &[value.shape().len() - 1]);
    let of_groups = of_last(&magnitudes.reshape(&[leading, &[groups, group]].concat()));
    let of_block = MOMENT_BLOCK / group;
    if of_block == 1 {
        return of_groups;
    }
    let missing = blocks.per_row() * of_block - groups;
    let [low, mut high] = [(); 2].map(|()| vec![0; scales.len()]);
    high[scales.len() - 1] = missing;
    let padded = of_groups.pad(&of_groups.builder().scalar(0.0, Dtype::F32), &low, &high);
    of_last(&padded.reshape(&[scales, &[of_block]].concat()))
}

/// Returns the scale of every value of a parameter of `shape`.
fn spread(blocks: &MomentBlocks, group: usize, scales: &Value, shape: &[usize]) -> Value {
    let leading = &scales.shape()[..scales.shape().len() - 1];
    let (groups, of_block) = (blocks.row() / group, MOMENT_BLOCK / group);
    let repeated = |value: &Value, times: usize| {
        let dimensions: Vec<usize> = (0..value.shape().len()).collect();
        value.broadcast_in_dim(&[value.shape(), &[times]].concat(), &dimensions)
    };
    let of_groups = if of_block == 1 {
        scales.clone()
    } else {
        let all = repeated(scales, of_block).reshape(&[leading, &[blocks.per_row() * of_block]].concat());
        all.slice(&vec![0; all.shape().len()], &[leading, &[groups]].concat())
    };
    repeated(&of_groups, group).reshape(shape)
}

/// The levels of a code book: level e has 2^e entries from 10^(e - E - 1) to 10^(e - E).
struct Levels {
    first: i32,
    last: i32,
    /// E, the level that ends at 1.
    of_one: i32,
}

impl Levels {
    fn of(book: CodeBook) -> Self {
        match book {
            CodeBook::Signed => Self { first: 0, last: 6, of_one: 6 },
            CodeBook::Unsigned => Self { first: 1, last: 7, of_one: 7 },
        }
    }

    /// Selects a number by level; `reaches(e)` is true where a value is in level e or above.
    fn select(&self, like: &Value, reaches: &dyn Fn(i32) -> Value, number: impl Fn(i32) -> f64) -> Value {
        let levels = self.first + 1..=self.last;
        let first = like.like(number(self.first));
        levels.fold(first, |value, level| reaches(level).select(&like.like(number(level)), &value))
    }

    fn power(&self, level: i32) -> f64 {
        10f64.powi(level - self.of_one)
    }
}

/// Returns the entries of codes, f32.
fn decode(book: CodeBook, codes: &Value) -> Value {
    let levels = Levels::of(book);
    let codes = codes.convert(Dtype::F32);
    // t of `grpo_policy::CodeBook`, and its sign.
    let (t, sign) = match book {
        CodeBook::Signed => {
            let signed = &codes - codes.like(127.0);
            (signed.abs(), signed.unary(Unary::Sign))
        }
        CodeBook::Unsigned => (&codes + codes.like(1.0), codes.unary(Unary::Sign)),
    };
    let reaches = |level: i32| t.ge(&t.like(2f64.powi(level)));
    let power = levels.select(&t, &reaches, |level| levels.power(level));
    let share = levels.select(&t, &reaches, |level| 2f64.powi(-level));
    let fraction = (&t + t.like(0.5)) * share - t.like(1.0);
    let entry = power * (t.like(0.1) + fraction * t.like(0.9));
    sign * codes.eq(&codes.like(255.0)).select(&t.like(1.0), &entry)
}

/// Returns the codes, u8, of the entries nearest to `unit`, from -1 to 1.
fn encode(book: CodeBook, unit: &Value) -> Value {
    let (levels, midpoints) = (Levels::of(book), book.midpoints());
    let size = unit.abs();
    let zero = usize::from(book.zero());
    // The code of the first entry of a level, of positive numbers.
    let first_code = |level: i32| match book {
        CodeBook::Signed => 127 + (1 << level),
        CodeBook::Unsigned => (1 << level) - 1,
    };
    let above = |midpoint: usize| size.gt(&size.like(f64::from(midpoints[midpoint])));
    let reaches = |level: i32| above(first_code(level) - 1);
    let inverse = levels.select(&size, &reaches, |level| levels.power(level).recip());
    let count = levels.select(&size, &reaches, |level| 2f64.powi(level));
    // Conversion rounds towards 0.
    let index = ((&size * inverse - size.like(0.1)) * &count * size.like(1.0 / 0.9)).convert(Dtype::I32);
    let count = count.convert(Dtype::I32);
    let index = index.max(&index.like(0)).min(&(&count - count.like(1)));
    let t = count + index;
    let code = match book {
        CodeBook::Signed => unit.lt(&unit.like(0.0)).select(&(t.like(127) - &t), &(t.like(127) + &t)),
        CodeBook::Unsigned => &t - t.like(1),
    };
    let code = above(zero).select(&code, &code.like(zero as i64));
    let is_one = unit.gt(&unit.like(f64::from(midpoints[254])));
    is_one.select(&code.like(255), &code).convert(Dtype::U8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{Adapters, parameters};
    use grpo_models::{Experts, LoraConfig, ModelConfig, TargetModules};
    use grpo_stablehlo::{Array, Builder, Mesh, TensorType};

    /// Returns the entries of codes, and the codes of numbers, from the interpreter.
    fn both(book: CodeBook, codes: &[u8], numbers: &[f32]) -> (Vec<f32>, Vec<u8>) {
        let f = Builder::new();
        let of_codes = f.argument("codes", TensorType::new(Dtype::U8, [codes.len()]));
        let of_numbers = f.argument("numbers", TensorType::new(Dtype::F32, [numbers.len()]));
        let (entries, found) = (decode(book, &of_codes), encode(book, &of_numbers));
        let module = f.finish("code_book", &[("entries", &entries), ("codes", &found)]).unwrap();
        let codes = Array::ints(Dtype::U8, [codes.len()], codes.iter().copied().map(i64::from)).unwrap();
        let numbers = Array::floats(Dtype::F32, [numbers.len()], numbers.iter().copied().map(f64::from)).unwrap();
        let found = module.interpret(&[codes, numbers]).unwrap();
        let entries = found[0].to_floats().into_iter().map(|entry| entry as f32).collect();
        (entries, found[1].to_ints().into_iter().map(|code| code as u8).collect())
    }

    #[test]
    fn codes_and_entries_are_those_of_the_code_book() {
        let all: Vec<u8> = (0..=255).collect();
        for book in CodeBook::OF_MOMENTS {
            // Next to all midpoints, and between them.
            let beside =
                book.midpoints().iter().flat_map(|midpoint| [midpoint * (1.0 - 1e-5), midpoint * (1.0 + 1e-5)]);
            let random = grpo_rng::uniform_weights(3000, 1.0, 3, "numbers").into_iter().enumerate();
            let random = random.map(|(i, x)| x * 10f32.powi(-(i as i32 % 8)));
            let random = random.map(|x| if book == CodeBook::Unsigned { x.abs() } else { x });
            let numbers: Vec<f32> =
                beside.chain(random).chain(*book.entries()).chain([0.0, -0.0, 1.0, f32::MIN_POSITIVE]).collect();
            let is_beside = |x: f32| book.midpoints().iter().any(|midpoint| (x - midpoint).abs() < 2e-6 * x.abs());
            let (entries, codes) = both(book, &all, &numbers);
            for (found, expected) in entries.iter().zip(book.entries()) {
                assert!((found - expected).abs() <= 3e-7 * expected.abs(), "{book:?}: {found} {expected}");
            }
            let mut compared = 0;
            for (number, code) in numbers.iter().zip(codes).filter(|(number, _)| !is_beside(**number)) {
                assert_eq!(code, book.nearest(*number), "{book:?}: {number}");
                compared += 1;
            }
            assert!(compared > 3700, "{compared}");
            if book == CodeBook::Signed {
                assert_eq!(both(book, &all, &[-1.0]).1, [0], "-1 has the lowest code");
            }
        }
    }

    #[test]
    fn blocks_are_quantised_as_on_the_host() {
        let table = parameters(&ModelConfig::default());
        let of = |shape: &[usize], axes: &[Axis]| table[0].with_shape(shape.to_vec(), axes.to_vec());
        let rules = AxisRules::new(&Mesh::new("mesh", [("fsdp", 4)]).unwrap());
        let dense = [
            (of(&[20, 300], &[Axis::Heads, Axis::Embed]), AxisRules::default()),
            (of(&[2, 20, 300], &[Axis::Layer, Axis::Heads, Axis::Embed]), AxisRules::default()),
            (of(&[2, 66, 64], &[Axis::Layer, Axis::Heads, Axis::Embed]), AxisRules::default()),
            (of(&[4101], &[Axis::Embed]), AxisRules::default()),
            (of(&[2, 8, 1024], &[Axis::Layer, Axis::Heads, Axis::Embed]), AxisRules::default()),
            (of(&[20, 300], &[Axis::Heads, Axis::Embed]), rules.clone()),
            // Padded to 72 rows, in 18 blocks, and to 20 rows.
            (rules.padded(of(&[69, 64], &[Axis::Vocab, Axis::Embed])), rules.clone()),
            (rules.padded(of(&[17, 300], &[Axis::Vocab, Axis::Embed])), rules.clone()),
        ];
        // A and B of experts, whose ranks are a dimension of their own: rows of A with fewer and with more values than a block.
        let of_experts = [(64, 300, 2), (320, 8, 3)].into_iter().flat_map(|(hidden_size, num_experts, r)| {
            let experts = Experts { num_experts, moe_intermediate_size: 12, ..Experts::default() };
            let config = ModelConfig { hidden_size, experts: Some(experts), ..ModelConfig::default() };
            let target_modules = TargetModules::Names(vec![]);
            let target_parameters = vec!["experts.gate_up_proj".into()];
            let lora = LoraConfig { r, target_modules, target_parameters, ..LoraConfig::default() };
            let adapters = Adapters::new(&config, &lora).unwrap().parameters(&config);
            let large = adapters.into_iter().filter(|p| p.tensor_shape().iter().product::<usize>() >= 4096);
            large.map(|parameter| (parameter, AxisRules::default())).collect::<Vec<_>>()
        });
        let of_experts: Vec<_> = of_experts.collect();
        assert_eq!(of_experts.len(), 3);
        for (parameter, axis_rules) in dense.into_iter().chain(of_experts) {
            let of_file = MomentBlocks::of(OptimizerName::AdamW8bit, &parameter.file_shape()).unwrap();
            let format = MomentFormat::of(&parameter, OptimizerName::AdamW8bit, &axis_rules);
            let MomentFormat::EightBit { blocks, scales: of_scales, .. } = &format else { panic!("{parameter:?}") };
            let [_, of_moment] = &format.tensors(&parameter)[..] else { panic!("codes and scales") };
            assert_eq!(of_moment.parameter.file_shape(), of_file.scales(&parameter.file_shape()));
            let count: usize = parameter.shape.iter().product();
            let mut moments: Vec<f32> = grpo_rng::uniform_weights(count, 1.0, 5, "moments");
            for (i, moment) in moments.iter_mut().enumerate() {
                *moment *= 10f32.powi(-(i as i32 % 5));
            }
            moments[3] = 100.0;
            moments[blocks.row() - 3..blocks.row()].fill(0.0);
            moments[count - parameter.padding * parameter.shape[1..].iter().product::<usize>()..].fill(0.0);
            moments[..2].fill(0.0);
            let f = Builder::new();
            let argument = f.argument("moments", TensorType::new(Dtype::F32, &parameter.shape[..]));
            let parts = format.put(CodeBook::Signed, &argument);
            let again = format.get(CodeBook::Signed, &parts);
            let results = [("codes", &parts[0]), ("scales", &parts[1]), ("again", &again)];
            let module = f.finish("blocks", &results).unwrap();
            let input = Array::floats(Dtype::F32, parameter.shape.clone(), moments.iter().copied().map(f64::from));
            let found = module.interpret(&[input.unwrap()]).unwrap();
            assert_eq!((found[1].shape(), found[0].shape()), (&of_scales[..], &parameter.shape[..]));
            let (mut codes, mut scales, mut values) = (vec![], vec![], vec![]);
            for block in moments.chunks(blocks.row()).flat_map(|row| row.chunks(MOMENT_BLOCK)) {
                let (mut of_block, mut again) = (vec![0; block.len()], vec![0.0; block.len()]);
                scales.push(CodeBook::Signed.quantize(block, &mut of_block));
                CodeBook::Signed.dequantize(&of_block, *scales.last().unwrap(), &mut again);
                codes.extend(of_block);
                let scale = *scales.last().unwrap();
                values.extend(again.into_iter().map(|value| (value, scale)));
            }
            let of_device: Vec<f32> = found[1].to_floats().into_iter().map(|scale| scale as f32).collect();
            assert_eq!(of_device, scales, "{:?}", parameter.shape);
            let different = found[0].to_ints().into_iter().zip(&codes).filter(|(a, b)| *a != i64::from(**b)).count();
            assert!(different <= count / 1000, "{different} of {count} codes differ");
            let far = |(found, (expected, scale)): &(f64, &(f32, f32))| {
                (found - f64::from(*expected)).abs() > 1e-6 * f64::from(*scale)
            };
            assert!(found[2].to_floats().into_iter().zip(&values).filter(far).count() <= different);
        }
    }

    #[test]
    fn scales_are_sharded_where_shards_have_whole_blocks() {
        let mesh = Mesh::new("mesh", [("fsdp", 2), ("tensor", 2)]).unwrap();
        let axis_rules = AxisRules::new(&mesh);
        let table = parameters(&ModelConfig::default());
        let of = |shape: &[usize]| {
            let axes = [Axis::Layer, Axis::Heads, Axis::Embed];
            let parameter = table[0].with_shape(shape.to_vec(), axes.to_vec());
            match MomentFormat::of(&parameter, OptimizerName::AdamW8bit, &axis_rules) {
                MomentFormat::EightBit { axes, group, .. } => (*axes.last().unwrap(), group),
                MomentFormat::Single => panic!("{shape:?}"),
            }
        };
        assert_eq!(of(&[2, 8, 1024]), (Axis::Embed, 256));
        assert_eq!(of(&[2, 64, 256]), (Axis::Blocks, 128));
        assert_eq!(of(&[2, 64, 896]), (Axis::Blocks, 64));
        // Rows of a shard are apart.
        assert_eq!(of(&[2, 128, 64]), (Axis::Blocks, 1));
    }
}
