//! Derivatives of whole programs.

use super::transformer::{self, Sizes};
use super::*;

pub fn cases() -> Vec<Case> {
    let policies = [Save::Carry, Save::Named(vec!["key".into()]), Save::Products, Save::Everything];
    let narrow = Sizes { stored: Dtype::F32, computed: Dtype::F32, ..Sizes::TOY };
    policies.into_iter().map(|save| decoder(narrow, save)).collect()
}

/// The loss of a decoder and the gradients of its parameters.
fn decoder(sizes: Sizes, save: Save) -> Case {
    let mut random = Random(17);
    let gradient = transformer::gradient(sizes, save.clone());
    let argument = |ty: &TensorType| match ty.dtype {
        Dtype::I32 => {
            let ids = (0..ty.elements()).map(|_| (random.bits() % sizes.vocabulary as u64) as i64);
            Array::ints(Dtype::I32, &ty.shape[..], ids).expect("ids")
        }
        dtype => Array::floats(dtype, &ty.shape[..], (0..ty.elements()).map(|_| random.float() / 4.0)).expect("floats"),
    };
    let arguments: Vec<Array> = sizes.types().iter().map(argument).collect();
    let mut case = case(format!("gradients of a decoder, {save:?}"), &arguments, |f, a| {
        f.call(&gradient, &a.iter().collect::<Vec<_>>())
    });
    case.slack = 2e-5;
    case
}
