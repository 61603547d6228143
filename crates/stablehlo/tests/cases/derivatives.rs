//! Derivatives of whole programs.

use super::transformer::{self, Sizes};
use super::*;

pub fn cases() -> Vec<Case> {
    let policies = [Save::Carry, Save::Every(2), Save::Named(vec!["key".into()]), Save::Products, Save::Everything];
    let narrow = Sizes { stored: Dtype::F32, computed: Dtype::F32, ..Sizes::TOY };
    policies.into_iter().map(|save| decoder(narrow, save)).chain([Save::Carry, Save::Every(2)].map(sums)).collect()
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

/// Gradients that are added to accumulators; gradients of slices are added within the loop.
fn sums(save: Save) -> Case {
    let mut random = Random(18);
    let (row, stack) = (ty(Dtype::F32, &[3]), ty(Dtype::F32, &[4, 3]));
    let body = built(trace(&[row.clone(), row.clone(), row.clone()], |_, a| vec![(&a[0] * &a[1] + &a[2]).tanh()]));
    let function = built(trace(&[row.clone(), stack.clone(), row.clone()], |f, a| {
        f.scan(4, &body, &[&a[0]], &[&a[1]], &[&a[2]], save.clone()).carry
    }));
    let types = [row.clone(), stack.clone(), row.clone(), row.clone(), row.clone(), stack, row];
    let arguments: Vec<Array> = types.iter().map(|ty| random.array(ty.dtype, &ty.shape)).collect();
    case(format!("sums of gradients, {save:?}"), &arguments, |f, a| {
        let (_, pullback) = f.vjp(&function, &[&a[0], &a[1], &a[2]], &[0, 1, 2]).expect("a derivative");
        pullback.add_to(&[&a[3]], &[&a[4], &a[5], &a[6]])
    })
}
