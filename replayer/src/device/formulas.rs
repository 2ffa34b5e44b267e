//! The formulas that the kernels call, as C: read off `kernels::formula`, in f64 and in f32.

use crate::kernels::formula::{
    dense_entry, probability, tanh_bounded, tanh_bounded_slope, tanh_slope,
};
use crate::kernels::text::{Language, Program, Text};

/// A formula of one to three numbers.
type Formula = for<'p> fn(&[Text<'p>]) -> Text<'p>;

/// The formulas with the names of their numbers.
const FORMULAS: [(&str, &[&str], Formula); 5] = [
    ("probability", &["logit", "lse"], |x| probability(x[0].clone(), x[1].clone())),
    ("dense_entry", &["p", "of_lse", "smooth"], |x| {
        dense_entry(x[0].clone(), x[1].clone(), x[2].clone())
    }),
    ("tanh_bounded", &["x", "cap"], |x| tanh_bounded(x[0].clone(), x[1].clone())),
    ("tanh_bounded_slope", &["value", "cap"], |x| tanh_bounded_slope(x[0].clone(), x[1].clone())),
    ("tanh_slope", &["x"], |x| tanh_slope(x[0].clone())),
];

/// A function for each formula, of doubles under its own name, of floats with `_f` behind it. The
/// f32 rows of the policies have no slope of tanh by itself.
pub(super) fn source() -> String {
    let functions_of = |(behind, number, language): (&str, &str, Language)| {
        let function = move |(name, arguments, formula): &(&str, &[&str], Formula)| {
            let program = Program::new(language, "");
            let numbers: Vec<Text<'_>> = arguments.iter().map(|name| program.name(name)).collect();
            let declared: Vec<String> =
                arguments.iter().map(|name| format!("{number} {name}")).collect();
            let declared = declared.join(", ");
            let value = formula(&numbers);
            format!("DEVICE {number} {name}{behind}({declared}) {{ return {value}; }}\n")
        };
        let is_known = move |(name, ..): &&(&str, &[&str], Formula)| {
            language == Language::C || *name != "tanh_slope"
        };
        FORMULAS.iter().filter(is_known).map(function).collect::<String>()
    };
    [("", "double", Language::C), ("_f", "float", Language::C_F32)].map(functions_of).concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formulas_are_c() {
        let lines = source();
        let wanted = [
            "DEVICE double tanh_bounded(double x, double cap) { return tanh(x / cap) * cap; }",
            "DEVICE float probability_f(float logit, float lse) { return exp_of(logit - lse); }",
        ];
        for line in wanted {
            assert!(lines.contains(line), "{lines}");
        }
    }
}
