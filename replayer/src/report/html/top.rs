//! The head of the page: the verdict in one sentence, what was read, where to go on.

use std::fmt::Write;

use super::Page;
use super::escape::esc;
use crate::diagnose::Standing;
use crate::number::{bytes, plural};
use crate::report::schema::{DumpSummary, Verdict};
use crate::report::text;

pub(super) fn verdict_word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Agreed => "agreed",
        Verdict::Diverged => "diverged",
        Verdict::Misdeclared => "misdeclared",
        Verdict::Incomplete => "incomplete",
        Verdict::Differs => "differs",
    }
}

/// A mark that says the same without a colour.
fn glyph(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Agreed => "✓",
        Verdict::Diverged | Verdict::Misdeclared => "✕",
        Verdict::Incomplete => "?",
        Verdict::Differs => "≠",
    }
}

impl Page<'_> {
    pub(super) fn top(&self, out: &mut String) {
        let (report, dump, id) = (self.report, &self.report.dump, &self.id);
        let _ = writeln!(
            out,
            "<header>\n<div class=\"bt-bar\"><h1>Run {}, step {}</h1>\
             <button type=\"button\" class=\"bt-theme\" hidden>theme: system</button></div>",
            esc(&dump.run),
            report.step
        );
        let word = verdict_word(report.verdict);
        let sentence = text::verdict(report);
        let _ = writeln!(
            out,
            "<p class=\"bt-verdict bt-{word}\"><span class=\"bt-glyph\" aria-hidden=\"true\">{}</span> \
             <strong>{}</strong></p>",
            glyph(report.verdict),
            esc(&sentence)
        );
        self.because(out);
        out.push_str("<dl class=\"bt-facts\">\n");
        facts(out, "run", dump);
        if let Some(against) = &report.against {
            facts(out, "against", &against.dump);
        }
        out.push_str("</dl>\n");
        let _ = write!(out, "<nav aria-label=\"parts of this report\">");
        let mut parts = vec![("graph", "Graph"), ("causes", "Cause"), ("stages", "Stages")];
        if report.against.is_some() {
            parts.push(("against", "Both runs"));
        }
        parts.extend([
            ("maps", "Heat maps"),
            ("norm", "grad_norm"),
            ("ranks", "Ranks"),
            ("unchecked", "Not checked"),
        ]);
        for (name, words) in parts {
            let _ = write!(out, "<a href=\"#{id}-{name}\">{words}</a> ");
        }
        out.push_str("</nav>\n</header>\n");
    }
}

impl Page<'_> {
    /// The cause in a line, with what to do: whoever is woken reads no further.
    fn because(&self, out: &mut String) {
        if let Some(other) = &self.report.other_declaration {
            let words = format!("{}; to tell, look at {}", other.sentence(), other.look);
            let _ = writeln!(out, "<p class=\"bt-because\">Declaration: {}.</p>", esc(&words));
        }
        let (causes, id) = (&self.report.causes, &self.id);
        let Some(first) = causes.first() else { return };
        let all: Vec<String> = causes.iter().map(|cause| esc(&cause.id)).collect();
        let said = match first.standing {
            Standing::Unknown => "nothing in the catalogue explains it".to_string(),
            Standing::Tied => "the captured tensors cannot tell them apart".to_string(),
            Standing::Named if causes.len() > 1 => "each explains a part of it".to_string(),
            Standing::Named => format!("to do: {}", esc(&first.advice)),
        };
        let _ = writeln!(
            out,
            "<p class=\"bt-because\">Cause: <a href=\"#{id}-causes\"><strong>{}</strong></a>: {said}.</p>",
            all.iter().take(self.detail.items).cloned().collect::<Vec<_>>().join(", ")
        );
    }
}

fn facts(out: &mut String, label: &str, dump: &DumpSummary) {
    let mut line = |name: &str, text: String| {
        let _ = writeln!(out, "<div><dt>{name}</dt><dd>{}</dd></div>", esc(&text));
    };
    let of = format!("{}, attempt {}, step {}", dump.run, dump.attempt, dump.step);
    line(label, format!("{of} ({}); read from {}", dump.ranks, dump.path));
    let size = format!("{}, {}", plural(dump.shards, "shard"), bytes(dump.bytes));
    let where_to_look = if dump.proved { "" } else { ": see the ranks below" };
    line("dump", format!("{}; {size}; {}{where_to_look}", dump.state, dump.proof()));
    line("head", dump.head.clone());
    if let Some(trigger) = &dump.trigger {
        line("trigger", trigger.clone());
    }
    if let Some(selection) = &dump.selection {
        line("selection", selection.clone());
    }
}
