//! How the token x vocabulary plane is cut to the memory of a device.

use crate::kernels::Tiles;

/// A share of what is free is left to the libraries' own workspace.
const USED: f64 = 0.75;
/// Wide enough that the GEMMs of a large device run near their peak.
const TILES: Tiles = Tiles { tokens: 2048, vocab: 8192 };
const SMALLEST: usize = 64;

/// What the device holds at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) tiles: Tiles,
    /// Tokens whose sums lie on the device together: all of them, where they fit.
    pub(super) band: usize,
}

/// Sizes of a walk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) tokens: usize,
    /// Rows of k that are walked at a time.
    pub(super) rows: usize,
    pub(super) depth: usize,
    /// Matrices of a tile's size, and sums of each row of q and of k.
    pub(super) terms: usize,
}

impl Plan {
    /// The largest tiles and bands that fit into so many free bytes. Where even the smallest do
    /// not, the device says so when it is asked for the memory.
    pub(super) fn of(free: usize, sizes: Sizes) -> Plan {
        let Sizes { tokens, rows, depth, terms } = sizes;
        let budget = (free as f64 * USED) as usize / size_of::<f64>();
        let mut tiles = TILES;
        while terms * tiles.tokens * tiles.vocab > budget / 4 && tiles.tokens > SMALLEST {
            tiles = Tiles { tokens: tiles.tokens / 2, vocab: (tiles.vocab / 2).max(SMALLEST) };
        }
        // Beside the sums: a panel's values, squares, magnitudes and bits.
        let row = (terms + 4) * depth + 16;
        let fixed = terms * tiles.tokens * tiles.vocab + (rows + tiles.vocab) * row;
        let fit = budget.saturating_sub(fixed) / row / tiles.tokens * tiles.tokens;
        Plan { tiles, band: fit.min(tokens).max(tiles.tokens) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: Sizes = Sizes { tokens: 1 << 20, rows: 4096, depth: 4096, terms: 5 };

    #[test]
    fn what_fits_is_held_whole_and_what_does_not_goes_in_whole_tiles() {
        let plan_for = |gib: usize| Plan::of(gib << 30, LARGE);
        assert_eq!(plan_for(1000), Plan { tiles: TILES, band: 1 << 20 });
        for gib in [1, 8, 24, 80, 140] {
            let plan = plan_for(gib);
            assert!(plan.band < 1 << 20 && plan.band % plan.tiles.tokens == 0, "{plan:?}");
            let tile = LARGE.terms * plan.tiles.tokens * plan.tiles.vocab;
            let rows = (plan.band + LARGE.rows) * LARGE.depth * LARGE.terms;
            assert!((tile + rows) * size_of::<f64>() < gib << 30, "{gib} GiB: {plan:?}");
        }
    }

    #[test]
    fn a_device_without_memory_is_asked_for_the_smallest_tiles() {
        let plan = Plan::of(0, LARGE);
        assert_eq!((plan.tiles.tokens, plan.band), (SMALLEST, SMALLEST));
    }
}
