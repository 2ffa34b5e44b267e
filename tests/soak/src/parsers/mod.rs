//! R8: no input makes a parser panic, hang or allocate on its word.
//!
//! Method: mutations of what backtape itself writes, thrown at the parsers in this process on
//! stable Rust. Checksums and lengths of the outside are mended in most inputs, so that what
//! lies behind them is reached. The heap is counted: what a parser holds at a time must be
//! bounded by the length of its input.

pub(crate) mod allocated;
mod mutate;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};

use self::mutate::mutate;
use self::targets::{Parser, Target};
use crate::random::Random;

/// Bytes that may be held for each byte of input. `{"a":0}` is 7 bytes of text and a node of a
/// B-tree in memory, 640 bytes; three generations of it may live at a time.
const HELD_PER_BYTE: usize = 400;
/// And besides: buffers of fixed size.
const HELD_ANYWAY: usize = 256 << 10;
/// Longest that one input may take on a machine that does other things too.
const SLOWEST: Duration = Duration::from_secs(2);

#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Inputs of each parser
    #[arg(long, default_value_t = 1_000_000)]
    pub(crate) trials: u64,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// One parser alone
    #[arg(long, value_enum)]
    pub(crate) only: Option<Target>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    for target in Target::value_variants() {
        if arguments.only.is_none_or(|only| only == *target) {
            println!("{}", campaign(*target, arguments)?);
        }
    }
    Ok(())
}

/// What was seen of one parser.
#[derive(Default)]
struct Seen {
    accepted: u64,
    /// Most bytes held, and by an input of how many.
    held: (usize, usize),
    slowest: Duration,
}

fn campaign(target: Target, arguments: &Arguments) -> Result<String> {
    let parser = Parser::new(target)?;
    let name = target.to_possible_value().map_or(String::new(), |value| value.get_name().into());
    let (seed, trials) = (arguments.seed, arguments.trials);
    let mut seen = Seen::default();
    for input in &parser.seeds {
        let sound = (0..8).any(|how| parser.parse(&parser.pack(input.clone(), how)));
        ensure!(sound, "parsers: a sound {name} is refused");
    }
    for (number, bomb) in bombs(&parser.seeds).into_iter().enumerate() {
        for how in [0, 1, 4] {
            let packed = parser.pack(bomb.clone(), how);
            let tried = seen.throw(&parser, &packed);
            tried.with_context(|| format!("parsers: {name}: bomb {number}"))?;
        }
    }
    let begun = Instant::now();
    for trial in 0..trials {
        let mut random = Random::of(seed, trial);
        let mutated = mutate(&parser.seeds, &mut random);
        let packed = parser.pack(mutated, random.next());
        let tried = seen.throw(&parser, &packed);
        tried.with_context(|| format!("parsers: {name}: seed {seed} trial {trial}"))?;
    }
    let rate = trials as f64 / begun.elapsed().as_secs_f64();
    let (held, length) = seen.held;
    Ok(format!(
        "parsers: {name}: seed {seed}, {trials} inputs, {rate:.0} a second, {} accepted, 0 panics; at most {held} bytes held (an input of {length}); slowest {:.1} ms",
        seen.accepted,
        seen.slowest.as_secs_f64() * 1e3
    ))
}

impl Seen {
    fn throw(&mut self, parser: &Parser, input: &[u8]) -> Result<()> {
        let begun = Instant::now();
        let parse = AssertUnwindSafe(|| parser.parse(input));
        let (parsed, held) = allocated::most(|| catch_unwind(parse));
        let took = begun.elapsed();
        let shown = || String::from_utf8_lossy(&input[..input.len().min(300)]).into_owned();
        let Ok(accepted) = parsed else { bail!("it panics on {:?}", shown()) };
        let allowed = HELD_ANYWAY + HELD_PER_BYTE * input.len();
        if held > allowed {
            bail!("{held} bytes held for {} of input: {:?}", input.len(), shown());
        }
        ensure!(took < SLOWEST, "{took:?} for {} bytes: {:?}", input.len(), shown());
        self.accepted += u64::from(accepted);
        self.slowest = self.slowest.max(took);
        if held > self.held.0 {
            self.held = (held, input.len());
        }
        Ok(())
    }
}

/// Inputs made to hurt: lengths that are not there, products that overflow, depth without end.
fn bombs(seeds: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for length in [u64::MAX, 1 << 63, (64 << 20) + 1, 64 << 20, 1 << 20, 7, 0] {
        all.push([&length.to_le_bytes()[..], b"{}"].concat());
    }
    for nest in ["[", "{\"a\":", "[{\"a\":", "[[[[[[[["] {
        all.extend([100, 10_000, 200_000].map(|depth| nest.repeat(depth).into_bytes()));
    }
    for many in ["[],", "{},", "0,", "\"\",", "{\"a\":0},", "\"\\u0000\",", "1e308,"] {
        let body = many.repeat(20_000);
        all.push(format!("[{}]", body.trim_end_matches(',')).into_bytes());
    }
    let keys: Vec<String> = (0..10_000).map(|i| format!("\"{i}\":0")).collect();
    all.push(format!("{{{}}}", keys.join(",")).into_bytes());
    all.push(b"0-18446744073709551615,".repeat(700));
    all.push(b"every:1,".repeat(1024));
    all.push(format!("a{}b", "*".repeat(190)).into_bytes());
    all.push([&b"*a".repeat(60)[..], b"!"].concat());
    for seed in seeds {
        // Every number of a sound input, made as large as it goes.
        for huge in ["18446744073709551615", "4294967295", "-1"] {
            let mut text = Vec::new();
            let mut digits = false;
            for &byte in seed {
                match (byte.is_ascii_digit(), digits) {
                    (true, false) => text.extend(huge.bytes()),
                    (true, true) => {}
                    (false, _) => text.push(byte),
                }
                digits = byte.is_ascii_digit();
            }
            all.push(text);
        }
        let shape = String::from_utf8_lossy(seed)
            .replace("\"shape\":[4,3]", "\"shape\":[4294967296,4294967296,4294967296]");
        all.push(shape.into_bytes());
        let wide =
            String::from_utf8_lossy(seed).replace("[4,3]", &format!("[{}1]", "1,".repeat(5000)));
        all.push(wide.into_bytes());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_input_makes_a_parser_panic_hang_or_allocate_on_its_word() {
        run(&Arguments { trials: 20_000, seed: 11, only: None }).unwrap();
    }
}
