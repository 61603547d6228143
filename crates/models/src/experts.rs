//! Mixtures of experts (arXiv 1701.06538): a router sends each token to some of the layer's MLPs.

use crate::error::{Result, between, check};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The experts of the MLP of every layer, with the field names of `config.json` of Qwen3-MoE.
///
/// The router computes a logit for each expert. A token goes to the `num_experts_per_tok` experts with the largest logits; of equal logits,
/// those with the lowest index are taken. The output is the sum of the experts' outputs, each times its weight.
///
/// ```
/// use grpo_models::{Experts, Family, ModelConfig};
///
/// let experts = Experts { num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32, ..Experts::default() };
/// let plain = ModelConfig { attention_bias: false, qk_norm: true, ..ModelConfig::default() };
/// let config = ModelConfig { experts: Some(experts), ..plain };
/// config.validate()?;
/// assert_eq!(Family::of(&config)?, Family::Qwen3Moe);
/// # Ok::<(), grpo_models::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Experts {
    /// E, the number of experts.
    #[default(8)]
    pub num_experts: usize,
    /// The number of experts of a token.
    #[default(2)]
    pub num_experts_per_tok: usize,
    /// The width of an expert's MLP.
    #[default(96)]
    pub moe_intermediate_size: usize,
    /// `true` if the weights of a token's experts are a softmax over their logits, so that they sum to 1; `false` if they are those of the
    /// softmax over all experts.
    #[default(true)]
    pub norm_topk_prob: bool,
    /// The shared expert, an MLP that computes every token in addition to its experts.
    pub shared_expert: Option<SharedExpert>,
    /// The router of GLM-4.x; `None` is a softmax.
    pub sigmoid: Option<SigmoidRouter>,
    /// The activation and layout of gpt-oss; `None` is the activation `hidden_act` without biases, as in Qwen3-MoE.
    pub clamped: Option<ClampedSwiglu>,
}

/// The experts of gpt-oss: SwiGLU with clamped inputs, `(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)` with
/// `g = min(gate, limit)`. Router and experts have biases. In files, the experts of a layer are one tensor, `[in, out]`, and the columns of
/// gate and up alternate.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClampedSwiglu {
    /// The factor of the gate in its sigmoid.
    #[default(1.702)]
    pub swiglu_alpha: f64,
    /// The limit of gate and up.
    #[default(7.0)]
    pub swiglu_limit: f64,
}

/// The router of GLM-4.x and DeepSeek-V3 (arXiv 2412.19437). An expert's score is the sigmoid of its logit, and its rank is by the score plus a
/// correction bias, which is never trained. Experts are in groups of equal size, and a token chooses among the experts of the groups with the largest sums
/// of their two best ranks. The weights are scores, which `norm_topk_prob` divides by their sum, times a factor.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SigmoidRouter {
    /// The number of groups of experts.
    #[default(1)]
    pub n_group: usize,
    /// The number of groups of a token.
    #[default(1)]
    pub topk_group: usize,
    /// The factor of the weights of a token's experts.
    #[default(1.0)]
    pub routed_scaling_factor: f64,
}

impl SigmoidRouter {
    fn validate(self, experts: &Experts) -> Result<()> {
        let (groups, all) = (self.n_group, experts.num_experts);
        let fits = groups > 0 && all.is_multiple_of(groups) && all / groups >= 2;
        let expected = format!("a divisor of num_experts, {all}, with at least two experts in a group");
        check(fits, "model.experts.sigmoid.n_group", &expected, groups)?;
        let fits =
            (1..=groups).contains(&self.topk_group) && experts.num_experts_per_tok <= self.topk_group * (all / groups);
        let expected =
            format!("between 1 and n_group, {groups}, with at least num_experts_per_tok experts in these groups");
        check(fits, "model.experts.sigmoid.topk_group", &expected, self.topk_group)?;
        let (range, factor) = (1e-6..=1e6, self.routed_scaling_factor);
        check(range.contains(&factor), "model.experts.sigmoid.routed_scaling_factor", &between(&range), factor)?;
        check(experts.clamped.is_none(), "model.experts.clamped", "null beside model.experts.sigmoid", "a section")
    }
}

/// The shared expert of a layer: an MLP whose output is added to the output of each token's experts.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SharedExpert {
    /// The width of the MLP.
    #[default(96)]
    pub intermediate_size: usize,
    /// `true` if the output is multiplied by the sigmoid of a projection of the token, `mlp.shared_expert_gate`, as in Qwen2-MoE. The MLP is then
    /// `mlp.shared_expert`, and `mlp.shared_experts` otherwise, as in GLM-4.x.
    #[default(true)]
    pub is_gated: bool,
}

impl Experts {
    pub(crate) fn validate(&self, layers: usize) -> Result<()> {
        for (key, value, limit) in [
            ("model.experts.num_experts", self.num_experts, 1 << 12),
            ("model.experts.num_experts_per_tok", self.num_experts_per_tok, self.num_experts),
            ("model.experts.moe_intermediate_size", self.moe_intermediate_size, 1 << 18),
        ] {
            check((1..=limit).contains(&value), key, &format!("between 1 and {limit}"), value)?;
        }
        if let Some(shared) = self.shared_expert {
            let (key, width) = ("model.experts.shared_expert.intermediate_size", shared.intermediate_size);
            check((1..=1 << 18).contains(&width), key, &format!("between 1 and {}", 1 << 18), width)?;
            check(
                self.clamped.is_none(),
                "model.experts.clamped",
                "null beside model.experts.shared_expert",
                "a section",
            )?;
        }
        self.sigmoid.map_or(Ok(()), |router| router.validate(self))?;
        // Each expert of each layer has tensors with names.
        const MOST: usize = 1 << 17;
        let all = self.num_experts * layers;
        check(all <= MOST, "model.experts.num_experts", &format!("at most {MOST} experts in all layers"), all)?;
        let clamped = self.clamped.unwrap_or_default();
        for (key, value) in [
            ("model.experts.clamped.swiglu_alpha", clamped.swiglu_alpha),
            ("model.experts.clamped.swiglu_limit", clamped.swiglu_limit),
        ] {
            let range = 1e-3..=1e6;
            check(range.contains(&value), key, &between(&range), value)?;
        }
        Ok(())
    }
}
