//! How a user's kernel is called: a comment in its own source, as nothing else knows it.
//!
//! ```text
//! // backtape: dk_kernel(q: bf16, k: bf16, labels: i32, lse: f32, g: f32, dk: f32, n: i32, d: i32, v: i32)
//! //           grid(v / 128) block(128) shared(0)
//! ```
//!
//! Arguments in their order, each with the type that the kernel takes it in. What has the name of
//! the stage is the output. `a / b` in a grid rounds up. A cubin's declaration lies beside it, in
//! a file of its name and `.args`.

use crate::head::Stage;
use crate::kernels::transform::{Constant, Transform};

/// Sizes of a unit's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    /// Tokens.
    pub(super) n: usize,
    pub(super) d: usize,
    /// Rows of k, padding included.
    pub(super) v: usize,
    /// Rows of k that are not padding.
    pub(super) valid: usize,
}

/// What an argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// `[n, D]`.
    Q,
    /// `[V, D]`.
    K,
    /// `[n]`, -1 for a token that takes no part.
    Labels,
    /// `[n]`.
    Lse,
    /// `[n]`: upstream gradient of each token's nll.
    G,
    /// `[V]`.
    Bias,
    /// What the kernel computes.
    Output,
    /// A number of [`Sizes`].
    Size(Size),
    /// Which of the transform's constants.
    Constant(usize),
}

/// One of [`Sizes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Size {
    N,
    D,
    V,
    Valid,
}

/// A type of CUDA C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Bf16,
    F16,
    F32,
    F64,
    I32,
    I64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Argument {
    pub(super) name: Name,
    pub(super) dtype: Type,
}

/// A declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Declared {
    pub(super) arguments: Vec<Argument>,
    grid: Vec<Extent>,
    block: [u32; 3],
    pub(super) shared: u32,
}

/// One dimension of a grid: a number or a size, over another number, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    count: Count,
    over: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Count {
    Of(Size),
    Fixed(u32),
}

const SIZES: [(&str, Size); 4] =
    [("n", Size::N), ("d", Size::D), ("v", Size::V), ("valid", Size::Valid)];

const INPUTS: [(&str, Name); 6] = [
    ("q", Name::Q),
    ("k", Name::K),
    ("labels", Name::Labels),
    ("lse", Name::Lse),
    ("g", Name::G),
    ("bias", Name::Bias),
];

const CONSTANTS: [Constant; 2] = Transform::CONSTANTS;

const TYPES: [(&str, Type); 6] = [
    ("bf16", Type::Bf16),
    ("f16", Type::F16),
    ("f32", Type::F32),
    ("f64", Type::F64),
    ("i32", Type::I32),
    ("i64", Type::I64),
];

impl Sizes {
    pub(super) fn of(&self, size: Size) -> usize {
        match size {
            Size::N => self.n,
            Size::D => self.d,
            Size::V => self.v,
            Size::Valid => self.valid,
        }
    }
}

impl Type {
    pub(super) fn bytes(self) -> usize {
        match self {
            Type::Bf16 | Type::F16 => 2,
            Type::F32 | Type::I32 => 4,
            Type::F64 | Type::I64 => 8,
        }
    }

    pub(super) fn is_float(self) -> bool {
        !matches!(self, Type::I32 | Type::I64)
    }

    pub(super) fn name(self) -> &'static str {
        TYPES[self as usize].0
    }
}

impl Declared {
    /// The declaration of a kernel in the text of its source; an error is one clause.
    pub(super) fn read(text: &str, entry: &str, stage: Stage) -> Result<Declared, String> {
        let begin = format!("{entry}(");
        let mut lines = text.lines().map(comment).skip_while(|line| {
            !line.strip_prefix("backtape:").is_some_and(|rest| rest.trim().starts_with(&begin))
        });
        let first = lines.next().ok_or_else(|| {
            format!("no comment declares it: // backtape: {entry}(q: bf16, ..., n: i32) grid(...) block(...)")
        })?;
        let mut whole = first["backtape:".len()..].trim().to_string();
        // A declaration goes on over the comments below until its block is told.
        for line in lines.take_while(|line| !line.is_empty()) {
            if whole.contains("block(") && whole.ends_with(')') {
                break;
            }
            whole = format!("{whole} {line}");
        }
        let part = |name: &str| parenthesised(&whole, name);
        let arguments = part(entry).ok_or("the list of its arguments does not end")?;
        let arguments = list(arguments).map(|one| argument(one, stage));
        let arguments: Vec<Argument> = arguments.collect::<Result<_, _>>()?;
        let outputs = arguments.iter().filter(|argument| argument.name == Name::Output).count();
        if outputs != 1 {
            return Err(format!("its arguments name {stage} {outputs} times, wanted once"));
        }
        let grid = part("grid").ok_or("its declaration has no grid(...)")?;
        let grid: Vec<Extent> = list(grid).map(extent).collect::<Result<_, _>>()?;
        let block: Vec<u32> = list(part("block").ok_or("its declaration has no block(...)")?)
            .map(number)
            .collect::<Result<_, _>>()?;
        if !(1..=3).contains(&grid.len()) || !(1..=3).contains(&block.len()) {
            return Err("its grid and its block have one to three dimensions".into());
        }
        let mut threads = [1; 3];
        threads[..block.len()].copy_from_slice(&block);
        let shared = part("shared").filter(|bytes| bytes.trim() != "0");
        let shared = shared.map_or(Ok(0), number)?;
        Ok(Declared { arguments, grid, block: threads, shared })
    }

    /// Blocks of the grid for a head of these sizes.
    pub(super) fn grid(&self, sizes: &Sizes) -> Result<[u32; 3], String> {
        let mut grid = [1; 3];
        for (to, extent) in grid.iter_mut().zip(&self.grid) {
            let count = match extent.count {
                Count::Of(size) => sizes.of(size),
                Count::Fixed(number) => number as usize,
            };
            let blocks = count.div_ceil(extent.over as usize).max(1);
            *to = u32::try_from(blocks).map_err(|_| format!("{blocks} blocks are too many"))?;
        }
        Ok(grid)
    }

    pub(super) fn block(&self) -> [u32; 3] {
        self.block
    }
}

/// What a line says beside the signs of a comment.
fn comment(line: &str) -> &str {
    line.trim().trim_start_matches(['/', '*', '#', ';']).trim_end_matches(['*', '/']).trim()
}

/// What stands between the parentheses behind a name.
fn parenthesised<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let place = text.match_indices(name).find(|(place, _)| {
        let alone = |byte: Option<&u8>| {
            byte.is_none_or(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_')
        };
        let before = place.checked_sub(1).and_then(|at| text.as_bytes().get(at));
        alone(before) && text[place + name.len()..].starts_with('(')
    })?;
    let from = place.0 + name.len() + 1;
    text[from..].find(')').map(|length| &text[from..from + length])
}

fn list(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|one| !one.is_empty())
}

fn argument(text: &str, stage: Stage) -> Result<Argument, String> {
    let (name, type_name) = text
        .split_once(':')
        .ok_or_else(|| format!("its argument {text:?} has no type, as in {text}: f32"))?;
    let (name, type_name) = (name.trim(), type_name.trim());
    let known = |of: &[&str]| of.join(", ");
    let dtype =
        TYPES.iter().find(|(named, _)| *named == type_name).map(|(_, dtype)| *dtype).ok_or_else(
            || {
                format!(
                    "the type {type_name:?} of its argument {name} is none of {}",
                    known(&TYPES.map(|type_name| type_name.0))
                )
            },
        )?;
    let size = SIZES.iter().find(|(named, _)| *named == name).map(|(_, size)| Name::Size(*size));
    let input = || INPUTS.iter().find(|(named, _)| *named == name).map(|(_, input)| *input);
    let constant = || CONSTANTS.iter().position(|(named, _)| *named == name).map(Name::Constant);
    let name = match name == stage.name() {
        true => Name::Output,
        false => size.or_else(input).or_else(constant).ok_or_else(|| {
            let names = INPUTS.iter().map(|of| of.0).chain(CONSTANTS.iter().map(|of| of.0));
            let names: Vec<&str> = names.chain(SIZES.iter().map(|of| of.0)).collect();
            format!(
                "its argument {name:?} is neither the stage {stage} nor one of {}",
                known(&names)
            )
        })?,
    };
    let whole = matches!(name, Name::Labels | Name::Size(_));
    if dtype.is_float() == whole {
        let wanted = if whole { "i32 or i64" } else { "a float" };
        return Err(format!("its argument {text:?} must be {wanted}"));
    }
    Ok(Argument { name, dtype })
}

fn extent(text: &str) -> Result<Extent, String> {
    let (counted, over) = text.split_once('/').unwrap_or((text, "1"));
    let size = SIZES.iter().find(|(named, _)| *named == counted.trim()).map(|(_, size)| *size);
    let count = match size {
        Some(size) => Count::Of(size),
        None => Count::Fixed(number(counted)?),
    };
    Ok(Extent { count, over: number(over)? })
}

fn number(text: &str) -> Result<u32, String> {
    let positive = text.trim().parse().ok().filter(|&number| number > 0);
    positive.ok_or_else(|| format!("{:?} in its declaration is no number above 0", text.trim()))
}
