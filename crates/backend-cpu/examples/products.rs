//! Measures the products of a decoder's layers in GF/s: tokens times a packed weight, and forward plus backward.
//!
//!     cargo run --release -p grpo-backend-cpu --example products -- HIDDEN

use grpo_backend_cpu::layers::{Add, Layers};
use grpo_backend_cpu::peak::{Multiply, Unit};
use std::hint::black_box;
use std::time::Instant;

fn main() {
    let hidden: usize = std::env::args().nth(1).map_or(512, |text| text.parse().expect("a hidden size"));
    let layers = Layers::new();
    for (unit, threads) in Unit::available().into_iter().flat_map(|unit| [(unit, 1), (unit, 2)]) {
        if let Some(multiply) = Multiply::new(unit, threads, 0.02) {
            let best = (0..9).map(|_| multiply.run()).fold(f64::INFINITY, f64::min);
            println!("{} on {threads} threads: {:.1} GF/s", unit.name(), 1e-9 * multiply.flops() / best);
        }
    }
    // The weights of eight layers, in the order in which a model reads them.
    let shapes = [[hidden, 2 * hidden], [hidden, hidden], [hidden, 6 * hidden], [3 * hidden, hidden]];
    let numbers = |count: usize| (0..count).map(|i| (i % 17) as f32 / 17.0 - 0.5).collect::<Vec<f32>>();
    let weights: Vec<(Vec<f32>, [usize; 2])> =
        (0..8).flat_map(|_| shapes).map(|[input, output]| (numbers(input * output), [input, output])).collect();
    let packed: Vec<_> = weights.iter().map(|(w, dims)| layers.pack_weight(w, *dims).expect("a weight")).collect();
    let size: usize = weights.iter().map(|(w, _)| w.len()).sum();
    for n in [1, 4, 16, 64, 128, 568] {
        let (x, dy) = (numbers(n * 3 * hidden), numbers(n * 6 * hidden));
        let report = |name: &str, run: &dyn Fn(usize)| {
            let mut times: Vec<f64> = (0..9)
                .map(|_| {
                    let began = Instant::now();
                    (0..weights.len()).for_each(run);
                    began.elapsed().as_secs_f64()
                })
                .collect();
            times.sort_by(f64::total_cmp);
            let rate = |time: f64| 2e-9 * (n * size) as f64 / time;
            println!("{n:>4} tokens, {name:<8} {:7.1} GF/s, best {:7.1}", rate(times[4]), rate(times[0]));
        };
        report("packed", &|i| {
            black_box(layers.linear_packed(&x[..n * weights[i].1[0]], &packed[i], Add::Nothing, n).expect("shapes"));
        });
        if n < 64 {
            continue;
        }
        report("forward", &|i| {
            let (w, [input, output]) = &weights[i];
            black_box(layers.linear(&x[..n * input], w, Add::Nothing, [n, *input, *output]).expect("shapes"));
        });
        report("dx", &|i| {
            let (w, [input, output]) = &weights[i];
            black_box(layers.linear_dx(w, &dy[..n * output], [n, *input, *output]).expect("shapes"));
        });
        report("dweight", &|i| {
            let (_, [input, output]) = &weights[i];
            let (x, dy) = (&x[..n * input], &dy[..n * output]);
            black_box(layers.linear_dweight(x, dy, [n, *input, *output]).expect("shapes"));
        });
    }
}
