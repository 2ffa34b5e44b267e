//! A stratified sample of tokens, for what would take too long over all of them.
//!
//! Strata are how often a token's label occurs and how confident its prediction is:
//! the two things on which causes of the catalogue depend. Ignored tokens, and those
//! whose confidence is no number, are strata of their own. Drawn without replacement;
//! the seed is the report's to print, and gives the same sample again.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use crate::draw::Draw;
use crate::kernels::matrix::IGNORED;

/// Rows drawn from a stratum at least, where it has them: one row has no variance.
pub const LEAST: usize = 2;
/// Label hits from which a class starts.
const FREQUENT: usize = 16;
const SOME: usize = 4;
/// Probability of the label from which a class starts.
const SURE: f64 = 0.5;
const LIKELY: f64 = 0.1;
/// Size that a row has at least where rows are drawn by size, of what all have on average.
const SMALL: f64 = 0.1;

/// Tokens that stand for each other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stratum {
    /// What they have in common: `label 16 times or more, p below 0.1`.
    pub name: String,
    /// True for tokens without a label: what they add to a sum is known to be zero.
    pub ignored: bool,
    /// How many there are.
    pub population: usize,
    /// Places of those drawn in the sample's `rows`.
    pub drawn: Vec<usize>,
}

/// The rows drawn, ascending.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// Token rows.
    pub rows: Vec<usize>,
    /// How many tokens each stands for, N_h / n_h.
    pub weights: Vec<f64>,
    /// Every stratum that has tokens.
    pub strata: Vec<Stratum>,
    /// What they were drawn from.
    pub seed: u64,
}

/// Draws `n` of the tokens, all of them where there are no more.
///
/// Every stratum gets `LEAST`, the rest is shared out in proportion to the strata's
/// sizes. Where `n` is too small for that, strata are joined: first over confidence,
/// then all.
pub fn stratified(labels: &[u32], confidence: &[f64], n: usize, seed: u64) -> Sample {
    assert_eq!(labels.len(), confidence.len(), "one confidence a token");
    let n = n.min(labels.len());
    let strata = strata(labels, confidence, n);
    let shares = shares(&strata, n);
    let mut draw = Draw::new(seed);
    let mut rows: Vec<(usize, f64, usize)> = Vec::with_capacity(n);
    for (h, ((_, members), &share)) in strata.values().zip(&shares).enumerate() {
        let weight = members.len() as f64 / share as f64;
        rows.extend(choose(members, share, &mut draw).into_iter().map(|row| (row, weight, h)));
    }
    rows.sort_unstable_by_key(|row| row.0);
    let stratum = |(h, (name, members)): (usize, &(String, Vec<usize>))| Stratum {
        name: name.clone(),
        ignored: labels[members[0]] == IGNORED,
        population: members.len(),
        drawn: (0..rows.len()).filter(|&at| rows[at].2 == h).collect(),
    };
    Sample {
        strata: strata.values().enumerate().map(stratum).collect(),
        weights: rows.iter().map(|row| row.1).collect(),
        rows: rows.iter().map(|row| row.0).collect(),
        seed,
    }
}

/// Draws classes by how often each is a label: up to `n` of those with no hit, of those with one,
/// and of each doubling of hits from there. Rows, ascending, and how many each stands for.
pub fn by_hits(hits: &[u32], n: usize, seed: u64) -> (Vec<usize>, Vec<f64>) {
    let mut strata: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (class, hits) in hits.iter().enumerate() {
        strata.entry(u32::BITS - hits.leading_zeros()).or_default().push(class);
    }
    let mut draw = Draw::new(seed);
    let draw_from = |members: Vec<usize>| {
        let drawn = choose(&members, n.min(members.len()), &mut draw);
        let weight = members.len() as f64 / drawn.len().max(1) as f64;
        drawn.into_iter().map(move |class| (class, weight)).collect::<Vec<_>>()
    };
    let mut drawn: Vec<(usize, f64)> = strata.into_values().flat_map(draw_from).collect();
    drawn.sort_unstable_by_key(|one| one.0);
    drawn.into_iter().unzip()
}

/// Draws rows with a probability in proportion to their size, the largest for certain: `n` of
/// them, or all that have a size where those are fewer. Every row has at least a tenth of what it
/// would have if all were of one size, as small is not nothing; a size of 0 is. Sizes that are no
/// finite numbers, or all 0, tell nothing: then every row has the same. Rows, ascending, and how
/// many each stands for, 1 / probability (Horvitz and Thompson 1952).
///
/// Rows are shuffled and laid end to end, each as long as its probability; those are drawn in
/// which a mark at u, u + 1, u + 2 ... falls (Madow 1949).
pub fn by_size(sizes: &[f64], n: usize, seed: u64) -> (Vec<usize>, Vec<f64>) {
    let known = sizes.iter().sum::<f64>();
    let alike = !(known > 0.0 && known.is_finite());
    let size = |row: usize| if alike { 1.0 } else { sizes[row] };
    let mut left: Vec<usize> = (0..sizes.len()).filter(|&row| size(row) > 0.0).collect();
    let least = SMALL * left.iter().map(|&row| size(row)).sum::<f64>() / left.len().max(1) as f64;
    let size_of = |row: usize| size(row).max(least);
    let mut drawn = Vec::new();
    // A row of which the rest would be drawn more than once is taken; that leaves less for others.
    let share = loop {
        let share = n.saturating_sub(drawn.len()) as f64
            / left.iter().map(|&row| size_of(row)).sum::<f64>();
        let certain: Vec<usize> =
            left.iter().copied().filter(|&row| size_of(row) * share >= 1.0).collect();
        if certain.is_empty() {
            break share;
        }
        left.retain(|&row| size_of(row) * share < 1.0);
        drawn.extend(certain.into_iter().map(|row| (row, 1.0)));
    };
    let mut draw = Draw::new(seed);
    let mut mark = draw.unit();
    for row in choose(&left, left.len(), &mut draw) {
        let probability = size_of(row) * share;
        if mark < probability {
            drawn.push((row, 1.0 / probability));
            mark += 1.0;
        }
        mark -= probability;
    }
    drawn.sort_unstable_by_key(|one| one.0);
    drawn.into_iter().unzip()
}

type Strata = BTreeMap<(u8, u8), (String, Vec<usize>)>;

/// The tokens by stratum, in as many strata as `n` rows can serve.
fn strata(labels: &[u32], confidence: &[f64], n: usize) -> Strata {
    let mut hits: HashMap<u32, usize> = HashMap::new();
    labels.iter().for_each(|&label| *hits.entry(label).or_default() += 1);
    let frequency = |label: u32| match hits[&label] {
        _ if label == IGNORED => (0, "ignored".to_string()),
        n if n >= FREQUENT => (3, format!("label {FREQUENT} times or more")),
        n if n >= SOME => (2, format!("label {SOME} to {} times", FREQUENT - 1)),
        _ => (1, format!("label below {SOME} times")),
    };
    let certainty = |label: u32, p: f64| match p {
        _ if label == IGNORED => (0, String::new()),
        p if p.is_nan() => (4, ", p not a number".into()),
        p if p >= SURE => (3, format!(", p from {SURE}")),
        p if p >= LIKELY => (2, format!(", p from {LIKELY} to {SURE}")),
        _ => (1, format!(", p below {LIKELY}")),
    };
    let by = |level: usize| {
        let mut strata = Strata::new();
        for (token, (&label, &p)) in labels.iter().zip(confidence).enumerate() {
            let (a, b) = (frequency(label), certainty(label, p));
            let (key, name) = match level {
                2 => ((a.0, b.0), a.1 + &b.1),
                1 => ((a.0, 0), a.1),
                // Zeros that are known must not make the others' spread look small.
                _ if label == IGNORED => ((0, 0), a.1),
                _ => ((1, 0), "all tokens with a label".into()),
            };
            strata.entry(key).or_insert((name, Vec::new())).1.push(token);
        }
        strata
    };
    let least = |strata: &Strata| {
        let counted = strata.iter().filter(|(key, _)| key.0 != 0);
        counted.map(|(_, stratum)| stratum.1.len().min(LEAST)).sum::<usize>()
    };
    let fitting = [2, 1].into_iter().map(by).find(|strata| least(strata) <= n);
    fitting.unwrap_or_else(|| by(0))
}

/// Rows of each stratum. Ignored tokens, of which nothing is unknown, get the least once
/// the others have theirs, and what is left over.
fn shares(strata: &Strata, n: usize) -> Vec<usize> {
    let size = |ignored: bool| {
        let sizes_of = strata.iter().filter(move |(key, _)| (key.0 == 0) == ignored);
        sizes_of.map(|(_, stratum)| stratum.1.len()).collect::<Vec<usize>>()
    };
    let (ignored, others) = (size(true), size(false));
    let least: usize = others.iter().map(|&size| size.min(LEAST)).sum();
    let kept = ignored.iter().sum::<usize>().min(LEAST).min(n.saturating_sub(least));
    let sizes = allocate(&others, n - kept);
    let left = n - sizes.iter().sum::<usize>();
    // Ignored tokens are the first stratum, where there are any.
    ignored.iter().map(|_| left).chain(sizes).collect()
}

/// Rows of each stratum: the least, then by largest remainder, never more than there are.
fn allocate(sizes: &[usize], n: usize) -> Vec<usize> {
    let mut shares: Vec<usize> = sizes.iter().map(|&size| size.min(LEAST).min(n)).collect();
    loop {
        let left = n.saturating_sub(shares.iter().sum());
        let room: usize = sizes.iter().zip(&shares).map(|(size, share)| size - share).sum();
        if left == 0 || room == 0 {
            return shares;
        }
        let free = |h: usize| sizes[h] - shares[h];
        let exact = |h: usize| (left as f64) * free(h) as f64 / room as f64;
        let whole: Vec<usize> =
            (0..sizes.len()).map(|h| (exact(h) as usize).min(free(h))).collect();
        if whole.iter().all(|&more| more == 0) {
            let mut order: Vec<usize> = (0..sizes.len()).filter(|&h| free(h) > 0).collect();
            order.sort_by(|&a, &b| exact(b).total_cmp(&exact(a)).then(a.cmp(&b)));
            order.into_iter().take(left).for_each(|h| shares[h] += 1);
        } else {
            shares.iter_mut().zip(&whole).for_each(|(share, more)| *share += more);
        }
    }
}

/// The first of a shuffle (Fisher and Yates): every subset is equally likely.
fn choose(members: &[usize], n: usize, draw: &mut Draw) -> Vec<usize> {
    let mut members = members.to_vec();
    for index in 0..n {
        let other = index + draw.below(members.len() - index);
        members.swap(index, other);
    }
    members.truncate(n);
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 500 tokens: a Zipf-like head, a tail of single labels, ignored ones, sure ones.
    fn tokens() -> (Vec<u32>, Vec<f64>) {
        let label = |t: usize| match t {
            t if t % 10 == 3 => IGNORED,
            t if t % 2 == 0 => (t % 6) as u32,
            t => 100 + t as u32 / 7,
        };
        let p = |t: usize| [0.01, 0.2, 0.02, 0.9, 0.03][t % 5];
        ((0..500).map(label).collect(), (0..500).map(p).collect())
    }

    #[test]
    fn every_stratum_is_drawn_from_and_the_weights_add_up_to_all_tokens() {
        let (labels, p) = tokens();
        for n in [1, 2, 9, 20, 77, 250, 499, 500, 9000] {
            let sample = stratified(&labels, &p, n, 5);
            assert_eq!(sample.rows.len(), n.min(500));
            assert!(sample.rows.windows(2).all(|pair| pair[0] < pair[1]), "ascending, once");
            let drawn = sample.strata.iter().filter(|s| !s.drawn.is_empty());
            let stood_for: usize = drawn.map(|s| s.population).sum();
            assert!((sample.weights.iter().sum::<f64>() - stood_for as f64).abs() < 1e-9);
            assert_eq!(sample.strata.iter().map(|s| s.population).sum::<usize>(), 500);
            let least = |s: &Stratum| s.ignored || s.drawn.len() >= s.population.min(LEAST).min(n);
            assert!(sample.strata.iter().all(least), "{:?}", sample.strata);
        }
    }

    #[test]
    fn a_sample_too_small_for_all_strata_joins_them_and_a_larger_one_tells_them_apart() {
        let (labels, p) = tokens();
        let count = |n| stratified(&labels, &p, n, 5).strata.len();
        assert_eq!(count(2), 2, "ignored tokens are never joined with others");
        assert!(count(8) > 2 && count(100) > count(8), "{} {}", count(8), count(100));
    }

    #[test]
    fn a_seed_gives_one_sample_and_another_seed_another() {
        let (labels, p) = tokens();
        let draw = |seed| stratified(&labels, &p, 50, seed).rows;
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    /// Goal: no token is favoured inside its stratum. Method: the count of each over
    /// many seeds against its probability, six standard deviations.
    #[test]
    fn every_token_is_drawn_as_often_as_its_weight_says() {
        let (labels, p) = tokens();
        let (mut counts, mut wanted) = (vec![0.0; 500], vec![0.0; 500]);
        let seeds = 4000;
        for seed in 0..seeds {
            let sample = stratified(&labels, &p, 60, seed);
            for (&row, weight) in sample.rows.iter().zip(&sample.weights) {
                counts[row] += 1.0;
                wanted[row] = 1.0 / weight;
            }
        }
        for (row, (count, p)) in counts.iter().zip(&wanted).enumerate() {
            let sigma = (f64::from(seeds as u32) * p * (1.0 - p)).sqrt();
            let off = (count - f64::from(seeds as u32) * p).abs();
            assert!(off <= 6.0 * sigma, "token {row}: {count}, p {p}");
        }
    }

    #[test]
    fn a_confidence_that_is_no_number_is_a_stratum_of_its_own() {
        let sample = stratified(&[1, 1, 1, 1], &[0.9, f64::NAN, 0.9, 0.9], 3, 0);
        assert!(sample.rows.contains(&1));
        assert!(sample.strata.iter().any(|s| s.name.contains("not a number")));
    }

    #[test]
    fn classes_are_drawn_from_every_doubling_of_hits_and_stand_for_all() {
        let mut hits = vec![0; 900];
        hits.extend([1; 50]);
        hits.extend([2, 3, 3, 9, 700]);
        let (rows, weights) = by_hits(&hits, 20, 4);
        assert_eq!(rows.len(), 20 + 20 + 3 + 1 + 1);
        assert!(rows.windows(2).all(|pair| pair[0] < pair[1]), "ascending, once");
        assert_eq!(weights.iter().sum::<f64>(), hits.len() as f64);
        assert!(rows.ends_with(&[950, 951, 952, 953, 954]) && weights.ends_with(&[1.0; 5]));
    }

    /// Goal: an estimate from such a sample has no bias. Method: the count of each row over many
    /// seeds against its probability, six standard deviations.
    #[test]
    fn rows_are_drawn_as_often_as_their_size_says_and_the_largest_always() {
        let mut draw = Draw::new(8);
        let mut sizes: Vec<f64> = (0..300).map(|_| libm::exp(3.0 * draw.normal())).collect();
        (sizes[7], sizes[8], sizes[9]) = (0.0, 1e-9, 1e9);
        let (mut counts, mut wanted) = (vec![0.0; 300], vec![0.0; 300]);
        let seeds = 4000;
        for seed in 0..seeds {
            let (rows, weights) = by_size(&sizes, 60, seed);
            assert_eq!(rows.len(), 60);
            assert!(rows.windows(2).all(|pair| pair[0] < pair[1]), "ascending, once");
            for (&row, weight) in rows.iter().zip(&weights) {
                counts[row] += 1.0;
                wanted[row] = 1.0 / weight;
            }
        }
        let n = f64::from(seeds as u32);
        assert_eq!((counts[7], counts[9]), (0.0, n), "nothing is never drawn, the largest always");
        assert!(counts[8] > 0.0, "small is not nothing");
        for (row, (count, p)) in counts.iter().zip(&wanted).enumerate() {
            let off = (count - n * p).abs();
            assert!(off <= 6.0 * (n * p * (1.0 - p)).sqrt(), "row {row}: {count}, p {p}");
        }
    }

    #[test]
    fn sizes_that_tell_nothing_draw_every_row_alike_and_few_rows_are_all_drawn() {
        for sizes in [[0.0; 9], [f64::NAN; 9], [f64::INFINITY; 9]] {
            let (rows, weights) = by_size(&sizes, 3, 1);
            assert_eq!((rows.len(), &weights[..]), (3, &[3.0; 3][..]), "{sizes:?}");
        }
        assert_eq!(by_size(&[1.0, 0.0, 5.0], 4, 1), (vec![0, 2], vec![1.0, 1.0]));
        assert_eq!(by_size(&[], 4, 1), (vec![], vec![]));
    }

    #[test]
    fn no_tokens_give_an_empty_sample() {
        assert!(stratified(&[], &[], 10, 0).rows.is_empty());
    }
}
