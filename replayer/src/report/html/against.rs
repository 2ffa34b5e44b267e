//! Two runs: stage by stage, then tensors by name.

use std::fmt::Write;

use super::Page;
use super::escape::esc;
use super::stages::{class, glyph, stage_table};
use crate::number::{error, ratio, short};
use crate::replay::outcome::Status;
use crate::report::schema::AgainstReport;
use crate::report::text::{place, word};

impl Page<'_> {
    pub(super) fn against(&self, out: &mut String) {
        let Some(against) = &self.report.against else { return };
        self.section(out, "against", "Both runs");
        if against.differences.is_empty() && against.tensors.is_empty() {
            out.push_str("<p>Nothing that was asked for is held by both runs.</p>\n");
        }
        if !against.differences.is_empty() {
            self.differences(out, against);
        }
        if !against.tensors.is_empty() {
            self.tensors_by_name(out, against);
        }
        if !against.stages.is_empty() {
            let id = format!("{}-other", self.id);
            let caption = format!("Stages of the other run, {}", against.dump.run);
            stage_table(out, &against.stages, &id, &caption);
        }
        out.push_str("</section>\n");
    }

    fn differences(&self, out: &mut String, against: &AgainstReport) {
        out.push_str(
            "<div class=\"bt-scroll\"><table class=\"bt-pairs\"><caption>Stages of both runs</caption><thead><tr>\
             <th scope=\"col\">stage</th><th scope=\"col\">status</th><th scope=\"col\">difference</th>\
             <th scope=\"col\">allowed</th><th scope=\"col\">worst element</th><th scope=\"col\">this run</th>\
             <th scope=\"col\">other run</th><th scope=\"col\">where</th><th scope=\"col\">remarks</th></tr></thead><tbody>\n",
        );
        for found in against.differences.iter().take(self.detail.items) {
            let (index, ours, theirs) = match found.worst {
                Some((at, x, y)) => (format!("[{}, {}]", at.0, at.1), short(x), short(y)),
                None if found.difference == 0.0 => {
                    ("equal bit for bit".into(), String::new(), String::new())
                }
                None => Default::default(),
            };
            let (glyph, said) = match found.status {
                Status::Skip => ("–", "not judged"),
                of => (glyph(of, false), word(of)),
            };
            let mut remarks = vec![found.reason.as_str(), found.aligned.as_str()];
            remarks.retain(|text| !text.is_empty());
            let _ = writeln!(
                out,
                "<tr class=\"{}\"><th scope=\"row\">{}</th><td>{glyph} {said}</td><td class=\"bt-num\">{}</td>\
                 <td class=\"bt-num\">{}</td><td class=\"bt-num\">{}</td><td class=\"bt-num\">{}</td>\
                 <td class=\"bt-num\">{}</td><td>{}</td><td>{}</td></tr>",
                class(found.status),
                found.stage,
                error(found.difference),
                found.allowed.map_or("-".into(), error),
                esc(&index),
                ours,
                theirs,
                place(found.microbatch.map(|mb| mb.0), None),
                esc(&remarks.join("; "))
            );
        }
        out.push_str("</tbody></table></div>\n");
        self.more(out, against.differences.len(), "comparisons");
    }

    fn tensors_by_name(&self, out: &mut String, against: &AgainstReport) {
        let all = &against.tensors;
        let equal = all.iter().filter(|found| found.status == Status::Pass).count();
        let _ = writeln!(
            out,
            "<p>{} tensors by name, in the order of capture: {equal} equal bit for bit, {} not.</p>",
            all.len(),
            all.len() - equal
        );
        match &against.likely {
            Some(likely) => {
                let _ = writeln!(
                    out,
                    "<p>Likely the first to part: <strong>{}</strong>, because {}.</p>",
                    esc(&likely.tensor),
                    esc(&likely.why)
                );
            }
            None => out.push_str("<p>None stands out.</p>\n"),
        }
        out.push_str(
            "<div class=\"bt-scroll\"><table class=\"bt-named\"><caption>Tensors that differ</caption><thead><tr>\
             <th scope=\"col\">tensor</th><th scope=\"col\">status</th><th scope=\"col\">difference</th>\
             <th scope=\"col\">unit</th><th scope=\"col\">by chance</th><th scope=\"col\">growth</th>\
             <th scope=\"col\">max abs</th><th scope=\"col\">cosine</th><th scope=\"col\">remarks</th></tr></thead><tbody>\n",
        );
        let differ: Vec<_> = all.iter().filter(|found| found.status != Status::Pass).collect();
        for found in differ.iter().take(self.detail.items) {
            let growth = found.growth.map_or("-".into(), |growth| format!("{}x", ratio(growth)));
            let _ = writeln!(
                out,
                "<tr class=\"{}\"><th scope=\"row\">{}</th><td>{} {}</td><td class=\"bt-num\">{}</td><td class=\"bt-num\">{}</td>\
                 <td class=\"bt-num\">{}</td><td class=\"bt-num\">{growth}</td><td class=\"bt-num\">{}</td>\
                 <td class=\"bt-num\">{:.8}</td><td>{}</td></tr>",
                class(found.status),
                esc(&found.tensor),
                glyph(found.status, false),
                word(found.status),
                error(found.difference),
                error(found.unit),
                error(found.expected),
                error(found.measures.max_abs),
                found.measures.cosine,
                esc(&found.reason)
            );
        }
        out.push_str("</tbody></table></div>\n");
        self.more(out, differ.len(), "tensors that differ");
    }
}
