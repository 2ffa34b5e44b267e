//! The roundings that a job may have made, given its declaration.
//!
//! What the head leaves undeclared is unknown, not f32: it is then plausible that an intermediate
//! was rounded to the input's dtype, and the allowed error is larger. A low-precision *accumulator*
//! is never plausible by default: if it is not declared, it must show as a divergence
//! (docs/decisions/numerics.md). Operands of products are taken as they were recorded, unless there
//! are signs that the job computes in fewer bits (`lowered`).

use backtape::dtype::Dtype;
use backtape::head::DeclaredTiles;

use super::options::{HeadError, HeadOptions, Walk};
use super::policy_file::policy_of;
use crate::kernels::policy::{Path, Policy, Sum, Sums};
use crate::kernels::round::Precision;
use crate::kernels::tiles::Tiles;

/// Names accepted in `tape.head(dtypes={...})`.
pub const DTYPE_KEYS: [&str; 13] = [
    "input",
    "product",
    "logits",
    "lse",
    "log_p",
    "p",
    "dlogits",
    "label_grad",
    "parts",
    "accumulate",
    "label_scatter",
    "reduce",
    "output",
];

/// Unit roundoff of f32, of every undeclared accumulator of a job below f64.
pub const F32: f64 = 5.960_464_477_539_063e-8;

/// Unit roundoff (half the spacing at 1) of a declared dtype.
pub fn unit(name: &str) -> Option<f64> {
    Precision::from_name(name).map(Precision::unit_roundoff)
}

/// The precision of a stored dtype; `None` for integers, which do not round.
pub fn precision_of(dtype: Dtype) -> Option<Precision> {
    Precision::from_name(dtype.name())
}

/// Unit roundoff of a stored dtype; 0 for integers.
pub fn unit_of(dtype: Dtype) -> f64 {
    precision_of(dtype).map_or(0.0, Precision::unit_roundoff)
}

/// The largest plausible rounding at each point.
#[derive(Clone, Debug, PartialEq)]
pub struct Roundings {
    /// Every rounding point in the lowest precision that is plausible, every sum as declared.
    pub widest: Policy,
    /// Every rounding point in the highest plausible precision: the declared one, else none.
    pub narrowest: Policy,
    /// Tiles of the declared policy or head.
    pub tiles: Tiles,
    /// Accumulator of sums over microbatches and ranks.
    pub reduce: Precision,
    /// Format in which lse is kept between forward and backward pass, where declared.
    pub lse: Option<Precision>,
    /// Whether the GEMMs round q and k to fewer bits than they were recorded in.
    pub narrowed: bool,
    /// True when the job declared a whole policy, so that `widest` and `narrowest` are the same.
    pub declared: bool,
}

impl Roundings {
    /// The plausible roundings of this head with inputs of this dtype.
    pub fn plausible(options: &HeadOptions, input: Dtype) -> Result<Roundings, HeadError> {
        let stored = precision_of(input).unwrap_or(Precision::F32);
        let full = if stored == Precision::F64 { Precision::F64 } else { Precision::F32 };
        let declared = |key: &str| {
            options.declared.dtypes.get(key).and_then(|name| Precision::from_name(name))
        };
        let lower = |low: &Precision| low.unit_roundoff() > stored.unit_roundoff();
        let lowest = options.lowered.filter(lower).unwrap_or(stored);
        let policy = |intermediate: Precision, operand: Precision| {
            let point = |key: &str| declared(key).unwrap_or(intermediate);
            // GEMMs that round their operands also round dlogits.
            let narrowed = |precision: Precision| match declared("input").filter(lower) {
                Some(to) if to.unit_roundoff() > precision.unit_roundoff() => to,
                _ => precision,
            };
            // Logits that the head starts from, without a transform, were rounded before they were
            // recorded.
            let is_input =
                |precision: &Precision| precision.unit_roundoff() <= stored.unit_roundoff();
            let logits = point("logits");
            let logits = if options.takes_logits() && is_input(&logits) { full } else { logits };
            let accumulate = Sum::of(declared("accumulate").unwrap_or(full));
            let scatter = declared("label_scatter").map_or(accumulate, Sum::of);
            Policy {
                path: path(options.walk),
                input: declared("input").unwrap_or(operand),
                product: declared("product").unwrap_or(full),
                logits,
                // Kept by no job that does not say so: it would excuse errors of percents.
                log_p: declared("log_p").unwrap_or(Precision::F64),
                p: point("p"),
                dlogits: narrowed(point("dlogits")),
                label_grad: point("label_grad"),
                parts: point("parts"),
                output: point("output"),
                tile_add: accumulate.precision,
                chunk_add: accumulate.precision,
                addend: full,
                sums: Sums { label_scatter: scatter, ..Sums::all(accumulate) },
                ..Policy::plain_f32()
            }
        };
        let mut roundings = Roundings {
            widest: policy(lowest, lowest),
            narrowest: policy(full, stored),
            tiles: tiles(options.declared.tiles.unwrap_or_default()),
            reduce: declared("reduce").unwrap_or(full),
            lse: declared("lse"),
            narrowed: false,
            declared: false,
        };
        if let Some(declared) = &options.declared.policy {
            let (policy, tiles) = policy_of(declared, roundings.narrowest)?;
            (roundings.widest, roundings.narrowest) = (policy, policy);
            (roundings.tiles, roundings.declared) = (tiles, true);
        }
        let input = roundings.widest.input.unit_roundoff();
        roundings.narrowed = input > stored.unit_roundoff();
        Ok(roundings)
    }

    /// Unit roundoff of element-wise arithmetic. In an f64 job the reference errs as much as the
    /// job does, so it counts twice.
    pub fn compute(&self) -> f64 {
        match self.widest.sums.lse.precision {
            Precision::F64 => 2.0 * Precision::F64.unit_roundoff(),
            _ => F32,
        }
    }

    /// Largest relative error of rounding q or k to the input format of the GEMMs; 0 where they are
    /// not rounded.
    pub fn input(&self) -> f64 {
        if self.narrowed { self.widest.input.unit_roundoff() } else { 0.0 }
    }

    /// Unit roundoff of the log-probabilities that the job keeps and makes p of; 0 where it keeps
    /// none in few bits.
    pub fn kept_log_p(&self) -> f64 {
        if self.widest.keeps_log_p() { self.widest.log_p.unit_roundoff() } else { 0.0 }
    }

    /// True when a sum is declared in so few bits that addends can be lost in it, always with the
    /// same sign.
    pub fn swamps(&self) -> bool {
        let Policy { sums, tile_add, chunk_add, .. } = self.widest;
        let Sums { logits, lse, dq, dk, label_scatter } = sums;
        let all = [logits, lse, dq, dk, label_scatter].map(|sum| sum.precision);
        all.into_iter().chain([tile_add, chunk_add]).any(|p| p.unit_roundoff() > F32)
    }

    /// Whether the label's term may be an addend of the same sum as the softmax's terms, so that it
    /// is part of every later partial sum. It is where dlogits are computed whole, and may be in a
    /// fused kernel that subtracts 1 from p in place, which jobs do not declare. It is not where
    /// the parts were recorded apart (not `whole`), and where a fused policy was declared.
    pub fn carries_label(&self, whole: bool) -> bool {
        self.widest.path != Path::Fused || (whole && !self.declared)
    }

    /// 1 when the job rounds whole entries of dlogits to few bits, else 0: the label's entry `g (p
    /// - 1)` is nearly the same for all tokens with small p, so its rounding error is shared.
    pub fn shared_g(&self) -> f64 {
        let shared = self.widest.path != Path::Fused && self.widest.dlogits.unit_roundoff() > F32;
        f64::from(u8::from(shared))
    }
}

fn path(walk: Walk) -> Path {
    match walk {
        Walk::Plain => Path::Plain,
        Walk::Fused => Path::Fused,
        Walk::Chunked => Path::Chunked,
    }
}

fn tiles(declared: DeclaredTiles) -> Tiles {
    let usual = Tiles::default();
    let size = |declared: Option<u32>, usual: usize| match declared {
        Some(n) if n > 0 => n as usize,
        _ => usual,
    };
    Tiles { tokens: size(declared.tokens, usual.tokens), vocab: size(declared.vocab, usual.vocab) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backtape::head::HeadDeclaration;

    fn of(declaration: &HeadDeclaration, dtype: Dtype) -> Roundings {
        Roundings::plausible(&HeadOptions::new(declaration).unwrap(), dtype).unwrap()
    }

    #[test]
    fn an_undeclared_intermediate_may_be_rounded_and_an_undeclared_accumulator_may_not() {
        let roundings = of(&HeadDeclaration::default(), Dtype::Bf16);
        assert_eq!(
            (roundings.widest.dlogits, roundings.widest.logits),
            (Precision::Bf16, Precision::Bf16)
        );
        assert_eq!(
            (roundings.narrowest.dlogits, roundings.reduce),
            (Precision::F32, Precision::F32)
        );
        assert!(!roundings.swamps());
    }

    #[test]
    fn a_declared_low_precision_scatter_is_floor() {
        let mut head = HeadDeclaration::default();
        head.dtypes.insert("label_scatter".into(), "bf16".into());
        let roundings = of(&head, Dtype::Bf16);
        assert_eq!(roundings.widest.sums.label_scatter.precision, Precision::Bf16);
        assert!(roundings.swamps());
    }

    #[test]
    fn a_job_in_f64_is_taken_to_compute_in_f64() {
        let roundings = of(&HeadDeclaration::default(), Dtype::F64);
        assert_eq!(roundings.widest, roundings.narrowest);
        assert_eq!(roundings.widest.sums.dk.precision, Precision::F64);
        assert!(roundings.compute() < 1e-15);
    }

    #[test]
    fn a_job_that_shows_lower_arithmetic_may_round_operands_too_unless_it_declares_them() {
        let lowered = |head: &HeadDeclaration| {
            let mut options = HeadOptions::new(head).unwrap();
            options.lowered = Some(Precision::Bf16);
            Roundings::plausible(&options, Dtype::F32).unwrap()
        };
        let mut head = HeadDeclaration::default();
        let roundings = lowered(&head);
        assert_eq!(
            (roundings.widest.input, roundings.widest.logits),
            (Precision::Bf16, Precision::Bf16)
        );
        assert_eq!((roundings.narrowest.input, roundings.input()), (Precision::F32, 1.0 / 256.0));
        assert!(!roundings.swamps(), "accumulators stay in f32");
        head.dtypes.insert("input".into(), "f32".into());
        assert_eq!((lowered(&head).widest.input, lowered(&head).input()), (Precision::F32, 0.0));
        assert_eq!(lowered(&head).widest.dlogits, Precision::Bf16);
    }

    #[test]
    fn products_that_narrow_their_operands_narrow_dlogits_too() {
        let mut head = HeadDeclaration::default();
        head.dtypes.insert("dlogits".into(), "f32".into());
        head.dtypes.insert("input".into(), "tf32".into());
        assert_eq!(of(&head, Dtype::F32).widest.dlogits, Precision::Tf32);
        head.dtypes.insert("input".into(), "bf16".into());
        assert_eq!(of(&head, Dtype::Bf16).widest.dlogits, Precision::F32, "as they are stored");
        assert_eq!(of(&head, Dtype::F32).widest.dlogits, Precision::Bf16);
    }

    #[test]
    fn gemm_inputs_declared_below_the_recorded_dtype_cost_their_rounding() {
        let mut head = HeadDeclaration::default();
        head.dtypes.insert("input".into(), "tf32".into());
        assert_eq!(of(&head, Dtype::F32).input(), Precision::Tf32.unit_roundoff());
        assert_eq!(of(&head, Dtype::Bf16).input(), 0.0);
    }
}
