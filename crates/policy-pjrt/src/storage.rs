//! Storage of weights on a device: in one dtype, or as f32 split into two halves.
//!
//! Products in bf16 read weights in bf16, but updates are too small for its 8-bit mantissa. An f32 weight is therefore stored as the
//! nearest bf16 number, which the decoder reads, and a 16-bit remainder, which only updates and exports read: 4 bytes together, as one f32.
//! NVIDIA's Apex calls this `store_param_remainders` (`DistributedFusedAdam`).
//!
//! All three are treated as two's complement integers:
//!
//! ```text
//! parameter = (word + 0x8000) >> 16                 the bits of the nearest bf16, ties away from zero
//! remainder = word - (parameter << 16)              from -32768 to 32767
//! word      = (parameter << 16) + remainder
//! ```
//!
//! This is exact for every finite f32 and both infinities; NaN stays NaN. If the magnitude of a finite weight is at least 3.3961776e38, its
//! bf16 is infinite; updates with such a result are rejected.

use crate::decoder::Parameter;
use crate::leaves::all;
use grpo_stablehlo::{Builder, Dtype, TensorType, Unary, Value};

/// Bits of the smallest f32 whose nearest bf16 is infinite.
const INFINITE_IN_BF16: u32 = 0x7F7F_8000;
/// Bits of an f32 NaN.
const NAN: i64 = 0x7FC0_0000;

/// Storage format of weights on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Storage {
    /// One dtype. Norms and biases of a bf16 model are f32. u8 stores whole numbers, the codes of 8-bit moments.
    Plain(Dtype),
    /// bf16 with remainders: full f32 precision. Norms and biases are f32.
    Split,
}

impl Storage {
    /// Returns the format of f32 weights that the decoder reads in dtype `read`.
    pub(crate) fn of_masters(read: Dtype) -> Self {
        if read == Dtype::F32 { Self::Plain(Dtype::F32) } else { Self::Split }
    }

    /// Returns the dtype that the decoder reads.
    pub(crate) fn dtype(self) -> Dtype {
        match self {
            Self::Plain(dtype) => dtype,
            Self::Split => Dtype::Bf16,
        }
    }

    /// Returns the format without remainders.
    pub(crate) fn without_remainders(self) -> Self {
        Self::Plain(self.dtype())
    }

    /// Returns the format of one parameter in a model with this format.
    pub(crate) fn of(self, parameter: &Parameter) -> Self {
        match parameter.dtype(self.dtype()) {
            _ if self == Self::Plain(Dtype::U8) => self,
            dtype @ (Dtype::F32 | Dtype::U32) => Self::Plain(dtype),
            _ => self,
        }
    }

    /// Returns the dtypes of a tensor's buffers; the decoder reads the first one.
    pub(crate) fn dtypes(self) -> impl Iterator<Item = Dtype> {
        let remainder = (self == Self::Split).then_some(Dtype::I16);
        std::iter::once(self.dtype()).chain(remainder)
    }

    /// Returns the bytes per weight.
    pub(crate) fn bytes(self) -> u64 {
        self.dtypes().map(|dtype| dtype.bytes() as u64).sum()
    }

    /// Returns the name in memory tables.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Plain(Dtype::F32) => "float32",
            Self::Plain(Dtype::U8) => "8 bits",
            Self::Plain(_) => "bfloat16",
            Self::Split => "bfloat16 with 16-bit remainders",
        }
    }

    /// Declares a tensor as the next arguments of a program.
    pub(crate) fn declare(self, f: &Builder, name: &str, shape: &[usize]) -> Vec<Value> {
        let named = self.dtypes().zip(["", ".remainder"]);
        named.map(|(dtype, suffix)| f.argument(&format!("{name}{suffix}"), TensorType::new(dtype, shape))).collect()
    }

    /// Encodes a tensor: one value per buffer.
    pub(crate) fn put(self, tensor: &Value) -> Vec<Value> {
        match self {
            Self::Plain(dtype) => vec![tensor.convert(dtype)],
            Self::Split => split(&tensor.convert(Dtype::F32)).to_vec(),
        }
    }

    /// Decodes a tensor to f32.
    pub(crate) fn get(self, parts: &[Value]) -> Value {
        match self {
            Self::Plain(_) => all::<1>(parts)[0].convert(Dtype::F32),
            Self::Split => {
                let [parameter, remainder] = all(parts);
                join(parameter, remainder)
            }
        }
    }

    /// Returns the predicate of elements of an f32 tensor that are finite in the dtype that the decoder reads.
    pub(crate) fn finite(self, tensor: &Value) -> Value {
        match self {
            Self::Plain(_) => tensor.unary(Unary::IsFinite),
            // Comparisons with NaN are false.
            Self::Split => tensor.abs().lt(&tensor.like(f64::from(f32::from_bits(INFINITE_IN_BF16)))),
        }
    }
}

/// Splits f32 words into bf16 parameters and i16 remainders.
fn split(words: &Value) -> [Value; 2] {
    let bits = words.bitcast_convert(Dtype::I32);
    // Rounding could overflow the bits of a NaN to zero, so all NaNs get the same bits.
    let bits = words.ne(words).select(&bits.like(NAN), &bits);
    let parameters = (&bits + bits.like(0x8000)).shift_right_arithmetic(&bits.like(16));
    let remainders = &bits - parameters.shift_left(&bits.like(16));
    [parameters.convert(Dtype::I16).bitcast_convert(Dtype::Bf16), remainders.convert(Dtype::I16)]
}

/// Joins bf16 parameters and i16 remainders to f32 words.
fn join(parameters: &Value, remainders: &Value) -> Value {
    let bits = parameters.bitcast_convert(Dtype::I16).convert(Dtype::I32);
    (bits.shift_left(&bits.like(16)) + remainders.convert(Dtype::I32)).bitcast_convert(Dtype::F32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_stablehlo::Array;
    use half::bf16;
    use proptest::prelude::*;

    /// Returns parameters, remainders, words, and which are finite, from the interpreter.
    fn halves(words: &[u32]) -> (Vec<f32>, Vec<i64>, Vec<f32>, Vec<bool>) {
        let f = Builder::new();
        let argument = f.argument("words", TensorType::new(Dtype::F32, [words.len()]));
        let parts = Storage::Split.put(&argument);
        let (again, finite) = (Storage::Split.get(&parts), Storage::Split.finite(&argument));
        let dtypes: Vec<Dtype> = parts.iter().map(Value::dtype).collect();
        assert_eq!(dtypes, Storage::Split.dtypes().collect::<Vec<_>>());
        let results = [("parameters", &parts[0]), ("remainders", &parts[1]), ("words", &again), ("finite", &finite)];
        let module = f.finish("halves", &results).unwrap();
        let words = words.iter().map(|word| f64::from(f32::from_bits(*word)));
        let found = module.interpret(&[Array::floats(Dtype::F32, [words.len()], words).unwrap()]).unwrap();
        let floats = |array: &Array| array.to_floats().into_iter().map(|x| x as f32).collect::<Vec<_>>();
        (floats(&found[0]), found[1].to_ints(), floats(&found[2]), found[3].to_preds())
    }

    fn check(words: &[u32]) {
        let (parameters, remainders, again, finite) = halves(words);
        for (i, word) in words.iter().enumerate() {
            let (value, parameter) = (f32::from_bits(*word), parameters[i]);
            assert!((-0x8000..0x8000).contains(&remainders[i]), "{word:#x}: {}", remainders[i]);
            if value.is_nan() {
                assert!(parameter.is_nan() && again[i].is_nan(), "{word:#x}: {parameter} {}", again[i]);
            } else {
                assert_eq!(again[i].to_bits(), *word, "{word:#x}: {parameter} and {}", remainders[i]);
            }
            assert_eq!(finite[i], parameter.is_finite(), "{word:#x}");
            // Ties round away from zero.
            let expected = match word & 0xFFFF {
                _ if value.is_nan() => continue,
                0x8000 => f32::from_bits(word.wrapping_add(0x8000)),
                _ => bf16::from_f32(value).to_f32(),
            };
            assert_eq!(parameter.to_bits(), expected.to_bits(), "{word:#x}: {parameter} for {value}");
        }
    }

    #[test]
    fn split_and_join_are_exact_for_all_exponents_and_ties() {
        let mantissas =
            [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1_0000, 0x1_8000, 0x2_8000, 0x7F_7FFF, 0x7F_8000, 0x7F_FFFF];
        let words = (0..512_u32).flat_map(|exponent| mantissas.map(|mantissa| exponent << 23 | mantissa));
        let words: Vec<u32> = words.collect();
        // Subnormals, the largest finite numbers, infinities and NaN, of both signs.
        for word in
            [0x0000_0001, 0x807F_FFFF, f32::MAX.to_bits(), f32::MIN.to_bits(), 0x7F80_0000, 0xFF80_0000, u32::MAX]
        {
            assert!(words.contains(&word), "{word:#x}");
        }
        check(&words);
        let (parameters, _, again, finite) = halves(&[f32::MAX.to_bits(), INFINITE_IN_BF16, INFINITE_IN_BF16 - 1]);
        assert_eq!((parameters[0], again[0], &finite[..]), (f32::INFINITY, f32::MAX, &[false, false, true][..]));
    }

    proptest! {
        #[test]
        fn split_and_join_are_exact_for_random_words(words in prop::collection::vec(any::<u32>(), 1..200)) {
            check(&words);
        }
    }
}
