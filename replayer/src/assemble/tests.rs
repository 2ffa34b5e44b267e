//! Tests assembly against a naive oracle on dumps cut at random, and with one test for each reason
//! why a tensor cannot be assembled.

use backtape::dtype::Dtype;
use backtape::identity::{Name, Rank};
use backtape::index_box::IndexBox;
use backtape::placement::Reduction;
use proptest::prelude::*;

use super::*;
use crate::dump::fixture::{FixtureShard, commit, fixture_shard, key, naive_cut, noise, slabs};

/// A tensor cut at random, with the array that assembly must give back.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) whole: Vec<u8>,
    /// Box, rank and replica of every shard, in the order of recording.
    pub(crate) shards: Vec<(IndexBox, u32, u32)>,
}

pub(crate) const WORLD: u32 = 5;

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

/// Splits one box after the other, so that grids, slabs, strided sets and
/// uneven remains all occur; empty boxes too. Each box has one to three
/// holders on random ranks, and all of them come in a random order.
pub(crate) fn cut() -> impl Strategy<Value = Cut> {
    let shape = proptest::collection::vec(prop_oneof![1 => Just(0u64), 12 => 1..7u64], 0..=4);
    let splits = proptest::collection::vec((any::<usize>(), any::<usize>(), any::<u64>()), 0..10);
    let holders = proptest::collection::vec((0..WORLD, 1..=3u32), 11);
    let dtype = proptest::sample::select(DTYPES.to_vec());
    (shape, splits, holders, dtype, any::<u64>())
        .prop_map(|(shape, splits, holders, dtype, seed)| {
            let mut boxes = vec![IndexBox::whole(&shape)];
            for (which, dim, position) in splits {
                if shape.is_empty() {
                    break;
                }
                let (which, dim) = (which % boxes.len(), dim % shape.len());
                let (lo, hi) = boxes[which].0[dim];
                let middle = lo + position % (hi - lo + 1);
                let mut rest = boxes[which].clone();
                boxes[which].0[dim] = (lo, middle);
                rest.0[dim] = (middle, hi);
                boxes.push(rest);
            }
            boxes.sort();
            boxes.dedup();
            let mut shards = Vec::new();
            for (place, (rank, count)) in boxes.into_iter().zip(holders) {
                shards.extend((0..count).map(|r| (place.clone(), (rank + r) % WORLD, r)));
            }
            let length = shape.iter().product::<u64>() as usize * dtype.width();
            Cut { dtype, shape, whole: noise(seed, length), shards }
        })
        .prop_flat_map(|cut| {
            let order = Just(cut.shards.clone()).prop_shuffle();
            (Just(cut), order).prop_map(|(cut, shards)| Cut { shards, ..cut })
        })
}

impl Cut {
    pub(crate) fn fixture_shards(&self, name: &str) -> Vec<FixtureShard> {
        let width = self.dtype.width();
        let held_shard = |(place, rank, replica): &(IndexBox, u32, u32)| {
            let bytes = naive_cut(&self.shape, &self.whole, place, width);
            let global = (self.dtype, self.shape.as_slice());
            let mut shard = fixture_shard(&key(name), global, place.clone(), *rank, bytes);
            shard.record.replica = *replica;
            shard
        };
        self.shards.iter().map(held_shard).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_500, ..ProptestConfig::default() })]

    /// Goal: whatever the cut, assembly gives back the array. Method: real
    /// files, against an oracle that cuts element by element; one replica of
    /// one box is damaged wherever another one is left.
    #[test]
    fn any_cut_of_any_array_is_put_together_again_byte_for_byte(
        cut in cut(),
        corner in proptest::collection::vec((any::<u64>(), any::<u64>()), 4),
        victim in any::<proptest::sample::Index>(),
    ) {
        let mut shards = cut.fixture_shards("q");
        let victim = victim.index(shards.len());
        let same = |shard: &&FixtureShard| shard.record.place == shards[victim].record.place;
        if shards.iter().filter(same).count() > 1 && !shards[victim].bytes.is_empty() {
            // The record has the hash of the right bytes, but other bytes are written to the file.
            shards[victim].bytes[0] ^= 1;
        }
        let dump = commit(shards, WORLD).open();
        prop_assert_eq!(dump.faults(), &[]);
        let tensor = assemble(&dump, &key("q")).unwrap();
        prop_assert_eq!(tensor.bytes(), &cut.whole[..]);
        prop_assert_eq!(&tensor.shape, &cut.shape);

        let ranges = cut.shape.iter().zip(corner).map(|(&n, (a, b))| {
            let (a, b) = (a % (n + 1), b % (n + 1));
            (a.min(b), a.max(b))
        });
        let place = IndexBox(ranges.collect());
        let part = assemble_box(&dump, &key("q"), &place).unwrap();
        let wanted = naive_cut(&cut.shape, &cut.whole, &place, cut.dtype.width());
        prop_assert_eq!(part.bytes(), &wanted[..]);
        prop_assert_eq!(&part.place, &place);
    }
}

/// Goal: parallel assembly puts its pieces in the right places. Method: arrays of several pieces,
/// with long and with short rows, in thread pools of different sizes.
#[test]
fn large_tensors_come_out_the_same_under_any_number_of_threads() {
    for shape in [vec![3u64, 700, 513], vec![1, 1_200_000], vec![1_200_000, 1], vec![2, 1, 600_000]]
    {
        let length = shape.iter().product::<u64>() as usize * 4;
        let whole = noise(shape[0], length);
        let long = (0..shape.len()).max_by_key(|&d| shape[d]).unwrap();
        let cuts = [0, 1, 7, shape[long] / 3, shape[long] / 2 + 1, shape[long]];
        let mut shards = Vec::new();
        for (rank, ends) in cuts.windows(2).enumerate() {
            let mut place = IndexBox::whole(&shape);
            place.0[long] = (ends[0], ends[1]);
            let bytes = naive_cut(&shape, &whole, &place, 4);
            shards.push(fixture_shard(&key("q"), (Dtype::F32, &shape), place, rank as u32, bytes));
        }
        let dump = commit(shards, 5).open();
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let tensor = pool.install(|| assemble(&dump, &key("q"))).unwrap();
            assert!(tensor.bytes() == whole, "{shape:?} on {threads} threads");
        }
    }
}

#[test]
fn what_is_missing_is_named_with_its_box_its_rank_and_its_file() {
    let whole = noise(1, 8 * 3 * 4);
    let dumped = commit(slabs("q", &[8, 3], 4, &whole), 4);
    std::fs::remove_file(dumped.file(2)).unwrap();
    let start = dumped.data_start(3);
    dumped.damage(3, |bytes| bytes[start] ^= 0x10);
    let dump = dumped.open();
    let error = assemble(&dump, &key("q")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "q is incomplete: nothing intact holds [4:8, 0:3], which ranks 2 and 3 should \
         (its bytes in rank-00003.safetensors do not hash to what the job hashed; \
         rank-00002.safetensors of rank 2 is missing)"
    );
    // The other elements can be read.
    let part = assemble_box(&dump, &key("q"), &IndexBox(vec![(1, 4), (1, 3)])).unwrap();
    assert_eq!(part.bytes(), naive_cut(&[8, 3], &whole, &part.place, 4));
    assert_eq!(part.shape, [3, 2]);
}

#[test]
fn a_shard_before_the_tear_of_its_file_is_still_used() {
    let (a, b) = (noise(1, 64), noise(2, 64));
    let mut shards = slabs("a", &[16], 1, &a);
    shards.extend(slabs("b", &[16], 1, &b));
    let dumped = commit(shards, 1);
    dumped.damage(0, |bytes| bytes.truncate(bytes.len() - 1));
    let dump = dumped.open();
    assert_eq!(assemble(&dump, &key("a")).unwrap().bytes(), a);
    assert!(matches!(assemble(&dump, &key("b")), Err(AssembleError::Incomplete(_))));
    assert_eq!(dump.faults()[0].tensors, [key("b")]);
}

#[test]
fn a_record_that_claims_a_huge_tensor_allocates_nothing() {
    for shape in [vec![1 << 62, 1 << 62], vec![1 << 45], vec![u64::MAX, 2, 0]] {
        let place = IndexBox(shape.iter().map(|&n| (0, n.min(2))).collect());
        let length = place.elements().unwrap() as usize;
        let shard = fixture_shard(&key("q"), (Dtype::U8, &shape), place, 0, vec![7; length]);
        let dump = commit(vec![shard], 1).open();
        let error = assemble(&dump, &key("q")).unwrap_err();
        assert!(matches!(error, AssembleError::Incomplete(_)), "{shape:?}: {error}");
    }
}

#[test]
fn errors_say_what_there_is_instead() {
    let whole = noise(1, 64);
    let mut shards = slabs("q", &[16], 2, &whole);
    shards[1].record.dtype = Dtype::I32;
    shards.extend(slabs("k", &[16], 2, &whole));
    let dump = commit(shards, 2).open();
    let error = |name: &str| assemble(&dump, &key(name)).unwrap_err().to_string();
    assert_eq!(error("v"), "v was not dumped: the step holds k, q");
    assert_eq!(
        error("q"),
        "q has no one meaning: the ranks disagree on its dtype: f32 on rank 0, i32 on rank 1"
    );
    let outside = assemble_box(&dump, &key("k"), &IndexBox(vec![(8, 17)]));
    assert!(matches!(outside, Err(AssembleError::Outside { .. })));
    let flat = assemble_box(&dump, &key("k"), &IndexBox(vec![]));
    assert!(matches!(flat, Err(AssembleError::Outside { .. })));
    let values = addend(&dump, &key("k"), Rank(0));
    assert!(matches!(values, Err(AssembleError::Values { .. })));
}

#[test]
fn an_addend_is_one_ranks_own_and_never_mixed_with_anothers() {
    let shape = [4u64, 3];
    let addends: Vec<Vec<u8>> = (0..2).map(|rank| noise(rank, 48)).collect();
    let place = |rows: (u64, u64)| IndexBox(vec![rows, (0, 3)]);
    let part = |rank: usize, rows: (u64, u64)| {
        let bytes = naive_cut(&shape, &addends[rank], &place(rows), 4);
        let mut shard =
            fixture_shard(&key("dk"), (Dtype::F32, &shape), place(rows), rank as u32, bytes);
        shard.record.partial = Some(Reduction::Sum);
        shard
    };
    let shards = vec![part(1, (2, 4)), part(0, (0, 4)), part(1, (0, 2)), part(2 - 1, (0, 2))];
    let mut scattered = part(0, (0, 1));
    scattered.record.key = key("dv");
    let mut far = part(0, (3, 4));
    far.record.key = key("dv");
    let dump = commit([shards, vec![scattered, far]].concat(), 3).open();
    for (rank, whole) in addends.iter().enumerate() {
        let tensor = addend(&dump, &key("dk"), Rank(rank as u32)).unwrap();
        assert_eq!((tensor.bytes(), &tensor.shape), (&whole[..], &shape.to_vec()));
    }
    assert_eq!(holders(&dump, &key("dk")), [Rank(0), Rank(1)]);
    let nobody = addend(&dump, &key("dk"), Rank(2)).unwrap_err();
    assert_eq!(nobody.to_string(), "rank 2 holds no addend of dk: ranks 0 and 1 do");
    let whole = assemble(&dump, &key("dk"));
    assert!(matches!(whole, Err(AssembleError::Addends { .. })));
    let error = addend(&dump, &key("dv"), Rank(0));
    assert!(matches!(error, Err(AssembleError::Scattered { boxes: 2, .. })));
    let parts = addend_parts(&dump, &key("dv"), Rank(0)).unwrap();
    assert_eq!(parts[1].place, place((3, 4)));
    assert_eq!(parts[1].bytes(), &addends[0][36..]);
}

#[test]
fn a_view_is_given_for_its_own_dtype_alone() {
    let bytes: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let shard = fixture_shard(&key("q"), (Dtype::F32, &[2]), IndexBox::whole(&[2]), 0, bytes);
    let dump = commit(vec![shard], 1).open();
    let tensor = assemble(&dump, &key("q")).unwrap();
    assert_eq!(tensor.f32(), Some(&[1.5, -2.0][..]));
    assert_eq!((tensor.i32(), tensor.bf16_bits(), tensor.f64()), (None, None, None));
    assert_eq!(tensor.elements(), 2);
    assert_eq!(tensor.key.tensor, Name::new("q").unwrap());
}
