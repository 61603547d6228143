//! Scans.

use super::*;
use stablehlo::{DotDimensions, Precision, Save};

/// (carry [2, 3], weight [3, 3], constant [3]) -> (tanh(carry weight) + constant, a part).
fn layer() -> Traced {
    trace(&[wide(&[2, 3]), wide(&[3, 3]), wide(&[3])], |_, a| {
        let product = a[0].dot_general(&a[1], DotDimensions::contract(1, 0), Dtype::F64, Precision::Default);
        let hidden = product.named("product").tanh();
        let next = &hidden + a[2].broadcast_in_dim(&[2, 3], &[1]) * &a[0];
        vec![next, (&hidden * &hidden).reduce(Reducer::Add, &[1])]
    })
    .expect("a layer")
}

fn policies() -> [Save; 4] {
    [Save::Carry, Save::Named(vec!["product".into()]), Save::Products, Save::Everything]
}

#[test]
fn a_scan_over_layers() {
    let layer = layer();
    for save in policies() {
        for reverse in [false, true] {
            check(&format!("{save:?}"), &[wide(&[2, 3]), wide(&[4, 3, 3]), wide(&[3])], |f, a| {
                let scan = if reverse { Builder::scan_reverse } else { Builder::scan };
                let scanned = scan(f, 4, &layer, &[&a[0]], &[&a[1]], &[&a[2]], save.clone());
                vec![scanned.carry[0].clone(), scanned.ys[0].clone()]
            });
        }
    }
}
