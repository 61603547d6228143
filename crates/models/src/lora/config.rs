//! The configuration of LoRA: adapted matrices, rank and scaling.

use crate::config::ModelConfig;
use crate::error::{Error, Result, check, nearest};
use crate::names::{EXPERTS, HEAD_MODULE, PEFT_PREFIX, wrapped};
use crate::parameters::{Initial, Matrix, Parameter, ParameterSpec};
use regex::Regex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// PEFT's name for all matrices except the head.
const ALL_LINEAR: &str = "all-linear";

/// LoRA (Hu et al. 2021, <https://arxiv.org/abs/2106.09685>): every adapted matrix W `[out, in]` becomes W + s B A with A `[r, in]` and
/// B `[out, r]`, and only A and B are trained. Fields have the names of PEFT's `LoraConfig`.
///
/// ```
/// use grpo_models::{LoraConfig, ModelConfig, TargetModules};
///
/// let model = ModelConfig::default();
/// let lora = LoraConfig { target_modules: TargetModules::Names(vec!["q_proj".into(), "lm_head".into()]), ..Default::default() };
/// let names: Vec<String> = lora.resolve(&model)?.into_iter().map(|matrix| matrix.name).collect();
/// assert_eq!(names, ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"]);
/// assert_eq!(lora.scaling(), 2.0);
/// # Ok::<(), grpo_models::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// r, the rank.
    pub r: usize,
    /// The numerator of [`LoraConfig::scaling`].
    pub lora_alpha: f64,
    /// The dropout of the inputs of adapters, which is 0.
    pub lora_dropout: f64,
    /// The matrices that get an adapter. The list may be empty beside `target_parameters`.
    pub target_modules: TargetModules,
    /// The parameters of mixtures of experts that get an adapter, by name or its suffix after a dot: `mlp.experts.gate_up_proj`,
    /// `mlp.experts.down_proj`. Every expert has its own A and B of rank r.
    pub target_parameters: Vec<String>,
    /// `true` if s is `lora_alpha / sqrt(r)` (rsLoRA, <https://arxiv.org/abs/2312.03732>) instead of `lora_alpha / r`.
    pub use_rslora: bool,
    /// A folder in PEFT's layout from which training starts; `None` starts with fresh adapters. Its rank, alpha and targets are taken where
    /// none are set here.
    pub adapter: Option<PathBuf>,
}

/// The matrices that get an adapter, as a string or a list of strings, as in PEFT.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected `all-linear`, a regular expression, or a list of names of modules")]
pub enum TargetModules {
    /// `all-linear` for every matrix except the head, or a regular expression that matches a whole module name, such as
    /// `model\.layers\.[01]\..*_proj`.
    Pattern(String),
    /// Module names, or their suffixes after a dot, such as `q_proj` or `lm_head`. A name in a model of images and text, such as
    /// `model.language_model.layers.0.self_attn.q_proj`, is that of the matrix in the text decoder, also in a regular expression.
    Names(Vec<String>),
}

/// A matrix with an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptedMatrix {
    /// The module name in `transformers`, such as `model.layers.0.self_attn.q_proj` or `lm_head`; the weight's name adds `.weight`. A
    /// parameter of experts has its own name, such as `model.layers.0.mlp.experts.down_proj`.
    pub name: String,
    /// The number of rows of the matrix.
    pub output: usize,
    /// The number of columns of the matrix.
    pub input: usize,
    /// The experts that have such a matrix each, if it is a parameter of a mixture of experts; `None` for the matrix of a module.
    pub experts: Option<AdaptedExperts>,
}

/// The adapter of a parameter of all experts of a layer ([`LoraConfig::target_parameters`]).
///
/// PEFT keeps all experts in one A `[E r, in]`, expert by expert, and one B `[out, r E]`, in which the columns of an expert are E apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptedExperts {
    /// E, the number of experts.
    pub count: usize,
    /// `true` if PEFT stores the adapter inside the adapter of another parameter of the same module.
    pub is_inner: bool,
}

impl AdaptedMatrix {
    /// Returns the number of rows of A and of columns of B for rank `r`: `r`, or `r` times the number of experts.
    pub fn rank(&self, r: usize) -> usize {
        r * self.experts.map_or(1, |experts| experts.count)
    }

    /// Returns the name of A `[r, in]` in PEFT's files.
    pub fn lora_a(&self) -> String {
        format!("{PEFT_PREFIX}{}.lora_A.weight", self.module())
    }

    /// Returns the name of B `[out, r]` in PEFT's files.
    pub fn lora_b(&self) -> String {
        format!("{PEFT_PREFIX}{}.lora_B.weight", self.module())
    }

    /// Returns the name of PEFT's module.
    fn module(&self) -> String {
        match (self.experts, self.name.rsplit_once('.')) {
            (Some(AdaptedExperts { is_inner: true, .. }), Some((module, _))) => format!("{module}.base_layer"),
            (Some(_), Some((module, _))) => module.to_owned(),
            _ => self.name.clone(),
        }
    }

    /// Returns the name by which PEFT stores the original head with an adapter of the head.
    pub(super) fn base_layer(&self) -> String {
        format!("{PEFT_PREFIX}{}.base_layer.weight", self.name)
    }
}

impl Default for LoraConfig {
    /// Returns rank 16 and alpha 32 for every matrix except the head.
    fn default() -> Self {
        Self {
            r: 16,
            lora_alpha: 32.0,
            lora_dropout: 0.0,
            target_modules: TargetModules::Pattern(ALL_LINEAR.into()),
            target_parameters: Vec::new(),
            use_rslora: false,
            adapter: None,
        }
    }
}

impl LoraConfig {
    /// Checks rank, alpha and dropout. [`LoraConfig::resolve`] checks the targets.
    ///
    /// # Errors
    /// [`Error::Config`] with the key.
    pub fn validate(&self) -> Result<()> {
        check((1..=1 << 14).contains(&self.r), "lora.r", "between 1 and 16384", self.r)?;
        let alpha = self.lora_alpha;
        check(alpha.is_finite() && alpha > 0.0, "lora.lora_alpha", "a number above 0", alpha)?;
        let expected =
            "0: adapters are trained without dropout, so that a step has the log-probabilities of its rollout";
        check(self.lora_dropout == 0.0, "lora.lora_dropout", expected, self.lora_dropout)
    }

    /// Returns s, the factor of B A.
    pub fn scaling(&self) -> f64 {
        let rank = self.r as f64;
        self.lora_alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// Returns the matrices of `model` with an adapter, in layer order, the head last.
    ///
    /// # Errors
    /// [`Error::Config`] from [`LoraConfig::validate`]; [`Error::Target`] for an unknown name, an invalid pattern or one without a match, and a
    /// target that is not a matrix (the embedding, a norm, a whole layer) or not a parameter of experts.
    pub fn resolve(&self, model: &ModelConfig) -> Result<Vec<AdaptedMatrix>> {
        self.validate()?;
        let mut matrices = self.resolve_modules(model)?;
        for adapted in self.resolve_parameters(model)? {
            let layer = |matrix: &AdaptedMatrix| layer_of(&matrix.name).unwrap_or(usize::MAX);
            let place = matrices.iter().position(|matrix| layer(matrix) > layer(&adapted)).unwrap_or(matrices.len());
            matrices.insert(place, adapted);
        }
        Ok(matrices)
    }

    /// Returns the adapted parameters of experts, in layer order.
    fn resolve_parameters(&self, model: &ModelConfig) -> Result<Vec<AdaptedMatrix>> {
        let mut all = expert_parameters(model);
        for target in &self.target_parameters {
            if !all.iter().any(|matrix| is_at_end(&matrix.name, target)) {
                let reason = match all.is_empty() {
                    true => "lora.target_parameters are parameters of experts, and the model has no experts",
                    false => {
                        "lora.target_parameters are parameters of experts: mlp.experts.gate_up_proj, mlp.experts.down_proj"
                    }
                };
                return Err(no_match(target, reason));
            }
        }
        all.retain(|matrix| self.target_parameters.iter().any(|target| is_at_end(&matrix.name, target)));
        // PEFT wraps the module for one parameter after the other, in the order of the module.
        let modules: Vec<String> = all.iter().map(AdaptedMatrix::module).collect();
        for (matrix, module) in all.iter_mut().enumerate().map(|(i, matrix)| (matrix, &modules[i..])) {
            let is_inner = module[1..].contains(&module[0]);
            matrix.experts = matrix.experts.map(|experts| AdaptedExperts { is_inner, ..experts });
        }
        Ok(all)
    }

    fn resolve_modules(&self, model: &ModelConfig) -> Result<Vec<AdaptedMatrix>> {
        let mut matrices = matrices(model);
        let others = other_modules(model);
        match &self.target_modules {
            TargetModules::Pattern(name) if name.eq_ignore_ascii_case(ALL_LINEAR) => {
                matrices.retain(|matrix| matrix.name != HEAD_MODULE);
            }
            TargetModules::Pattern(pattern) => {
                let whole = Regex::new(&format!("^(?:{pattern})$")).map_err(|e| Error::Target {
                    target: pattern.clone(),
                    // The last line has the reason; the others show the position.
                    reason: format!(
                        "not a regular expression here (look-around and back-references are not supported): {}",
                        e.to_string().lines().next_back().unwrap_or_default().trim_start_matches("error: ")
                    ),
                })?;
                let selects = |name: &str| whole.is_match(name) || whole.is_match(&wrapped(name));
                expect_matrices(pattern, (&others, &matrices), selects)?;
                matrices.retain(|matrix| selects(&matrix.name));
                if matrices.is_empty() {
                    return Err(no_match(
                        pattern,
                        "it matches the whole name of no matrix; one is model.layers.0.self_attn.q_proj",
                    ));
                }
            }
            TargetModules::Names(names) => {
                for target in names {
                    expect_matrices(target, (&others, &matrices), |name| is_at_end(name, target))?;
                    if !matrices.iter().any(|matrix| is_at_end(&matrix.name, target)) {
                        let ends = matrices.iter().filter_map(|matrix| matrix.name.rsplit('.').next());
                        let near = nearest(target, ends).map(|name| format!("; the nearest is {name}"));
                        return Err(no_match(
                            target,
                            &format!("the model has no such matrix{}", near.unwrap_or_default()),
                        ));
                    }
                }
                matrices.retain(|matrix| names.iter().any(|target| is_at_end(&matrix.name, target)));
                let is_any = !matrices.is_empty() || !self.target_parameters.is_empty();
                check(is_any, "lora.target_modules", "at least one name", "an empty list")?;
            }
        }
        Ok(matrices)
    }

    /// Returns the configuration of `model` after merging the adapters. It differs if they adapt a head that is tied to the embedding: merging
    /// unties the head (`tie_word_embeddings: false`), because the embedding does not change.
    ///
    /// ```
    /// use grpo_models::{LoraConfig, ModelConfig, TargetModules};
    ///
    /// let tied = ModelConfig { tie_word_embeddings: true, ..ModelConfig::default() };
    /// let head = LoraConfig { target_modules: TargetModules::Names(vec!["lm_head".into()]), ..LoraConfig::default() };
    /// assert!(!head.merged_into(&tied)?.tie_word_embeddings);
    /// assert_eq!(LoraConfig::default().merged_into(&tied)?, tied);
    /// # Ok::<(), grpo_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`LoraConfig::resolve`].
    pub fn merged_into(&self, model: &ModelConfig) -> Result<ModelConfig> {
        let of_head = self.resolve(model)?.iter().any(|matrix| matrix.name == HEAD_MODULE);
        Ok(ModelConfig { tie_word_embeddings: model.tie_word_embeddings && !of_head, ..model.clone() })
    }

    /// Returns PEFT's `target_modules`: the last components of the matrix names, such as `q_proj`, if they select the same matrices, and
    /// full names otherwise.
    ///
    /// # Errors
    /// The errors of [`LoraConfig::resolve`].
    pub fn target_names(&self, model: &ModelConfig) -> Result<Vec<String>> {
        let matrices = self.resolve_modules(model)?;
        let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
        let short: BTreeSet<String> = matrices.iter().map(|matrix| last(&matrix.name)).collect();
        let names = TargetModules::Names(short.iter().cloned().collect());
        let is_same = Self { target_modules: names, ..self.clone() }.resolve_modules(model)? == matrices;
        Ok(if is_same { short.into_iter().collect() } else { matrices.into_iter().map(|matrix| matrix.name).collect() })
    }

    /// Returns PEFT's `target_parameters`: names within a layer, such as `mlp.experts.down_proj`, if all layers have the same adapters, and
    /// full names otherwise.
    ///
    /// # Errors
    /// The errors of [`LoraConfig::resolve`].
    pub fn parameter_names(&self, model: &ModelConfig) -> Result<Vec<String>> {
        let adapted = self.resolve_parameters(model)?;
        let of_layer = |matrix: &AdaptedMatrix| matrix.name.splitn(4, '.').nth(3).unwrap_or_default().to_owned();
        let short: BTreeSet<String> = adapted.iter().map(of_layer).collect();
        let is_same = short.len() * model.routers() == adapted.len();
        Ok(if is_same { short.into_iter().collect() } else { adapted.into_iter().map(|matrix| matrix.name).collect() })
    }

    /// Returns the adapter tensors, A and B of every matrix of [`LoraConfig::resolve`], by PEFT's names.
    ///
    /// # Errors
    /// The errors of [`LoraConfig::resolve`].
    pub fn parameters(&self, model: &ModelConfig) -> Result<Vec<Parameter>> {
        let list = self.resolve(model)?.into_iter().flat_map(|matrix| {
            [
                Parameter { name: matrix.lora_a(), shape: vec![matrix.rank(self.r), matrix.input] },
                Parameter { name: matrix.lora_b(), shape: vec![matrix.output, matrix.rank(self.r)] },
            ]
        });
        Ok(list.collect())
    }
}

/// Returns `true` if `target` is the module's name or its suffix after a dot.
fn is_at_end(name: &str, target: &str) -> bool {
    let is_end =
        |name: &str| name.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'));
    is_end(name) || is_end(&wrapped(name))
}

/// Refuses a target that selects another module than a matrix. The parameters of experts are no modules, so a target may have their names if it
/// also selects matrices, such as those of a shared expert.
fn expect_matrices(
    target: &str,
    (others, matrices): (&[String], &[AdaptedMatrix]),
    matches: impl Fn(&str) -> bool,
) -> Result<()> {
    let is_parameter = format!(".{EXPERTS}.");
    let selects_some = matrices.iter().any(|matrix| matches(&matrix.name));
    let mut modules = others.iter().filter(|name| !(selects_some && name.contains(&is_parameter)));
    match modules.find(|name| matches(name)) {
        Some(name) => {
            let is_of_experts =
                [".gate_up_proj", ".down_proj"].iter().any(|end| name.ends_with(&format!("{EXPERTS}{end}")));
            let hint = if is_of_experts { "; it is a parameter of experts, for lora.target_parameters" } else { "" };
            Err(no_match(target, &format!("`{name}` is not a matrix that can have an adapter here{hint}")))
        }
        None => Ok(()),
    }
}

fn no_match(target: &str, reason: &str) -> Error {
    Error::Target { target: target.to_owned(), reason: reason.to_owned() }
}

/// Returns all matrices that can have an adapter.
fn matrices(model: &ModelConfig) -> Vec<AdaptedMatrix> {
    let layers = (0..model.num_hidden_layers).flat_map(|layer| {
        model.layer_matrices(layer).into_iter().map(move |matrix| AdaptedMatrix {
            name: format!("model.layers.{layer}.{}", matrix.name),
            output: matrix.output,
            input: matrix.input,
            experts: None,
        })
    });
    let name = HEAD_MODULE.into();
    let head = AdaptedMatrix { name, output: model.vocab_size, input: model.hidden_size, experts: None };
    layers.chain([head]).collect()
}

/// Returns all parameters of experts, in the order of transformers' modules.
fn expert_parameters(model: &ModelConfig) -> Vec<AdaptedMatrix> {
    let Some(experts) = &model.experts else { return Vec::new() };
    let (hidden, wide) = (model.hidden_size, experts.moe_intermediate_size);
    let matrices = [(Matrix::ExpertGateUpProj, 2 * wide, hidden), (Matrix::ExpertDownProj, hidden, wide)];
    let of_layer = |layer: usize| {
        matrices.map(|(matrix, output, input)| AdaptedMatrix {
            name: format!("model.layers.{layer}.{}", matrix.modules()[0]),
            output,
            input,
            experts: Some(AdaptedExperts { count: experts.num_experts, is_inner: false }),
        })
    };
    (0..model.num_hidden_layers).filter(|layer| model.experts_of(*layer).is_some()).flat_map(of_layer).collect()
}

/// Returns the layer of a module; `None` for the head.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split_once('.')?.0.parse().ok()
}

/// Returns the modules of `transformers` that cannot have an adapter, and the parameters of experts.
fn other_modules(model: &ModelConfig) -> Vec<String> {
    let mut names =
        ["model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb"].map(String::from).to_vec();
    for layer in 0..model.num_hidden_layers {
        let prefix = format!("model.layers.{layer}");
        names.push(prefix.clone());
        let (mut modules, mut of_experts) = (Vec::new(), Vec::new());
        for row in ParameterSpec::of_layer(model, model.layer(layer)) {
            let own = row.module();
            // Parameters of experts are no modules, but have names like modules.
            let is_other =
                row.initial != Initial::Linear && (row.path.ends_with(".weight") || row.role.is_of_experts());
            let parents = own.match_indices('.').map(|(end, _)| &own[..end]);
            modules.extend(parents.chain(is_other.then_some(own)).map(str::to_owned));
            modules.extend(own.strip_suffix(".down_proj").map(|mlp| format!("{mlp}.act_fn")));
            let count = model.experts.as_ref().filter(|_| row.is_per_expert()).map_or(0, |experts| experts.num_experts);
            let all = (0..count).map(|expert| row.name(layer, expert));
            of_experts.extend(all.map(|name| name.trim_end_matches(".weight").to_owned()));
        }
        if model.value_norm && model.linear_attention_of(layer).is_none() {
            modules.push("self_attn.v_norm".to_owned());
        }
        if model.experts_of(layer).is_some() {
            modules.extend(Matrix::ExpertGateUpProj.modules().into_iter().map(str::to_owned));
        }
        let mut known = BTreeSet::new();
        modules.retain(|module| known.insert(module.clone()));
        names.extend(modules.into_iter().map(|module| format!("{prefix}.{module}")));
        names.extend(of_experts);
    }
    names
}
