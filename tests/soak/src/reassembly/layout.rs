//! Ways in which a tensor lies on ranks: sets of boxes, drawn at random.

use backtape::index_box::IndexBox;
use backtape::placement::{Mesh, MeshCoordinates, Placement, Placements};

use crate::random::Random;

/// One box of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) rank: u32,
    pub(crate) place: IndexBox,
}

/// The job's grid.
#[derive(Clone, Debug)]
pub(crate) struct Grid {
    pub(crate) mesh: Mesh,
    pub(crate) ranks: u32,
}

impl Grid {
    pub(crate) fn draw(random: &mut Random) -> Grid {
        let axes = ["data", "fsdp", "tensor"];
        let n = 1 + random.below(3) as usize;
        let mesh: Vec<_> =
            axes[..n].iter().map(|axis| (axis.to_string(), 1 + random.below(3) as u32)).collect();
        let ranks = mesh.iter().map(|(_, size)| size).product();
        Grid { mesh: Mesh(mesh), ranks }
    }

    /// Where a rank sits, the last axis running fastest.
    pub(crate) fn coordinates(&self, rank: u32) -> MeshCoordinates {
        let mut left = rank;
        let mut found = MeshCoordinates::new();
        for (axis, size) in self.mesh.0.iter().rev() {
            found.insert(axis.clone(), left % size);
            left /= size;
        }
        found
    }

    /// Each axis cuts a dimension or replicates; several may cut the same one.
    pub(crate) fn placements(&self, dims: usize, random: &mut Random) -> Placements {
        let one = |(axis, _): &(String, u32)| {
            let dim = random.below(dims as u64 + 1);
            let placed = if dim == dims as u64 {
                Placement::Replicate
            } else {
                Placement::Shard(dim as u32)
            };
            (axis.clone(), placed)
        };
        self.mesh.0.iter().map(one).collect()
    }
}

/// Chunks of equal size but for the last ones, which may be short or empty: what is padded to
/// equal size in the job is recorded without its padding.
fn chunk((lo, hi): (u64, u64), at: u64, of: u64) -> (u64, u64) {
    let size = (hi - lo).div_ceil(of);
    (hi.min(lo + at * size), hi.min(lo + (at + 1) * size))
}

/// Sizes that differ by one at most.
fn balanced((lo, hi): (u64, u64), at: u64, of: u64) -> (u64, u64) {
    (lo + (hi - lo) * at / of, lo + (hi - lo) * (at + 1) / of)
}

/// The boxes of a mesh placement; ranks along a replicated axis hold the same.
pub(crate) fn placed(
    grid: &Grid,
    shape: &[u64],
    placements: &Placements,
    random: &mut Random,
) -> Vec<Held> {
    let cut = if random.below(2) == 0 { chunk } else { balanced };
    let one = |rank: u32| {
        let at = grid.coordinates(rank);
        let mut place = IndexBox::whole(shape);
        for (axis, size) in &grid.mesh.0 {
            if let Some(Placement::Shard(dim)) = placements.get(axis) {
                let range = &mut place.0[*dim as usize];
                *range = cut(*range, u64::from(at[axis]), u64::from(*size));
            }
        }
        Held { rank, place }
    };
    (0..grid.ranks).map(one).collect()
}

/// Slices of one dimension dealt out: in turn (strided), or there and back (zigzag).
pub(crate) fn dealt(grid: &Grid, shape: &[u64], random: &mut Random) -> Vec<Held> {
    let (dim, ranks) = (random.below(shape.len() as u64) as usize, u64::from(grid.ranks));
    let zigzag = random.below(2) == 0;
    let slices = if zigzag { 2 * ranks } else { ranks * (1 + random.below(3)) };
    let one = |slice: u64| {
        let mut place = IndexBox::whole(shape);
        place.0[dim] = balanced(place.0[dim], slice, slices);
        let rank = match zigzag && slice >= ranks {
            true => 2 * ranks - 1 - slice,
            false => slice % ranks,
        };
        Held { rank: rank as u32, place }
    };
    (0..slices).map(one).collect()
}

/// Ranges of the flattened tensor, as flat-parameter FSDP cuts, each a few boxes.
pub(crate) fn flat(grid: &Grid, shape: &[u64], random: &mut Random) -> Vec<Held> {
    let elements: u64 = shape.iter().product();
    let mut cuts: Vec<u64> = (1..grid.ranks).map(|_| random.below(elements + 1)).collect();
    cuts.extend([0, elements]);
    cuts.sort_unstable();
    let mut held = Vec::new();
    for (rank, range) in (0..).zip(cuts.windows(2)) {
        let mut boxes = Vec::new();
        boxes_of(shape, range[0], range[1], &mut Vec::new(), &mut boxes);
        held.extend(boxes.into_iter().map(|place| Held { rank, place }));
    }
    held
}

/// The boxes that make up the flat range `[from, to)` below `before`.
fn boxes_of(
    shape: &[u64],
    from: u64,
    to: u64,
    before: &mut Vec<(u64, u64)>,
    out: &mut Vec<IndexBox>,
) {
    let Some((_, rest)) = shape.split_first() else {
        if from < to {
            out.push(IndexBox(before.clone()));
        }
        return;
    };
    let row: u64 = rest.iter().product();
    let mut at = from;
    while at < to {
        let index = at / row;
        // As many whole rows as there are, else a part of one.
        let (end, indices) = match at.is_multiple_of(row) && at + row <= to {
            true => (to / row * row, (index, to / row)),
            false => (to.min((index + 1) * row), (index, index + 1)),
        };
        before.push(indices);
        match indices.1 - indices.0 {
            1 => boxes_of(rest, at - index * row, end - index * row, before, out),
            _ => out.push(IndexBox(
                before.iter().copied().chain(rest.iter().map(|&n| (0, n))).collect(),
            )),
        }
        before.pop();
        at = end;
    }
}

/// A grid of cells at random cuts, each cell on one rank or on several.
pub(crate) fn cells(grid: &Grid, shape: &[u64], random: &mut Random) -> Vec<Held> {
    let mut cells = vec![Vec::new()];
    for &size in shape {
        let mut cuts: Vec<u64> = (0..random.below(3)).map(|_| random.below(size + 1)).collect();
        cuts.extend([0, size]);
        cuts.sort_unstable();
        cuts.dedup();
        if cuts.len() == 1 {
            cuts.push(size);
        }
        let longer = |cell: &Vec<(u64, u64)>| -> Vec<Vec<(u64, u64)>> {
            let ranges = cuts.windows(2).map(|pair| (pair[0], pair[1]));
            ranges.map(|range| cell.iter().copied().chain([range]).collect()).collect()
        };
        cells = cells.iter().flat_map(longer).collect();
    }
    let mut held = Vec::new();
    for cell in cells {
        let first = random.below(u64::from(grid.ranks)) as u32;
        for more in 0..1 + random.below(2).min(u64::from(grid.ranks) - 1) as u32 {
            held.push(Held { rank: (first + more) % grid.ranks, place: IndexBox(cell.clone()) });
        }
    }
    held
}
