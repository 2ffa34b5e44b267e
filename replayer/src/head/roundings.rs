//! What the job may have rounded, as far as its declaration says.
//!
//! What the head leaves undeclared is unknown, not f32: a rounding of an
//! intermediate to the input's dtype is then plausible and widens what is
//! allowed. A low-precision *accumulator* is never plausible by default:
//! undeclared, it must show as a divergence (NUMERICS: what error is allowed).

use backtape::dtype::Dtype;

use super::options::HeadOptions;
use crate::kernels::round::Precision;

/// Names accepted in `tape.head(dtypes={...})`.
pub const DTYPE_KEYS: [&str; 10] = [
    "logits",
    "lse",
    "p",
    "dlogits",
    "label_grad",
    "parts",
    "accumulate",
    "label_scatter",
    "reduce",
    "output",
];

/// Unit roundoff of f32, of every undeclared accumulator.
pub const F32: f64 = 5.960_464_477_539_063e-8;

/// Unit roundoff (half the spacing at 1) of a declared dtype.
pub fn unit(name: &str) -> Option<f64> {
    let bits = match name {
        "f64" => 53,
        "f32" => 24,
        "tf32" | "f16" => 11,
        "bf16" => 8,
        _ => return None,
    };
    Some((-f64::from(bits)).exp2())
}

/// Unit roundoff of a stored dtype; 0 for integers, which do not round.
pub fn unit_of(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F8E4m3 => 0.0625,
        Dtype::F8E5m2 => 0.125,
        float if float.is_float() => unit(float.name()).unwrap_or(0.0),
        _ => 0.0,
    }
}

/// The largest plausible unit roundoff of each rounding point.
#[derive(Clone, Debug, PartialEq)]
pub struct Roundings {
    /// Unit roundoff of the dtype in which q and k enter.
    pub input: f64,
    /// Logits, between the GEMM and the softmax.
    pub logits: f64,
    /// p, or `g_lse·p`, before the backward GEMMs.
    pub dlogits: f64,
    /// The product `g_label·q` before it is added.
    pub label_grad: f64,
    /// The two parts of dq and dk before they are added.
    pub parts: f64,
    /// Accumulator of every sum.
    pub accumulate: f64,
    /// Accumulator of the label scatter.
    pub label_scatter: f64,
    /// Accumulator of sums over microbatches and ranks.
    pub reduce: f64,
    /// True when one rounded constant may scale all label gradients alike.
    pub shared_g: bool,
}

impl Roundings {
    /// What is plausible for this head with inputs of this dtype.
    pub fn plausible(options: &HeadOptions, input: Dtype) -> Roundings {
        let input = unit_of(input).max(F32);
        let declared = |key: &str| options.declared.dtypes.get(key).and_then(|name| unit(name));
        let intermediate = |key: &str| declared(key).unwrap_or(input);
        let accumulator = |key: &str, usual: f64| declared(key).unwrap_or(usual);
        let accumulate = accumulator("accumulate", F32);
        let dlogits = intermediate("dlogits").max(declared("p").unwrap_or(0.0));
        Roundings {
            input,
            logits: intermediate("logits"),
            dlogits,
            label_grad: intermediate("label_grad"),
            parts: intermediate("parts"),
            accumulate,
            label_scatter: accumulator("label_scatter", accumulate),
            reduce: accumulator("reduce", F32),
            // plain rounds g(p_y - 1): nearly one number when p_y is small.
            shared_g: options.plain && dlogits > F32,
        }
    }
}

/// The precision whose unit roundoff this is, for the emulated floor.
pub fn precision(unit: f64) -> Precision {
    match unit {
        u if u >= 0.003 => Precision::Bf16,
        u if u > F32 => Precision::F16,
        u if u < F32 / 2.0 => Precision::F64,
        _ => Precision::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backtape::head::HeadDeclaration;

    #[test]
    fn an_undeclared_intermediate_may_be_rounded_and_an_undeclared_accumulator_may_not() {
        let options = HeadOptions::new(&HeadDeclaration::default()).unwrap();
        let found = Roundings::plausible(&options, Dtype::Bf16);
        assert_eq!((found.dlogits, found.logits), (1.0 / 256.0, 1.0 / 256.0));
        assert_eq!((found.accumulate, found.label_scatter, found.reduce), (F32, F32, F32));
    }

    #[test]
    fn a_declared_low_precision_scatter_is_floor() {
        let mut head = HeadDeclaration::default();
        head.dtypes.insert("label_scatter".into(), "bf16".into());
        let options = HeadOptions::new(&head).unwrap();
        assert_eq!(Roundings::plausible(&options, Dtype::Bf16).label_scatter, 1.0 / 256.0);
    }
}
