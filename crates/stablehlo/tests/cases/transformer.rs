//! A small decoder with a loss: embedding, scanned layers of causal attention and a gated feed-forward network, and the
//! mean negative log-likelihood of the next token.

use grpo_stablehlo::*;

/// The sizes of the decoder.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub length: usize,
    pub hidden: usize,
    pub heads: usize,
    pub mlp: usize,
    pub vocabulary: usize,
    pub layers: usize,
    /// The dtype of the weights.
    pub stored: Dtype,
    /// The dtype of operands of products.
    pub computed: Dtype,
}

impl Sizes {
    /// The smallest sizes, for the interpreter.
    pub const TOY: Self = Self {
        batch: 2,
        length: 5,
        hidden: 8,
        heads: 2,
        mlp: 6,
        vocabulary: 7,
        layers: 2,
        stored: Dtype::F64,
        computed: Dtype::F64,
    };

    /// Returns the types of the arguments: ids [B, T], embedding [V, H] (tied to the head), then the stacked weights of
    /// layers: attention norm [H], query, key, value, output [H, H], feed-forward norm [H], gate, up [H, M], down [M,
    /// H].
    pub fn types(&self) -> Vec<TensorType> {
        let Self { batch, length, hidden, mlp, vocabulary, layers, stored, .. } = *self;
        let mut types =
            vec![TensorType::new(Dtype::I32, [batch, length]), TensorType::new(stored, [vocabulary, hidden])];
        types.extend(self.layer().iter().map(|ty| {
            let shape: Vec<usize> = std::iter::once(layers).chain(ty.shape.iter().copied()).collect();
            TensorType::new(stored, shape)
        }));
        assert_eq!(types.last().map(|ty| ty.shape.clone()), Some(vec![layers, mlp, hidden]));
        types
    }

    fn layer(&self) -> Vec<TensorType> {
        let Self { hidden: h, mlp: m, stored, .. } = *self;
        let shapes: [&[usize]; 9] = [&[h], &[h, h], &[h, h], &[h, h], &[h, h], &[h], &[h, m], &[h, m], &[m, h]];
        shapes.iter().map(|shape| TensorType::new(stored, *shape)).collect()
    }

    fn stream(&self) -> TensorType {
        TensorType::new(self.computed, [self.batch, self.length, self.hidden])
    }
}

/// The indices of the floating-point arguments.
pub const PARAMETERS: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];

fn f32_at_least(dtype: Dtype) -> Dtype {
    if dtype == Dtype::F64 { dtype } else { Dtype::F32 }
}

fn linear(x: &Value, weight: &Value) -> Value {
    let last = x.shape().len() - 1;
    x.dot_general(&weight.convert(x.dtype()), DotDimensions::contract(last, 0), x.dtype(), Precision::Default)
}

/// RMSNorm.
fn norm(x: &Value, weight: &Value) -> Value {
    let last = x.shape().len() - 1;
    let wide = x.convert(f32_at_least(x.dtype()));
    let kept: Vec<usize> = (0..last).collect();
    let sum = (&wide * &wide).reduce(Reducer::Add, &[last]);
    let scale = (&sum * sum.like(1.0 / x.shape()[last] as f64) + sum.like(1e-6)).unary(Unary::Rsqrt);
    let weight = weight.convert(wide.dtype()).broadcast_in_dim(x.shape(), &[last]);
    (wide * scale.broadcast_in_dim(x.shape(), &kept) * weight).convert(x.dtype())
}

fn attention(sizes: &Sizes, x: &Value, [q, k, v, o]: [&Value; 4]) -> Value {
    let (b, t, n) = (sizes.batch, sizes.length, sizes.heads);
    let d = sizes.hidden / n;
    let heads = |w: &Value| linear(x, w).reshape(&[b, t, n, d]);
    let (q, k, v) = (heads(q).named("query"), heads(k).named("key"), heads(v).named("value"));
    let wide = f32_at_least(x.dtype());
    let pairs = DotDimensions { batch: (vec![0, 2], vec![0, 2]), contract: (vec![3], vec![3]) };
    // [B, N, T, T]
    let scores = q.dot_general(&k, pairs, wide, Precision::Default);
    let f = x.builder();
    let [row, column] = [2, 3].map(|d| f.iota(d, TensorType::new(Dtype::I32, scores.shape())));
    let scores = column.le(&row).select(&(&scores * scores.like((d as f64).powf(-0.5))), &scores.like(-1e9));
    let spread = |v: &Value| v.broadcast_in_dim(scores.shape(), &[0, 1, 2]);
    let weights = (&scores - spread(&scores.reduce(Reducer::Max, &[3]).stop_gradient())).exp();
    let weights = &weights / spread(&weights.reduce(Reducer::Add, &[3]));
    let mix = DotDimensions { batch: (vec![0, 1], vec![0, 2]), contract: (vec![3], vec![1]) };
    // [B, N, T, D]
    let mixed = weights.convert(x.dtype()).dot_general(&v, mix, x.dtype(), Precision::Default);
    linear(&mixed.transpose(&[0, 2, 1, 3]).reshape(x.shape()), o)
}

/// One layer, a function of the residual stream and the weights of [`Sizes::layer`].
fn layer(sizes: &Sizes) -> Traced {
    let types: Vec<TensorType> = std::iter::once(sizes.stream()).chain(sizes.layer()).collect();
    let layer = trace(&types, |_, a| {
        let attended = &a[0] + attention(sizes, &norm(&a[0], &a[1]), [&a[2], &a[3], &a[4], &a[5]]);
        let normed = norm(&attended, &a[6]);
        let gate = linear(&normed, &a[7]);
        let gated = &gate * gate.unary(Unary::Logistic) * linear(&normed, &a[8]);
        vec![attended + linear(&gated, &a[9])]
    });
    layer.expect("a layer")
}

/// The mean negative log-likelihood of each token, given the tokens before it.
pub fn loss(sizes: Sizes, save: Save) -> Traced {
    let layer = layer(&sizes);
    let Sizes { batch: b, length: t, hidden: h, vocabulary, layers, computed, .. } = sizes;
    let loss = trace(&sizes.types(), |f, a| {
        let rows = GatherDimensions {
            offset_dims: vec![2],
            collapsed_slice_dims: vec![0],
            start_index_map: vec![0],
            index_vector_dim: 2,
            slice_sizes: vec![1, h],
            ..GatherDimensions::default()
        };
        let stream = a[1].gather(&a[0], rows, &[b, t, h]).convert(computed);
        let weights: Vec<&Value> = a[2..].iter().collect();
        let stream = f.scan(layers, &layer, &[&stream], &weights, &[], save).carry.remove(0);
        let before = stream.slice(&[0, 0, 0], &[b, t - 1, h]);
        let wide = f32_at_least(computed);
        let logits =
            before.dot_general(&a[1].convert(computed), DotDimensions::contract(2, 1), wide, Precision::Default);
        let spread = |v: &Value| v.broadcast_in_dim(logits.shape(), &[0, 1]);
        let shifted = &logits - spread(&logits.reduce(Reducer::Max, &[2]).stop_gradient());
        let total = shifted.exp().reduce(Reducer::Add, &[2]).log();
        let next = spread(&a[0].slice(&[0, 1], &[b, t]));
        let hit = f.iota(2, TensorType::new(Dtype::I32, [b, t - 1, vocabulary])).eq(&next);
        let picked = hit.select(&shifted, &shifted.like(0.0)).reduce(Reducer::Add, &[2]);
        let sum = (total - picked).reduce(Reducer::Add, &[0, 1]);
        vec![&sum * sum.like(1.0 / (b * (t - 1)) as f64)]
    });
    loss.expect("a loss")
}

/// The loss and the gradients of all parameters.
pub fn gradient(sizes: Sizes, save: Save) -> Traced {
    let loss = loss(sizes, save);
    trace(&sizes.types(), |f, a| {
        let (mut results, gradients) =
            f.value_and_grad(&loss, &a.iter().collect::<Vec<_>>(), &PARAMETERS).expect("a derivative");
        results.extend(gradients);
        results
    })
    .expect("gradients")
}
