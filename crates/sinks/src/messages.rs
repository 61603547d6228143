//! Declares messages of protocol buffers, as in a `.proto` file.

/// Declares messages with a line per field: its number, its kind in the words of `prost`, its name and its type.
macro_rules! messages {
    ($($(#[$about:meta])* $message:ident { $($number:tt => [$($kind:tt)+] $field:ident: $type:ty,)* })*) => {$(
        $(#[$about])*
        #[derive(Clone, PartialEq, prost::Message)]
        pub(super) struct $message {
            $(#[prost($($kind)+, tag = $number)] pub(super) $field: $type,)*
        }
    )*};
}

pub(crate) use messages;
