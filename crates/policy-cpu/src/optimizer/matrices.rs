//! The rule of matrices ([`grpo_policy::Matrices`]) on the kernels of [`grpo_backend_cpu::layers`].

use super::Update;
use crate::decoder::Part;
use grpo_backend_cpu::layers::{Add, Layers};
use grpo_policy::Matrices;

/// A matrix `[rows, columns]` in f32.
struct Matrix {
    values: Vec<f32>,
    dims: [usize; 2],
}

/// Updates the values of a tensor in the parameter `values`, which has this many columns, and its buffer. Each matrix of a stack is updated for
/// itself.
pub(super) fn apply(
    part: &Part,
    update: &Update,
    values: &mut [f32],
    gradient: &[f32],
    buffer: &mut [f32],
    columns: usize,
) {
    let [.., rows, width] = part.shape[..] else { return };
    let step = |values: &mut [f32], gradient: &[f32], buffer: &mut [f32]| {
        let matrix = |values| Matrix { values, dims: [rows, width] };
        update.step.update_matrices(update.clip, values, gradient, buffer, matrix, |matrix| matrix.values);
    };
    if !part.transposed {
        let whole = if part.columns.is_empty() { 0..values.len() } else { part.columns.clone() };
        let count = rows * width;
        let matrices = values[whole.clone()].chunks_exact_mut(count).zip(gradient[whole].chunks_exact(count));
        for ((values, gradient), buffer) in matrices.zip(buffer.chunks_exact_mut(count)) {
            step(values, gradient, buffer);
        }
        return;
    }
    // The parameter is `[in, out]`, with this tensor's transpose in some of its rows and columns.
    let inputs = part.first_row * columns..(part.first_row + width) * columns;
    let of_part = |from: &[f32]| -> Vec<f32> {
        let values = from[inputs.clone()].chunks_exact(columns).flat_map(|row| &row[part.columns.clone()]);
        Matrix { values: values.copied().collect(), dims: [width, rows] }.transposed().values
    };
    let (mut of_values, of_gradient) = (of_part(values), of_part(gradient));
    step(&mut of_values, &of_gradient, buffer);
    let back = Matrix { values: of_values, dims: [rows, width] }.transposed().values;
    let to = values[inputs].chunks_exact_mut(columns);
    for (to, from) in to.zip(back.chunks_exact(rows)) {
        to[part.columns.clone()].copy_from_slice(from);
    }
}

impl Matrix {
    fn map(&self, values: Vec<f32>) -> Self {
        Self { values, dims: self.dims }
    }
}

impl Matrices for Matrix {
    fn dims(&self) -> [usize; 2] {
        self.dims
    }

    fn transposed(&self) -> Self {
        let [rows, columns] = self.dims;
        let mut values = vec![0.0; rows * columns];
        for (row, from) in self.values.chunks_exact(columns.max(1)).enumerate() {
            values[row..].iter_mut().step_by(rows.max(1)).zip(from).for_each(|(to, from)| *to = *from);
        }
        Self { values, dims: [columns, rows] }
    }

    fn gram(&self) -> Self {
        let [rows, columns] = self.dims;
        let product = Layers::new().linear_dx(&self.values, &self.values, [rows, rows, columns]);
        Self { values: product.expect("shapes of one matrix"), dims: [rows, rows] }
    }

    fn product(&self, other: &Self) -> Self {
        let ([rows, inner], [_, columns]) = (self.dims, other.dims);
        let product = Layers::new().linear(&self.values, &other.values, Add::Nothing, [rows, inner, columns]);
        Self { values: product.expect("a square matrix on the left"), dims: [rows, columns] }
    }

    fn combined(&self, a: f64, other: &Self, b: f64) -> Self {
        let (a, b) = (a as f32, b as f32);
        self.map(self.values.iter().zip(&other.values).map(|(x, y)| a * x + b * y).collect())
    }

    fn normalised(&self, smallest: f64) -> Self {
        let squares = self.values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        let norm = squares.sqrt().max(smallest) as f32;
        self.map(self.values.iter().map(|value| value / norm).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_policy::{OptimizerSettings, Rule};
    use grpo_testkit::optimizer_steps::{OptimizerSteps, to_f32};

    /// A matrix for itself, the second of a stack, and the transpose in a wider parameter.
    #[test]
    fn steps_match_torch() {
        let name = "model.layers.0.mlp.up_proj.weight";
        let cases = OptimizerSteps::<OptimizerSettings>::all().into_iter();
        let cases = cases.filter(|case| Rule::of(case.settings.name, name, &case.shape).is_of_matrices());
        let mut count = 0;
        for case in cases {
            count += 1;
            let [rows, columns] = case.shape[..] else { panic!("a matrix") };
            for (stack, transposed) in [(1, false), (2, false), (1, true)] {
                let shape = if stack == 1 { vec![rows, columns] } else { vec![stack, rows, columns] };
                let (of_part, first_row) = if transposed { (3..3 + rows, 2) } else { (0..0, 0) };
                let part = Part { name: name.to_owned(), shape, columns: of_part, first_row, transposed };
                let width = if transposed { rows + 7 } else { columns };
                // The index of each of the case's values in the parameter.
                let at = |i: usize| match transposed {
                    true => (2 + i % columns) * width + 3 + i / columns,
                    false => (stack - 1) * rows * columns + i,
                };
                let length = if transposed { (2 + columns) * width } else { stack * rows * columns };
                let place = |values: &[f64]| {
                    let mut all = vec![0.5; length];
                    to_f32(values).into_iter().enumerate().for_each(|(i, value)| all[at(i)] = value);
                    all
                };
                let mut values = place(&case.weight);
                let mut buffer = vec![0.0; stack * rows * columns];
                for (step, gradient) in (1..).zip(&case.gradients) {
                    let update = Update::new(&case.settings, step, 1.0, case.learning_rate);
                    apply(&part, &update, &mut values, &place(gradient), &mut buffer, width);
                    let found: Vec<f32> = (0..rows * columns).map(|i| values[at(i)]).collect();
                    case.assert_weight(step as usize, &found);
                }
                case.assert_state("momentum_buffer", &buffer[(stack - 1) * rows * columns..]);
                if transposed {
                    assert_eq!(values.iter().filter(|value| **value == 0.5).count(), length - rows * columns);
                }
            }
        }
        assert_eq!(count, 4);
    }
}
