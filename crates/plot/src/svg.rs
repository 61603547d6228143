//! An SVG document.

use grpo_files::is_printable;
use std::fmt::Write as _;

/// A position in pixels from the top left corner.
pub type Point = (f64, f64);

/// Okabe and Ito's palette, which colour-blind readers can distinguish, made darker where white would swallow it.
pub const COLORS: [&str; 7] = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#968200", "#3C3C3C"];

/// The alignment of a text at its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The text starts there.
    Start,
    /// The middle of the text is there.
    Middle,
    /// The text ends there.
    End,
}

/// An SVG document on a white background. Shapes and texts at positions that are not finite are left out.
#[derive(Debug)]
pub struct Svg(String);

impl Svg {
    /// Creates a document of this size in pixels.
    pub fn new(width: u32, height: u32) -> Self {
        Self(format!(
            "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
             xmlns=\"http://www.w3.org/2000/svg\">\n<rect width=\"100%\" height=\"100%\" fill=\"#FFFFFF\"/>\n"
        ))
    }

    /// Adds a line through `points`; `style` has presentation attributes of SVG, such as `stroke="#000000"`.
    pub fn line(&mut self, points: impl IntoIterator<Item = Point>, style: &str) {
        self.path(points, &format!("fill=\"none\" {style}"));
    }

    /// Adds a rectangle between two corners.
    pub fn rectangle(&mut self, (left, top): Point, (right, bottom): Point, style: &str) {
        self.path([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], style);
    }

    /// Adds a filled circle.
    pub fn circle(&mut self, (x, y): Point, radius: f64, color: &str) {
        if x.is_finite() && y.is_finite() {
            self.add(format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{color}\"/>"));
        }
    }

    /// Adds the marker of the series `index`: the seven colours as circles, then as squares, triangles and crosses.
    pub fn marker(&mut self, (x, y): Point, index: usize) {
        let color = COLORS[index % COLORS.len()];
        let fill = format!("fill=\"{color}\"");
        match index / COLORS.len() % 4 {
            0 => self.circle((x, y), 6.0, color),
            1 => self.rectangle((x - 5.0, y - 5.0), (x + 5.0, y + 5.0), &fill),
            2 => self.path([(x, y - 6.0), (x + 6.0, y + 5.0), (x - 6.0, y + 5.0)], &fill),
            _ => {
                let style = format!("stroke=\"{color}\" stroke-width=\"3\"");
                self.line([(x - 5.0, y - 5.0), (x + 5.0, y + 5.0)], &style);
                self.line([(x - 5.0, y + 5.0), (x + 5.0, y - 5.0)], &style);
            }
        }
    }

    /// Adds a text of this font size, vertically centred at `y`. Control characters become U+FFFD, because XML cannot represent them.
    pub fn text(&mut self, text: &str, at: Point, size: f64, anchor: Anchor) {
        self.words(text, at, size, anchor, "");
    }

    /// Adds a text that is read from bottom to top, centred at a position.
    pub fn vertical_text(&mut self, text: &str, (x, y): Point, size: f64) {
        self.words(text, (x, y), size, Anchor::Middle, &format!(" transform=\"rotate(270 {x:.1} {y:.1})\""));
    }

    /// Returns the document.
    pub fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }

    fn path(&mut self, points: impl IntoIterator<Item = Point>, style: &str) {
        let mut places = String::new();
        for (x, y) in points.into_iter().filter(|(x, y)| x.is_finite() && y.is_finite()) {
            // Writing to a string does not fail.
            let _ = write!(places, "{}{x:.1},{y:.1}", if places.is_empty() { "" } else { " " });
        }
        if !places.is_empty() {
            self.add(format_args!("<polyline points=\"{places}\" {style}/>"));
        }
    }

    fn words(&mut self, text: &str, (x, y): Point, size: f64, anchor: Anchor, more: &str) {
        if !(x.is_finite() && y.is_finite()) {
            return;
        }
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let mut escaped = String::new();
        for c in text.chars() {
            match c {
                '&' => escaped.push_str("&amp;"),
                '<' => escaped.push_str("&lt;"),
                '>' => escaped.push_str("&gt;"),
                '\u{fffe}' | '\u{ffff}' => escaped.push(char::REPLACEMENT_CHARACTER),
                c => escaped.push(if is_printable(c) { c } else { char::REPLACEMENT_CHARACTER }),
            }
        }
        self.add(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" dy=\"0.35em\" font-size=\"{size}\" text-anchor=\"{anchor}\"{more}>{escaped}</text>"
        ));
    }

    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.0, "{element}");
    }
}

/// Returns the width of a text in pixels, in a wide font.
pub fn text_width(text: &str, size: f64) -> f64 {
    0.65 * size * text.chars().count() as f64
}

/// Shortens a text to at most `most` characters and an ellipsis.
pub fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped_and_positions_that_are_not_finite_left_out() {
        let mut svg = Svg::new(100, 50);
        svg.text("a<b & \"c\" > \u{1b}[0m\u{ffff}", (1.0, 2.0), 12.0, Anchor::End);
        svg.text("nowhere", (f64::NAN, 2.0), 12.0, Anchor::Start);
        (0..28).for_each(|index| svg.marker((f64::INFINITY, 1.0), index));
        svg.line([(0.0, f64::NAN), (1.0, 2.0), (3.0, f64::INFINITY), (4.0, 5.0)], "stroke=\"#000000\"");
        let text = svg.finish();
        assert!(text.contains(">a&lt;b &amp; \"c\" &gt; \u{fffd}[0m\u{fffd}</text>"), "{text}");
        assert!(text.contains("points=\"1.0,2.0 4.0,5.0\"") && text.matches("<polyline").count() == 1, "{text}");
        assert!(!text.contains("nowhere") && !text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn markers_of_28_series_differ() {
        let marker = |index| {
            let mut svg = Svg::new(20, 20);
            svg.marker((10.0, 10.0), index);
            svg.finish()
        };
        let all: std::collections::BTreeSet<String> = (0..28).map(marker).collect();
        assert_eq!(all.len(), 28);
    }
}
