//! The lse of an online softmax over tiles of classes that forgets to rescale the running sum when
//! the running maximum grows. With `P_j` the sum of the probabilities in tile j, `m_j` the largest
//! probability up to the end of tile j, and m the largest of all, `exp(lse' - lse) = m Σ_j P_j /
//! m_j`. The right algorithm (Milakov and Gimelshein 2018) multiplies the running sum by `exp` of
//! the change of the maximum logit.

/// Share of the squared error that may be left to be worth a trial.
const LEFT: f64 = 1e-4;
/// At least this many tokens must be off, because many widths are tried.
const FEWEST: usize = 4;
/// A token is off if its ratio differs from 1 by more than this.
const SHOWS: f64 = 1e-3;

/// A token's sum of probabilities and largest probability before each class, `[V + 1]` each.
struct Running {
    sums: Vec<f64>,
    largest: Vec<f64>,
}

impl Running {
    fn of(probabilities: &[f64]) -> Running {
        let (mut sums, mut largest) = (vec![0.0f64], vec![0.0f64]);
        for (index, share) in probabilities.iter().enumerate() {
            sums.push(sums[index] + share);
            largest.push(largest[index].max(*share));
        }
        Running { sums, largest }
    }

    /// `exp(lse' - lse)` with tiles of `width` classes.
    fn ratio(&self, width: usize) -> f64 {
        let classes = self.sums.len() - 1;
        let tile = |from: usize| {
            let to = (from + width).min(classes);
            (self.sums[to] - self.sums[from]) / self.largest[to].max(f64::MIN_POSITIVE)
        };
        self.largest[classes] * (0..classes).step_by(width).map(tile).sum::<f64>()
    }
}

/// `exp(lse' - lse)` of a token with these probabilities of the classes, with tiles of `width`
/// classes.
pub(super) fn ratio(probabilities: &[f64], width: usize) -> f64 {
    Running::of(probabilities).ratio(width)
}

/// The width of the tiles, found by trying all. `tokens`: the probabilities of each token, and its
/// `exp(lse' - lse)`. None where no width explains them. Trying all widths of V classes costs `V ln
/// V` per token.
pub(super) fn width(tokens: &[(Vec<f64>, f64)]) -> Option<usize> {
    let shown = tokens.iter().filter(|(_, wanted)| (wanted - 1.0).abs() > SHOWS).count();
    if shown < FEWEST || tokens.iter().any(|(_, wanted)| !wanted.is_finite()) {
        return None;
    }
    let running: Vec<(Running, f64)> = tokens
        .iter()
        .map(|(probabilities, wanted)| (Running::of(probabilities), *wanted))
        .collect();
    let off = |of: &dyn Fn(&Running) -> f64| -> f64 {
        running.iter().map(|(running, wanted)| (of(running) - wanted).powi(2)).sum()
    };
    let classes = tokens.first()?.0.len();
    let all = (1..classes).map(|width| (width, off(&|running| running.ratio(width))));
    let (width, least) = all.min_by(|a, b| a.1.total_cmp(&b.1))?;
    (least <= LEFT * off(&|_| 1.0)).then_some(width)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the ratio equals that of the faulty loop, and its width is found. Method: the loop
    /// itself.
    #[test]
    fn the_width_of_tiles_is_read_off_what_a_loop_without_rescaling_gives() {
        for width_of_tiles in [1, 7, 20, 33] {
            let token = |t: usize| -> (Vec<f64>, f64) {
                let z: Vec<f64> = (0..97).map(|v| 3.0 * ((v * v + 31 * t) as f64).sin()).collect();
                let lse = z.iter().map(|z| z.exp()).sum::<f64>().ln();
                let (mut most, mut sum) = (f64::NEG_INFINITY, 0.0);
                for tile in z.chunks(width_of_tiles) {
                    most = tile.iter().fold(most, |most: f64, z| most.max(*z));
                    sum += tile.iter().map(|z| (z - most).exp()).sum::<f64>();
                }
                (z.iter().map(|z| (z - lse).exp()).collect(), (most + sum.ln() - lse).exp())
            };
            let tokens: Vec<(Vec<f64>, f64)> = (0..12).map(token).collect();
            assert_eq!(width(&tokens), Some(width_of_tiles));
            for (probabilities, wanted) in &tokens {
                let computed = ratio(probabilities, width_of_tiles);
                assert!((computed / wanted - 1.0).abs() < 1e-12, "{computed} {wanted}");
            }
            let right: Vec<_> =
                tokens.iter().map(|(probabilities, _)| (probabilities.clone(), 1.0)).collect();
            assert_eq!(width(&right), None);
        }
    }
}
