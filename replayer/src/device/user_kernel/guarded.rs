//! A user's kernel between guards: run four times, so that what it must not do shows.
//!
//! | run | guards around inputs | output before | a difference from the first run says |
//! |---|---|---|---|
//! | 1 | NaN | NaN | |
//! | 2 | NaN | NaN | not deterministic |
//! | 3 | NaN | 6e-13 | unwritten elements, or the output is read before it is written |
//! | 4 | 0 | NaN | inputs are read beyond their ends |
//!
//! Guards lie on both sides, a MiB each: a kernel that strays farther hits memory that is not its
//! own, which the driver answers with an error. A guard that changed was written to.

use std::fmt::Write;

use super::declared::{Declared, Name, Sizes, Type};
use super::launch::{Code, Launch, Launches, Passed};
use super::values::{self, Unit};
use crate::device::error::DeviceError;
use crate::kernels::Precision;

/// Bytes of a guard: the tile that a kernel reads past the end is smaller.
const GUARD: usize = 1 << 20;
/// All bits set: NaN in every float, -1 in every integer.
const NAN: u8 = 0xff;
const ZERO: u8 = 0;
/// A number in every float, 6.1e-13 in bf16 and f32: so small that what is added to it shows.
const ODD: u8 = 0x2b;

/// What one kernel gave for one unit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Given {
    /// `[n, D]`, `[V, D]`, `[V]` or `[n]`, row-major.
    pub values: Vec<f64>,
    /// What the kernel gives them in.
    pub precision: Option<Precision>,
    /// What the kernel does that it must not, in sentences.
    pub findings: Vec<String>,
}

/// An output with its guards, as it came back.
struct Ended {
    output: Vec<u8>,
    /// Names of what was written to and must not be.
    strayed: Vec<&'static str>,
}

/// Runs a kernel on a unit's head.
///
/// # Safety
///
/// As for [`Launches::start`]: it is the user's code.
pub(super) unsafe fn run<M: Launches>(
    machine: &M,
    (code, entry): (&Code, &str),
    declared: &Declared,
    unit: &Unit<'_>,
) -> Result<Given, DeviceError> {
    let kernel = machine.load(code, entry)?;
    let sizes = unit.sizes();
    let refused = |why: String| DeviceError::Call { what: format!("the kernel {entry}"), why };
    let launch = Launch {
        grid: declared.grid(&sizes).map_err(refused)?,
        block: declared.block(),
        shared: declared.shared,
    };
    let inputs = unit.inputs(declared).map_err(refused)?;
    let output = declared.arguments.iter().find(|argument| argument.name == Name::Output);
    let dtype = output.expect("a declaration names its output").dtype;
    let attempt = |guard: u8, poison: u8| {
        let given =
            Attempt { declared, sizes, inputs: &inputs, count: unit.count(), guard, poison };
        // SAFETY: the caller's.
        unsafe { given.run(machine, (&kernel, launch)) }
    };
    let runs = [attempt(NAN, NAN)?, attempt(NAN, NAN)?, attempt(NAN, ODD)?, attempt(ZERO, NAN)?];
    let findings = judged(&runs, (dtype, unit.columns()));
    let precision = Precision::from_name(dtype.name());
    Ok(Given { values: values::floats(&runs[0].output, dtype), precision, findings })
}

/// One run, all that it is given.
struct Attempt<'a> {
    declared: &'a Declared,
    sizes: Sizes,
    /// Of each argument; empty for what is no array that is read.
    inputs: &'a [Vec<u8>],
    /// Elements of the output.
    count: usize,
    guard: u8,
    poison: u8,
}

impl Attempt<'_> {
    /// # Safety
    ///
    /// As for [`Launches::start`].
    unsafe fn run<M: Launches>(
        &self,
        machine: &M,
        (kernel, launch): (&M::Kernel, Launch),
    ) -> Result<Ended, DeviceError> {
        let mut buffers = Vec::new();
        let mut passed = Vec::new();
        for (argument, input) in self.declared.arguments.iter().zip(self.inputs) {
            let bytes = match argument.name {
                Name::Output => vec![self.poison; self.count * argument.dtype.bytes()],
                Name::Size(size) => {
                    passed.push(whole(self.sizes.of(size), argument.dtype));
                    continue;
                }
                Name::Constant(_) => {
                    passed.push(number(values::floats(input, argument.dtype)[0], argument.dtype));
                    continue;
                }
                _ => input.clone(),
            };
            let guarded = [vec![self.guard; GUARD], bytes, vec![self.guard; GUARD]].concat();
            let mut buffer = machine.zeros(guarded.len())?;
            machine.upload(&guarded, &mut buffer)?;
            passed.push(Passed::Address(machine.address(&buffer) + GUARD as u64));
            buffers.push((argument.name, buffer, guarded));
        }
        // SAFETY: the caller's; the addresses lie in buffers that live to the end of this.
        unsafe { machine.start(kernel, launch, &passed)? };
        let mut ended = Ended { output: Vec::new(), strayed: Vec::new() };
        for (name, buffer, before) in &buffers {
            let mut after = vec![0; before.len()];
            machine.download(buffer, &mut after)?;
            let end = after.len() - GUARD;
            let guards = after[..GUARD] != before[..GUARD] || after[end..] != before[end..];
            match name {
                Name::Output => {
                    if guards {
                        ended.strayed.push("beyond the ends of its output");
                    }
                    ended.output = after[GUARD..end].to_vec();
                }
                _ if guards || after != *before => ended.strayed.push(named(*name)),
                _ => {}
            }
        }
        Ok(ended)
    }
}

fn whole(size: usize, dtype: Type) -> Passed {
    match dtype {
        Type::I32 => Passed::I32(size as i32),
        _ => Passed::I64(size as i64),
    }
}

fn number(x: f64, dtype: Type) -> Passed {
    match dtype {
        Type::F32 => Passed::F32(x as f32),
        _ => Passed::F64(x),
    }
}

fn named(name: Name) -> &'static str {
    match name {
        Name::Q => "to q or around it",
        Name::K => "to k or around it",
        Name::Labels => "to the labels or around them",
        Name::Lse => "to lse or around it",
        Name::G => "to g or around it",
        _ => "to the bias or around it",
    }
}

/// What four runs say.
fn judged(runs: &[Ended; 4], (dtype, columns): (Type, usize)) -> Vec<String> {
    let [first, second, odd, clear] =
        runs.each_ref().map(|run| Elements { dtype, bytes: &run.output });
    let mut findings = Vec::new();
    let mut say = |what: &str, elements: Vec<usize>| {
        if let Some(&element) = elements.first() {
            let place = match columns {
                1 => format!("[{element}]"),
                _ => format!("[{}, {}]", element / columns, element % columns),
            };
            let mut said = format!("{} of {} elements {what}", elements.len(), first.len());
            let _ = write!(said, ", the first is {place}");
            findings.push(said);
        }
    };
    let unwritten = |at: &usize| first.holds(*at, NAN) && odd.holds(*at, ODD);
    say("are never written", first.all(unwritten));
    let wavers = first.all(|at| first.at(*at) != second.at(*at));
    // Where a run differs from itself, only what becomes NaN, or no longer is, says more.
    let steady = wavers.is_empty();
    let differs = |other: &Elements<'_>, index: usize| match steady {
        true => first.at(index) != other.at(index),
        false => first.is_nan(index) != other.is_nan(index),
    };
    say("differ between two runs", wavers);
    let read_first = |at: &usize| !unwritten(at) && differs(&odd, *at);
    say("depend on what the output held before", first.all(read_first));
    say("depend on what lies beyond the ends of an input", first.all(|at| differs(&clear, *at)));
    let mut strayed: Vec<&str> = runs.iter().flat_map(|run| run.strayed.iter().copied()).collect();
    strayed.sort_unstable();
    strayed.dedup();
    findings.extend(strayed.into_iter().map(|place| format!("it writes {place}")));
    findings
}

/// The elements of an output.
struct Elements<'a> {
    dtype: Type,
    bytes: &'a [u8],
}

impl Elements<'_> {
    fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    fn at(&self, index: usize) -> &[u8] {
        &self.bytes[index * self.dtype.bytes()..][..self.dtype.bytes()]
    }

    fn holds(&self, index: usize, byte: u8) -> bool {
        self.at(index).iter().all(|byte_there| *byte_there == byte)
    }

    fn is_nan(&self, index: usize) -> bool {
        values::floats(self.at(index), self.dtype)[0].is_nan()
    }

    fn all(&self, is_wanted: impl Fn(&usize) -> bool) -> Vec<usize> {
        (0..self.len()).filter(is_wanted).collect()
    }
}
