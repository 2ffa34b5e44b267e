//! Tests that verification finds and names every way in which a dump can differ from what the job
//! held, and finds nothing in intact dumps.

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::identity::{Microbatch, Rank};
use backtape::index_box::IndexBox;
use backtape::manifest::Omission;
use backtape::placement::{Mesh, Placement, Reduction};
use backtape::role::Role;
use backtape::shard::FingerprintSource;
use proptest::prelude::*;

use super::*;
use crate::assemble::tests::{WORLD, cut};
use crate::dump::fixture::{
    Dumped, FixtureShard, commit, fixture_shard, key, naive_cut, noise, slabs,
};
use crate::dump::{OpenError, Selection, open};

fn check(dumped: &Dumped) -> Verification {
    verify(&dumped.open(), &|_| ())
}

/// The kinds of the faults, each once.
fn faults(verification: &Verification) -> Vec<FindingKind> {
    let findings = verification.findings.iter();
    let mut kinds: Vec<_> =
        findings.filter(|f| f.severity == Severity::Fault).map(|f| f.kind).collect();
    kinds.dedup();
    kinds
}

fn sentences(verification: &Verification, kind: FindingKind) -> Vec<&str> {
    let findings = verification.findings.iter().filter(|f| f.kind == kind);
    findings.map(|f| f.sentence.as_str()).collect()
}

/// q of 8 rows by 3 on 4 ranks, two rows each.
fn four_slabs() -> Vec<FixtureShard> {
    slabs("q", &[8, 3], 4, &noise(5, 96))
}

/// The same box on each of `ranks`.
fn replicas(ranks: u32) -> Vec<FixtureShard> {
    let whole = noise(5, 96);
    let place = || IndexBox::whole(&[8, 3]);
    let replica = |rank| {
        let global = (Dtype::F32, &[8, 3][..]);
        let mut shard = fixture_shard(&key("k"), global, place(), rank, whole.clone());
        shard.record.replica = rank;
        shard
    };
    (0..ranks).map(replica).collect()
}

/// Gives a shard other bytes, as if the rank had held them.
fn hold(shard: &mut FixtureShard, change: impl FnOnce(&mut Vec<u8>)) {
    change(&mut shard.bytes);
    let record = &shard.record;
    let global = (record.dtype, record.shape.as_slice());
    let new = fixture_shard(
        &record.key,
        global,
        record.place.clone(),
        record.rank.0,
        shard.bytes.clone(),
    );
    shard.record.hash = new.record.hash;
    shard.record.fingerprint = new.record.fingerprint;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// Goal: no false alarm. Method: clean dumps cut at random; the tensor's
    /// fingerprint is also that of the array before it was cut.
    #[test]
    fn nothing_is_found_in_a_clean_dump_however_it_is_cut(cut in cut()) {
        let verification = check(&commit(cut.fixture_shards("q"), WORLD));
        prop_assert!(verification.intact(), "{:#?}", verification.findings);
        prop_assert_eq!(verification.unusable(&key("q")), None);
        prop_assert_eq!(verification.hashes_ok, cut.shards.len() as u64);
        prop_assert_eq!(verification.places_ok, cut.shards.len() as u64);
        let whole = match cut.whole.is_empty() {
            true => Fingerprint::default(),
            false => Fingerprint::of(cut.dtype, &IndexBox::whole(&cut.shape), &cut.whole),
        };
        prop_assert_eq!(verification.tensors[0].fingerprint, Some(whole));
        prop_assert_eq!(verification.not_checked, vec![]);
    }

    /// Goal: the fingerprint finds swapped shards. Method: two shards of the same extent are
    /// swapped, and records and files are written again, so that every hash is right.
    #[test]
    fn swapped_places_are_found_by_the_fingerprint_and_by_nothing_else(
        seed in any::<u64>(),
        a in 0..4usize,
        b in 1..4usize,
        moved in any::<bool>(),
    ) {
        let mut shards = slabs("q", &[8, 3], 4, &noise(seed, 96));
        let b = (a + b) % 4;
        if moved {
            let place = shards[a].record.place.clone();
            shards[a].record.place = std::mem::replace(&mut shards[b].record.place, place);
        } else {
            // The other way round: bytes and hashes are swapped, fingerprints are not.
            let (bytes, hash) = (shards[a].bytes.clone(), shards[a].record.hash);
            shards[a].bytes = std::mem::replace(&mut shards[b].bytes, bytes);
            shards[a].record.hash = std::mem::replace(&mut shards[b].record.hash, hash);
        }
        let verification = check(&commit(shards, 4));
        prop_assert_eq!(verification.hashes_ok, 4);
        prop_assert_eq!(verification.places_ok, 2);
        prop_assert_eq!(faults(&verification), vec![FindingKind::OutOfPlace]);
        prop_assert!(verification.unusable(&key("q")).is_some());
        let named: Vec<Rank> = verification.findings.iter().flat_map(|f| f.ranks.clone()).collect();
        prop_assert_eq!(named, vec![Rank(a.min(b) as u32), Rank(a.max(b) as u32)]);
        let says = sentences(&verification, FindingKind::OutOfPlace);
        prop_assert_eq!(says.iter().all(|s| s.contains("they belong in [")), moved);
    }
}

/// Goal: every flipped bit of a dump is found. Method: one bit of each byte of data and of the
/// header's text, and of each 61st byte of its padding, is flipped, one at a time.
#[test]
fn a_flip_of_any_byte_of_a_shard_file_is_found_and_its_file_named() {
    let dumped = commit(four_slabs(), 4);
    let path = dumped.file(1);
    let clean = std::fs::read(&path).unwrap();
    let start = dumped.data_start(1);
    let text = clean[..start].iter().rposition(|b| *b == b'}').unwrap() + 2;
    let padding = (text..start).step_by(61);
    for offset in (0..text).chain(padding).chain(start..clean.len()) {
        let mut bytes = clean.clone();
        bytes[offset] ^= 1 << (offset % 8);
        std::fs::write(&path, &bytes).unwrap();
        let verification = check(&dumped);
        let kind =
            [FindingKind::DamagedFile, FindingKind::BytesAltered][usize::from(offset >= start)];
        let finding = verification.findings.iter().find(|f| f.kind == kind);
        let finding = finding.unwrap_or_else(|| panic!("byte {offset}: nothing found"));
        assert_eq!((finding.path.as_ref(), &finding.ranks[..]), (Some(&path), &[Rank(1)][..]));
        // Shards whose bytes match their hash can be read although the header is damaged.
        let usable = verification.unusable(&key("q")).is_none();
        assert_eq!(usable, offset < start, "byte {offset}");
    }
}

#[test]
fn a_flip_of_any_byte_of_the_manifest_is_found() {
    let dumped = commit(replicas(1), 1);
    let path = dumped.step.manifest();
    let clean = std::fs::read(&path).unwrap();
    for offset in 0..clean.len() {
        let mut bytes = clean.clone();
        bytes[offset] ^= 1 << (offset % 8);
        std::fs::write(&path, &bytes).unwrap();
        match open(&dumped.run, &Selection::default()) {
            Ok(dump) => assert!(!verify(&dump, &|_| ()).intact(), "byte {offset}: nothing found"),
            Err(OpenError::Newer { .. }) => {}
            Err(error) => panic!("byte {offset}: {error}"),
        }
    }
}

#[test]
fn files_that_are_short_long_missing_or_exchanged_are_named() {
    type Damage = fn(&Dumped);
    let cases: [(&str, Damage); 6] = [
        ("was truncated: 65559 bytes, 65560 were written", |d| {
            d.damage(1, |bytes| bytes.truncate(bytes.len() - 1));
        }),
        ("was truncated: 5 bytes", |d| d.damage(1, |bytes| bytes.truncate(5))),
        ("was truncated: 0 bytes", |d| d.damage(1, Vec::clear)),
        ("was extended: 65561 bytes, 65560 were written", |d| d.damage(1, |bytes| bytes.push(0))),
        ("rank-00001.safetensors of rank 1 is missing", |d| {
            std::fs::remove_file(d.file(1)).unwrap();
        }),
        ("rank-00001.safetensors holds what belongs in rank-00002.safetensors", |d| {
            let other = d.step.path.join("aside");
            std::fs::rename(d.file(1), &other).unwrap();
            std::fs::rename(d.file(2), d.file(1)).unwrap();
            std::fs::rename(other, d.file(2)).unwrap();
        }),
    ];
    for (words, damage) in cases {
        let dumped = commit(four_slabs(), 4);
        damage(&dumped);
        let verification = check(&dumped);
        let says = sentences(&verification, FindingKind::DamagedFile);
        assert!(says[0].contains(words), "{words:?} is not in {says:?}");
        let finding = &verification.findings[0];
        assert_eq!(
            (&finding.ranks[..], finding.path.clone()),
            (&[Rank(1)][..], Some(dumped.file(1)))
        );
        // A file with extra bytes at its end still contains every shard.
        let usable = verification.unusable(&key("q")).is_none();
        assert_eq!(usable, words.contains("extended"), "{words}");
        assert_eq!(faults(&verification).contains(&FindingKind::Gap), !usable);
    }
}

#[test]
fn of_three_replicas_the_odd_one_out_is_named_and_of_two_neither() {
    let mut shards = replicas(3);
    hold(&mut shards[1], |bytes| bytes[50] ^= 4);
    let verification = check(&commit(shards, 3));
    assert_eq!(faults(&verification), [FindingKind::ReplicasDisagree]);
    assert_eq!(verification.findings[0].ranks, [Rank(1)]);
    assert_eq!(
        verification.unusable(&key("k")),
        Some(
            "k [0:8, 0:3] should be the same bits on all its holders: rank 1 differs from ranks 0 and 2, which agree"
        )
    );
    let mut shards = replicas(2);
    hold(&mut shards[1], |bytes| bytes[50] ^= 4);
    let verification = check(&commit(shards, 2));
    assert_eq!(verification.findings[0].ranks, [Rank(0), Rank(1)]);
    let says = sentences(&verification, FindingKind::ReplicasDisagree)[0];
    assert!(says.ends_with("there is no majority: rank 0 against rank 1"), "{says}");
}

#[test]
fn a_lost_replica_is_a_finding_that_spoils_no_tensor() {
    let dumped = commit(replicas(3), 3);
    std::fs::remove_file(dumped.file(0)).unwrap();
    let verification = check(&dumped);
    assert_eq!(faults(&verification), [FindingKind::DamagedFile]);
    assert_eq!(verification.unusable(&key("k")), None);
    assert_eq!((verification.shards, verification.hashes_ok), (3, 2));
}

#[test]
fn gaps_and_overlaps_are_named_by_their_boxes() {
    let mut shards = four_slabs();
    shards.remove(2);
    let verification = check(&commit(shards, 4));
    assert_eq!(faults(&verification), [FindingKind::Gap]);
    let gap = &verification.findings[0];
    assert_eq!(gap.place, Some(IndexBox(vec![(4, 6), (0, 3)])));
    assert!(gap.sentence.contains("and no rank recorded it"), "{}", gap.sentence);

    for differs in [false, true] {
        let mut shards = four_slabs();
        let place = IndexBox(vec![(1, 3), (0, 2)]);
        let bytes = naive_cut(&[8, 3], &noise(5, 96), &place, 4);
        let mut extra = fixture_shard(&key("q"), (Dtype::F32, &[8, 3]), place, 3, bytes);
        if differs {
            hold(&mut extra, |bytes| bytes[9] ^= 1);
        }
        shards.push(extra);
        let verification = check(&commit(shards, 4));
        let places: Vec<_> =
            verification.findings.iter().map(|f| f.place.clone().unwrap()).collect();
        let (low, high) = (IndexBox(vec![(1, 2), (0, 2)]), IndexBox(vec![(2, 3), (0, 2)]));
        assert_eq!(places, [low, high]);
        let spoilt = [FindingKind::Overlap, FindingKind::ReplicasDisagree];
        let wanted = if differs { &spoilt[..] } else { &spoilt[..1] };
        assert_eq!(faults(&verification), wanted);
        assert_eq!(verification.unusable(&key("q")).is_some(), differs);
    }
}

#[test]
fn ranks_that_declare_a_tensor_differently_are_named() {
    type Change = fn(&mut FixtureShard);
    let cases: [(&str, Change); 4] = [
        ("dtype: f32 on ranks 0, 1 and 3, i32 on rank 2", |s| s.record.dtype = Dtype::I32),
        ("shape: [8, 3] on ranks 0, 1 and 3, [9, 3] on rank 2", |s| s.record.shape[0] = 9),
        ("role: none on ranks 0, 1 and 3, q on rank 2", |s| s.record.role = Some(Role::Q)),
        ("partial: none on ranks 0, 1 and 3, sum on rank 2", |s| {
            s.record.partial = Some(Reduction::Sum);
        }),
    ];
    for (words, change) in cases {
        let mut shards = four_slabs();
        change(&mut shards[2]);
        let verification = check(&commit(shards, 4));
        let says = sentences(&verification, FindingKind::DeclarationsDisagree);
        assert_eq!(says, [format!("q: the ranks disagree on its {words}")]);
        assert_eq!(verification.findings[0].ranks, [Rank(2)]);
        assert!(verification.unusable(&key("q")).is_some());
    }
}

/// One whole addend of dk per rank.
fn addends(ranks: u32) -> Vec<FixtureShard> {
    let mut shards = replicas(ranks);
    for (rank, shard) in shards.iter_mut().enumerate() {
        hold(shard, |bytes| *bytes = noise(rank as u64, 96));
        shard.record.key = key("dk");
        shard.record.partial = Some(Reduction::Sum);
        shard.record.replica = 0;
    }
    shards
}

#[test]
fn addends_may_differ_but_none_may_be_lost_or_narrower() {
    assert!(check(&commit(addends(3), 3)).intact());

    let dumped = commit(addends(3), 3);
    std::fs::remove_file(dumped.file(1)).unwrap();
    let verification = check(&dumped);
    assert_eq!(
        verification.unusable(&key("dk")),
        Some("dk [0:8, 0:3]: the addend of rank 1 is lost")
    );

    let mut shards = addends(3);
    let place = IndexBox(vec![(0, 5), (0, 3)]);
    let bytes = shards[2].bytes[..60].to_vec();
    shards[2] = fixture_shard(&key("dk"), (Dtype::F32, &[8, 3]), place, 2, bytes);
    shards[2].record.partial = Some(Reduction::Sum);
    let verification = check(&commit(shards, 3));
    assert_eq!(
        verification.unusable(&key("dk")),
        Some("dk [5:8, 0:3] has 2 addends where other elements have 3")
    );

    let verification = check(&commit(addends(2), 3));
    assert!(verification.intact());
    assert_eq!(verification.not_checked[0].what, "whether rank 2 should hold an addend of dk");
}

#[test]
fn on_a_mesh_the_addends_are_counted_and_their_replicas_compared() {
    // dk is summed over the axis data=2 and replicated over tensor=2: ranks 0 and 1 hold the same
    // bytes, and so do 2 and 3.
    let on_mesh = || {
        let mut shards = addends(4);
        for (rank, shard) in shards.iter_mut().enumerate() {
            let data = rank as u32 / 2;
            hold(shard, |bytes| *bytes = noise(u64::from(data), 96));
            let summed = ("data".into(), Placement::Partial(Reduction::Sum));
            let copied = ("tensor".into(), Placement::Replicate);
            shard.record.placement = [summed, copied].into();
            shard.record.mesh = [("data".into(), data), ("tensor".into(), rank as u32 % 2)].into();
        }
        shards
    };
    let check_mesh = |shards: Vec<FixtureShard>| {
        let mut dumped = commit(shards, 4);
        dumped.manifest.mesh = Mesh(vec![("data".into(), 2), ("tensor".into(), 2)]);
        dumped.seal();
        check(&dumped)
    };
    assert!(check_mesh(on_mesh()).intact());
    let verification = check_mesh(on_mesh()[..2].to_vec());
    assert_eq!(faults(&verification), [FindingKind::MissingAddend]);
    assert_eq!(
        verification.unusable(&key("dk")),
        Some("dk: 1 of 2 addends over data were recorded")
    );
    let mut shards = on_mesh();
    hold(&mut shards[3], |bytes| bytes[0] ^= 1);
    assert_eq!(faults(&check_mesh(shards)), [FindingKind::ReplicasDisagree]);
}

#[test]
fn what_a_rank_gave_up_on_is_reported_with_its_reason() {
    let mut dumped = commit([addends(2), replicas(2)].concat(), 2);
    for tensor in ["dk", "k", "lse"] {
        dumped.manifest.omissions.push(Omission {
            rank: Rank(1),
            tensor: tensor.into(),
            microbatch: None,
            reason: "the memory cap\nwas reached".into(),
        });
    }
    dumped.seal();
    let verification = check(&dumped);
    let says = sentences(&verification, FindingKind::Omitted);
    assert!(says.contains(&"lse was not recorded by rank 1: the memory cap was reached"));
    assert_eq!(says.len(), 3);
    // A damaged value is read from its replica; a damaged addend has none.
    assert_eq!(verification.unusable(&key("k")), None);
    assert_eq!(verification.unusable(&key("dk")), Some("rank 1 did not record its addend of dk"));
    assert_eq!(verification.unusable(&key("lse")), Some("it was not dumped"));
}

#[test]
fn a_place_that_the_job_only_declared_is_said_to_be_unproved() {
    let mut shards = four_slabs();
    shards[0].record.fingerprint_source = FingerprintSource::Recorder;
    let verification = check(&commit(shards, 4));
    assert!(verification.intact());
    assert_eq!(verification.not_checked[0].what, "the place of q");
    assert_eq!(verification.tensors[0].fingerprint_source, FingerprintSource::Recorder);
}

/// Goal: the thousands of tensors of a step take a few words, and what a rank declares in text none.
#[test]
fn tensors_whose_place_is_unproved_are_named_and_those_of_a_step_are_counted() {
    let told = |names: &[&str]| {
        let keys: Vec<TensorKey> = names.iter().map(|name| key(name)).collect();
        name_tensors(keys.iter())
    };
    assert_eq!(told(&["step.declared:0", "step.declared:1"]), None);
    assert_eq!(told(&["q", "step.declared:0"]).as_deref(), Some("q"));
    let both = told(&["q", "step.after:layers.0.w", "step.before:layers.0.w"]);
    assert_eq!(both.as_deref(), Some("q, and of 2 tensors of the step"));
    assert_eq!(told(&["step.after:w"]).as_deref(), Some("1 tensor of the step"));
    let many: Vec<String> = (0..10).map(|at| format!("x{at}")).collect();
    let many = told(&many.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    assert!(many.ends_with("x7 and 2 more"), "{many}");
}

#[test]
fn a_salvaged_step_says_which_ranks_are_missing_and_trusts_no_sum() {
    let dumped = commit([addends(3), four_slabs()].concat(), 4);
    dumped.unseal();
    std::fs::remove_file(dumped.file(2)).unwrap();
    let verification = check(&dumped);
    let says = sentences(&verification, FindingKind::Uncommitted);
    assert_eq!(
        says,
        [
            "step 0 is partial: it has no manifest: it was never committed; rank 2 left no readable file"
        ]
    );
    let lost = verification.unusable(&key("dk")).unwrap();
    assert_eq!(lost, "dk: an addend may be lost: nothing of it was found from ranks 2 and 3");
    let gap = verification.unusable(&key("q")).unwrap();
    assert_eq!(gap, "q is incomplete: nothing intact holds [4:6, 0:3], and rank 2 left no file");
    assert!(verification.not_checked.iter().any(|n| n.why.contains("without a manifest")));
}

#[test]
fn a_step_without_tensors_is_no_success() {
    let verification = check(&commit(Vec::new(), 1));
    assert_eq!(faults(&verification), [FindingKind::Empty]);
}

#[test]
fn held_by_some_is_a_note_and_json_names_every_part_of_a_finding() {
    let mut shards = four_slabs();
    for shard in &mut shards {
        shard.record.key.microbatch = Some(Microbatch(1));
    }
    let progress = std::sync::atomic::AtomicU64::new(0);
    let add = |bytes| {
        progress.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
    };
    let verification = verify(&commit(shards, 6).open(), &add);
    assert_eq!(progress.into_inner(), 96);
    assert!(verification.intact());
    let json = serde_json::to_value(&verification).unwrap();
    assert_eq!(
        json["findings"][0],
        serde_json::json!({
            "severity": "note",
            "kind": "held_by_some",
            "tensor": {"tensor": "q", "microbatch": 1, "when": null},
            "box": null,
            "ranks": [4, 5],
            "path": null,
            "sentence": "q microbatch 1: ranks 4 and 5 hold no shard of it",
        })
    );
    assert_eq!(json["tensors"][0]["dtype"], "f32");
}
