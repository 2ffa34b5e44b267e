//! Numbers as text for the tables of reports.

/// Four significant digits in at most ten characters.
pub fn short(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        size if (1e-3..1e5).contains(&size) => {
            let digits = (3 - size.log10().floor() as i32).max(0) as usize;
            format!("{x:.digits$}")
        }
        _ => format!("{x:.3e}"),
    }
}

/// Two significant digits, for errors and floors.
pub fn error(x: f64) -> String {
    if x == 0.0 { "0".into() } else { format!("{x:.1e}") }
}

/// A ratio, with one decimal below 100.
pub fn ratio(x: f64) -> String {
    match x {
        x if !x.is_finite() => format!("{x}"),
        x if x < 100.0 => format!("{x:.1}"),
        x if x < 1e5 => format!("{x:.0}"),
        x => format!("{x:.0e}"),
    }
}

/// A slope, `factor - 1`, in percent; the factor itself where the slope is 10 or more.
pub fn scale(slope: f64) -> String {
    match slope.abs() < 10.0 {
        true => format!("{:+.2} %", 100.0 * slope),
        false => format!("a factor of {}", short(1.0 + slope)),
    }
}

/// A count with its digits in groups of three.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Bytes in binary units.
pub fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let step = (n.max(1).ilog2() / 10).min(4);
    match step {
        0 => format!("{n} B"),
        _ => format!("{:.1} {}", n as f64 / f64::from(step * 10).exp2(), units[step as usize]),
    }
}

/// A count with its noun: `1 row`, `2 rows`, `3 batches`, `4 copies`.
pub fn plural(n: u64, noun: &str) -> String {
    let hisses = ["s", "x", "z", "ch", "sh"].iter().any(|end| noun.ends_with(end));
    let stem = noun.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'i', 'o', 'u']));
    let noun = match (n, stem) {
        (1, _) => noun.to_string(),
        (_, Some(stem)) => format!("{stem}ies"),
        _ if hisses => format!("{noun}es"),
        _ => format!("{noun}s"),
    };
    format!("{} {noun}", count(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_noun_of_many_is_spelt_as_it_is_spoken() {
        assert_eq!(
            (plural(1, "microbatch"), plural(0, "row")),
            ("1 microbatch".into(), "0 rows".into())
        );
        assert_eq!(plural(2, "microbatch"), "2 microbatches");
        assert_eq!(plural(1000, "box"), "1,000 boxes");
        assert_eq!((plural(3, "copy"), plural(3, "array")), ("3 copies".into(), "3 arrays".into()));
    }

    #[test]
    fn numbers_keep_their_digits_and_fit_their_columns() {
        assert_eq!(short(-0.0123456), "-0.01235");
        assert_eq!(short(1234.5678), "1235");
        assert_eq!(short(1e-9), "1.000e-9");
        assert_eq!(short(f64::NAN), "NaN");
        assert_eq!((count(1_234_567), bytes(3 << 20)), ("1,234,567".into(), "3.0 MiB".into()));
        assert_eq!((scale(-0.5), scale(3e38)), ("-50.00 %".into(), "a factor of 3.000e38".into()));
        assert_eq!((ratio(4.94), ratio(f64::INFINITY)), ("4.9".into(), "inf".into()));
        assert_eq!((ratio(f64::NAN), error(f64::NAN)), ("NaN".into(), "NaN".into()));
    }
}
