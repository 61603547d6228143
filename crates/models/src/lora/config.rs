//! Which matrices get an adapter, and of what size.

use crate::config::ModelConfig;
use crate::error::{Error, Result, check, nearest};
use crate::parameters::Parameter;
use regex::Regex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// What PEFT puts before the name of a module of the model.
const PREFIX: &str = "base_model.model.";
/// The short name of every matrix but the head.
const ALL_LINEAR: &str = "all-linear";
/// The head, as a module.
pub(super) const HEAD_MODULE: &str = "lm_head";

/// LoRA (Hu et al. 2021, <https://arxiv.org/abs/2106.09685>): every adapted matrix W `[out, in]` acts as W + s B A with A
/// `[r, in]` and B `[out, r]`, of which only A and B are trained. The names are those of PEFT's `LoraConfig`.
///
/// ```
/// use models::{LoraConfig, ModelConfig, TargetModules};
///
/// let model = ModelConfig::default();
/// let lora = LoraConfig { target_modules: TargetModules::Names(vec!["q_proj".into(), "lm_head".into()]), ..Default::default() };
/// let names: Vec<String> = lora.resolve(&model)?.into_iter().map(|matrix| matrix.name).collect();
/// assert_eq!(names, ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"]);
/// assert_eq!(lora.scaling(), 2.0);
/// # Ok::<(), models::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// r, the rank.
    pub r: usize,
    /// The numerator of [`LoraConfig::scaling`].
    pub lora_alpha: f64,
    /// The matrices that get an adapter.
    pub target_modules: TargetModules,
    /// Whether s is `lora_alpha / sqrt(r)` (rsLoRA, <https://arxiv.org/abs/2312.03732>) and not `lora_alpha / r`.
    pub use_rslora: bool,
    /// A folder in PEFT's layout from which training starts; `None` starts with fresh adapters. Its rank, alpha and targets are taken where
    /// none are set here.
    pub adapter: Option<PathBuf>,
}

/// The matrices that get an adapter: a text or a list of texts in configurations, as in PEFT.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected `all-linear`, a regular expression, or a list of names of modules")]
pub enum TargetModules {
    /// `all-linear` for every matrix but the head, or a regular expression that matches the whole of a module's name, such as
    /// `model\.layers\.[01]\..*_proj`.
    Pattern(String),
    /// Names of modules, or their ends after a dot, such as `q_proj` or `lm_head`.
    Names(Vec<String>),
}

/// A matrix with an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptedMatrix {
    /// The name of its module in `transformers`, such as `model.layers.0.self_attn.q_proj` or `lm_head`; its weight has
    /// `.weight` at the end.
    pub name: String,
    /// The number of rows of the matrix.
    pub output: usize,
    /// The number of its columns.
    pub input: usize,
}

impl AdaptedMatrix {
    /// The name of A `[r, in]` in PEFT's files.
    pub fn lora_a(&self) -> String {
        format!("{PREFIX}{}.lora_A.weight", self.name)
    }

    /// The name of B `[out, r]` in PEFT's files.
    pub fn lora_b(&self) -> String {
        format!("{PREFIX}{}.lora_B.weight", self.name)
    }

    /// The name under which PEFT stores the head that an adapter of it belongs to.
    pub(super) fn base_layer(&self) -> String {
        format!("{PREFIX}{}.base_layer.weight", self.name)
    }
}

impl Default for LoraConfig {
    /// Rank 16, alpha 32, every matrix but the head.
    fn default() -> Self {
        Self {
            r: 16,
            lora_alpha: 32.0,
            target_modules: TargetModules::Pattern(ALL_LINEAR.into()),
            use_rslora: false,
            adapter: None,
        }
    }
}

impl LoraConfig {
    /// Checks rank and alpha; the targets need a model ([`LoraConfig::resolve`]).
    ///
    /// # Errors
    /// [`Error::Config`] that names the key.
    pub fn validate(&self) -> Result<()> {
        check((1..=1 << 14).contains(&self.r), "lora.r", "between 1 and 16384", self.r)?;
        let alpha = self.lora_alpha;
        check(alpha.is_finite() && alpha > 0.0, "lora.lora_alpha", "a number above 0", alpha)
    }

    /// s, the factor of B A.
    pub fn scaling(&self) -> f64 {
        let rank = self.r as f64;
        self.lora_alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// The matrices of `model` that get an adapter, in the order of its layers, the head last.
    ///
    /// # Errors
    /// [`Error::Config`] of [`LoraConfig::validate`]; [`Error::Target`] for a name that the model does not have, a pattern that
    /// is none or that matches nothing, and a target that is not a matrix (the embedding, a norm, a whole layer).
    pub fn resolve(&self, model: &ModelConfig) -> Result<Vec<AdaptedMatrix>> {
        self.validate()?;
        let mut matrices = matrices(model);
        let others = other_modules(model);
        match &self.target_modules {
            TargetModules::Pattern(name) if name.eq_ignore_ascii_case(ALL_LINEAR) => {
                matrices.retain(|matrix| matrix.name != HEAD_MODULE);
            }
            TargetModules::Pattern(pattern) => {
                let whole = Regex::new(&format!("^(?:{pattern})$")).map_err(|e| Error::Target {
                    target: pattern.clone(),
                    // The last line says why; those before it draw a picture of the place.
                    reason: format!(
                        "not a regular expression here (look-around and back-references are not supported): {}",
                        e.to_string().lines().next_back().unwrap_or_default().trim_start_matches("error: ")
                    ),
                })?;
                expect_matrices(pattern, &others, |name| whole.is_match(name))?;
                matrices.retain(|matrix| whole.is_match(&matrix.name));
                if matrices.is_empty() {
                    return Err(no_match(
                        pattern,
                        "it matches the whole name of no matrix; one is model.layers.0.self_attn.q_proj",
                    ));
                }
            }
            TargetModules::Names(names) => {
                for target in names {
                    expect_matrices(target, &others, |name| is_at_end(name, target))?;
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
                check(!matrices.is_empty(), "lora.target_modules", "at least one name", "an empty list")?;
            }
        }
        Ok(matrices)
    }

    /// The configuration of the model that `model` becomes when the adapters are added to its weights. It differs where they adapt a head
    /// that is the embedding: the merged head has weights of its own then (`tie_word_embeddings: false`), because the embedding stays
    /// what it is.
    ///
    /// ```
    /// use models::{LoraConfig, ModelConfig, TargetModules};
    ///
    /// let tied = ModelConfig { tie_word_embeddings: true, ..ModelConfig::default() };
    /// let head = LoraConfig { target_modules: TargetModules::Names(vec!["lm_head".into()]), ..LoraConfig::default() };
    /// assert!(!head.merged_into(&tied)?.tie_word_embeddings);
    /// assert_eq!(LoraConfig::default().merged_into(&tied)?, tied);
    /// # Ok::<(), models::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`LoraConfig::resolve`].
    pub fn merged_into(&self, model: &ModelConfig) -> Result<ModelConfig> {
        let of_head = self.resolve(model)?.iter().any(|matrix| matrix.name == HEAD_MODULE);
        Ok(ModelConfig { tie_word_embeddings: model.tie_word_embeddings && !of_head, ..model.clone() })
    }

    /// The names by which PEFT finds the matrices that have an adapter: the last parts of their names, such as `q_proj`, where these mean the
    /// same matrices, otherwise whole names.
    ///
    /// # Errors
    /// Those of [`LoraConfig::resolve`].
    pub fn target_names(&self, model: &ModelConfig) -> Result<Vec<String>> {
        let matrices = self.resolve(model)?;
        let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
        let short: BTreeSet<String> = matrices.iter().map(|matrix| last(&matrix.name)).collect();
        let names = TargetModules::Names(short.iter().cloned().collect());
        let is_same = Self { target_modules: names, ..self.clone() }.resolve(model)? == matrices;
        Ok(if is_same { short.into_iter().collect() } else { matrices.into_iter().map(|matrix| matrix.name).collect() })
    }

    /// The tensors of the adapters, A and B of every matrix that [`LoraConfig::resolve`] gives, with the names of PEFT's files.
    ///
    /// # Errors
    /// Those of [`LoraConfig::resolve`].
    pub fn parameters(&self, model: &ModelConfig) -> Result<Vec<Parameter>> {
        let list = self.resolve(model)?.into_iter().flat_map(|matrix| {
            [
                Parameter { name: matrix.lora_a(), shape: vec![self.r, matrix.input] },
                Parameter { name: matrix.lora_b(), shape: vec![matrix.output, self.r] },
            ]
        });
        Ok(list.collect())
    }
}

/// Whether a module is meant by `target`: its name, or the end of it after a dot.
fn is_at_end(name: &str, target: &str) -> bool {
    name.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

fn expect_matrices(target: &str, others: &[String], matches: impl Fn(&str) -> bool) -> Result<()> {
    match others.iter().find(|name| matches(name)) {
        Some(name) => Err(no_match(target, &format!("`{name}` is not a matrix that can have an adapter here"))),
        None => Ok(()),
    }
}

fn no_match(target: &str, reason: &str) -> Error {
    Error::Target { target: target.to_owned(), reason: reason.to_owned() }
}

/// Every matrix that can have an adapter.
fn matrices(model: &ModelConfig) -> Vec<AdaptedMatrix> {
    let layers = (0..model.num_hidden_layers).flat_map(|layer| {
        model.layer_matrices().map(|matrix| AdaptedMatrix {
            name: format!("model.layers.{layer}.{}", matrix.name),
            output: matrix.output,
            input: matrix.input,
        })
    });
    let head = AdaptedMatrix { name: HEAD_MODULE.into(), output: model.vocab_size, input: model.hidden_size };
    layers.chain([head]).collect()
}

/// Modules of `transformers` that are not such a matrix.
fn other_modules(model: &ModelConfig) -> Vec<String> {
    let mut names =
        ["model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb"].map(String::from).to_vec();
    for layer in 0..model.num_hidden_layers {
        let prefix = format!("model.layers.{layer}");
        names.push(prefix.clone());
        for module in ["self_attn", "mlp", "mlp.act_fn", "input_layernorm", "post_attention_layernorm"] {
            names.push(format!("{prefix}.{module}"));
        }
        if model.qk_norm {
            names.extend(["q_norm", "k_norm"].map(|norm| format!("{prefix}.self_attn.{norm}")));
        }
    }
    names
}
