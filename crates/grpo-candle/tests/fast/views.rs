//! Views, other strides, frozen tensors, and tensors in three dimensions.

use super::case::{Leaves, gradient, grpo, laid_out, values};
use candle_core::{DType, IndexOp, Tensor, Var};
use grpo_core::{HeadLayout, Implementation, LossConfig};
use grpo_testkit::{Case, Shape};

fn setup() -> (LossConfig, Case, Leaves) {
    let config = LossConfig::default();
    let case = Case::new(&config, &Shape { h: 12, v: 37, lengths: &[6, 6], ..Shape::default() }, 7);
    let leaves = Leaves::new(&case);
    (config, case, leaves)
}

/// Returns the gradients of the two leaves for hidden states and head that are functions of them. `Loss::backward` and candle's
/// `backward` of the scalar must agree.
fn gradients(
    layout: HeadLayout,
    (hidden, lm_head): (&Var, &Var),
    views: (&Tensor, &Tensor),
    case: &Case,
) -> (Vec<f32>, Vec<f32>) {
    let grpo = laid_out(&LossConfig::default(), Implementation::Fused, layout);
    let step = grpo.loss(views.0, views.1, None, &case.batch).unwrap();
    let [found, by_graph] = [step.backward().unwrap(), step.loss.backward().unwrap()]
        .map(|gradients| (gradient(&gradients, hidden), gradient(&gradients, lm_head)));
    assert_eq!(found, by_graph);
    found
}

#[test]
fn views_of_any_stride_give_the_gradients_of_contiguous_tensors() {
    let (_, case, Leaves { hidden, lm_head, .. }) = setup();
    let (n, h, v) = (case.tokens(), case.h, case.v);
    let leaves = (&hidden, &lm_head);
    let expected = gradients(HeadLayout::VocabHidden, leaves, (&hidden, &lm_head), &case);
    // A head [H, V] that is a transposed view is read in place.
    let transposed = lm_head.t().unwrap();
    assert_eq!(gradients(HeadLayout::HiddenVocab, leaves, (&hidden, &transposed), &case), expected);
    // Rows of a larger tensor, columns of a larger tensor, and hidden states in three dimensions.
    let rows = Tensor::cat(&[hidden.as_tensor(), hidden.as_tensor()], 0).unwrap().i(n..).unwrap();
    let columns = Tensor::cat(&[lm_head.as_tensor(), lm_head.as_tensor()], 1).unwrap().narrow(1, h, h).unwrap();
    assert!(rows.is_contiguous() && !columns.is_contiguous());
    let three = rows.reshape((2, n / 2, h)).unwrap();
    assert_eq!(gradients(HeadLayout::VocabHidden, leaves, (&rows, &columns), &case), expected);
    assert_eq!(gradients(HeadLayout::VocabHidden, leaves, (&three, &lm_head), &case), expected);
    // Hidden states that are stored by columns.
    let by_columns = Var::from_tensor(&hidden.t().unwrap().contiguous().unwrap()).unwrap();
    let view = by_columns.t().unwrap();
    let found = gradients(HeadLayout::VocabHidden, (&by_columns, &lm_head), (&view, &lm_head), &case);
    assert_eq!((grpo_testkit::transposed(&found.0, h, n), found.1), expected);
    assert_eq!(lm_head.dims(), [v, h]);
}

#[test]
fn frozen_tensors_have_no_gradient() {
    let (config, case, Leaves { hidden, lm_head, bias }) = setup();
    let grpo = grpo(&config, Implementation::Fused);
    let all = grpo.loss(&hidden, &lm_head, Some(&bias), &case.batch).unwrap().loss.backward().unwrap();
    let frozen = lm_head.detach();
    let found = grpo.loss(&hidden, &frozen, Some(&bias.detach()), &case.batch).unwrap().backward().unwrap();
    assert_eq!(gradient(&found, &hidden), gradient(&all, &hidden));
    assert!(found.get(&frozen).is_none() && found.get(&lm_head).is_none());
    let head_only = grpo.loss(&hidden.detach(), &lm_head, Some(&bias.detach()), &case.batch).unwrap();
    let head_only = head_only.backward().unwrap();
    assert_eq!(gradient(&head_only, &lm_head), gradient(&all, &lm_head));
    assert!(head_only.get(&hidden).is_none());
}

/// A frozen head in bf16 with hidden states in f32 gives the bits of the same head in f32.
#[test]
fn frozen_bf16_head_equals_the_same_head_in_f32() {
    let (config, case, Leaves { hidden, lm_head, .. }) = setup();
    let narrow = lm_head.to_dtype(DType::BF16).unwrap().detach();
    let of = |head: &Tensor| {
        let step = grpo(&config, Implementation::Fused).loss(&hidden, head, None, &case.batch).unwrap();
        (values(&step.loss), gradient(&step.loss.backward().unwrap(), &hidden))
    };
    assert_eq!(of(&narrow), of(&narrow.to_dtype(DType::F32).unwrap()));
}

#[test]
fn a_tied_head_gets_the_sum_of_both_gradients() {
    let (config, case, Leaves { hidden, lm_head, .. }) = setup();
    let grpo = grpo(&config, Implementation::Fused);
    let ids = Tensor::arange(0u32, case.tokens() as u32, hidden.device()).unwrap();
    let embedded = lm_head.index_select(&ids, 0).unwrap();
    let tied = grpo.loss(&embedded, &lm_head, None, &case.batch).unwrap();
    let (tied, by_graph) = (tied.backward().unwrap(), tied.loss.backward().unwrap());
    let leaf = Var::from_tensor(&embedded.detach()).unwrap();
    let apart = grpo.loss(&leaf, &lm_head, None, &case.batch).unwrap().loss.backward().unwrap();
    let (rows, head) = (gradient(&apart, &leaf), gradient(&apart, &lm_head));
    let sum: Vec<f32> = head.iter().enumerate().map(|(i, g)| g + rows.get(i).unwrap_or(&0.0)).collect();
    super::case::assert_close("tied", &gradient(&tied, &lm_head), &sum, 1e-6);
    assert_eq!(gradient(&tied, &lm_head), gradient(&by_graph, &lm_head));
}
