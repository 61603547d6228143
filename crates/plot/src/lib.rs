#![doc = include_str!("../README.md")]
//! [`Svg`] is the document, [`Axis`] chooses labels and maps values to pixels, [`Chart`] draws the grid and the labels of two axes. Curves and
//! markers are drawn by the caller, at [`Chart::at`].
//!
//! ```
//! use grpo_plot::{Axis, Chart, Svg, labels};
//!
//! let (x, y) = (0.0..10.0, 0.0..1.0);
//! let (steps, shares) = (labels(&x, 5, true), labels(&y, 5, false));
//! let chart = Chart {
//!     x: Axis::linear("step", x, steps).between(60.0, 380.0),
//!     y: Axis::linear("share", y, shares).between(160.0, 20.0),
//! };
//! let mut svg = Svg::new(400, 200);
//! chart.draw(&mut svg);
//! svg.line([(0.0, 0.1), (5.0, 0.7), (10.0, 0.8)].map(|point| chart.at(point)), "stroke=\"#0072B2\"");
//! assert!(svg.finish().contains(">step</text>"));
//! ```
#![forbid(unsafe_code)]

mod axis;
mod svg;

/// The object `axis` in JavaScript, for pages that redraw their charts: `axis.vertical` returns the labels of [`labels`], and `axis.horizontal` as
/// many as fit by the widths that a browser measures.
pub const AXIS_SCRIPT: &str = include_str!("axis.js");

pub use axis::{Axis, Chart, Label, horizontal_labels, labels, three_digits, widest};
pub use svg::{Anchor, COLORS, Point, Svg, shortened, text_width};
