//! What becomes of lse where a running sum of exponentials over tiles of the classes is not rescaled
//! when the running maximum moves: with `P_j` the sum of the shares in tile j and `m_j` the largest
//! share up to its end, `exp(lse' - lse) = m Σ_j P_j / m_j` (Milakov and Gimelshein 2018, without
//! its factor `exp(m_{j-1} - m_j)`).

/// Share of the error that may be left to be worth a trial.
const LEFT: f64 = 1e-4;
/// Tokens that must show it: a width is one of many.
const FEWEST: usize = 4;
/// How far off a token's sum shows.
const SHOWS: f64 = 1e-3;

/// A token's sums of shares and largest share before each class, `[V + 1]` each.
struct Running {
    sums: Vec<f64>,
    largest: Vec<f64>,
}

impl Running {
    fn of(shares: &[f64]) -> Running {
        let (mut sums, mut largest) = (vec![0.0f64], vec![0.0f64]);
        for (at, share) in shares.iter().enumerate() {
            sums.push(sums[at] + share);
            largest.push(largest[at].max(*share));
        }
        Running { sums, largest }
    }

    /// `exp(lse' - lse)` with tiles of so many classes.
    fn ratio(&self, width: usize) -> f64 {
        let classes = self.sums.len() - 1;
        let tile = |from: usize| {
            let to = (from + width).min(classes);
            (self.sums[to] - self.sums[from]) / self.largest[to].max(f64::MIN_POSITIVE)
        };
        self.largest[classes] * (0..classes).step_by(width).map(tile).sum::<f64>()
    }
}

/// `exp(lse' - lse)` of a token by its shares of the classes, with tiles of so many classes.
pub(super) fn ratio(shares: &[f64], width: usize) -> f64 {
    Running::of(shares).ratio(width)
}

/// How many classes a tile has, by tokens' shares and what `exp(lse' - lse)` is of each; none where
/// no width makes it so. All widths of V classes cost `V ln V` a token.
pub(super) fn width(tokens: &[(Vec<f64>, f64)]) -> Option<usize> {
    let shown = tokens.iter().filter(|(_, wanted)| (wanted - 1.0).abs() > SHOWS).count();
    if shown < FEWEST || tokens.iter().any(|(_, wanted)| !wanted.is_finite()) {
        return None;
    }
    let running: Vec<(Running, f64)> =
        tokens.iter().map(|(shares, wanted)| (Running::of(shares), *wanted)).collect();
    let off = |of: &dyn Fn(&Running) -> f64| -> f64 {
        running.iter().map(|(one, wanted)| (of(one) - wanted).powi(2)).sum()
    };
    let classes = tokens.first()?.0.len();
    let all = (1..classes).map(|width| (width, off(&|one| one.ratio(width))));
    let (width, least) = all.min_by(|a, b| a.1.total_cmp(&b.1))?;
    (least <= LEFT * off(&|_| 1.0)).then_some(width)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the ratio is that of the loop, and its width is read off. Method: the loop itself.
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
            for (shares, wanted) in &tokens {
                let found = ratio(shares, width_of_tiles);
                assert!((found / wanted - 1.0).abs() < 1e-12, "{found} {wanted}");
            }
            let right: Vec<_> = tokens.iter().map(|(shares, _)| (shares.clone(), 1.0)).collect();
            assert_eq!(width(&right), None);
        }
    }
}
