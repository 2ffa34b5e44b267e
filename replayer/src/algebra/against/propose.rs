//! Parameters that have other names in two runs, found by what the data show: the same elements
//! before the step, in the same order, transposed, or as a part of a fused parameter; where values
//! tell nothing, by names that differ in a prefix alone.

use std::collections::BTreeMap;

use backtape::part::Part;

use super::align::{Aligned, Left, Pair};
use super::side::Side;
use super::view::{Values, View, permuted};
use crate::kernels::round::Precision;

/// Elements by which parameters are looked up before all of theirs are compared.
const BEGINNING: usize = 32;

/// The order of the dimensions of a kernel of a convolution in one framework and the other.
const KERNELS: [[usize; 4]; 2] = [[3, 2, 0, 1], [2, 3, 1, 0]];

/// A parameter in one order of its elements, by how it begins.
struct Beginning {
    name: String,
    view: View,
    count: usize,
    /// Rounded to bf16, so that a copy of fewer bits begins alike.
    first: Vec<u64>,
    /// Whether all elements are one number, as those of a bias at the start: it tells nothing.
    is_constant: bool,
}

/// Brings parameters together that have other names.
pub(super) fn propose(
    ours: &Side<'_>,
    theirs: &Side<'_>,
    left: &mut Left<'_>,
    aligned: &mut Aligned,
) {
    if left.ours.is_empty() || left.theirs.is_empty() {
        return;
    }
    let (mut found, mut taken) = (Vec::new(), Vec::new());
    for pair in by_prefix(ours, theirs, left) {
        left.take(&pair);
        found.push((pair, "by name"));
    }
    for pair in by_value(ours, theirs, left, aligned) {
        left.take(&pair);
        found.push((pair, VALUES));
    }
    for is_ours in [true, false] {
        for pair in fused(ours, theirs, left, is_ours) {
            left.take(&pair);
            taken.push(pair.clone());
            found.push((pair, VALUES));
        }
    }
    for pair in like_them(ours, theirs, left, &taken) {
        left.take(&pair);
        found.push((pair, "as the parameter beside it"));
    }
    aligned.found.extend(told(&found));
    aligned.pairs.extend(found.into_iter().map(|(pair, _)| pair));
}

const VALUES: &str = "by their values before the step";

/// Pairs whose names differ in what stands before them, the same for all.
fn by_prefix(ours: &Side<'_>, theirs: &Side<'_>, left: &Left<'_>) -> Vec<Pair> {
    let mut prefixes: BTreeMap<(bool, &str), Vec<(&str, &str)>> = BTreeMap::new();
    for a in &left.ours {
        for b in &left.theirs {
            let longer = |long: &'_ str, short: &str| {
                long.strip_suffix(short).filter(|prefix| prefix.ends_with('.')).map(str::len)
            };
            let (key, length) = match (longer(a, b), longer(b, a)) {
                (Some(length), _) => ((true, *a), length),
                (_, Some(length)) => ((false, *b), length),
                _ => continue,
            };
            if ours.shape(a) == theirs.shape(b) {
                prefixes.entry((key.0, &key.1[..length])).or_default().push((a, b));
            }
        }
    }
    let whole = |name: &str| View::Whole(name.to_string());
    let most = prefixes.into_values().max_by_key(Vec::len).unwrap_or_default();
    most.into_iter().map(|(a, b)| Pair { ours: whole(a), theirs: whole(b) }).collect()
}

/// The orders of elements in which a parameter may be found, each with its beginning.
fn beginnings(side: &Side<'_>, name: &str, kernels: bool) -> Vec<Beginning> {
    let view = View::Whole(name.to_string());
    let Ok(values) = side.values(&view, &Part::Before) else { return Vec::new() };
    let is_constant = values.of.iter().all(|x| *x == values.of[0]);
    let mut all = vec![(view.clone(), values.clone())];
    match values.shape[..] {
        [_, _] => all.push((view.transposed(), permuted(&values, &[1, 0]))),
        [_, _, _, _] if kernels => all.extend(KERNELS.map(|order| {
            let of = Box::new(view.clone());
            (View::Permuted { of, order: order.to_vec() }, permuted(&values, &order))
        })),
        _ => {}
    }
    let beginning = |(view, values): (View, Values)| Beginning {
        name: name.to_string(),
        view,
        count: values.of.len(),
        first: first(&values.of),
        is_constant,
    };
    all.into_iter().map(beginning).collect()
}

fn first(values: &[f64]) -> Vec<u64> {
    let rounded = |x: &f64| Precision::Bf16.round64(*x).to_bits();
    values.iter().take(BEGINNING).map(rounded).collect()
}

/// Pairs with the same elements before the step.
fn by_value(
    ours: &Side<'_>,
    theirs: &Side<'_>,
    left: &Left<'_>,
    aligned: &mut Aligned,
) -> Vec<Pair> {
    let mut known: BTreeMap<(usize, Vec<u64>), Vec<Beginning>> = BTreeMap::new();
    for name in &left.theirs {
        for one in beginnings(theirs, name, true) {
            known.entry((one.count, one.first.clone())).or_default().push(one);
        }
    }
    let mut pairs: Vec<(Pair, bool)> = Vec::new();
    for name in &left.ours {
        let mut candidates: Vec<Pair> = Vec::new();
        for own in beginnings(ours, name, false) {
            let key = (own.count, own.first.clone());
            for other in known.get(&key).into_iter().flatten() {
                let is_taken = candidates.iter().any(|pair| pair.theirs.names()[0] == other.name);
                let pair = Pair { ours: own.view.clone(), theirs: other.view.clone() };
                if !is_taken && let Some(pair) = is_same(ours, theirs, pair) {
                    candidates.push(pair);
                }
            }
        }
        match &candidates[..] {
            [] => {}
            [one] => pairs.push((one.clone(), true)),
            several => match likest(name, several) {
                Some(pair) => pairs.push((pair.clone(), false)),
                None => aligned.open.push(format!(
                    "{name} may be any of {} of the other run, which have the same values before \
                     the step: say in a mapping (--map, map= in Python) which",
                    several
                        .iter()
                        .map(|pair| pair.theirs.to_string())
                        .collect::<Vec<_>>()
                        .join(", ")
                )),
            },
        }
    }
    // One that is the only candidate goes before one that was chosen by its name.
    pairs.sort_by_key(|(_, is_only)| !is_only);
    let mut taken: Vec<String> = Vec::new();
    pairs.retain(|(pair, _)| {
        let name = pair.theirs.names()[0].to_string();
        let is_free = !taken.contains(&name);
        taken.push(name);
        is_free
    });
    pairs.into_iter().map(|(pair, _)| pair).collect()
}

/// The pair, in one shape, where both hold the same elements up to the format of fewer bits.
fn is_same(ours: &Side<'_>, theirs: &Side<'_>, pair: Pair) -> Option<Pair> {
    let a = ours.values(&pair.ours, &Part::Before).ok()?;
    let b = theirs.values(&pair.theirs, &Part::Before).ok()?;
    let unit = [ours.stored(&pair.ours, &Part::Before), theirs.stored(&pair.theirs, &Part::Before)];
    let [x, y] = unit.map(|format| format.map_or(0.0, Precision::unit_roundoff));
    let most = if x == y { 0.0 } else { x.max(y) };
    let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= most * a.abs().max(b.abs());
    if a.of.len() != b.of.len() || !a.of.iter().zip(&b.of).all(is_near) {
        return None;
    }
    match a.shape == b.shape {
        true => Some(pair),
        false => {
            let theirs = View::Reshaped { of: Box::new(pair.theirs), shape: a.shape };
            Some(Pair { theirs, ..pair })
        }
    }
}

/// The one of several whose name is nearest: the same numbers in it, then most words from its end.
fn likest<'p>(name: &str, several: &'p [Pair]) -> Option<&'p Pair> {
    let words = |name: &str| -> Vec<String> {
        name.split(['.', '_', '/']).map(str::to_lowercase).collect()
    };
    let digits = |name: &str| -> Vec<String> {
        let parts = name.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty());
        parts.map(str::to_string).collect()
    };
    let likeness = |pair: &Pair| {
        let other = pair.theirs.names()[0].to_string();
        let (own, other_words) = (words(name), words(&other));
        let tail = own.iter().rev().zip(other_words.iter().rev());
        let tail = tail.take_while(|(a, b)| a == b).count();
        let shared = own.iter().filter(|word| other_words.contains(word)).count();
        (digits(name) == digits(&other), tail, shared)
    };
    let best = several.iter().max_by_key(|pair| likeness(pair))?;
    let is_only = several.iter().filter(|pair| likeness(pair) == likeness(best)).count() == 1;
    (is_only && likeness(best) > (false, 0, 0)).then_some(best)
}

/// Parameters of one run that several of the other make, one behind the other.
fn fused(ours: &Side<'_>, theirs: &Side<'_>, left: &Left<'_>, is_ours: bool) -> Vec<Pair> {
    let (whole, parts) = if is_ours { (ours, theirs) } else { (theirs, ours) };
    let (names, others) =
        if is_ours { (&left.ours, &left.theirs) } else { (&left.theirs, &left.ours) };
    let known = others.iter().flat_map(|name| beginnings(parts, name, false));
    let known: Vec<Beginning> = known.filter(|one| !one.is_constant).collect();
    let mut pairs: Vec<Pair> = Vec::new();
    for name in names {
        let view = View::Whole(name.to_string());
        let Ok(values) = whole.values(&view, &Part::Before) else { continue };
        let mut orders = vec![(view.clone(), values.clone())];
        if values.shape.len() == 2 {
            orders.push((view.transposed(), permuted(&values, &[1, 0])));
        }
        let is_taken = |one: &Beginning| {
            let of = |pair: &Pair| if is_ours { pair.theirs.clone() } else { pair.ours.clone() };
            pairs.iter().any(|pair| of(pair).names().contains(&one.name.as_str()))
        };
        let joined = orders.iter().find_map(|(view, values)| {
            let joined = tiled(values, parts, &known, &is_taken)?;
            Some((view.clone(), View::Joined { parts: joined, dim: 0, blocks: 1 }))
        });
        let Some((one, joined)) = joined else { continue };
        let (ours, theirs) = if is_ours { (one, joined) } else { (joined, one) };
        pairs.push(Pair { ours, theirs });
    }
    pairs
}

/// The parameters that fill these elements, in order; `None` where some are left.
fn tiled(
    values: &Values,
    parts: &Side<'_>,
    known: &[Beginning],
    is_taken: &dyn Fn(&Beginning) -> bool,
) -> Option<Vec<View>> {
    let (mut filled, mut start) = (Vec::new(), 0);
    while start < values.of.len() {
        let rest = &values.of[start..];
        let begins = first(rest);
        let fits = |one: &&Beginning| {
            let is_first = one.count <= rest.len() && begins.starts_with(&one.first);
            let is_free = !is_taken(one) && !filled.contains(&one.view);
            is_first && is_free && {
                let own = parts.values(&one.view, &Part::Before);
                own.is_ok_and(|own| {
                    own.shape.get(1..) == values.shape.get(1..) && rest.starts_with(&own.of)
                })
            }
        };
        let next = known.iter().filter(fits).max_by_key(|one| one.count)?;
        start += next.count;
        filled.push(next.view.clone());
    }
    (filled.len() > 1).then_some(filled)
}

/// Parameters that lie beside those of a fused one, as its bias: `a.bias` is to `a.weight` as
/// `q.bias`, `k.bias` and `v.bias` are to the weights that make it.
fn like_them(ours: &Side<'_>, theirs: &Side<'_>, left: &Left<'_>, fused: &[Pair]) -> Vec<Pair> {
    let mut pairs: Vec<Pair> = Vec::new();
    for pair in fused {
        let parent = |name: &str| name.rsplit_once('.').map(|(parent, _)| parent.to_string());
        let Some(place) = parent(pair.ours.names()[0]) else { continue };
        let beside = left.ours.iter().filter(|name| parent(name).as_deref() == Some(&place[..]));
        for name in beside {
            let last = &name[place.len()..];
            let renamed = |view: &View| {
                let name = |own: &str| {
                    parent(own).map_or_else(|| own.to_string(), |parent| format!("{parent}{last}"))
                };
                let parts: Vec<View> =
                    view.names().into_iter().map(|own| View::Whole(name(own))).collect();
                match &parts[..] {
                    [one] => one.clone(),
                    _ => View::Joined { parts, dim: 0, blocks: 1 },
                }
            };
            let like = Pair { ours: renamed(&pair.ours), theirs: renamed(&pair.theirs) };
            let is_free = like.ours.names().iter().all(|own| left.ours.contains(own))
                && like.theirs.names().iter().all(|own| left.theirs.contains(own));
            let shapes = (
                like.ours.shape(&|name| ours.shape(name)),
                like.theirs.shape(&|name| theirs.shape(name)),
            );
            if is_free && shapes.0.is_ok() && shapes.0 == shapes.1 && !pairs.contains(&like) {
                pairs.push(like);
            }
        }
    }
    pairs
}

/// What was found, in sentences: pairs that differ in numbers alone are told together.
fn told(found: &[(Pair, &str)]) -> Vec<String> {
    let mut groups: Vec<((String, &str), usize)> = Vec::new();
    for (pair, how) in found {
        let view = |view: &View| view.renamed(&|name| starred(name)).to_string();
        let words = (format!("{} = {}", view(&pair.ours), view(&pair.theirs)), *how);
        match groups.iter_mut().find(|(own, _)| *own == words) {
            Some((_, count)) => *count += 1,
            None => groups.push((words, 1)),
        }
    }
    let one = |((words, how), count): ((String, &str), usize)| match count {
        1 => format!("{words}, {how}"),
        count => format!("{words} ({count} pairs), {how}"),
    };
    groups.into_iter().map(one).collect()
}

/// A name with `*` for each part that is a number.
fn starred(name: &str) -> String {
    let part = |part: &str| match part.chars().all(|c| c.is_ascii_digit()) {
        true => "*".to_string(),
        false => part.to_string(),
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(ours: &str, theirs: &str) -> Pair {
        Pair { ours: View::Whole(ours.into()), theirs: View::Whole(theirs.into()) }
    }

    /// Goal: biases, which are all zeros at the start, go to those of the same layer and kind, and to
    /// none where two are as near.
    #[test]
    fn of_parameters_with_the_same_values_the_nearest_name_is_taken() {
        let name = "layers.1.norm1.bias";
        let theirs = ["h.0.norm1.bias", "h.1.norm1.bias", "h.1.norm2.bias", "h.1.norm1.scale"];
        let several: Vec<Pair> = theirs.iter().map(|other| pair(name, other)).collect();
        assert_eq!(likest(name, &several), Some(&several[1]));
        let twins = [pair(name, "a.1.norm1.bias"), pair(name, "b.1.norm1.bias")];
        assert_eq!(likest(name, &twins), None);
        assert_eq!(likest("x", &[pair("x", "y"), pair("x", "z")]), None);
    }

    #[test]
    fn what_was_found_of_many_layers_is_one_sentence() {
        let found: Vec<(Pair, &str)> = (0..3)
            .map(|at| (pair(&format!("layers.{at}.w"), &format!("h.{at}.kernel")), VALUES))
            .chain([(pair("head", "model.head"), "by name")])
            .collect();
        let told = told(&found);
        assert_eq!(told[0], format!("layers.*.w = h.*.kernel (3 pairs), {VALUES}"));
        assert_eq!(told[1..], ["head = model.head, by name"]);
    }
}
