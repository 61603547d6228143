//! Operations that control derivatives. Outside a derivative they return their operands, or run their code, unchanged.

use super::trace::{Traced, listed};
use super::{Builder, Value};
use crate::graph::Kind;
use crate::types::TensorType;

impl Value {
    /// Returns the value unchanged; derivatives treat it as a constant.
    #[track_caller]
    pub fn stop_gradient(&self) -> Self {
        self.then(Kind::StopGradient, &[], Ok(self.ty().clone()))
    }

    /// Returns the value unchanged, under a name by which [`Save::Named`](crate::Save::Named) selects it.
    #[track_caller]
    pub fn named(&self, name: &str) -> Self {
        self.then(Kind::Named(name.into()), &[], Ok(self.ty().clone()))
    }
}

impl Builder {
    /// Calls `forward` and returns its first `results` results, with a custom derivative: `backward` takes the other
    /// results of `forward` (the residuals), then one cotangent per floating-point result, and returns one cotangent
    /// per floating-point argument, of the argument's type.
    ///
    /// ```
    /// use grpo_stablehlo::{Builder, Dtype, TensorType, trace};
    ///
    /// // The identity, with its gradient clipped to [-1, 1].
    /// let ty = TensorType::new(Dtype::F32, [4]);
    /// let forward = trace(&[ty.clone()], |_, a| vec![a[0].clone()])?;
    /// let backward = trace(&[ty.clone()], |_, ct| vec![ct[0].clamp(&ct[0].like(-1.0), &ct[0].like(1.0))])?;
    /// let clipped = trace(&[ty.clone()], |f, a| f.custom_vjp(&forward, &backward, &[&a[0]], 1))?;
    ///
    /// let f = Builder::new();
    /// let (x, ct) = (f.argument("x", ty.clone()), f.argument("ct", ty));
    /// let (_, pullback) = f.vjp(&clipped, &[&x], &[0])?;
    /// let dx = pullback.call(&[&ct]).remove(0);
    /// assert!(f.finish("clipped", &[("dx", &dx)])?.to_string().contains("stablehlo.clamp"));
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    #[track_caller]
    pub fn custom_vjp(&self, forward: &Traced, backward: &Traced, arguments: &[&Value], results: usize) -> Vec<Value> {
        let returned = forward.result_types();
        let (given, residuals) = returned.split_at(results.min(returned.len()));
        let float = |types: &[TensorType]| types.iter().filter(|ty| ty.dtype.is_float()).cloned().collect::<Vec<_>>();
        let takes = [residuals, &float(given)].concat();
        let gives = float(&forward.argument_types());
        let check = if let Err(reason) = self.takes(forward, arguments) {
            Err(reason)
        } else if results == 0 || results > returned.len() {
            Err(format!("from 1 to {} results expected, got {results}", returned.len()))
        } else if backward.argument_types() != takes || backward.result_types() != gives {
            let (found, back) = (backward.argument_types(), backward.result_types());
            Err(format!(
                "a backward from ({}) to ({}) expected, got one from ({}) to ({})",
                listed(&takes),
                listed(&gives),
                listed(&found),
                listed(&back)
            ))
        } else {
            Ok(given.to_vec())
        };
        let mut state = self.state.borrow_mut();
        let regions = vec![state.body(forward), state.body(backward)];
        drop(state);
        self.emit_all(Kind::CustomVjp { results }, arguments, regions, check, || given.to_vec())
    }
}
