//! The report of `replay precision` as text of at most 100 columns.

use std::fmt::Write;

use super::text::wrap;
use crate::number::{count, error, plural};
use crate::precision::Precision;
use crate::precision::difference::{Differences, Input};

/// The whole report as text.
pub fn render(precision: &Precision) -> String {
    let mut out = String::new();
    let (all, summed, differentiated) = precision.tokens;
    wrap(
        &mut out,
        "run       ",
        &format!("{}, step {}, {}", precision.run, precision.step, precision.of),
    );
    wrap(&mut out, "inputs    ", &precision.inputs);
    wrap(
        &mut out,
        "tokens    ",
        &format!(
            "{} of {} summed, {} differentiated, drawn by label frequency and confidence; seed {}",
            count(summed as u64),
            count(all as u64),
            count(differentiated as u64),
            precision.seed
        ),
    );
    wrap(&mut out, "assumed   ", &precision.assumed);
    sums(&mut out, precision);
    for differences in &precision.differences {
        table(&mut out, differences, precision.loss);
    }
    check(&mut out, precision);
    for item in &precision.not_checked {
        wrap(&mut out, "unchecked ", item);
    }
    out.push('\n');
    wrap(&mut out, "", &precision.verdict);
    out
}

fn sums(out: &mut String, precision: &Precision) {
    let terms = plural(precision.terms as u64, "exponential");
    let _ = writeln!(
        out,
        "\nsoftmax denominators, {terms} each; relative error against their exact sum"
    );
    let _ = writeln!(
        out,
        "{:<16}{:>9}{:>9}{:>11}{:>14}  {:<24}worst token",
        "method", "max", "rms", "worst case", "probable", "moves lse, gradients"
    );
    for sum in &precision.sums {
        let _ = writeln!(
            out,
            "{:<16}{:>9}{:>9}{:>11}{:>14}  {:<24}{}",
            sum.method,
            error(sum.max),
            error(sum.rms),
            error(sum.worst),
            error(sum.probable),
            format!("{0}, {0} of each", error(sum.max)),
            sum.token
        );
    }
    let text = format!(
        "lse with every step as assumed: off by {} at most, logits, exponentials and logarithm included",
        error(precision.lse_f32)
    );
    wrap(out, "", &text);
}

fn table(out: &mut String, differences: &Differences, loss: f64) {
    let name = match differences.input {
        Input::Q => "q",
        Input::K => "k",
    };
    let noise = differences.noise.map_or("not measurable".into(), error);
    let text = format!(
        "derivative of the loss {loss:.4} along random directions of {name} (rms of {name} {}): {}; noise of the f32 loss {noise}, |f''| {}, |f'''| {}",
        error(differences.scale),
        error(differences.derivative),
        error(differences.second),
        error(differences.third)
    );
    out.push('\n');
    wrap(out, "", &text);
    let _ = writeln!(
        out,
        "{:<9}{:>9}{:>9}{:>13}{:>9}{:>9}  best step of f32",
        "step", "forward", "central", "u|loss|/eps", "forward", "central"
    );
    let _ = writeln!(
        out,
        "{:<9}{:>9}{:>9}{:>13}{:>9}{:>9}  {:<11}central",
        "", "f32", "f32", "", "f64", "f64", "forward"
    );
    for step in &differences.steps {
        let line = format!(
            "{:<9}{:>9}{:>9}{:>13}{:>9}{:>9}  {:<11}{}",
            error(step.step),
            error(step.forward_f32),
            error(step.central_f32),
            error(step.predicted),
            error(step.forward_f64),
            error(step.central_f64),
            step.forward_best.word(),
            step.central_best.word()
        );
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

fn check(out: &mut String, precision: &Precision) {
    let Some(check) = &precision.check else { return };
    let option = |x: Option<f64>| x.map_or("not known".into(), error);
    let text = format!(
        "{} elements of q moved one at a time, central, f32 loss: at eps = {:e} the gradient is off by {} (noise predicts {}); at h = {} by {}",
        check.elements,
        check.step,
        error(check.error),
        option(check.predicted),
        option(check.best_step),
        option(check.best_error)
    );
    out.push('\n');
    wrap(out, "check     ", &text);
}
