//! Registration of losses. The line of a loss in [`super`] defines a variant of [`super::LossType`], a constructor of
//! [`crate::LossConfig`] and, if the loss has keys of its own, keys of the flat configuration.

/// Each line is `module::Loss`, or `module::Loss with Parameters` for a loss with keys of its own. The module's name is the name
/// in configuration files. `cargo fmt` does not find modules declared here, so `.ci/run` calls `rustfmt` on them.
macro_rules! losses {
    ($($(#[$attribute:meta])* $module:ident::$loss:ident $(with $parameters:ident)?,)*) => {
        $(pub mod $module;)*

        /// The loss per token and, under TRL's names, the average over tokens ([`crate::aggregate`]).
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum LossType {
            $(
                #[doc = concat!("The loss of [`", stringify!($module), "`](crate::objective::", stringify!($module), ").")]
                $(#[$attribute])*
                $loss,
            )*
        }

        impl LossType {
            /// All losses, in order of registration.
            pub const ALL: &[Self] = &[$(Self::$loss),*];

            /// Returns the name used in configuration.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$loss => stringify!($module),)*
                }
            }

            /// Returns the facts about the loss.
            pub const fn traits(self) -> &'static LossTraits {
                match self {
                    $(Self::$loss => &<$module::$loss as Loss>::TRAITS,)*
                }
            }

            /// Calls the loss's [`Loss::policy`].
            fn policy<R: Real>(self, config: &LossConfig, terms: &TokenTerms<R>, ratio: &Ratio<R>) -> PolicyTerm<R> {
                match self {
                    $(Self::$loss => $module::$loss.policy(config, terms, ratio),)*
                }
            }

            /// Calls the loss's [`Loss::shared_part`].
            fn shared_part<R: Real>(self, config: &LossConfig, logp: &R, old_logp: &R, advantage: &R) -> R {
                match self {
                    $(Self::$loss => $module::$loss.shared_part(config, logp, old_logp, advantage),)*
                }
            }

            /// Calls the loss's [`Loss::check`].
            pub(crate) fn check(self, config: &LossConfig) -> crate::Result<()> {
                match self {
                    $(Self::$loss => $module::$loss.check(config),)*
                }
            }

            /// Calls the loss's [`Loss::choose`].
            pub(crate) fn choose(
                self,
                config: &LossConfig,
                batch: &TokenBatch,
                policy: &PolicyValues,
                factors: &mut TokenFactors,
            ) {
                match self {
                    $(Self::$loss => $module::$loss.choose(config, batch, policy, factors),)*
                }
            }

            /// Calls the loss's [`Loss::metrics`].
            pub(crate) fn metrics(self, config: &LossConfig, clipped: &Clipped<'_>, metrics: &mut Metrics) {
                match self {
                    $(Self::$loss => $module::$loss.metrics(config, clipped, metrics),)*
                }
            }
        }

        /// Keys of single losses. Configuration files hold them at the top level; in Rust they are
        /// `config.parameters.sapo.temperature_pos` and so on.
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        pub struct LossParameters {
            $($(
                #[doc = concat!("The keys of [`", stringify!($module), "`].")]
                #[serde(flatten)]
                pub $module: $module::$parameters,
            )?)*
        }

        impl LossParameters {
            /// Checks the keys of all losses, including losses that the configuration does not use.
            ///
            /// # Errors
            /// [`crate::Error::Config`] that names the key.
            pub(crate) fn check(&self) -> crate::Result<()> {
                $($(
                    let parameters: &$module::$parameters = &self.$module;
                    parameters.check()?;
                )?)*
                Ok(())
            }
        }

        /// The default configuration of each loss.
        impl LossConfig {
            $(
                #[doc = concat!("The loss [`", stringify!($module), "`](crate::objective::", stringify!($module), ") with TRL's")]
                /// defaults.
                pub fn $module() -> Self {
                    Self { loss_type: LossType::$loss, ..Self::default() }
                }
            )*
        }
    };
}
