//! The derivative of PPO's value loss, for a program that computes values.

use super::traced::Traced;
use grpo_core::backend_api::real::Dual;
use grpo_core::objective::{ValueLossConfig, ValueTerms, value_loss};
use grpo_stablehlo::{Dtype, Value};

/// The inputs of the value loss of tokens, as values of a program, `[N]` each, f32.
#[derive(Clone, Copy, Debug)]
pub struct ValueTable<'a> {
    /// The current output of the value head.
    pub values: &'a Value,
    /// The output of the value head when the completions were sampled.
    pub old_values: &'a Value,
    /// The returns, which are the targets of the values.
    pub returns: &'a Value,
    /// The weights of the tokens' losses; 0 for tokens without a loss.
    pub weights: &'a Value,
}

/// Computes d loss / d value `[N]` of [`value_loss`] with `config`; 0 where a weight is 0.
///
/// ```
/// use grpo_backend_tpu::program::{ValueTable, value_gradient};
/// use grpo_core::objective::ValueLossConfig;
/// use grpo_stablehlo::{Array, Builder, Dtype, TensorType};
///
/// let f = Builder::new();
/// let [values, old_values, returns, weights] =
///     ["values", "old_values", "returns", "weights"].map(|name| f.argument(name, TensorType::new(Dtype::F32, [2])));
/// let table = ValueTable { values: &values, old_values: &old_values, returns: &returns, weights: &weights };
/// let dvalues = value_gradient(&ValueLossConfig::default(), table);
/// let module = f.finish("value_gradient", &[("dvalues", &dvalues)])?;
/// let of = |numbers: [f64; 2]| Array::floats(Dtype::F32, [2], numbers);
/// let found = module.interpret(&[of([0.1, 0.5])?, of([0.0, 0.5])?, of([1.0, 1.0])?, of([0.5, 0.0])?])?;
/// assert!((found[0].to_floats()[0] + 0.5 * 0.5 * 0.9).abs() < 1e-6 && found[0].to_floats()[1] == 0.0);
/// # Ok::<(), grpo_stablehlo::Error>(())
/// ```
pub fn value_gradient(config: &ValueLossConfig, table: ValueTable<'_>) -> Value {
    let ValueTable { values, old_values, returns, weights } = table;
    // In f64, like the policy's loss.
    let wide = |value: &Value| value.convert(Dtype::F64);
    let number = |value: &Value| Traced::Value(wide(value));
    let terms = ValueTerms {
        value: Dual::variable(number(values)),
        old_value: Dual::fixed(number(old_values)),
        target: Dual::fixed(number(returns)),
    };
    let weights = wide(weights);
    let tangent = value_loss(config.cliprange_value, &terms).loss.tangent.into_value(&weights);
    let none = weights.like(0.0);
    // A selection, because a product of 0 and a non-finite value is NaN.
    let dvalues = weights.eq(&none).select(&none, &(&weights * weights.like(config.vf_coef) * tangent));
    dvalues.convert(values.dtype())
}
