//! Renders the page: tables are written here, and `page/page.js` draws curves and samples from the data of [`crate::data`], with the labels of
//! [`grpo_plot::AXIS_SCRIPT`].

mod sections;

use crate::html::Html;
use crate::{Report, data};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use grpo_plot::AXIS_SCRIPT;
use sections::{configuration, evaluations, every_metric, section, summary, times};
use sha2::{Digest, Sha256};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

impl Report {
    /// Returns the page. It depends on the files only.
    pub fn html(&self) -> String {
        let names: Vec<&str> = self.names().collect();
        let title = format!("grpo report: {}", names.join(", "));
        let mut html = Html::default();
        html.raw("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\" />\n");
        // The policy forbids external resources and any script but the page's own, regardless of what a completion contains.
        html.raw("<meta http-equiv=\"Content-Security-Policy\" content=\"").text(&policy()).raw("\" />\n");
        html.raw("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\" />\n");
        html.raw("<meta name=\"color-scheme\" content=\"light dark\" />\n");
        html.raw("<meta name=\"generator\" content=\"grpo ").text(env!("CARGO_PKG_VERSION")).raw("\" />\n");
        html.element("title", &title).raw("\n<style>").raw(STYLE).raw("</style>\n</head>\n<body>\n");
        html.raw("<header>\n<h1>grpo report</h1>\n<nav aria-label=\"Sections\">");
        html.raw(
            "<a href=\"#summary\">Summary</a> <a href=\"#curves\">Curves</a> <a href=\"#evaluations\">Evaluations</a> ",
        );
        html.raw(
            "<a href=\"#samples\">Samples</a> <a href=\"#time\">Time</a> <a href=\"#configuration\">Configuration</a> ",
        );
        html.raw("<a href=\"#metrics\">All metrics</a></nav>\n</header>\n<main>\n");
        let (page, runs) = (&mut html, &self.runs);
        section(page, "summary", "Summary", |html| summary(html, self));
        section(page, "curves", "Curves", |html| {
            html.raw(NO_SCRIPT).raw("<div id=\"curve-browser\"></div>\n");
        });
        section(page, "evaluations", "Evaluations before and after", |html| evaluations(html, runs));
        section(page, "samples", "Samples", |html| {
            html.raw(NO_SCRIPT).raw("<div id=\"sample-browser\"></div>\n");
        });
        section(page, "time", "Where the time of a GRPO step goes", |html| times(html, runs));
        section(page, "configuration", "Configuration", |html| configuration(html, self));
        section(page, "metrics", "All metrics as a table", |html| every_metric(html, runs));
        html.raw("</main>\n<script type=\"application/json\" id=\"data\">")
            .json(&data::json(self))
            .raw("</script>\n<script>");
        html.raw(AXIS_SCRIPT).raw(SCRIPT).raw("</script>\n</body>\n</html>\n");
        html.into_string()
    }
}

const NO_SCRIPT: &str = "<noscript><p class=\"note\">This part is drawn by the script of this page, which is switched off.</p></noscript>\n";

fn policy() -> String {
    let hash = |text: String| STANDARD.encode(Sha256::digest(text.as_bytes()));
    let (style, script) = (hash(STYLE.to_owned()), hash([AXIS_SCRIPT, SCRIPT].concat()));
    format!(
        "default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; base-uri 'none'; form-action 'none'"
    )
}
