//! Bars as inline SVG: a line of text, a bar, a number. Every bar has its value beside it, so
//! that none has to be measured or told apart by its colour.

use askama::Template;

use super::{Markup, markup};

/// One line of a drawing.
pub(super) struct Bar {
    /// What it is of.
    pub(super) label: String,
    /// Where it begins and ends, as shares of the width.
    pub(super) from: f64,
    pub(super) to: f64,
    /// How it looks: `bt-plain`, `bt-total`, `bt-up`, `bt-down`, `bt-after`.
    pub(super) class: &'static str,
    /// A hollow mark beside it, as a share of the width: what was to be expected.
    pub(super) mark: Option<f64>,
    /// The value in words.
    pub(super) value: String,
}

/// Widths of the label, of the bars and of the values.
pub(super) struct Widths(pub(super) i32, pub(super) i32, pub(super) i32);

/// Height of a line.
const LINE: i32 = 20;

/// Bars that are drawn, and what they show in words.
pub(super) struct Drawing {
    pub(super) about: String,
    pub(super) bars: Markup,
}

#[derive(Template)]
#[template(path = "bars.html")]
struct Bars<'a> {
    about: &'a str,
    width: i32,
    height: i32,
    /// Widths of the labels, of the values and the height of a line.
    label: i32,
    value: i32,
    line: i32,
    bars: Vec<Placed>,
}

struct Placed {
    bar: Bar,
    y: i32,
    from: f64,
    length: f64,
    mark: Option<f64>,
}

/// A drawing of bars, one below the other.
pub(super) fn draw(about: String, bars: Vec<Bar>, widths: &Widths) -> Drawing {
    let Widths(label, room, value) = *widths;
    let x = |share: f64| f64::from(label) + share.clamp(0.0, 1.0) * f64::from(room);
    let place = |(index, bar): (usize, Bar)| {
        let (from, to) = (x(bar.from.min(bar.to)), x(bar.from.max(bar.to)));
        let (y, mark) = (index as i32 * LINE + 2, bar.mark.map(x));
        Placed { bar, y, from, length: (to - from).max(1.5), mark }
    };
    let drawn = Bars {
        about: &about,
        width: label + room + value,
        height: bars.len() as i32 * LINE + 4,
        label,
        value,
        line: LINE,
        bars: bars.into_iter().enumerate().map(place).collect(),
    };
    let bars = markup(&drawn);
    Drawing { about, bars }
}

/// Shares of the width on a logarithmic scale over the decades that these values need; what
/// is 0 stands at the left edge, what is no number at the right.
pub(super) fn decades(values: impl Iterator<Item = f64> + Clone) -> impl Fn(f64) -> f64 {
    let sized = || values.clone().filter(|x| x.is_finite() && *x > 0.0);
    let least = sized().fold(f64::INFINITY, f64::min).log10().floor();
    let most = sized().fold(0.0, f64::max).log10().ceil();
    let (least, span) = match (most - least).is_finite() {
        true => (least, (most - least).max(1.0)),
        false => (0.0, 1.0),
    };
    move |x: f64| match x {
        0.0 => 0.0,
        x if x.is_finite() => ((x.log10() - least) / span).clamp(0.01, 1.0),
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_holds_all_values_and_what_is_no_number_is_no_panic() {
        let scale = decades([1e-5, 0.1, f64::NAN, 0.0].into_iter());
        assert_eq!(
            (scale(0.0), scale(0.1), scale(f64::NAN), scale(f64::INFINITY)),
            (0.0, 1.0, 1.0, 1.0)
        );
        assert!((scale(1e-3) - 0.5).abs() < 1e-12);
        let none = decades(std::iter::empty());
        assert!((0.0..=1.0).contains(&none(7.0)));
    }
}
