//! What verification found, what was not checked and why, and how to read the page.

use std::fmt::Write;

use super::Page;
use super::escape::esc;
use crate::report::step_checks;

impl Page<'_> {
    pub(super) fn rest(&self, out: &mut String) {
        let findings = &self.report.findings;
        if !findings.is_empty() {
            self.section(out, "findings", "What verification found");
            out.push_str("<ul>\n");
            for finding in findings.iter().take(self.detail.items) {
                let _ = writeln!(out, "<li>{}</li>", esc(finding));
            }
            out.push_str("</ul>\n");
            self.more(out, findings.len(), "findings");
            out.push_str("</section>\n");
        }
        self.checks(out);
        self.unchecked(out);
        let _ = writeln!(
            out,
            "<footer><p>backtape {}, schema {}. Every number is of this dump: captured values as the \
             ranks held them, reference values recomputed in f64 from the dumped inputs. \
             docs/report.md says how each drawing is computed.</p></footer>",
            esc(self.report.version),
            esc(self.report.schema)
        );
    }

    /// What the checks of the step found, as the text has it.
    fn checks(&self, out: &mut String) {
        let mut lines = step_checks::lines(&self.report.checks, "");
        if let Some(against) = &self.report.against {
            lines.extend(step_checks::lines(&against.checks, "other run: "));
        }
        self.section(out, "checks", "Checks of the step");
        out.push_str("<ul>\n");
        for line in lines.iter().take(self.detail.items) {
            let _ = writeln!(out, "<li>{}</li>", esc(line));
        }
        out.push_str("</ul>\n");
        self.more(out, lines.len(), "findings of checks");
        out.push_str("</section>\n");
    }

    /// Things with one reason together, as the text has them.
    fn unchecked(&self, out: &mut String) {
        self.section(out, "unchecked", "Not checked");
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for item in &self.report.not_checked {
            match reasons.iter_mut().find(|(why, _)| *why == item.why) {
                Some((_, what)) => what.push(&item.what),
                None => reasons.push((&item.why, vec![&item.what])),
            }
        }
        if reasons.is_empty() {
            out.push_str("<p>Nothing was left out.</p>\n");
        }
        out.push_str("<dl class=\"bt-unchecked\">\n");
        for (why, what) in reasons.iter().take(self.detail.items) {
            let shown = &what[..what.len().min(self.detail.items)];
            let more = match what.len() - shown.len() {
                0 => String::new(),
                n => format!(" and {n} more"),
            };
            let _ = writeln!(out, "<dt>{}{more}</dt><dd>{}</dd>", esc(&shown.join(", ")), esc(why));
        }
        out.push_str("</dl>\n");
        self.more(out, reasons.len(), "reasons");
        out.push_str("</section>\n");
    }
}
