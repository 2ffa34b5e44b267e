//! R9: whatever the layout, what comes out is what went in, byte for byte, or an error that
//! names what is missing or who disagrees.
//!
//! Method: tensors of random bytes are cut by loops over single elements, written as ranks
//! write, and put together by the replayer. The oracle shares no arithmetic with it.

mod layout;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use backtape::dtype::Dtype;
use backtape::identity::{Microbatch, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::placement::{Placements, Reduction};
use backtape::shard::TensorKey;
use backtape::store::AttemptDir;
use backtape_replayer::assemble::{AssembleError, addend, assemble, assemble_box};
use backtape_replayer::dump::{self, Selection, StepDump};
use backtape_replayer::verify::{FindingKind, verify};
use clap::Args;

use self::layout::{Grid, Held};
use crate::bitrot::memory;
use crate::random::Random;
use crate::small_dump::{Shard, commit};

const DTYPES: [Dtype; 15] = [
    Dtype::Bool,
    Dtype::U8,
    Dtype::I8,
    Dtype::U16,
    Dtype::I16,
    Dtype::U32,
    Dtype::I32,
    Dtype::U64,
    Dtype::I64,
    Dtype::F8E4m3,
    Dtype::F8E5m2,
    Dtype::F16,
    Dtype::Bf16,
    Dtype::F32,
    Dtype::F64,
];

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Arguments {
    /// Dumps of one to three tensors
    #[arg(long, default_value_t = 100_000)]
    pub(crate) trials: u64,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    #[arg(long, default_value_t = 2)]
    pub(crate) threads: u64,
}

pub(crate) fn run(arguments: Arguments) -> Result<()> {
    campaign(arguments).map(|line| println!("{line}"))
}

pub(crate) fn campaign(arguments: Arguments) -> Result<String> {
    let Arguments { trials, seed, threads } = arguments;
    let begun = Instant::now();
    let share = |of: u64| -> Result<Counts> {
        let folder = memory()?;
        let mut counts = Counts::new();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
        pool.install(|| {
            for trial in (of..trials).step_by(threads as usize) {
                let run = folder.path().join("run-a");
                let tried = one(&run, &mut Random::of(seed, trial), &mut counts);
                tried.with_context(|| format!("reassembly: seed {seed} trial {trial}"))?;
                std::fs::remove_dir_all(&run)?;
            }
            anyhow::Ok(())
        })?;
        Ok(counts)
    };
    let shares: Vec<Result<Counts>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|of| scope.spawn(move || share(of))).collect();
        let joined = running.into_iter().map(|thread| thread.join());
        joined.map(|one| one.unwrap_or_else(|_| bail!("the replayer panicked"))).collect()
    });
    let mut counts = Counts::new();
    for share in shares {
        for (what, n) in share? {
            *counts.entry(what).or_default() += n;
        }
    }
    let named: Vec<String> = counts.iter().map(|(what, n)| format!("{n} {what}")).collect();
    let each = begun.elapsed().as_secs_f64() * 1e3 * threads as f64 / trials.max(1) as f64;
    Ok(format!(
        "reassembly: seed {seed}, {trials} cases, all equal to the oracle or named; {each:.2} ms each ({})",
        named.join(", ")
    ))
}

type Counts = BTreeMap<&'static str, u64>;

/// A tensor, and how it lies.
struct Case {
    key: TensorKey,
    dtype: Dtype,
    shape: Vec<u64>,
    whole: Vec<u8>,
    partial: bool,
    placement: Placements,
    held: Vec<Held>,
}

/// What is done to a sound dump.
enum Fault {
    None,
    /// A shard is never written.
    Left(usize),
    /// A holder of a box has other bits than the others.
    Other(usize),
    /// A rank's file is lost.
    File(u32),
}

fn one(run: &Path, random: &mut Random, counts: &mut Counts) -> Result<()> {
    let grid = Grid::draw(random);
    let tensors = 1 + random.below(3);
    let cases: Vec<Case> =
        (0..tensors).map(|i| Case::draw(&grid, i, random, counts)).collect::<Result<_>>()?;
    let first = &cases[0];
    let boxes = first.held.len() as u64;
    let fault = match random.below(16) {
        0 => Fault::Left(random.below(boxes) as usize),
        1 if !first.partial => Fault::Other(random.below(boxes) as usize),
        2 => Fault::File(first.held[random.below(boxes) as usize].rank),
        _ => Fault::None,
    };
    let mut shards = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        shards.extend(case.shards(&grid, if i == 0 { &fault } else { &Fault::None }));
    }
    commit(run, grid.ranks, grid.mesh.clone(), &shards)?;
    if let Fault::File(rank) = fault {
        let microbatch = first.key.microbatch;
        let name = backtape::store::layout::file_name(Rank(rank), microbatch);
        let step = AttemptDir::of(run, Default::default()).step(Step(0));
        std::fs::remove_file(step.path.join(name.as_str()))?;
    }
    let dump = dump::open(run, &Selection::default())?;
    for case in &cases {
        let hit = case.key == first.key
            || matches!(fault, Fault::File(_)) && case.key.microbatch == first.key.microbatch;
        case.judge(&dump, if hit { &fault } else { &Fault::None }, random, counts)
            .with_context(|| format!("{} {:?} of {:?}", case.key, case.shape, case.dtype))?;
    }
    Ok(())
}

impl Case {
    fn draw(grid: &Grid, i: u64, random: &mut Random, counts: &mut Counts) -> Result<Case> {
        let dims = random.below(5) as usize;
        let size = |random: &mut Random| match random.below(40) {
            0 => 0,
            _ => 1 + random.below(if dims > 2 { 4 } else { 9 }),
        };
        let shape: Vec<u64> = (0..dims).map(|_| size(random)).collect();
        let dtype = DTYPES[random.below(15) as usize];
        let elements: u64 = shape.iter().product();
        let bytes = elements as usize * dtype.width();
        let whole: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        let microbatch = (random.below(2) == 0).then(|| Microbatch(random.below(3) as u32));
        let key = TensorKey { tensor: Name::new(format!("t{i}"))?, microbatch, when: None };
        let mut case = Case {
            key,
            dtype,
            shape,
            whole,
            partial: false,
            placement: Placements::new(),
            held: Vec::new(),
        };
        let empty = elements == 0 || dims == 0;
        let kind = match random.below(6) {
            0 if !empty => {
                case.held = layout::dealt(grid, &case.shape, random);
                "strided or zigzag"
            }
            1 if !empty => {
                case.held = layout::flat(grid, &case.shape, random);
                "flat"
            }
            2 if !empty => {
                case.held = layout::cells(grid, &case.shape, random);
                "cells"
            }
            3 => {
                case.partial = true;
                let place = IndexBox::whole(&case.shape);
                case.held =
                    (0..grid.ranks).map(|rank| Held { rank, place: place.clone() }).collect();
                "partial"
            }
            _ => {
                case.placement = grid.placements(case.shape.len(), random);
                case.held = layout::placed(grid, &case.shape, &case.placement, random);
                "placed"
            }
        };
        // What a rank holds nothing of it may leave out, unless nobody would be left.
        if !empty && random.below(2) == 0 {
            case.held.retain(|held| held.place.elements() != Some(0));
        }
        *counts.entry(kind).or_default() += 1;
        Ok(case)
    }

    /// The bytes of a rank's box, element by element.
    fn cut(&self, held: &Held) -> Vec<u8> {
        let mut bytes = naive_cut(&self.shape, &self.whole, &held.place, self.dtype.width());
        if self.partial {
            // Every rank's addend is another one.
            bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add(held.rank as u8));
        }
        bytes
    }

    fn shards(&self, grid: &Grid, fault: &Fault) -> Vec<Shard> {
        let mut replicas: BTreeMap<&IndexBox, u32> = BTreeMap::new();
        let mut shards = Vec::new();
        for (i, held) in self.held.iter().enumerate() {
            let mut bytes = self.cut(held);
            match fault {
                Fault::Left(left) if *left == i => continue,
                Fault::Other(other) if *other == i => {
                    bytes.iter_mut().take(1).for_each(|byte| *byte ^= 1)
                }
                _ => {}
            }
            let replica = replicas.entry(&held.place).or_default();
            shards.push(Shard {
                tensor: self.key.tensor.clone(),
                microbatch: self.key.microbatch.map(|mb| mb.0),
                dtype: self.dtype,
                shape: self.shape.clone(),
                place: held.place.clone(),
                rank: held.rank,
                replica: if self.partial { 0 } else { *replica },
                partial: self.partial.then_some(Reduction::Sum),
                mesh: grid.coordinates(held.rank),
                placement: self.placement.clone(),
                bytes,
            });
            *replica += 1;
        }
        shards
    }

    /// The shards that can be read, by what was done to the dump.
    fn left(&self, fault: &Fault) -> Vec<&Held> {
        let there = |(i, held): (usize, &'_ Held)| match fault {
            Fault::Left(left) => *left != i,
            Fault::File(rank) => held.rank != *rank,
            _ => true,
        };
        let all = self.held.iter().enumerate();
        all.filter(|&(i, held)| there((i, held))).map(|(_, held)| held).collect()
    }

    fn judge(
        &self,
        dump: &StepDump,
        fault: &Fault,
        random: &mut Random,
        counts: &mut Counts,
    ) -> Result<()> {
        let left = self.left(fault);
        if self.partial {
            return self.judge_addends(dump, &left, counts);
        }
        if let Fault::Other(i) = fault {
            return self.judge_disagreement(dump, &self.held[*i], counts);
        }
        let open = self.uncovered(&left);
        match assemble(dump, &self.key) {
            Ok(tensor) => {
                ensure!(open.is_empty(), "{} elements were made up", open.len());
                ensure!(tensor.bytes() == self.whole, "other bytes came out");
                *counts.entry("assembled").or_default() += 1;
            }
            Err(AssembleError::Incomplete(missing)) => {
                let mut named = BTreeSet::new();
                for gap in &missing.gaps {
                    named.extend(indices(&self.shape, gap));
                }
                ensure!(named == open, "gaps {:?} are not what is missing", missing.gaps);
                *counts.entry("gaps named").or_default() += 1;
                return self.judge_lost(dump, fault);
            }
            // Nobody spoke of it any more: as good as named, where it is true.
            Err(AssembleError::Absent { .. }) if matches!(fault, Fault::Left(_)) => {
                ensure!(left.is_empty(), "it is called absent and is there");
                return Ok(());
            }
            Err(error) => bail!("{error}"),
        }
        if open.is_empty() && !self.shape.is_empty() {
            let range = |&n: &u64| {
                let (a, b) = (random.below(n + 1), random.below(n + 1));
                (a.min(b), a.max(b))
            };
            let place = IndexBox(self.shape.iter().map(range).collect());
            let part = assemble_box(dump, &self.key, &place)?;
            let wanted = naive_cut(&self.shape, &self.whole, &place, self.dtype.width());
            ensure!(part.bytes() == wanted, "box {place} came out with other bytes");
        }
        Ok(())
    }

    /// Elements that nobody holds.
    fn uncovered(&self, left: &[&Held]) -> BTreeSet<usize> {
        let mut open: BTreeSet<usize> =
            indices(&self.shape, &IndexBox::whole(&self.shape)).collect();
        for held in left {
            for index in indices(&self.shape, &held.place) {
                open.remove(&index);
            }
        }
        open
    }

    fn judge_addends(&self, dump: &StepDump, left: &[&Held], counts: &mut Counts) -> Result<()> {
        for held in left {
            let own = addend(dump, &self.key, Rank(held.rank))?;
            ensure!(own.bytes() == self.cut(held), "another addend of rank {}", held.rank);
            *counts.entry("addends").or_default() += 1;
        }
        Ok(())
    }

    /// Holders of equal boxes, or of boxes that overlap, that disagree are named.
    fn judge_disagreement(&self, dump: &StepDump, odd: &Held, counts: &mut Counts) -> Result<()> {
        let twins = self.held.iter().filter(|held| held.place == odd.place).count();
        if twins < 2 || odd.place.elements() == Some(0) {
            return Ok(());
        }
        let proof = verify(dump, &|_| {});
        let named = proof.findings.iter().any(|found| {
            found.kind == FindingKind::ReplicasDisagree
                && found.tensor.as_ref() == Some(&self.key)
                && found.ranks.contains(&Rank(odd.rank))
        });
        ensure!(named, "rank {} disagrees and is not named: {:?}", odd.rank, proof.findings);
        *counts.entry("disagreements named").or_default() += 1;
        Ok(())
    }

    /// A lost file is named by verification.
    fn judge_lost(&self, dump: &StepDump, fault: &Fault) -> Result<()> {
        let proof = verify(dump, &|_| {});
        let of = |found: &&backtape_replayer::verify::VerifyFinding| match fault {
            Fault::File(rank) => {
                found.kind == FindingKind::DamagedFile && found.ranks == [Rank(*rank)]
            }
            _ => found.kind == FindingKind::Gap && found.tensor.as_ref() == Some(&self.key),
        };
        ensure!(proof.findings.iter().any(|found| of(&found)), "not named: {:?}", proof.findings);
        Ok(())
    }
}

/// Flat positions of a box's elements, in row-major order, one at a time.
fn indices(shape: &[u64], place: &IndexBox) -> impl Iterator<Item = usize> + use<> {
    let mut flat = vec![0u64];
    for (dim, &(lo, hi)) in place.0.iter().enumerate() {
        flat = flat.iter().flat_map(|at| (lo..hi).map(move |i| at * shape[dim] + i)).collect();
    }
    flat.into_iter().map(|at| at as usize)
}

/// The bytes of a box, element by element.
fn naive_cut(shape: &[u64], whole: &[u8], place: &IndexBox, width: usize) -> Vec<u8> {
    indices(shape, place).flat_map(|at| whole[at * width..(at + 1) * width].to_vec()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_comes_out_as_it_went_in_or_is_named() {
        println!("{}", campaign(Arguments { trials: 3000, seed: 9, threads: 2 }).unwrap());
    }
}
