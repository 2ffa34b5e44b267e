//! Numbers that are the text of an expression: a formula that is read with them is a program, in
//! Python or in C.

use std::cell::RefCell;
use std::fmt::{self, Display, Formatter};
use std::ops::{Add, Div, Mul, Sub};

use super::number::Number;
use super::surrogate::Choices;

/// How a language writes what is no operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Language {
    /// Stands before the name of a function: `jnp.` or `torch.`.
    pub before: &'static str,
    /// Stands behind it: `_of` for the f32 functions of the device's kernels.
    pub behind: &'static str,
    /// Stands behind a constant.
    pub suffix: &'static str,
    /// Its function for the absolute value.
    pub abs: &'static str,
    /// Whether it chooses by `condition ? a : b`, and has no functions for the larger of two
    /// numbers and for the sign.
    pub has_ternary: bool,
    /// Whether `1 - t²` is a subtraction, as in the f32 rows of the policies.
    pub subtracts_square: bool,
}

impl Language {
    const PLAIN: Language = Language {
        before: "",
        behind: "",
        suffix: "",
        abs: "abs",
        has_ternary: false,
        subtracts_square: false,
    };
    /// Python on `jax.numpy`.
    pub const JAX: Language = Language { before: "jnp.", ..Language::PLAIN };
    /// Python on torch.
    pub const TORCH: Language = Language { before: "torch.", ..Language::PLAIN };
    /// C in double precision.
    pub const C: Language = Language { abs: "fabs", has_ternary: true, ..Language::PLAIN };
    /// C in single precision, with the functions of `device/kernels/prelude.cuh`.
    pub const C_F32: Language =
        Language { behind: "_of", suffix: "f", subtracts_square: true, ..Language::C };
}

/// The lines that the steps of a formula become.
pub struct Program<'x> {
    language: Language,
    /// The variable that holds the result of each step.
    result: &'x str,
    lines: RefCell<Vec<String>>,
}

impl<'x> Program<'x> {
    /// Of no lines yet; `result` names the variable of each step's
    /// result; where it is empty a formula stays one expression.
    pub fn new(language: Language, result: &'x str) -> Program<'x> {
        Program { language, result, lines: RefCell::default() }
    }

    /// A variable, or another expression that binds as closely.
    pub fn name(&self, name: &str) -> Text<'_> {
        Text { code: name.into(), binds: Binds::Name, program: self }
    }

    /// What the steps became.
    pub fn lines(self) -> Vec<String> {
        self.lines.into_inner()
    }
}

/// How closely an expression binds, the loosest first.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Binds {
    Sum,
    Product,
    Name,
}

/// An expression.
#[derive(Clone)]
pub struct Text<'p> {
    code: String,
    binds: Binds,
    program: &'p Program<'p>,
}

impl<'p> Text<'p> {
    /// The expression where one is needed that binds so closely.
    fn within(&self, binds: Binds) -> String {
        if self.binds < binds { format!("({})", self.code) } else { self.code.clone() }
    }

    fn binary(self, operator: &str, other: &Text<'p>, (binds, right): (Binds, Binds)) -> Text<'p> {
        let code = format!("{} {operator} {}", self.within(binds), other.within(right));
        Text { code, binds, ..self }
    }

    fn call(self, function: &str) -> Text<'p> {
        let Language { before, behind, .. } = self.program.language;
        let code = format!("{before}{function}{behind}({})", self.code);
        Text { code, binds: Binds::Name, ..self }
    }
}

impl Display for Text<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.code)
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $text:literal $binds:ident $right:ident),*) => { $(
        impl<'p> $trait for Text<'p> {
            type Output = Text<'p>;
            fn $method(self, other: Text<'p>) -> Text<'p> {
                self.binary($text, &other, (Binds::$binds, Binds::$right))
            }
        }
    )* };
}

// What stands to the right of an operator keeps its parentheses: `a * (b * c)` is rounded otherwise
// than `a * b * c`.
operators!(
    Add add "+" Sum Product,
    Sub sub "-" Sum Product,
    Mul mul "*" Product Name,
    Div div "/" Product Name
);

/// A number as Python reads it back, bit for bit.
pub fn number(x: f64) -> String {
    format!("{x:?}")
}

impl Number for Text<'_> {
    fn constant(&self, x: f64) -> Self {
        // A negative number is a sum to Python: `-2 ** 2` is -4.
        let binds = if x < 0.0 { Binds::Sum } else { Binds::Name };
        let code = number(x) + self.program.language.suffix;
        Text { code, binds, program: self.program }
    }

    fn exp(self) -> Self {
        self.call("exp")
    }

    fn ln(self) -> Self {
        self.call("log")
    }

    fn tanh(self) -> Self {
        self.call("tanh")
    }

    fn sqrt(self) -> Self {
        self.call("sqrt")
    }

    fn abs(self) -> Self {
        let function = self.program.language.abs;
        self.call(function)
    }

    fn sign(self) -> Self {
        if self.program.language.has_ternary {
            let operand = self.within(Binds::Name);
            // As a product: C takes the difference of two comparisons for an integer.
            let unit = self.constant(1.0);
            let code = format!("(({operand} > 0) - ({operand} < 0))");
            return unit * Text { code, binds: Binds::Name, ..self };
        }
        self.call("sign")
    }

    fn larger(self, other: Self) -> Self {
        if self.program.language.has_ternary {
            let [a, b] = [&self, &other].map(|operand| operand.within(Binds::Name));
            // What is no number is unlike itself, and stays.
            let code = format!("({a} > {b} || {a} != {a} ? {a} : {b})");
            return Text { code, binds: Binds::Name, ..self };
        }
        self.call_with("maximum", &other.code)
    }

    fn one_minus_square(self) -> Self {
        let unit = self.constant(1.0);
        if self.program.language.subtracts_square {
            return unit - self.clone() * self;
        }
        (unit.clone() - self.clone()) * (unit + self)
    }

    fn step(self) -> Self {
        let Program { result, lines, .. } = self.program;
        if result.is_empty() {
            return self;
        }
        lines.borrow_mut().push(format!("{result} = {self}"));
        self.program.name(result)
    }
}

impl Text<'_> {
    /// A call with more arguments than one.
    fn call_with(self, function: &str, others: &str) -> Self {
        let code = format!("{}, {others}", self.code);
        Text { code, ..self }.call(function)
    }
}

impl Choices for Text<'_> {
    fn exp_m1(self) -> Self {
        self.call("expm1")
    }

    fn smaller(self, other: Self) -> Self {
        self.call_with("minimum", &other.code)
    }

    fn clipped(self, low: f64, high: f64) -> Self {
        self.call_with("clip", &format!("{}, {}", number(low), number(high)))
    }

    fn if_negative(&self, then: Self, otherwise: Self) -> Self {
        let condition = Text { code: format!("{self} < 0"), ..self.clone() };
        condition.call_with("where", &format!("{then}, {otherwise}"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::transform::Transform;
    use super::*;

    #[test]
    fn a_formula_read_as_text_is_python_with_the_parentheses_that_it_needs() {
        let program = Program::new(Language::TORCH, "z");
        let [x, y] = ["x", "y"].map(|name| program.name(name));
        let difference = x.clone() - (y.clone() - x.clone());
        assert_eq!(difference.to_string(), "x - (y - x)");
        assert_eq!((x.clone() / (y.clone() * x.clone())).to_string(), "x / (y * x)");
        assert_eq!((x.clone() * (y.clone() / x.clone())).to_string(), "x * (y / x)");
        assert_eq!(((x.clone() + y).exp() * x.clone()).to_string(), "torch.exp(x + y) * x");
        assert_eq!(x.clone().times(-2.0).to_string(), "x * (-2.0)");
        assert_eq!(x.clone().sign().to_string(), "torch.sign(x)");
        assert_eq!(x.clone().larger(x.clone().times(2.0)).to_string(), "torch.maximum(x, x * 2.0)");
        Transform::new(0.5, Some(30.0)).value(program.name("z"));
        assert_eq!(program.lines(), ["z = z * 0.5", "z = torch.tanh(z / 30.0) * 30.0"]);
    }

    #[test]
    fn a_formula_read_as_text_is_c_where_there_are_no_functions_for_its_choices() {
        let program = Program::new(Language::C_F32, "");
        let [x, y] = ["x", "y"].map(|name| program.name(name));
        let difference = x.clone() - y.clone();
        let sign = difference.clone().sign().to_string();
        assert_eq!(sign, "1.0f * (((x - y) > 0) - ((x - y) < 0))");
        let larger = difference.larger(y).to_string();
        assert_eq!(larger, "((x - y) > y || (x - y) != (x - y) ? (x - y) : y)");
        assert_eq!(x.power(3.0).to_string(), "exp_of(log_of(x) * 3.0f)");
    }
}
