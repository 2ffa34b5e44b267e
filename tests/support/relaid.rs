//! The same step as a larger mesh would have recorded it: every rank of a job becomes
//! several ranks that share its tokens, and what it held is cut over them, in boxes of
//! any dimension, repeated, or kept by the first. Works on the shards that a job recorded
//! and shares no code with the replayer.

use std::collections::BTreeMap;

use backtape::placement::{Mesh, MeshCoordinates, Placement, Placements, Reduction};
use backtape::shard::When;

use super::dump::{Laid, Shard};
use super::job::Job;
use super::job::number::Random;

/// How the ranks that share tokens hold one tensor.
#[derive(Clone, Debug, PartialEq)]
enum Holding {
    /// The first has it.
    First,
    /// All have it.
    All,
    /// Along a dimension, each a part that ends at a share of it; `zigzag`: two parts each,
    /// one from either end. `turned`: the last rank has the first part.
    Cut { dim: usize, ends: Vec<f64>, zigzag: bool, turned: bool },
}

/// How a job is laid out: its `Debug` tells what was drawn.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    data: u32,
    tensor: u32,
    /// Whether records say where they lie on the mesh and how.
    pub(crate) says: bool,
    holdings: BTreeMap<&'static str, Holding>,
    /// Tensors that are not recorded at all.
    dropped: Vec<&'static str>,
    /// Tensors that say when they were captured.
    timed: Vec<&'static str>,
    /// Boxes without an element are recorded, too.
    empties: bool,
    /// What addends make up.
    reduction: Reduction,
}

/// What a replay can do without.
const OPTIONAL: [&str; 13] = [
    "lse",
    "label_logits",
    "loss",
    "logprobs",
    "dlogits",
    "dq",
    "dq_lse",
    "dq_label",
    "dk",
    "dk_lse",
    "dk_label",
    "dbias",
    "grad_norm",
];

impl Layout {
    /// Draws how the shards of a job are held by more ranks.
    pub(crate) fn draw(job: &Job, shards: &[Shard], random: &mut Random) -> Layout {
        let tensor = random.one_of(&[1, 2, 2, 3]);
        let mut names: Vec<&'static str> = shards.iter().map(|shard| shard.name).collect();
        names.sort_unstable();
        names.dedup();
        let mut holdings = BTreeMap::new();
        for &name in &names {
            let of = shards.iter().find(|shard| shard.name == name).expect("it was named");
            holdings.insert(name, holding(of.shape.len(), tensor, random));
        }
        let says = random.chance(0.6);
        let dropped = names.iter().filter(|name| OPTIONAL.contains(name));
        let dropped = dropped.filter(|_| random.chance(0.12)).copied().collect();
        let timed = names.iter().filter(|_| random.chance(0.1)).copied().collect();
        let (data, empties) = (job.ranks as u32, random.chance(0.3));
        let (tensor, reduction) = (tensor as u32, job.reduction());
        Layout { data, tensor, says, holdings, dropped, timed, empties, reduction }
    }

    /// Whether the ranks that share a job's rank have each some of its tokens.
    pub(crate) fn cuts_tokens(&self) -> bool {
        ["q", "logits", "logprobs"]
            .iter()
            .any(|name| matches!(self.holdings.get(name), Some(Holding::Cut { .. })))
    }

    pub(crate) fn mesh(&self) -> Mesh {
        Mesh(vec![("data".into(), self.data), ("tensor".into(), self.tensor)])
    }

    /// What the ranks of the mesh record.
    pub(crate) fn apply(&self, shards: &[Shard]) -> Vec<Laid> {
        let held = shards.iter().filter(|shard| !self.dropped.contains(&shard.name));
        held.flat_map(|shard| self.held(shard)).collect()
    }

    fn held(&self, shard: &Shard) -> Vec<Laid> {
        let n = self.tensor;
        let holding = &self.holdings[shard.name];
        let (parts, along): (Vec<(u32, Shard)>, Option<Placement>) = match holding {
            Holding::First => (vec![(0, shard.clone())], None),
            Holding::All => {
                ((0..n).map(|t| (t, shard.clone())).collect(), Some(Placement::Replicate))
            }
            Holding::Cut { dim, ends, zigzag, turned } => {
                let edges = edges(shard, *dim, ends);
                let owner = |piece: usize| {
                    let piece = piece as u32;
                    let t = if *zigzag && piece >= n { 2 * n - 1 - piece } else { piece };
                    if *turned { n - 1 - t } else { t }
                };
                let pieces = edges.windows(2).enumerate();
                let cut = pieces.map(|(i, pair)| (owner(i), cut(shard, *dim, pair[0], pair[1])));
                (cut.collect(), Some(Placement::Shard(*dim as u32)))
            }
        };
        let kept = parts.into_iter().filter(|(_, part)| self.empties || !part.bytes.is_empty());
        kept.map(|(t, part)| self.laid(part, t, along, *holding == Holding::All)).collect()
    }

    fn laid(&self, shard: Shard, t: u32, along: Option<Placement>, repeated: bool) -> Laid {
        let (data, timed) = (shard.rank, self.timed.contains(&shard.name));
        let rank = data * self.tensor + t;
        let when = shard.when.or(timed.then_some(When::AfterOp));
        let (mut mesh, mut placement) = (MeshCoordinates::new(), Placements::new());
        if self.says {
            mesh = BTreeMap::from([("data".into(), data), ("tensor".into(), t)]);
            if shard.partial {
                placement.insert("data".into(), Placement::Partial(self.reduction));
            }
            placement.extend(along.map(|along| ("tensor".to_string(), along)));
        }
        let replica = if repeated && shard.partial { t } else { 0 };
        Laid { shard: Shard { rank, when, ..shard }, replica, mesh, placement, local: false }
    }
}

/// The same, recorded by ranks that know their own tokens alone: each says that the whole is
/// as many parts like its own as there are ranks.
pub(crate) fn local_parts(shards: &[Shard], ranks: u32) -> Vec<Laid> {
    let one = |shard: &Shard| {
        let mesh = BTreeMap::from([("data".to_string(), shard.rank)]);
        let mut shard = shard.clone();
        let own = shard.place.0.first().map(|(lo, hi)| hi - lo);
        let local = own.is_some_and(|own| own != shard.shape[0]) && !shard.partial;
        let word = match local {
            true => Placement::Shard(0),
            false if shard.partial => Placement::Partial(Reduction::Sum),
            false => Placement::Replicate,
        };
        if let Some(own) = own.filter(|_| local) {
            shard.shape[0] = own * u64::from(ranks);
            shard.place.0[0] = (u64::from(shard.rank) * own, u64::from(shard.rank + 1) * own);
        }
        let placement = BTreeMap::from([("data".to_string(), word)]);
        Laid { shard, replica: 0, mesh, placement, local }
    };
    shards.iter().map(one).collect()
}

/// The same on pods of two ranks.
pub(crate) fn in_pods(shards: &[Shard]) -> Vec<Laid> {
    let one = |shard: &Shard| {
        let at = [("pod".to_string(), shard.rank / 2), ("data".to_string(), shard.rank % 2)];
        let (shard, placement) = (shard.clone(), Placements::new());
        Laid { shard, replica: 0, mesh: BTreeMap::from(at), placement, local: false }
    };
    shards.iter().map(one).collect()
}

fn holding(dims: usize, ranks: usize, random: &mut Random) -> Holding {
    match random.between(0, 9) {
        _ if ranks == 1 && random.chance(0.7) => Holding::First,
        0 | 1 => Holding::First,
        2..=4 => Holding::All,
        _ if dims == 0 => Holding::All,
        _ => {
            let zigzag = random.chance(0.2);
            let pieces = if zigzag { 2 * ranks } else { ranks };
            let even = random.chance(0.4);
            let mut ends: Vec<f64> = (1..pieces)
                .map(|i| if even { i as f64 / pieces as f64 } else { random.unit() })
                .collect();
            ends.sort_by(f64::total_cmp);
            Holding::Cut {
                dim: random.between(0, dims - 1),
                ends,
                zigzag,
                turned: random.chance(0.2),
            }
        }
    }
}

/// Where the parts of a shard begin and end along a dimension, seen from its own corner.
fn edges(shard: &Shard, dim: usize, ends: &[f64]) -> Vec<u64> {
    let (lo, hi) = shard.place.0[dim];
    let length = (hi - lo) as f64;
    let inner = ends.iter().map(|share| (share * length).round() as u64);
    std::iter::once(0).chain(inner).chain([hi - lo]).collect()
}

/// The part of a shard from one index to another along a dimension.
fn cut(shard: &Shard, dim: usize, from: u64, to: u64) -> Shard {
    let extent: Vec<usize> = shard.place.0.iter().map(|(lo, hi)| (hi - lo) as usize).collect();
    let inner = extent[dim + 1..].iter().product::<usize>() * shard.dtype.width();
    let row = extent[dim] * inner;
    let outer: usize = extent[..dim].iter().product();
    let (first, last) = (from as usize * inner, to as usize * inner);
    let bytes = (0..outer).flat_map(|i| shard.bytes[i * row + first..i * row + last].to_vec());
    let mut part = Shard { bytes: bytes.collect(), ..shard.clone() };
    let lo = shard.place.0[dim].0;
    part.place.0[dim] = (lo + from, lo + to);
    part
}
