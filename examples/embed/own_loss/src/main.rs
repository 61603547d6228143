//! Gradient accumulation, and a loss of your own.
//!
//! The program computes one step three times: whole, in two micro-batches, and with an own term added to the loss. It fails if the
//! micro-batches do not add up to the whole step, or if the own term does not have the gradient of its formula.

use grpo_backend_cpu::CpuBackend;
use grpo_core::{CustomLoss, Grads, GrpoLoss, LossConfig, LossOutput, PolicyInput, Result, TokenBatch};

const VOCAB: usize = 16;
const HIDDEN: usize = 8;

/// Returns reproducible numbers in [-1, 1).
fn numbers(count: usize, factor: usize) -> Vec<f32> {
    (0..count).map(|i| (i * factor % 101) as f32 / 50.5 - 1.0).collect()
}

/// Asserts that two lists are equal up to rounding in f32.
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    let largest = expected.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-5 * largest, "{what}: {found} is not {expected}");
    }
}

fn main() -> Result<()> {
    // Two completions, of two and of six tokens: their own averages are not the average of the step.
    let batch = TokenBatch::packed(vec![3_u32, 7, 1, 0, 15, 4, 9, 2], vec![0, 2, 8])?;
    let batch = batch.with_advantages(vec![1.0, -0.5])?;
    let (hidden, lm_head) = (numbers(8 * HIDDEN, 37), numbers(VOCAB * HIDDEN, 53)); // [N, H] and [V, H]
    let config = LossConfig::dapo().epsilon_high(0.28);
    let loss = GrpoLoss::builder(config.clone()).head(HIDDEN, VOCAB).build(&CpuBackend::new())?;
    let zeros = || (vec![0.0; hidden.len()], vec![0.0; lm_head.len()]);

    let (mut dhidden, mut dlm_head) = zeros();
    let whole = loss.step(&hidden, &lm_head, &batch, Grads::new(&mut dhidden, &mut dlm_head))?;
    let expected = (dhidden, dlm_head);

    let (mut dhidden, mut dlm_head) = zeros();
    let mut total = LossOutput::default();
    let step = loss.config().prepare_step(&batch)?; // masks, and the weight of every token in the step
    for sequences in [0..1, 1..2] {
        let part = step.select_sequences(sequences.clone())?; // refuses a batch without weights
        let values = batch.offsets()[sequences.start] * HIDDEN..batch.offsets()[sequences.end] * HIDDEN;
        let grads = Grads::new(&mut dhidden[values.clone()], &mut dlm_head);
        total.merge(loss.step(&hidden[values], &lm_head, &part, grads)?);
    }
    assert!((total.loss - whole.loss).abs() < 1e-6, "{} is not {}", total.loss, whole.loss);
    assert_close("hidden states", &dhidden, &expected.0);
    assert_close("head", &dlm_head, &expected.1);

    // The own term is the sum of bonus x log-probability.
    let bonus = numbers(batch.tokens(), 29);
    let (mut dhidden, mut dlm_head) = zeros();
    let grads = Grads::new(&mut dhidden, &mut dlm_head);
    let output = loss.step_with(PolicyInput::head(&hidden, &lm_head), &batch, grads, |scores| {
        let mut own = CustomLoss::from(config.token_losses(&batch, scores)?);
        for &row in batch.active_rows() {
            own.loss += f64::from(bonus[row]) * f64::from(scores.logp[row]);
            own.dlogp[row] += f64::from(bonus[row]);
        }
        Ok(own)
    })?;
    let term = |(bonus, logp): (&f32, &f32)| f64::from(*bonus) * f64::from(*logp);
    let terms: f64 = bonus.iter().zip(&output.scores.logp).map(term).sum();
    assert!((output.loss - whole.loss - terms).abs() < 1e-6, "{} is not {} + {terms}", output.loss, whole.loss);

    // The derivative of the own loss along the gradient of the head is the squared norm of that gradient.
    let shifted = |shift: f32| lm_head.iter().zip(&dlm_head).map(|(w, g)| w + shift * g).collect::<Vec<f32>>();
    let value = |lm_head: &[f32]| -> Result<f64> {
        let scores = loss.score(&hidden, lm_head, &batch)?;
        let built_in: f64 =
            config.token_losses(&batch.clone().with_old_logp(whole.scores.logp.clone())?, &scores)?.loss.iter().sum();
        Ok(built_in + bonus.iter().zip(&scores.logp).map(term).sum::<f64>())
    };
    let norm = dlm_head.iter().map(|g| f64::from(g * g)).sum::<f64>();
    let slope = (value(&shifted(1e-3))? - value(&shifted(-1e-3))?) / 2e-3;
    assert!((slope - norm).abs() < 1e-2 * norm, "the slope along the gradient is {slope}, and not {norm}");
    println!("loss {:.4}, in two parts {:.4}, with the own term {:.4}", whole.loss, total.loss, output.loss);
    Ok(())
}
