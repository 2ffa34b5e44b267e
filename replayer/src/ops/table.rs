//! What a table of stages says, and the macro that makes a program of it.

use crate::kernels::number::Number;

/// How a tensor lies: R rows (tokens) of C columns (features).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `[R, C]`
    Plane,
    /// `[R]`
    Rows,
    /// `[C]`
    Columns,
}

impl Shape {
    /// Rows and columns of a tensor of this shape, in an op of R rows and C columns. `[C]` is one
    /// row: what its elements share they share along it.
    pub fn extent(self, rows: usize, columns: usize) -> (usize, usize) {
        match self {
            Shape::Plane => (rows, columns),
            Shape::Rows => (rows, 1),
            Shape::Columns => (1, columns),
        }
    }

    /// In words, as an error message has it.
    pub fn words(self) -> &'static str {
        match self {
            Shape::Plane => "[rows, columns]",
            Shape::Rows => "[rows]",
            Shape::Columns => "[columns]",
        }
    }
}

/// How the elements of a stage are made of its formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Each by itself.
    Each,
    /// A sum over the columns of a plane, one for each row.
    OverColumns,
    /// A sum over the rows of a plane, one for each column.
    OverRows,
}

/// Which way through the op a stage lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// From inputs to outputs.
    Forward,
    /// From the cotangents of outputs to those of inputs.
    Backward,
}

/// What an op starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The name that it is recorded under.
    pub name: &'static str,
    /// How it lies.
    pub shape: Shape,
    /// What it is, in words.
    pub words: &'static str,
}

/// What an op computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The name that it is recorded under, and that reports call it by.
    pub name: &'static str,
    /// How it lies.
    pub shape: Shape,
    /// How its elements are made.
    pub reduction: Reduction,
    /// Which way it lies.
    pub side: Side,
    /// The inputs and earlier stages that its formula takes, in this order.
    pub inputs: &'static [&'static str],
    /// What it is, in words.
    pub words: &'static str,
}

/// An op: its table, and the formulas of the table's rows.
pub trait Op: Sync {
    /// What a report calls it.
    const NAME: &'static str;

    /// What it starts from.
    fn inputs(&self) -> &'static [Tensor];

    /// What it computes, each stage after those that it needs.
    fn stages(&self) -> &'static [Stage];

    /// How many roundings of a stage all elements may share, in a job that keeps results in the
    /// format that it computes in and in one of fewer bits; `None` for as many as the formulas of
    /// written tables have at most.
    fn shared_roundings(&self, _stage: usize) -> Option<[usize; 2]> {
        None
    }

    /// For each way in which the rows of a sum may have been added in groups before these were added:
    /// the group of each row.
    fn groupings(&self) -> &[Vec<usize>] {
        &[]
    }

    /// An element of a stage, or an addend of it, from elements of the stage's inputs.
    fn element<N: Number>(&self, stage: usize, inputs: &[N]) -> N;

    /// What becomes of the sum of `count` addends.
    fn finish<N: Number>(&self, stage: usize, sum: N, count: f64) -> N;
}

/// Makes an [`Op`] of a table. A row of the table is
///
/// ```text
/// name: Shape Side Reduction |op, input, …| formula, then |op, sum, count| formula, "words";
/// ```
///
/// where `op` is the op with its options, and the inputs are named as they are recorded. What follows
/// `groups` is [`Op::groupings`].
macro_rules! op {
    (
        $op:ident = $op_name:literal;
        inputs { $($input:ident: $input_shape:ident, $input_words:literal;)* }
        stages { $(
            $stage:ident: $shape:ident $side:ident $reduction:ident
            |$this:ident, $($from:ident),*| $formula:expr,
            $(then |$that:ident, $sum:ident, $count:ident| $finish:expr,)?
            $words:literal;
        )* }
        $(groups |$own:ident| $groups:expr;)?
    ) => {
        impl $crate::ops::Op for $op {
            const NAME: &'static str = $op_name;

            fn inputs(&self) -> &'static [$crate::ops::Tensor] {
                const { &[$($crate::ops::Tensor {
                    name: stringify!($input),
                    shape: $crate::ops::Shape::$input_shape,
                    words: $input_words,
                },)*] }
            }

            fn stages(&self) -> &'static [$crate::ops::Stage] {
                const { &[$($crate::ops::Stage {
                    name: stringify!($stage),
                    shape: $crate::ops::Shape::$shape,
                    reduction: $crate::ops::Reduction::$reduction,
                    side: $crate::ops::Side::$side,
                    inputs: &[$(stringify!($from),)*],
                    words: $words,
                },)*] }
            }

            $(fn groupings(&self) -> &[Vec<usize>] {
                let $own = self;
                $groups
            })?

            fn element<N: $crate::kernels::number::Number>(&self, stage: usize, inputs: &[N]) -> N {
                #[allow(non_camel_case_types, dead_code)]
                enum Place { $($stage),* }
                $(if stage == Place::$stage as usize {
                    let [$($from),*] = inputs else { panic!("a stage has the inputs of its row") };
                    let ($this, $($from),*) = (self, $($from.clone()),*);
                    let _ = $this;
                    return $formula;
                })*
                panic!("no stage {stage}")
            }

            fn finish<N: $crate::kernels::number::Number>(
                &self,
                stage: usize,
                sum: N,
                count: f64,
            ) -> N {
                let _ = (stage, count);
                #[allow(non_camel_case_types, dead_code)]
                enum Place { $($stage),* }
                $($(if stage == Place::$stage as usize {
                    let ($that, $sum, $count) = (self, sum, count);
                    let _ = $that;
                    return $finish;
                })?)*
                sum
            }
        }
    };
}
pub(crate) use op;
