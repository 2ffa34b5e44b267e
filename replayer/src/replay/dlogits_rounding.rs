//! What rounding the entries of dlogits does to many of them alike.
//!
//! The entries of confident tokens are nearly g, whatever the token is: in a format of few bits
//! they all err by what g errs, and so does the scale of every sum of them. Entries that were
//! captured in more bits say how much that is; of those captured in few bits it is known how many
//! are one number.

use std::collections::BTreeMap;

use backtape::nan::largest;
use rayon::prelude::*;

use super::correlated_errors::MeanError;
use crate::kernels::matrix::Matrix;
use crate::kernels::round::Precision;

/// Relative errors that all sums of some entries have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct SharedErrors {
    /// The mean error of all entries, weighted by their energy; where entries lie near a tie, the
    /// largest that their last bits allow.
    pub(super) certain: f64,
    /// Its variance where tokens of one g count more in a sum than others.
    pub(super) shared: f64,
}

/// Bits of an f32 that no number of a format of at most 16 bits has.
const UNUSED: u32 = 13;

impl SharedErrors {
    /// Of captured entries `[T, V]`, stored in `stored`, of a job that rounds its own to a format
    /// from `finest` to `coarsest` for its products; `g` of each token.
    pub(super) fn of(
        entries: &Matrix<'_>,
        stored: Precision,
        [finest, coarsest]: [Precision; 2],
        g: &[f64],
    ) -> SharedErrors {
        let finer = |precision: Precision, than: Precision| {
            precision.unit_roundoff() < than.unit_roundoff()
        };
        let again = finer(stored, coarsest).then(|| SharedErrors::rounded(entries, coarsest, g));
        let before = finer(finest, stored) && !stored.keeps_f32();
        let before = before.then(|| SharedErrors::stored(entries, stored));
        let [again, before] = [again, before].map(Option::unwrap_or_default);
        let [certain, shared] = [again.certain + before.certain, again.shared + before.shared];
        SharedErrors { certain, shared }
    }

    /// Of entries that were rounded when they were captured, and not in the job: those of one
    /// value may all have erred alike, by at most a rounding.
    fn stored(entries: &Matrix<'_>, format: Precision) -> SharedErrors {
        let mut energies = vec![0.0f64; 1 << (31 - UNUSED)];
        for entry in (0..entries.len()).map(|at| entries.get_f64(at)) {
            let bin = (entry.abs() as f32).to_bits() >> UNUSED;
            energies[bin as usize] += entry * entry;
        }
        let all: f64 = energies.iter().sum();
        if !(all > 0.0) || !all.is_finite() {
            return SharedErrors::default();
        }
        let unit = format.unit_roundoff();
        let most = largest(energies.iter().copied()) / all;
        let squares: f64 = energies.iter().map(|energy| (energy / all).powi(2)).sum();
        let rest = (squares - most * most).max(0.0);
        SharedErrors { certain: unit * most, shared: unit * unit / 3.0 * rest }
    }

    /// Of entries that a job may have rounded to a format.
    fn rounded(entries: &Matrix<'_>, to: Precision, g: &[f64]) -> SharedErrors {
        let of_token = |t: usize| {
            let row = t * entries.cols..(t + 1) * entries.cols;
            MeanError::of(row.map(|at| entries.get_f64(at)), to)
        };
        let each: Vec<MeanError> = (0..entries.rows).into_par_iter().map(of_token).collect();
        let (mut groups, mut all) = (BTreeMap::<u64, MeanError>::new(), MeanError::default());
        for (g, errors) in g.iter().zip(&each) {
            groups.entry(g.to_bits()).or_default().join(errors);
            all.join(errors);
        }
        let (error, squares) = all.sums();
        if !(squares > 0.0) || !squares.is_finite() {
            return SharedErrors::default();
        }
        let apart = |errors: &MeanError| {
            let (error_sum, energy) = errors.sums();
            ((error_sum - error / squares * energy) / squares).powi(2)
        };
        // What is lost below the format's range is no rounding, and not allowed here.
        let certain = all.most().min(to.unit_roundoff());
        SharedErrors { certain, shared: groups.values().map(apart).sum() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::matrix::Values;

    const BF16: f64 = 1.0 / 256.0;

    fn matrix(entries: &[f64], tokens: usize) -> Matrix<'_> {
        let cols = entries.len() / tokens;
        Matrix { rows: tokens, cols, values: Values::F64(entries) }
    }

    fn alike(entries: &[f64], tokens: usize, g: &[f64]) -> SharedErrors {
        let formats = [Precision::F32, Precision::Bf16];
        SharedErrors::of(&matrix(entries, tokens), Precision::F32, formats, g)
    }

    /// Of entries captured in bf16.
    fn stored(entries: &[f64], finest: Precision) -> SharedErrors {
        let formats = [finest, Precision::Bf16];
        SharedErrors::of(&matrix(entries, 1), Precision::Bf16, formats, &[1.0])
    }

    /// A number and what bf16 makes of it, relatively.
    fn error(x: f64) -> f64 {
        (Precision::Bf16.round64(x) / x - 1.0).abs()
    }

    #[test]
    fn entries_that_are_nearly_one_number_err_by_what_that_errs() {
        let g = 1.0 / 351.0;
        let entries: Vec<f64> = (0..64).map(|i| g * (1.0 - 1e-5 * f64::from(i % 7))).collect();
        let errors = alike(&entries, 32, &[g; 32]);
        assert!((errors.certain / error(g) - 1.0).abs() < 0.05, "{errors:?}");
        assert_eq!(errors.shared, 0.0);
    }

    #[test]
    fn of_two_numbers_whose_errors_cancel_the_mean_may_go_to_either_side() {
        // Between two neighbours of bf16, a quarter above the lower and a quarter below the upper.
        let (low, high) = (1.0 + 0.25 / 128.0, 1.0 + 0.75 / 128.0);
        let errors = alike(&[low, high], 2, &[low, high]);
        let mean = error(low) / 2.0;
        assert!(errors.certain < 0.02 * mean, "{errors:?}");
        assert!((errors.shared.sqrt() / (2f64.sqrt() * mean) - 1.0).abs() < 0.02, "{errors:?}");
    }

    #[test]
    fn where_all_lie_at_a_tie_the_last_bits_decide() {
        let tie = 1.0 + 0.5 / 128.0;
        let errors = alike(&[tie; 8], 4, &[1.0; 4]);
        assert!((errors.certain / error(tie) - 1.0).abs() < 0.01, "{errors:?}");
    }

    #[test]
    fn of_one_value_that_was_stored_in_few_bits_all_may_have_erred_alike() {
        let errors = stored(&[0.5, -0.5, 0.5], Precision::F32);
        assert_eq!((errors.certain, errors.shared), (BF16, 0.0));
        assert_eq!(
            stored(&[0.5; 3], Precision::Bf16),
            SharedErrors::default(),
            "the job's own are those"
        );
        let many: Vec<f64> = (0..128).map(|i| 1.0 + f64::from(i) / 128.0).collect();
        let errors = stored(&many, Precision::F32);
        assert!(errors.certain < 0.02 * BF16 && errors.shared.sqrt() < 0.06 * BF16, "{errors:?}");
    }

    #[test]
    fn what_holds_no_number_or_nothing_says_nothing() {
        assert_eq!(alike(&[f64::NAN, 1.0], 1, &[1.0]), SharedErrors::default());
        assert_eq!(alike(&[0.0, 0.0], 1, &[0.0]), SharedErrors::default());
    }
}
