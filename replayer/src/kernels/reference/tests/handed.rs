//! Tests that the results have the same bits however the plane of logits is split into tasks that
//! hand partial sums on.

use std::ops::Range;

use super::*;
use crate::kernels::matrix::{Matrix, Reads, Values};
use crate::parcel::Parcel;
use proptest::prelude::*;

/// Random cuts of `0..length` at multiples of a tile.
fn cuts(length: usize, tile: usize, draw: u64) -> Vec<Range<usize>> {
    let tiles = length.div_ceil(tile);
    let mut starts = vec![0];
    starts.extend((1..tiles).filter(|at| draw >> (at % 64) & 1 == 1).map(|at| at * tile));
    let ends = starts[1..].iter().copied().chain([length]);
    starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()
}

fn rows<'a>(matrix: &Matrix<'a>, rows: Range<usize>) -> Matrix<'a> {
    let span = rows.start * matrix.cols..rows.end * matrix.cols;
    let Values::F32(values) = matrix.values else { panic!("a fixture is f32") };
    Matrix { rows: rows.len(), values: Values::F32(&values[span]), ..*matrix }
}

fn slab_of<'a>(
    inputs: &HeadInputs<'a>,
    classes: &Range<usize>,
    labels: &'a mut Vec<u32>,
) -> HeadInputs<'a> {
    let inside = |&label: &u32| match classes.contains(&(label as usize)) {
        true => label - classes.start as u32,
        false => IGNORED,
    };
    *labels = inputs.labels.iter().map(inside).collect();
    HeadInputs {
        k: rows(&inputs.k, classes.clone()),
        labels,
        valid_vocab: inputs.valid_vocab.clamp(classes.start, classes.end) - classes.start,
        bias: inputs.bias.map(|bias| &bias[classes.clone()]),
        ..*inputs
    }
}

fn part<'a>(inputs: &HeadInputs<'a>, tokens: Range<usize>, copies: &'a [f64]) -> HeadInputs<'a> {
    HeadInputs {
        q: rows(&inputs.q, tokens.clone()),
        labels: &inputs.labels[tokens.clone()],
        copies: Some(&copies[tokens]),
        ..*inputs
    }
}

/// Computes a head in one process, and again task by task, with the sums serialised between tasks.
fn compare(fixture: &Fixture, noise: &TermNoise, draws: (u64, u64)) {
    let copies: Vec<f64> = (0..fixture.tokens).map(|t| 1.0 + (t % 3) as f64).collect();
    let inputs = HeadInputs { copies: Some(&copies), ..fixture.inputs() };
    let owned = [fixture.g_lse_f64(), fixture.g_label_f64(), fixture.smooth_f64()];
    let cotangents = Cotangents { lse: &owned[0], label: &owned[1], smooth: &owned[2] };
    let whole = forward(&inputs, SMALL_TILES, &NoProgress);
    let mut blocks = Vec::new();
    let take = &mut |block: DkBlock| blocks.push(format!("{block:?}"));
    let all = backward(
        &inputs,
        &whole.lse,
        &cotangents,
        noise,
        (SMALL_TILES, Keep::Both, &NoProgress),
        take,
    );
    let blocks_of_tokens = cuts(fixture.tokens, SMALL_TILES.tokens, draws.0);
    let slabs = cuts(fixture.vocab, SMALL_TILES.vocab, draws.1);
    let mut dq: Vec<Option<Vec<u8>>> = vec![None; blocks_of_tokens.len()];
    let (mut handed, mut lse) = (Vec::new(), Vec::new());
    for tokens in &blocks_of_tokens {
        let head = part(&inputs, tokens.clone(), &copies);
        let mut sums = ForwardSums::zeros(tokens.len()).to_parcel();
        for slab in &slabs {
            let mut labels = Vec::new();
            let head = slab_of(&head, slab, &mut labels);
            let mut next = ForwardSums::of_parcel(&sums).unwrap();
            next.take(&head, (SMALL_TILES, &NoProgress), None);
            sums = next.to_parcel();
        }
        let sums = ForwardSums::of_parcel(&sums).unwrap();
        let done = sums.finish(inputs.mask, fixture.vocab - fixture.valid);
        let text_of = |all: &[f64]| format!("{:?}", &all[tokens.clone()]);
        assert_eq!(format!("{:?}", done.label_logits), text_of(&whole.label_logits));
        assert_eq!(format!("{:?}", done.logit_squares), text_of(&whole.logit_squares));
        lse.extend(done.lse);
    }
    assert_eq!(format!("{lse:?}"), format!("{:?}", whole.lse));
    for slab in &slabs {
        let mut dk: Option<Vec<u8>> = None;
        for (tokens, dq) in blocks_of_tokens.iter().zip(&mut dq) {
            let mut labels = Vec::new();
            let block = part(&inputs, tokens.clone(), &copies);
            let head = slab_of(&block, slab, &mut labels);
            let zeros = || Backward::zeros(&head, noise);
            let mut of_q = dq.as_ref().map_or_else(zeros, |b| Backward::of_parcel(b).unwrap());
            let zeros = || DkSums::zeros(&head, noise, SMALL_TILES);
            let mut of_k = dk.as_ref().map_or_else(zeros, |b| DkSums::of_parcel(b).unwrap());
            let given = (&whole.lse[tokens.clone()], &cotangents.of(tokens.clone()), noise);
            let onto = (&mut of_q, &mut of_k);
            backward_onto(
                onto,
                (&head, tokens.start),
                given,
                (SMALL_TILES, Keep::Both, &NoProgress),
            );
            (*dq, dk) = (Some(of_q.to_parcel()), Some(of_k.to_parcel()));
        }
        let mut sums = DkSums::default();
        sums.append(slab.start, DkSums::of_parcel(&dk.unwrap()).unwrap());
        sums.finish(&inputs.q, noise, &mut |block| handed.push(format!("{block:?}")));
    }
    let mut joined = Backward::default();
    for dq in dq {
        joined.extend(Backward::of_parcel(&dq.unwrap()).unwrap());
    }
    assert_eq!(format!("{joined:?}"), format!("{all:?}"));
    assert_eq!(handed, blocks);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Goal: partial sums that go from task to task, as on a cluster, give the bits of one process,
    /// on one thread and on three. Method: random heads, options and cuts; numbers are compared by
    /// their shortest decimal text, which differs for different numbers.
    #[test]
    fn sums_that_go_from_task_to_task_are_those_of_one_process(
        (tokens, depth, vocab) in (1usize..60, 1usize..9, 1usize..90),
        padding in 0usize..20,
        options in 0u8..64,
        draws in any::<(u64, u64)>(),
        threads in prop_oneof![Just(1usize), Just(3)],
    ) {
        let valid = vocab.saturating_sub(padding).max(1);
        let mut fixture = Fixture::new(tokens, depth, vocab, valid);
        if options & 1 > 0 {
            fixture = fixture.with_bias();
        }
        if options & 2 > 0 {
            fixture = fixture.with_smoothing();
        }
        if options & 4 > 0 {
            fixture.transform = Transform { softcap: Some(3.0), ..Transform::NONE };
        }
        if options & 8 > 0 {
            fixture.mask = Some(-0.7);
        }
        let filter = if options & 16 > 0 { 1e-2 } else { 0.0 };
        let whole = options & 32 > 0;
        let noise = TermNoise { filter, whole, label_step: 0.1, ..NOISE };
        with_threads(threads, || compare(&fixture, &noise, draws));
    }
}

/// Goal: a backward pass that reads the products q kᵀ which the forward pass stored, under any
/// options and for some of the tokens, has the bits of one that multiplies q and k again.
#[test]
fn kept_products_give_the_backward_pass_that_multiplies_again() {
    let usual = || Fixture::new(37, 5, 61, 53);
    let mut capped = usual().with_bias();
    capped.transform = Transform { scale: 2.0, softcap: Some(3.0), ..Transform::NONE };
    let options = [usual(), usual().with_bias(), capped];
    for (fixture, tiles) in options
        .into_iter()
        .flat_map(|fixture| [SMALL_TILES, Tiles::default()].map(|tiles| (fixture.clone(), tiles)))
    {
        let inputs = fixture.inputs();
        let valid = inputs.valid_vocab;
        let mut products = vec![f64::NAN; inputs.q.rows * valid];
        let kept = forward_keeping(&inputs, (tiles, &NoProgress), Some(&mut products));
        assert_eq!(kept, forward(&inputs, tiles, &NoProgress));
        let scores = Matrix { rows: inputs.q.rows, cols: valid, values: Values::F64(&products) };
        let reads = Reads {
            q: inputs.q,
            k: inputs.k,
            q_product: true,
            k_product: true,
            scores: Some((scores, 0)),
        };
        let reading = HeadInputs { reads: Some(reads), ..inputs };
        let run = |inputs: &HeadInputs| {
            run_on(inputs, &fixture, (&kept.lse, &NOISE), (tiles, &NoProgress))
        };
        assert_eq!(run(&reading), run(&inputs));
    }
}
