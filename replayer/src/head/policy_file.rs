//! Reads a policy that the user declares, in the head or in a TOML file with the same fields, into
//! the `Policy` that the kernels emulate.
//!
//! ```toml
//! base = "chunked"
//! round = { input = "bf16", dlogits = "bf16", output = "bf16" }
//! sums.dk = { dtype = "f32", order = "blocked", block = 128 }
//! sums.chunks = { dtype = "bf16" }
//! tiles.tokens = 1024
//! ```
//!
//! A declaration is either emulated or an error, never ignored: a rounding point that the declared
//! path does not have would otherwise look harmless.

use backtape::head::{DeclaredTiles, PolicyDeclaration, SumDeclaration};

use crate::kernels::policy::{Order, Path, Policy, Sum};
use crate::kernels::{Precision, Tiles};

/// Names accepted in `round`.
pub const ROUND_KEYS: [&str; 9] =
    ["input", "product", "logits", "log_p", "p", "dlogits", "label_grad", "parts", "output"];

/// Names accepted in `sums`.
pub const SUM_KEYS: [&str; 7] = ["logits", "lse", "dq", "dk", "label_scatter", "tiles", "chunks"];

const BASES: [&str; 3] = ["plain", "fused", "chunked"];
const ORDERS: [&str; 5] = ["sequential", "blocked", "pairwise", "kahan", "neumaier"];
/// Formats that a rounding point or a sum may have.
pub(super) const DTYPES: [&str; 7] = ["f64", "f32", "tf32", "bf16", "f16", "f8_e4m3", "f8_e5m2"];

/// Why a declaration is not a valid policy.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PolicyError {
    /// A name that is not known.
    #[error("the policy declares {what}={name}, which is none of {known}")]
    Unknown {
        /// The field that holds the name.
        what: String,
        /// As it was written.
        name: String,
        /// The names that are accepted.
        known: String,
    },
    /// Two declarations that cannot both hold.
    #[error("the policy declares {first} and {second}: {why}")]
    Contradiction {
        /// The first, with its value.
        first: String,
        /// The second, with its value.
        second: String,
        /// Why they cannot both hold.
        why: &'static str,
    },
    /// A size of 0.
    #[error("the policy declares {what}=0: it must be 1 or more")]
    Zero {
        /// Which size.
        what: String,
    },
    /// Text that is not TOML, or holds other fields than a policy's.
    #[error("the policy is not readable at line {line}: {message}")]
    Toml {
        /// Counted from 1.
        line: usize,
        /// What the parser says.
        message: String,
    },
}

/// Reads the TOML of a policy. Which names and which combinations are known is for
/// `policy_of` to say.
pub fn read_toml(text: &str) -> Result<PolicyDeclaration, PolicyError> {
    toml::from_str(text).map_err(|error| {
        let before = error.span().map_or("", |span| text.get(..span.start).unwrap_or(text));
        let line = 1 + before.matches('\n').count();
        let message = error.message().lines().collect::<Vec<_>>().join(" ");
        PolicyError::Toml { line, message }
    })
}

/// Applies a declaration to the policy `defaults`, which holds where nothing is declared; tile
/// sizes that are not declared are the default ones.
pub fn policy_of(
    declared: &PolicyDeclaration,
    defaults: Policy,
) -> Result<(Policy, Tiles), PolicyError> {
    let mut policy = defaults;
    if let Some(base) = &declared.base {
        policy.path = match base.as_str() {
            "plain" => Path::Plain,
            "fused" => Path::Fused,
            "chunked" => Path::Chunked,
            _ => return Err(unknown("base", base, &BASES)),
        };
    }
    for (point, dtype) in &declared.round {
        let what = format!("round.{point}");
        let known = ROUND_KEYS.contains(&point.as_str());
        let to = if known { precision(&what, dtype)? } else { Precision::F32 };
        if matches!(point.as_str(), "label_grad" | "parts") {
            only_on(Path::Fused, policy.path, &format!("{what}={dtype}"))?;
        }
        *rounding_point(&mut policy, point)? = to;
    }
    for (name, sum) in &declared.sums {
        set_sum(&mut policy, name, sum)?;
    }
    Ok((policy, tiles(declared.tiles, policy.path)?))
}

fn rounding_point<'p>(
    policy: &'p mut Policy,
    point: &str,
) -> Result<&'p mut Precision, PolicyError> {
    Ok(match point {
        "input" => &mut policy.input,
        "product" => &mut policy.product,
        "logits" => &mut policy.logits,
        "log_p" => &mut policy.log_p,
        "p" => &mut policy.p,
        "dlogits" => &mut policy.dlogits,
        "label_grad" => &mut policy.label_grad,
        "parts" => &mut policy.parts,
        "output" => &mut policy.output,
        _ => return Err(unknown("round", point, &ROUND_KEYS)),
    })
}

fn set_sum(policy: &mut Policy, name: &str, declared: &SumDeclaration) -> Result<(), PolicyError> {
    if !SUM_KEYS.contains(&name) {
        return Err(unknown("sums", name, &SUM_KEYS));
    }
    let what = format!("sums.{name}");
    let shown = format!("{what}.dtype={}", declared.dtype);
    match name {
        "label_scatter" | "tiles" => only_on(Path::Fused, policy.path, &shown)?,
        "chunks" => only_on(Path::Chunked, policy.path, &shown)?,
        _ => {}
    }
    let sum = Sum { precision: precision(&what, &declared.dtype)?, order: order(&what, declared)? };
    match name {
        "logits" => policy.sums.logits = sum,
        "lse" => policy.sums.lse = sum,
        "dq" => policy.sums.dq = sum,
        "dk" => policy.sums.dk = sum,
        "label_scatter" => policy.sums.label_scatter = sum,
        _ if !matches!(sum.order, Order::Native | Order::Sequential) => {
            let order = declared.order.as_deref().unwrap_or_default();
            return Err(PolicyError::Contradiction {
                first: shown,
                second: format!("{what}.order={order}"),
                why: "partial results are added one after the other, as they come",
            });
        }
        "tiles" => policy.tile_add = sum.precision,
        _ => policy.chunk_add = sum.precision,
    }
    Ok(())
}

fn order(what: &str, declared: &SumDeclaration) -> Result<Order, PolicyError> {
    let order = declared.order.as_deref();
    match (order, declared.block) {
        (Some("blocked"), Some(0)) => Err(PolicyError::Zero { what: format!("{what}.block") }),
        (Some("blocked"), Some(block)) => Ok(Order::Blocked(block as usize)),
        (Some("blocked"), None) => Err(PolicyError::Contradiction {
            first: format!("{what}.order=blocked"),
            second: format!("no {what}.block"),
            why: "a blocked sum needs the number of addends in a block",
        }),
        (_, Some(block)) => Err(PolicyError::Contradiction {
            first: format!("{what}.block={block}"),
            second: order.map_or(format!("no {what}.order"), |o| format!("{what}.order={o}")),
            why: "only order=blocked has blocks",
        }),
        (None, None) => Ok(Order::Native),
        (Some("sequential"), None) => Ok(Order::Sequential),
        (Some("pairwise"), None) => Ok(Order::Pairwise),
        (Some("kahan"), None) => Ok(Order::Kahan),
        (Some("neumaier"), None) => Ok(Order::Neumaier),
        (Some(other), None) => Err(unknown(&format!("{what}.order"), other, &ORDERS)),
    }
}

fn tiles(declared: DeclaredTiles, path: Path) -> Result<Tiles, PolicyError> {
    let mut tiles = Tiles::default();
    let sizes = [
        ("tiles.tokens", declared.tokens, &mut tiles.tokens),
        ("tiles.vocab", declared.vocab, &mut tiles.vocab),
    ];
    for (what, declared, size) in sizes {
        match declared {
            None => {}
            Some(0) => return Err(PolicyError::Zero { what: what.into() }),
            Some(rows) => {
                let tiled = match what {
                    "tiles.tokens" => path != Path::Plain,
                    _ => path == Path::Fused,
                };
                if !tiled {
                    return Err(PolicyError::Contradiction {
                        first: format!("base={}", name(path)),
                        second: format!("{what}={rows}"),
                        why: "plain has no tiles, and chunked takes the whole vocabulary at once",
                    });
                }
                *size = rows as usize;
            }
        }
    }
    Ok(tiles)
}

fn only_on(needed: Path, path: Path, shown: &str) -> Result<(), PolicyError> {
    if path == needed {
        return Ok(());
    }
    Err(PolicyError::Contradiction {
        first: format!("base={}", name(path)),
        second: shown.into(),
        why: match needed {
            Path::Chunked => "only base=chunked adds up token chunks",
            _ => "only base=fused adds up tiles, a label part and a softmax part",
        },
    })
}

fn name(path: Path) -> &'static str {
    match path {
        Path::Plain => "plain",
        Path::Fused => "fused",
        Path::Chunked => "chunked",
    }
}

fn precision(what: &str, dtype: &str) -> Result<Precision, PolicyError> {
    Precision::from_name(dtype).ok_or_else(|| unknown(&format!("{what} dtype"), dtype, &DTYPES))
}

fn unknown(what: &str, name: &str, known: &[&str]) -> PolicyError {
    let (last, before) = known.split_last().expect("there is something known");
    let known = format!("{} and {last}", before.join(", "));
    PolicyError::Unknown { what: what.into(), name: name.into(), known }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::policy::{LogitRounding, Walk};

    fn read(text: &str) -> Result<(Policy, Tiles), String> {
        let declared = read_toml(text).map_err(|error| error.to_string())?;
        policy_of(&declared, Policy::fused_f32()).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_file_is_the_default_policy() {
        assert_eq!(read(""), Ok((Policy::fused_f32(), Tiles::default())));
    }

    #[test]
    fn every_field_of_a_file_reaches_the_policy() {
        let text = r#"
            base = "fused"
            round = { input = "bf16", product = "tf32", logits = "f16", log_p = "bf16", p = "bf16", dlogits = "f8_e4m3", label_grad = "f8_e5m2", parts = "f16", output = "bf16" }
            [sums]
            logits = { dtype = "f32", order = "blocked", block = 32 }
            lse = { dtype = "f64", order = "pairwise" }
            dq = { dtype = "f32", order = "kahan" }
            dk = { dtype = "f16", order = "neumaier" }
            label_scatter = { dtype = "bf16", order = "sequential" }
            tiles = { dtype = "bf16" }
            [tiles]
            tokens = 128
            vocab = 512
        "#;
        let (policy, tiles) = read(text).unwrap();
        assert_eq!(tiles, Tiles { tokens: 128, vocab: 512 });
        let sum = |precision, order| Sum { precision, order };
        let Policy { sums, .. } = policy;
        assert_eq!(sums.logits, sum(Precision::F32, Order::Blocked(32)));
        assert_eq!(sums.lse, sum(Precision::F64, Order::Pairwise));
        assert_eq!(sums.dq, sum(Precision::F32, Order::Kahan));
        assert_eq!(sums.dk, sum(Precision::F16, Order::Neumaier));
        assert_eq!(sums.label_scatter, sum(Precision::Bf16, Order::Sequential));
        let wanted = Policy {
            path: Path::Fused,
            input: Precision::Bf16,
            product: Precision::Tf32,
            logits: Precision::F16,
            operand: Precision::F64,
            logits_when: LogitRounding::Each,
            log_p: Precision::Bf16,
            p: Precision::Bf16,
            dlogits: Precision::F8E4m3,
            label_grad: Precision::F8E5m2,
            parts: Precision::F16,
            output: Precision::Bf16,
            tile_add: Precision::Bf16,
            chunk_add: Precision::F32,
            addend: Precision::F32,
            scatter_shards: 1,
            scatter_join: Precision::F32,
            scatter_order: Walk::Ascending,
            sums,
            tile_order: Walk::Ascending,
            chunk_order: Walk::Ascending,
            cut: Default::default(),
        };
        assert_eq!(policy, wanted);
        let chunked = "base = \"chunked\"\nsums.chunks = { dtype = \"bf16\" }\ntiles.tokens = 64";
        let (policy, tiles) = read(chunked).unwrap();
        let wanted = Policy { chunk_add: Precision::Bf16, ..Policy::chunked_f32() };
        assert_eq!((policy, tiles.tokens), (wanted, 64));
    }

    #[test]
    fn a_wrong_file_is_told_in_one_sentence_that_names_what_is_wrong() {
        let cases: [(&str, &[&str]); 19] = [
            ("base = \"tiled\"", &["base=tiled", "plain, fused and chunked"]),
            ("round.softmax = \"bf16\"", &["round=softmax", "dlogits"]),
            ("round.p = \"bf17\"", &["round.p dtype=bf17", "tf32"]),
            ("sums.dv = { dtype = \"f32\" }", &["sums=dv", "label_scatter"]),
            ("sums.dk = { dtype = \"native\", order = \"kahan\" }", &["sums.dk dtype=native"]),
            (
                "sums.dk = { dtype = \"f32\", order = \"random\" }",
                &["sums.dk.order=random", "kahan"],
            ),
            (
                "sums.dk = { dtype = \"f32\", order = \"blocked\" }",
                &["order=blocked", "no sums.dk.block"],
            ),
            ("sums.dk = { dtype = \"f32\", order = \"blocked\", block = 0 }", &["sums.dk.block=0"]),
            (
                "sums.dk = { dtype = \"f32\", order = \"kahan\", block = 4 }",
                &["block=4", "order=kahan"],
            ),
            ("sums.dk = { dtype = \"f32\", block = 4 }", &["block=4", "no sums.dk.order"]),
            ("sums.tiles = { dtype = \"f32\", order = \"kahan\" }", &["dtype=f32", "order=kahan"]),
            ("sums.chunks = { dtype = \"bf16\" }", &["base=fused", "sums.chunks.dtype=bf16"]),
            (
                "base = \"plain\"\nsums.label_scatter = { dtype = \"bf16\" }",
                &["base=plain", "sums.label_scatter.dtype=bf16"],
            ),
            ("base = \"plain\"\nsums.tiles = { dtype = \"bf16\" }", &["base=plain", "sums.tiles"]),
            ("base = \"chunked\"\nround.parts = \"bf16\"", &["base=chunked", "round.parts=bf16"]),
            ("base = \"chunked\"\ntiles.vocab = 8", &["base=chunked", "tiles.vocab=8"]),
            ("base = \"plain\"\ntiles.tokens = 8", &["base=plain", "tiles.tokens=8"]),
            ("tiles.tokens = 0", &["tiles.tokens=0"]),
            ("base = \"fused\"\nrund = 1", &["line 2", "rund", "round"]),
        ];
        for (text, parts) in cases {
            let error = read(text).unwrap_err();
            assert!(!error.contains('\n'), "{error}");
            for part in parts {
                assert!(error.contains(part), "{error:?} says {part:?}");
            }
        }
    }

    #[test]
    fn every_name_offered_is_accepted() {
        for dtype in DTYPES {
            assert!(Precision::from_name(dtype).is_some(), "{dtype}");
        }
        for point in ROUND_KEYS {
            assert!(read(&format!("round.{point} = \"bf16\"")).is_ok(), "{point}");
        }
        for sum in SUM_KEYS {
            let base = if sum == "chunks" { "chunked" } else { "fused" };
            let text = format!("base = \"{base}\"\nsums.{sum} = {{ dtype = \"f32\" }}");
            assert!(read(&text).is_ok(), "{sum}");
        }
    }
}
